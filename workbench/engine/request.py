"""Request: the state of one generation, and what a forward did to it.

Contract: a request changes only in `commit_scaling`, `commit_adapted`, `keep_edited`, `preempt`, `finish` and `free`; a
step that fails in between leaves it as it was. What it wants from the next forward is in `planning`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_kernels.segments import BASE_SLOT
from workbench.adapters.merge import MergedAdapters
from workbench.engine.batch import ADAPTED, SCALING, SpanPlan
from workbench.engine.choosing import Answer, Choice
from workbench.engine.history import History
from workbench.engine.paged import PagedStream
from workbench.engine.sampling import Sampling
from workbench.engine.text import Detokenizer, StopText
from workbench.xlora.mixture import Mixture
from workbench.xlora.policy import ReusePolicy

if TYPE_CHECKING:
    from workbench.engine.grammar import Matcher


@dataclass(eq=False)
class Request:
    """One prompt being continued.

    Attributes:
        id: unique in its engine.
        prompt_ids: the prompt, at least one token.
        sampling: how tokens are chosen.
        seed: of its noise.
        number: those made later have larger ones.
        vocab_size: token ids are below it.
        breaker_ids: tokens that end a repetition, for DRY.
        eos_ids: tokens that end it.
        slot: its adapter's slot once it runs; -1 for the base model and for mixtures.
        adapter: that adapter's name, or None.
        merged: adapters it runs in constant proportions, or None.
        merged_slots: their slots, once it runs.
        mixture: its mixture, or None.
        policy: whose scalings each input uses.
        drafting: run the scaling row of the likely next token in advance.
        on_text: called with each piece of text as it becomes certain.
        on_progress: called with the request after each step that ran its rows, and once it has ended.
        continuation: tokens to score as if they were generated, instead of generating any.
        distributions: keep every log-probability of each scored token.
        priority: lower runs earlier.
        num_wanted: how many of its copies (`best_of`) are results.
        deadline_s: `time.perf_counter()` at which it ends, finished or not; None is never.
        grammar: being compiled, what its text must match; `matcher` once it is.
        tokens: prompt and generated tokens.
        choices: of the generated tokens.
        prompt_scores: of the prompt's tokens after the first, if asked for.
        token_times_s: when each generated token was known, seconds after submission.
        draft: the likely next token, once its scaling row's predecessor has run.
        drafts: per generated token: 1 accepted draft, 0 rejected, -1 not drafted.
        streams: its KV, by kind, while it runs.
        cached: per kind, tokens whose KV was found instead of computed, before any of its rows ran.
        ran: the kinds of which a row has run.
        scalings: float32 `[position, site, adapter]` on the host, by scaling row; the first `num_scaled` are valid.
        sources: per adapted row, the position whose scalings it used.
        edited: position -> float32 `[site, adapter]` that its row uses instead, once an edit has changed it.
        edits: what was done to it, in words.
        may_be_edited: an edit that may change it was open when it started.
        entered: those of its `names` that stay loaded for it.
        tickets: its place among the requests that wait for each of them.
        holds_mixture: its mixture stays loaded for it.
        has_lease: its adapters are kept in their slots for it.
        times_passed: steps it was passed over, waiting for its adapter.
        num_preemptions: how often its KV was taken away for others.
        num_isolations: how often a step beside others failed since one last succeeded.
        finish_reason: None while running, else "stop", "length", "cancelled", "deadline" or "error".
        error: the reason of a request that failed.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    detokenizer: Detokenizer
    vocab_size: int
    breaker_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    slot: int = BASE_SLOT
    adapter: str | None = None
    merged: MergedAdapters | None = None
    merged_slots: tuple[int, ...] = ()
    mixture: Mixture | None = None
    policy: ReusePolicy | None = None
    drafting: bool = False
    on_text: Callable[[str], None] | None = None
    on_progress: Callable[[Request], None] | None = None
    continuation: tuple[int, ...] = ()
    distributions: bool = False
    number: int = 0
    priority: int = 0
    num_wanted: int = 1
    deadline_s: float | None = None
    grammar: Any = None
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    prompt_scores: list[Choice] = field(default_factory=list)
    scored_distributions: list[Tensor] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    draft: int | None = None
    drafts: list[int] = field(default_factory=list)
    streams: dict[str, PagedStream] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    scalings: Tensor | None = None
    num_scaled: int = 0
    sources: list[int] = field(default_factory=list)
    edited: dict[int, Tensor] = field(default_factory=dict)
    edits: list[str] = field(default_factory=list)
    may_be_edited: bool = False
    entered: tuple[str, ...] = ()
    tickets: tuple[int, ...] = ()
    holds_mixture: bool = False
    has_lease: bool = False
    times_passed: int = 0
    num_preemptions: int = 0
    num_isolations: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        # the last token of a continuation is scored, never an input
        self.tokens = [*self.prompt_ids, *self.continuation[:-1]]
        self.history = History(self.sampling, self.prompt_ids, self.vocab_size, self.breaker_ids)
        self.output = StopText(self.sampling.stop)
        self.submitted_s = time.perf_counter()
        self.ended_s: float | None = None
        self.draft_ran, self._draft_after = False, None
        self._num_own = 0
        self._scaling_pass: Tensor | None = None
        if self.mixture is not None:
            self.scalings = torch.empty(len(self.prompt_ids), len(self.mixture.sites), len(self.mixture.adapters))
            self._scaling_pass = self.mixture.scaling_pass_weights()

    @property
    def max_length(self) -> int:
        """Most tokens the request can have, prompt included."""
        return len(self.prompt_ids) + (len(self.continuation) or self.sampling.max_tokens)

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def logprobs(self) -> list[float]:
        """Natural log-probabilities of the generated tokens."""
        return [choice.logprob for choice in self.choices]

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

    @property
    def key(self) -> str | None:
        """What it runs on, for fairness: an adapter, a merge, a mixture, or None for the base model."""
        if self.merged is not None:
            return "+".join(self.merged.ids)
        return self.adapter or (self.mixture.name if self.mixture is not None else None)

    @property
    def is_decoding(self) -> bool:
        """Whether it has come to its last known token, in every stream, and wants the next."""
        if ADAPTED not in self.streams or len(self.tokens) - self.streams[ADAPTED].length > 1:
            return False
        if SCALING not in self.streams or not self.needs_scaling_rows:
            return True
        return self.source(len(self.tokens) - 1) - self.streams[SCALING].length < 1

    @property
    def first_unanswered(self) -> int:
        """The first position whose row has yet to say something about the token after it."""
        prompt = len(self.prompt_ids)
        if self.sampling.prompt_logprobs and len(self.prompt_scores) < prompt - 1:
            return len(self.prompt_scores)
        return prompt - 1 + len(self.choices)

    @property
    def needs_scaling_rows(self) -> bool:
        """Whether any later input needs scalings of its own."""
        if self.mixture is None:
            return False
        last = self.policy.last_own(len(self.prompt_ids))
        return last is None or self.num_scaled <= last

    def source(self, position: int) -> int:
        """Return the position whose scalings the input at `position` uses."""
        return self.policy.source(position, len(self.prompt_ids))

    def num_own(self, stop: int) -> int:
        """Return how many of the first `stop` positions, without a gap, use their own scalings."""
        while self._num_own < stop and self.source(self._num_own) == self._num_own:
            self._num_own += 1
        return min(self._num_own, stop)

    def known_after(self, position: int) -> int | None:
        """Return the token after `position` if it is known, a continuation's last one included."""
        following = position + 1
        if following < len(self.tokens):
            return self.tokens[following]
        return self.continuation[-1] if self.continuation and following == self.max_length - 1 else None

    def row_weights(self, kind: str, first: int, stop: int) -> Tensor | None:
        """Return weights `[row, site, n]` (or a constant `[1, 1, n]`) of rows `first:stop`; None for base rows."""
        if kind == SCALING:
            return self._scaling_pass
        return self.used(first, stop) * self.mixture.config.global_scaling_weight

    def unedited(self, first: int, stop: int) -> Tensor:
        """Return float32 `[row, site, n]`: the scalings that the policy gives the inputs `first:stop`."""
        sources = [self.source(position) for position in range(first, stop)]
        own = sources == list(range(first, stop))
        return self.scalings[first:stop] if own else self.scalings[sources]

    def used(self, first: int, stop: int) -> Tensor:
        """Return float32 `[row, site, n]`: the scalings that the inputs `first:stop` use, edits included."""
        used = self.unedited(first, stop)
        if self.edited and len(used):
            used = torch.stack([self.edited.get(first + row, used[row]) for row in range(len(used))])
        return used

    @property
    def num_edited(self) -> int:
        """Position after the last one that an edit changed."""
        return next(reversed(self.edited)) + 1 if self.edited else 0

    @property
    def first_edited(self) -> int:
        """The first position whose adapted KV is not the mixture's own, because of an edit."""
        if self.edited:
            return next(iter(self.edited))
        return len(self.sources) if self.may_be_edited else self.max_length

    def keep_edited(self, rows: Mapping[int, Tensor]) -> None:
        """Let the inputs at these positions use these `[site, n]`, now and whenever they are computed again."""
        self.edited.update(rows)

    def take_scalings(self, first: int, scalings: Tensor) -> None:
        """Keep float32 `[row, site, n]` scalings of positions from `first` on; those used already stay as they are."""
        stop = first + len(scalings)
        if self.scalings.shape[0] < stop:
            room = max(stop, min(2 * self.scalings.shape[0], self.max_length))
            grown = self.scalings.new_empty(room, *self.scalings.shape[1:])
            grown[: self.num_scaled] = self.scalings[: self.num_scaled]
            self.scalings = grown
        if stop > self.num_scaled:
            new = max(first, self.num_scaled)
            self.scalings[new:stop] = scalings[new - first :]

    def commit_scaling(self, plan: SpanPlan, scalings: Tensor, draft: int | None) -> None:
        """Take the scalings of a scaling span; before the adapted span of the same step.

        Args:
            plan: the span.
            scalings: float32 `[row, site, n]`.
            draft: the token its last row suggests to come next, or None.
        """
        self.take_scalings(plan.first, scalings)
        stop = plan.stop - plan.drafted
        self.num_scaled = max(self.num_scaled, stop)
        self.streams[SCALING].commit(stop)
        self.ran.add(SCALING)
        if plan.drafted:
            self.draft_ran, self._draft_after = True, draft
        else:
            self.draft = draft

    def commit_adapted(self, plan: SpanPlan, answers: Sequence[Answer]) -> None:
        """Take an adapted span's rows and what they say about the tokens after them.

        Args:
            plan: the span.
            answers: one per row that has logits.
        """
        failed = next((answer.error for answer in answers if answer.error), None)
        if failed:
            self.finish("error", failed)
            return
        self.streams[ADAPTED].commit(plan.stop)
        self.ran.add(ADAPTED)
        if self.mixture is not None:
            self.sources += [self.source(p) for p in range(len(self.sources), plan.stop)]
        for position, answer in enumerate(answers, plan.stop - len(answers)):
            if position < len(self.prompt_ids) - 1:
                self.prompt_scores.append(answer.choice)
            elif self.continuation:
                self._score(answer)
            else:
                self._take(answer.choice)

    def preempt(self) -> None:
        """Give the KV back; everything known stays, and will be replayed."""
        self.free()
        self.num_preemptions += 1

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the request; no error if it has ended. Its KV stays until `free`: the last step's may be published."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            if reason != "stop" or not self.output.stopped:
                self._say(self.output.finish(self.detokenizer.flush()))
            self.ended_s = time.perf_counter()

    def free(self) -> None:
        """Give back every KV block."""
        self.draft = None
        self.draft_ran, self._draft_after = False, None
        for stream in self.streams.values():
            stream.free()
        self.streams = {}

    def _score(self, answer: Answer) -> None:
        self.choices.append(answer.choice)
        self.drafts.append(-1)
        self.token_times_s.append(time.perf_counter() - self.submitted_s)
        if answer.distribution is not None:
            self.scored_distributions.append(answer.distribution)
        if len(self.choices) == len(self.continuation):
            self.tokens.append(self.continuation[-1])
            self._say("".join(map(self.detokenizer.push, self.continuation)))
            self.finish("length")

    def _take(self, choice: Choice) -> None:
        token = choice.token
        self._settle_draft(token)
        self.tokens.append(token)
        self.history.push(token)
        self.choices.append(choice)
        self.token_times_s.append(time.perf_counter() - self.submitted_s)
        self._end_if_done(token)

    def _settle_draft(self, token: int) -> None:
        if not self.draft_ran:
            self.drafts.append(-1)
            return
        accepted = token == self.draft
        self.drafts.append(int(accepted))
        # a rejected draft's row lies past `length`: it does not exist, and its position runs again
        self.num_scaled += accepted
        self.streams[SCALING].commit(self.num_scaled)
        self.draft = self._draft_after if accepted else None
        self.draft_ran, self._draft_after = False, None

    def _end_if_done(self, token: int) -> None:
        if token in self.eos_ids and not self.sampling.ignore_eos:
            self.finish("stop")
            return
        if self.matcher is not None:
            self.matcher.accept(token)
        self._say(self.output.push(self.detokenizer.push(token), len(self.choices) >= self.sampling.min_tokens))
        if self.finish_reason is not None:
            return  # whoever reads the text has ended it
        if self.output.stopped or token in self.sampling.stop_token_ids or (
            self.matcher is not None and self.matcher.is_finished
        ):
            self.finish("stop")
        elif len(self.tokens) >= self.max_length:
            self.finish("length")
        elif SCALING in self.streams and not self.needs_scaling_rows:
            self.streams.pop(SCALING).free()

    def _say(self, text: str) -> None:
        if not text or self.on_text is None:
            return
        try:
            self.on_text(text)
        except Exception as error:  # the caller's own code: its failure is this request's alone
            self.on_text = None
            self.finish_reason = None
            self.finish("error", f"on_text raised {type(error).__name__}: {error}")
