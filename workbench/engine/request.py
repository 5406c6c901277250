"""Request: the state of one generation, and what it wants from the next forward.

Contract: a request changes only in `commit_scaling`, `commit_adapted` and `finish`; a step that fails in between
leaves it as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_kernels.segments import BASE_SLOT
from workbench.adapters.merge import MergedAdapters
from workbench.engine.batch import ADAPTED, SCALING, SpanPlan
from workbench.engine.kv import Stream
from workbench.engine.sampling import Sampling
from workbench.engine.text import Detokenizer, StopText
from workbench.xlora.mixture import Mixture
from workbench.xlora.policy import ReusePolicy


@dataclass(eq=False)
class Request:
    """One prompt being continued.

    Attributes:
        id: unique in its engine.
        prompt_ids: the prompt, at least one token.
        sampling: how tokens are chosen.
        seed: of its noise.
        eos_ids: tokens that end it.
        slot: its adapter's slot once it runs; -1 for the base model and for mixtures.
        adapter: that adapter's name, or None.
        merged: adapters it runs in constant proportions, or None.
        merged_slots: their slots, once it runs.
        mixture: its mixture, or None.
        policy: whose scalings each input uses.
        drafting: run the scaling row of the likely next token in advance.
        on_text: called with each piece of text as it becomes certain.
        continuation: tokens to score as if they were generated, instead of generating any.
        tokens: prompt and generated tokens.
        logprobs: of the generated tokens, natural log.
        token_times_s: when each generated token was known, seconds after submission.
        draft: the likely next token, once its scaling row's predecessor has run.
        drafts: per generated token: 1 accepted draft, 0 rejected, -1 not drafted.
        scalings: float32 `[position, site, adapter]` on the host, by scaling row; the first `num_scaled` are valid.
        sources: per adapted row, the position whose scalings it used.
        tickets: its place among the requests that wait for each of its `names`.
        has_lease: its adapters are kept in their slots for it.
        times_passed: steps it was passed over, waiting for its adapter.
        finish_reason: None while running, else "stop", "length", "cancelled" or "error".
        error: the reason of a request that failed.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    detokenizer: Detokenizer
    eos_ids: frozenset[int] = frozenset()
    slot: int = BASE_SLOT
    adapter: str | None = None
    merged: MergedAdapters | None = None
    merged_slots: tuple[int, ...] = ()
    mixture: Mixture | None = None
    policy: ReusePolicy | None = None
    drafting: bool = False
    on_text: Callable[[str], None] | None = None
    continuation: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    draft: int | None = None
    drafts: list[int] = field(default_factory=list)
    scalings: Tensor | None = None
    num_scaled: int = 0
    sources: list[int] = field(default_factory=list)
    tickets: tuple[int, ...] = ()
    has_lease: bool = False
    times_passed: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        # the last token of a continuation is scored, never an input
        self.tokens = [*self.prompt_ids, *self.continuation[:-1]]
        self.output = StopText(self.sampling.stop)
        self.submitted_s = time.perf_counter()
        self.streams = {ADAPTED: Stream(self.max_length)}
        if self.mixture is not None:
            self.streams[SCALING] = Stream(self.max_length)
            n = len(self.mixture.adapters)
            self.scalings = torch.empty(len(self.prompt_ids), len(self.mixture.sites), n)
            self._scaling_pass = self.mixture.scaling_pass_weights()
        self._draft_ran, self._draft_after = False, None

    @property
    def max_length(self) -> int:
        """Most tokens the request can have, prompt included."""
        return len(self.prompt_ids) + (len(self.continuation) or self.sampling.max_tokens)

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def scalings_computed(self) -> int:
        """Adapted rows that used their own scalings."""
        return sum(source == position for position, source in enumerate(self.sources))

    @property
    def scalings_reused(self) -> int:
        """Adapted rows that used another position's scalings."""
        return len(self.sources) - self.scalings_computed

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters it needs in slots."""
        return self.merged.ids if self.merged is not None else (self.adapter,) if self.adapter is not None else ()

    def plans(self, budget: int) -> list[SpanPlan]:
        """Return what this request can run now, at most `budget` rows: adapted rows first, then scaling rows."""
        if self.finish_reason is not None:
            return []
        plans = []
        adapted = self._adapted_plan(budget)
        if adapted is not None:
            plans.append(adapted)
            budget -= len(adapted.token_ids)
        if self.mixture is not None and budget > 0:
            scaling = self._scaling_plan(budget, emits=adapted is not None and bool(adapted.num_logits))
            if scaling is not None:
                plans.append(scaling)
        return plans

    def row_weights(self, kind: str, first: int, stop: int) -> Tensor | None:
        """Return weights `[row, site, n]` (or a constant `[1, 1, n]`) of rows `first:stop`; None for base rows."""
        if kind == SCALING:
            return self._scaling_pass
        sources = [self._source(position) for position in range(first, stop)]
        return self.scalings[sources] * self.mixture.config.global_scaling_weight

    def commit_scaling(self, plan: SpanPlan, scalings: Tensor, draft: int | None) -> None:
        """Take the scalings of a scaling span; before the adapted span of the same step.

        Args:
            plan: the span.
            scalings: float32 `[row, site, n]`.
            draft: the token its last row suggests to come next, or None.
        """
        if self.scalings.shape[0] < plan.stop:
            room = max(plan.stop, min(2 * self.scalings.shape[0], self.max_length))
            grown = self.scalings.new_empty(room, *self.scalings.shape[1:])
            grown[: self.num_scaled] = self.scalings[: self.num_scaled]
            self.scalings = grown
        self.scalings[plan.first : plan.stop] = scalings
        self.num_scaled = plan.stop - plan.drafted
        self.streams[SCALING].length = self.num_scaled
        if plan.drafted:
            self._draft_ran, self._draft_after = True, draft
        else:
            self.draft = draft

    def continuation_after(self, position: int) -> tuple[int, ...]:
        """Return the continuation's tokens that follow the input at `position`."""
        return self.continuation[position + 1 - len(self.prompt_ids) :]

    def commit_adapted(self, plan: SpanPlan, chosen: list[tuple[int, float]]) -> None:
        """Take an adapted span's rows and, if it reached the end of the known tokens, the chosen token.

        Args:
            plan: the span.
            chosen: (token, log-probability) of the next token, or of those of a continuation; empty for a span that
                ends inside the prompt.
        """
        self.streams[ADAPTED].length = plan.stop
        if self.mixture is not None:
            self.sources += [self._source(position) for position in range(plan.first, plan.stop)]
        if self.continuation:
            self._score(plan, chosen)
            return
        if not chosen:
            return
        token, logprob = chosen[0]
        self._settle_draft(token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.token_times_s.append(time.perf_counter() - self.submitted_s)
        self._end_if_done(token)

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the request and free its KV."""
        if self.finish_reason is None:
            if reason != "stop" or not self.output.stopped:
                self._say(self.output.finish(self.detokenizer.flush()))
            self.finish_reason, self.error = reason, error
        self.draft = None
        for stream in self.streams.values():
            stream.free()

    def _adapted_plan(self, budget: int) -> SpanPlan | None:
        first, ready = self.streams[ADAPTED].length, len(self.tokens)
        if self.mixture is not None:
            ready = first
            while ready < min(len(self.tokens), first + budget) and self._source(ready) < self.num_scaled:
                ready += 1
        stop = min(ready, first + budget)
        if stop <= first:
            return None
        return SpanPlan(self, ADAPTED, first, tuple(self.tokens[first:stop]),
                        num_logits=self._num_logits(first, stop))

    def _num_logits(self, first: int, stop: int) -> int:
        if self.continuation:
            return max(0, stop - max(first, len(self.prompt_ids) - 1))
        return int(stop == len(self.tokens))

    def _score(self, plan: SpanPlan, chosen: list[tuple[int, float]]) -> None:
        now = time.perf_counter() - self.submitted_s
        self.logprobs += [logprob for _, logprob in chosen]
        self.token_times_s += [now] * len(chosen)
        self.drafts += [-1] * len(chosen)
        if plan.stop == len(self.tokens):
            self.tokens.append(self.continuation[-1])
            self._say("".join(map(self.detokenizer.push, self.continuation)))
            self.finish("length")

    def _scaling_plan(self, budget: int, emits: bool) -> SpanPlan | None:
        first, known = self.num_scaled, len(self.tokens)
        stop = min(self._source(known - 1) + 1, first + budget)
        if first < stop:
            drafts = stop == known and self._drafts_after(stop)
            return SpanPlan(self, SCALING, first, tuple(self.tokens[first:stop]), num_logits=int(drafts))
        if emits and self.draft is not None and first == known and self._drafts_after(known):
            more = self._drafts_after(known + 1)
            return SpanPlan(self, SCALING, known, (self.draft,), drafted=True, num_logits=int(more))
        return None

    def _drafts_after(self, position: int) -> bool:
        # the token at `position` is worth drafting if it will be an input that needs scalings of its own
        return self.drafting and position < self.max_length - 1 and self._source(position) == position

    def _settle_draft(self, token: int) -> None:
        if not self._draft_ran:
            self.drafts.append(-1)
            return
        accepted = token == self.draft
        self.drafts.append(int(accepted))
        # a rejected draft's row lies past `length`: it does not exist, and its position runs again
        self.num_scaled += accepted
        self.streams[SCALING].length = self.num_scaled
        self.draft = self._draft_after if accepted else None
        self._draft_ran, self._draft_after = False, None

    def _source(self, position: int) -> int:
        return self.policy.source(position, len(self.prompt_ids))

    def _end_if_done(self, token: int) -> None:
        if token in self.eos_ids and not self.sampling.ignore_eos:
            self.finish("stop")
            return
        self._say(self.output.push(self.detokenizer.push(token)))
        if self.output.stopped:
            self.finish("stop")
        elif len(self.tokens) >= self.max_length:
            self.finish("length")
        elif self.mixture is not None:
            last = self.policy.last_own(len(self.prompt_ids))
            if last is not None and self.num_scaled > last:
                self.streams[SCALING].free()

    def _say(self, text: str) -> None:
        if text and self.on_text is not None:
            self.on_text(text)
