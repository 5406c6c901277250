"""What a finished request gives back: its text and its numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from workbench.engine.batch import ADAPTED, SCALING
from workbench.engine.request import Request


@dataclass(frozen=True)
class Usage:
    """What a request took.

    Attributes:
        prompt_tokens, completion_tokens, total_tokens: counts.
        prompt_time_s: from submission to the first token, waiting included.
        completion_time_s: from the first token to the last.
        total_time_s: from submission to the end.
        avg_prompt_tok_per_sec: prompt tokens per second of `prompt_time_s`.
        avg_compl_tok_per_sec: tokens after the first per second of `completion_time_s`; 0 with fewer than two.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_time_s: float
    completion_time_s: float
    total_time_s: float
    avg_prompt_tok_per_sec: float
    avg_compl_tok_per_sec: float


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        request_id: names its trace.
        text: generated text, special tokens and stop strings left out.
        token_ids: generated tokens.
        logprobs: the model's log-probability of each (natural log, before penalties and temperature).
        finish_reason: "stop", "length", "cancelled", "deadline" or "error".
        usage: counts and rates.
        scalings_computed: inputs that used their own scalings; 0 without a mixture.
        scalings_reused: inputs that used another position's.
        drafts_accepted, drafts_rejected: tokens whose scaling row was run in advance, rightly and in vain.
        seed: of the request's noise.
        error: why it failed, for "error".
        top_logprobs: per generated token, the likeliest tokens with their log-probabilities, if asked for.
        prompt_logprobs: of the prompt's tokens after the first, if asked for.
        distributions: float32 `[token, vocab]`, all log-probabilities of scored tokens, if asked for.
        choices: all `n` results of one prompt, likeliest first, if `n` or `best_of` was above 1.
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        cached_scaling_tokens: prompt tokens whose scaling pass was found there.
        preemptions: how often its KV was taken away for others and computed again.
        edits: what was done to its scalings, in words; empty for a request that nobody edited.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    usage: Usage
    scalings_computed: int = 0
    scalings_reused: int = 0
    drafts_accepted: int = 0
    drafts_rejected: int = 0
    seed: int = 0
    error: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    distributions: np.ndarray | None = field(default=None, repr=False, compare=False)
    choices: tuple[Completion, ...] = field(default=(), repr=False)
    cached_tokens: int = 0
    cached_scaling_tokens: int = 0
    preemptions: int = 0
    edits: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; `distributions`, an array, is left out."""
        data = asdict(replace(self, distributions=None, choices=()))
        del data["distributions"]
        return {**data, "choices": [choice.to_dict() for choice in self.choices]}

    def __str__(self) -> str:
        return f"error: {self.error}" if self.error else self.text


def completion_of(request: Request) -> Completion:
    """Return the result of a finished request."""
    times = request.token_times_s
    prompt, output = len(request.prompt_ids), request.generated
    ended_s = request.ended_s or time.perf_counter()
    total = ended_s - request.submitted_s if not times else times[-1]
    decoding = times[-1] - times[0] if len(times) > 1 else 0.0
    usage = Usage(
        prompt, len(output), prompt + len(output), times[0] if times else total, decoding, total,
        prompt / times[0] if times and times[0] > 0 else 0.0,
        (len(times) - 1) / decoding if decoding > 0 else 0.0,
    )
    return Completion(
        request.id, request.output.text, tuple(output), tuple(request.logprobs), request.finish_reason or "length",
        usage, request.scalings_computed, request.scalings_reused,
        request.drafts.count(1), request.drafts.count(0), request.seed, request.error,
        top_logprobs=tuple(choice.top for choice in request.choices) if request.sampling.top_logprobs else (),
        prompt_logprobs=tuple(score.logprob for score in request.prompt_scores),
        distributions=torch.stack(request.scored_distributions).numpy() if request.scored_distributions else None,
        cached_tokens=request.cached.get(ADAPTED, 0), cached_scaling_tokens=request.cached.get(SCALING, 0),
        preemptions=request.num_preemptions, edits=tuple(request.edits),
    )


def best_of(requests: Sequence[Request]) -> Completion:
    """Return the likeliest, per token, of several requests of one prompt, with the `n` likeliest as its choices."""
    if len(requests) == 1:
        return completion_of(requests[0])
    done = sorted((completion_of(request) for request in requests), key=_mean_logprob, reverse=True)
    return replace(done[0], choices=tuple(done[: requests[0].num_wanted]))


def _mean_logprob(done: Completion) -> float:
    return sum(done.logprobs) / len(done.logprobs) if done.logprobs and not done.error else float("-inf")


def failed(request_id: str, error: str) -> Completion:
    """Return the result of a request that was refused at the door."""
    return Completion(request_id, "", (), (), "error", Usage(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0), error=error)
