"""From the arguments of a call to a checked request, or several; nothing is queued here."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.adapters.merge import MergedAdapters
from workbench.adapters.merging import check_merge, load_merged, merged_of
from workbench.config import EngineConfig
from workbench.engine.base import BaseInfo
from workbench.engine.grammar import GrammarCompiler
from workbench.engine.library import Library
from workbench.engine.memory import Memory
from workbench.engine.options import check_arguments, policy_of, require_loaded, require_one, sampling_of, split_options
from workbench.engine.queue import check_priority
from workbench.engine.request import Request
from workbench.engine.response_format import ResponseFormat, check_endable
from workbench.engine.result import Completion, failed
from workbench.engine.sampling import DryBreakers, Sampling, check_vocabulary
from workbench.engine.text import Detokenizer
from workbench.errors import UserError
from workbench.xlora import ReusePolicy


@dataclass
class Submissions:
    """Makes the requests of one engine.

    Attributes:
        info: the base's prompts and end tokens.
        library: what requests may name.
        memory: the KV pool they must fit into.
        grammars: compiles response formats.
    """

    info: BaseInfo
    library: Library
    memory: Memory
    grammars: GrammarCompiler

    def __post_init__(self) -> None:
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self.num_requests = 0
        self._in_use: set[str] = set()
        self._breakers = DryBreakers(self.info.prompts.tokenizer, self.info.prompts.vocab_size)

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self.info.config

    def claim(self, wanted: str | None = None) -> tuple[str, int]:
        """Return the next request's id, the one asked for if it is free, and its number."""
        with self._lock:
            if wanted is not None and wanted in self._in_use:
                raise UserError(f"request id {wanted!r} is taken by a request that is still running")
            self.num_requests = next(self._numbers)
            while wanted is None and f"req-{self.num_requests}" in self._in_use:
                self.num_requests = next(self._numbers)
            chosen = wanted if wanted is not None else f"req-{self.num_requests}"
            self._in_use.add(chosen)
            return chosen, self.num_requests

    def discard(self, requests: Iterable[Request]) -> None:
        """Give back what requests hold that were made, but never queued."""
        for request in requests:
            request.finish("cancelled")
            self.library.leave(request)
            self.ended(request.id)

    def ended(self, request_id: str) -> None:
        """Let a request's id be used again."""
        with self._lock:
            self._in_use.discard(request_id)

    def make(
        self, prompt: Any, *, adapter: str | None = None, mixture: str | None = None,
        merged_adapters: MergedAdapters | Mapping[str, Any] | None = None,
        tgt_non_granular_index: int | None = None, policy: ReusePolicy | None = None,
        sampling: Sampling | None = None, response_format: Any = None, on_text: Callable[[str], None] | None = None,
        request_id: str | None = None, continuation: Any = None, distributions: bool = False, priority: int = 0,
        deadline_s: float | None = None, **options: Any,
    ) -> Request:
        """Return a request that is ready to be queued; see `Engine.submit` for the arguments.

        Raises:
            UserError: a prompt, name or setting that does not fit.
        """
        check_arguments(adapter, mixture, on_text, request_id, distributions, continuation)
        sampling, merged = sampling_of(sampling, options), merged_of(merged_adapters)
        chosen = policy_of(tgt_non_granular_index, policy, mixture)
        library = self.library
        require_one(adapter=adapter, mixture=mixture, merged_adapters=merged and merged.ids)
        require_loaded(adapter, "adapter", library.adapters)
        require_loaded(mixture, "mixture", library.mixtures)
        if merged is not None:
            check_merge(library.adapters, merged)
        check_vocabulary(sampling, self.info.prompts.vocab_size)
        _check_order(priority, deadline_s)
        given = () if continuation is None else self.info.prompts.continuation(continuation)
        ids = self.info.prompts.encode(prompt, len(given) or sampling.max_tokens)
        self.memory.require_room(len(ids) + (len(given) or sampling.max_tokens), 1 + (mixture is not None))
        grammar = self._grammar(response_format, sampling, given)
        if merged is not None and not merged.is_constant_row:
            adapter, merged = load_merged(library.adapters, merged), None
        name, number = self.claim(request_id)
        # a seed of the engine's own is a function of its number: the next run of the same calls gives the same
        seed = sampling.seed if sampling.seed is not None else self.config.seed * 1_000_003 + number
        request = Request(
            id=name, prompt_ids=tuple(ids), sampling=sampling, seed=seed,
            detokenizer=Detokenizer(self.info.prompts.tokenizer, skip_special=True),
            vocab_size=self.info.prompts.vocab_size, breaker_ids=self._breakers.ids(sampling),
            eos_ids=self.info.eos_ids, adapter=adapter, merged=merged,
            mixture=library.mixtures[mixture] if mixture is not None else None, policy=chosen,
            drafting=self.config.drafting and not given, on_text=on_text, continuation=tuple(given),
            distributions=distributions, priority=priority, grammar=grammar, number=number,
        )
        if deadline_s is not None:
            request.deadline_s = time.perf_counter() + deadline_s
        try:
            library.enter(request)
        except BaseException:
            self.discard([request])
            raise
        return request

    def batch(self, prompts: Sequence[tuple[Any, dict[str, Any]]], is_batch: bool) -> list[list[Request] | Completion]:
        """Return each prompt's requests, or, in a batch, the result of a prompt that cannot run.

        Raises:
            UserError: what is wrong with all of them alike.
        """
        made: list[list[Request] | Completion] = []
        try:
            for prompt, own in prompts:
                try:
                    sampling, own = split_options(own)
                    made.append(self.copies(prompt, sampling, own))
                except UserError as error:
                    if not is_batch:
                        raise
                    made.append(failed(self.claim()[0], str(error)))
                    self.ended(made[-1].request_id)
        except BaseException:
            self.discard(request for each in made if isinstance(each, list) for request in each)
            raise
        errors = {each.error for each in made if isinstance(each, Completion)}
        if len(errors) == 1 and all(isinstance(each, Completion) for each in made):
            raise UserError(errors.pop())
        return made

    def copies(self, prompt: Any, sampling: Sampling, options: Mapping[str, Any]) -> list[Request]:
        """Return the `best_of` requests of one prompt, with seeds of their own."""
        count = sampling.num_answers
        each = replace(sampling, n=1, best_of=None)
        if count == 1:
            return [self.make(prompt, sampling=each, **options)]
        first = sampling.seed if sampling.seed is not None else self.config.seed * 1_000_003 + self.num_requests + 1
        options = dict(options)
        wanted = options.pop("request_id", None)
        made: list[Request] = []
        try:
            for index in range(count):
                name = None if wanted is None else f"{wanted}-{index}"
                own = replace(each, seed=(first + index * 0x9E3779B97F4A7C15) % 2**63)
                made.append(self.make(prompt, sampling=own, request_id=name, **options))
                made[-1].num_wanted = sampling.n
        except BaseException:
            self.discard(made)
            raise
        return made

    def _grammar(self, response_format: Any, sampling: Sampling, given: Sequence[int]) -> Any:
        asked = ResponseFormat.of(response_format)
        if asked is None:
            return None
        if given:
            raise UserError("response_format says how text is generated; a given continuation is scored as it is")
        check_endable(asked, sampling.ignore_eos)
        return self.grammars.compile(asked)


def _check_order(priority: int, deadline_s: float | None) -> None:
    check_priority(priority)
    if deadline_s is None:
        return
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < float("inf"):
        raise UserError(f"deadline_s must be a number of seconds above 0, or None for never, not {deadline_s!r}")
