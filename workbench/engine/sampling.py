"""Choosing the next token from logits.

Randomness is a function of (request seed, position) only: the Gumbel-max trick, argmax of log-probabilities plus
Gumbel noise, with noise drawn for that seed and position. So a token does not depend on what else ran, and a draft
made with the same noise from other logits agrees with the choice as often as the two distributions allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import UserError

_COLDEST = 1e-30  # below it, differences of logits overflow float32; it is greedy already


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; above 0 divides the logits.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens whose probabilities reach p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1).
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt or output; 1 is off.
        presence_penalty: subtracted from logits of tokens seen in the output.
        frequency_penalty: subtracted once per time a token was seen in the output.
        seed: fixes the noise; None takes the engine's next one (reported with the result).
        stop: strings that end generation; none of them is part of the text.
        ignore_eos: go on past the end-of-sequence token.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        _check("max_tokens", self.max_tokens, int, lambda v: v >= 1, "a whole number of at least 1")
        if self.top_k is not None:
            _check("top_k", self.top_k, int, lambda v: v >= 1, "a whole number of at least 1, or None")
        if self.seed is not None:
            _check("seed", self.seed, int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2**63 - 1, or None")
        _check("temperature", self.temperature, float, lambda v: v >= 0, "a number of at least 0")
        _check("top_p", self.top_p, float, lambda v: 0 < v <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, float, lambda v: 0 <= v < 1, "at least 0 and below 1")
        _check("repetition_penalty", self.repetition_penalty, float, lambda v: v > 0, "a number above 0")
        _check("presence_penalty", self.presence_penalty, float, lambda v: True, "a finite number")
        _check("frequency_penalty", self.frequency_penalty, float, lambda v: True, "a finite number")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise UserError(f"stop must be non-empty strings, not {list(self.stop)!r}")


def choose(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], seed: int
) -> tuple[int, float]:
    """Choose the next token.

    Args:
        logits: float32 `[vocab]`.
        sampling: the request's settings.
        prompt, output: tokens so far; the next one's position is the sum of their lengths.
        seed: the request's.

    Returns:
        The token, and the model's own log-probability of it (natural log, before penalties and temperature).

    Raises:
        FloatingPointError: the logits are NaN or infinite, so no choice means anything.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if torch.isnan(logprobs).any():  # an infinite logit shows here too
        raise FloatingPointError(
            "the model's logits are NaN or infinite; the weights or the compute dtype do not hold this input"
        )
    scores = _penalised(logits, sampling, prompt, output)
    if sampling.temperature == 0:
        token = int(scores.argmax())
    else:
        kept = _filtered((scores - scores.max()) / max(sampling.temperature, _COLDEST), sampling)
        noise = gumbel(len(logits), seed, len(prompt) + len(output)).to(kept.device)
        token = int((kept + noise).argmax())
    return token, float(logprobs[token])


def gumbel(size: int, seed: int, position: int) -> Tensor:
    """Return standard Gumbel noise `[size]`, float32, a function of (seed, position) alone."""
    generator = torch.Generator().manual_seed(_mixed(seed, position))
    return -torch.empty(size).exponential_(generator=generator).log()


def _mixed(seed: int, position: int) -> int:
    # splitmix64: neighbouring (seed, position) pairs must not give related generators
    z = (seed * 0x9E3779B97F4A7C15 + position + 0x632BE59BD9B4E019) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)


def _penalised(logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    if sampling.repetition_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty:
        return logits
    scores = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64, device=scores.device)
        values, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output:
        said, counts = torch.tensor(list(output), device=scores.device).unique(return_counts=True)
        scores[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return scores


def _filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    dropped = float("-inf")
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], dropped)
    if sampling.top_p < 1:
        ordered, index = torch.softmax(scores, dim=-1).sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p  # the token that crosses p is kept
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter_(0, index, beyond), dropped)
    if sampling.min_p > 0:
        probabilities = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(probabilities < sampling.min_p * probabilities.max(), dropped)
    return scores


def _check(name: str, value: object, kind: type, fits, wanted: str) -> None:
    types = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not math.isfinite(value) or not fits(value):
        raise UserError(f"{name} must be {wanted}, not {value!r}")
