"""Grammars: a response format compiled once, and per request a matcher that says which tokens may come next.

Contract: what a matcher lets through, token by token up to an end-of-sequence token, is text of the format. Tokens
that the grammar forces are not filled in without a forward; each is one of the mask's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.engine.grammar_tokens import Vocabulary, is_dead_end, reason
from workbench.engine.json_schema import compilable
from workbench.engine.response_format import JSON_SCHEMA, KINDS, REGEX, ResponseFormat
from workbench.errors import UserError

# a small model may go on with blanks for ever where any number may stand
_BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
# below the defaults: the longest step and the automaton of one format stay near 0.1 s and 100 MB
_LIMITS = {"initial_lexer_fuel": 200_000, "max_lexer_states": 80_000, "verbose_errors": False}
# compiling recurses through rules that name rules; at 8 MB a thousand of them end the process
_STACK_BYTES = 256 << 20
_stack_lock = threading.Lock()


class GrammarError(UserError):
    """A request cannot go on: no token may follow, or its grammar grew beyond the limits."""


class GrammarCompiler:
    """Compiles response formats for one model, off the caller's thread; equal formats once.

    Args:
        tokenizer: a fast tokenizer of transformers; anything else fails each `compile`.
        vocab_size: width of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_ids: tokens that end a text.
        num_threads: how many formats compile at a time.
        max_cached: how many compiled ones are kept, by last use.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int], num_threads: int = 1, max_cached: int = 64
    ):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._cache: OrderedDict[ResponseFormat, Future[Grammar]] = OrderedDict()
        self._max_cached = max_cached
        self._waiting: set[Future[Grammar]] = set()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._closed = False

    def compile(self, wanted: ResponseFormat) -> Future[Grammar]:
        """Return the format's grammar, perhaps still to come; it is shared, so it cannot be cancelled.

        The future's exception is a UserError: the format does not compile, no text meets it, there is no tokenizer to
        match tokens with, or the compiler was closed.
        """
        with self._lock:
            if self._closed:
                return _failed("the engine was shut down; it compiles no more response formats")
            future = self._cache.get(wanted)
            if future is None:
                future = self._cache[wanted] = Future()
                future.set_running_or_notify_cancel()
                self._waiting.add(future)
                self._pool.submit(self._work, wanted, future)
                if len(self._cache) > self._max_cached:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(wanted)
        if future.done() and (error := future.exception()) is not None:
            return _failed(str(error))  # an exception raised in several threads collects all their frames
        return future

    def close(self) -> None:
        """End the threads, after what they compile now; whoever still waits gets a UserError. May be called twice."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in list(self._waiting):
            self._settle(future, UserError("the engine was shut down before the response format was compiled"))

    def _work(self, wanted: ResponseFormat, future: Future[Grammar]) -> None:
        try:
            self._settle(future, Grammar(wanted, self._words()))
        except UserError as error:
            self._settle(future, error)
        except Exception as error:  # one format's failure is its own, whatever the library raises
            self._settle(future, UserError(f"{_named(wanted)} cannot be compiled: {reason(str(error))}"))

    def _settle(self, future: Future[Grammar], outcome: Grammar | UserError) -> None:
        self._waiting.discard(future)
        future.set_exception(outcome) if isinstance(outcome, UserError) else future.set_result(outcome)

    def _words(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary


class Grammar:
    """A compiled response format; matchers of it are cheap.

    Attributes:
        format: what it was compiled from.
    """

    def __init__(self, wanted: ResponseFormat, vocabulary: Vocabulary):
        self.format, self.vocabulary = wanted, vocabulary
        self._source = _source(wanted)
        self._template = _on_deep_stack(self._build)
        first = self._template.deep_copy()
        allowed = vocabulary.allowed(first)
        if allowed is None:
            raise UserError(f"{_named(wanted)} cannot be compiled: {reason(first.get_error())}")
        if not allowed.any():
            raise UserError(f"{_named(wanted)} cannot be met: no text fits it")

    def matcher(self) -> Matcher:
        """Return a matcher at the start of a text."""
        return Matcher(self)

    def start(self, tokens: Sequence[int] = ()) -> Any:
        """Return llguidance's matcher after `tokens`. All of one grammar share an automaton that grows with use."""
        made = self._template.deep_copy()
        if tokens:
            made.consume_tokens(list(tokens))
        return made

    def renew(self) -> None:
        """Give up an automaton that reached its limit, for those who start from now on."""
        self._template = _on_deep_stack(self._build)

    def _build(self) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        built = LLMatcher(self.vocabulary.tokenizer, self._source, limits=LLParserLimits(**_LIMITS), log_level=0)
        if built.is_error():
            raise UserError(f"{_named(self.format)} cannot be compiled: {reason(built.get_error())}")
        return built


class Matcher:
    """The place of one request in its grammar. Not thread-safe.

    Whoever samples from `mask` asks `is_finished` first: a finished text has nothing left to choose.
    """

    def __init__(self, grammar: Grammar):
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._inner = grammar.start()
        self._tokens: list[int] = []
        self._has_ended, self._may_draft, self._may_renew = False, True, True
        self._now: np.ndarray | None = None

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far meets the format."""
        return self._has_ended or self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but an end-of-sequence token; False where `mask` would raise."""
        try:
            return self._has_ended or self._vocabulary.is_end(self._allowed())
        except GrammarError:
            return False

    def mask(self, after: Sequence[int] = ()) -> Tensor | None:
        """Return which tokens may come next, bool `[vocab]`; do not write into it.

        Args:
            after: tokens drafted to come first; the matcher stays where it is.

        Returns:
            The mask: tokens that end a text are in it exactly where the text may end. None where the draft breaks the
            grammar, ends the text, or leads where nothing follows.

        Raises:
            GrammarError: without a draft: no token may follow, or a limit was reached.
        """
        if after:
            allowed = self._allowed_after([int(token) for token in after])
            return None if allowed is None or not allowed.any() else torch.from_numpy(allowed)
        now = self._allowed()
        if not now.any():
            raise GrammarError(f"{_named(self._grammar.format)} allows nothing after the text so far, and not its end")
        return torch.from_numpy(now)

    def accept(self, token: int) -> None:
        """Go on by one token; a limit reached by that shows in the next `mask`.

        Raises:
            GrammarError: it is not one of the mask's, and the matcher stays where it was.
        """
        if self._has_ended or not 0 <= token < self._vocabulary.size or not self._allowed()[token]:
            raise GrammarError(f"token {token} does not follow by {_named(self._grammar.format)}")
        if token in self._vocabulary.eos_ids:
            self._has_ended, self._now = True, self._vocabulary.ends(self._now)
            return
        self._tokens.append(token)
        self._now = None
        if not self._inner.consume_token(token):
            self._renew()

    def _allowed(self) -> np.ndarray:
        if self._now is None:
            allowed = self._vocabulary.allowed(self._inner)
            if allowed is None:
                self._renew()
                allowed = self._vocabulary.allowed(self._inner)
            if allowed is None:
                raise self._broken()
            self._now = allowed
        return self._now

    def _allowed_after(self, draft: list[int]) -> np.ndarray | None:
        if self._has_ended or not self._may_draft or not all(map(self._vocabulary.may_lead, draft)):
            return None
        taken = self._inner.try_consume_tokens(draft)
        allowed = self._vocabulary.allowed(self._inner) if taken == len(draft) else None
        if self._inner.is_error() or not self._inner.rollback(taken):
            # there is no way back; where a limit is near, drafts cost too much
            self._may_draft = is_dead_end(self._inner)
            self._inner = self._grammar.start(self._tokens)
        return allowed

    def _renew(self) -> None:
        # once: a text that needs an automaton of its own again and again would hold up every step
        if self._may_renew:
            self._may_renew = False
            self._grammar.renew()
            self._inner = self._grammar.start(self._tokens)

    def _broken(self) -> GrammarError:
        return GrammarError(f"{_named(self._grammar.format)} is too complex here: {reason(self._inner.get_error())}")


def _source(wanted: ResponseFormat) -> str:
    from llguidance import LLMatcher

    if wanted.kind == JSON_SCHEMA:
        schema = compilable(wanted.text)
        if schema == "true":
            schema = "{}"  # an object can carry options
        options = {"whitespace_pattern": _BLANKS} if schema.startswith("{") else None
        return LLMatcher.grammar_from_json_schema(schema, defaults=options)
    if wanted.kind == REGEX:
        return LLMatcher.grammar_from_regex(wanted.text)
    return LLMatcher.grammar_from_lark(wanted.text)


def _on_deep_stack(call: Callable[[], Any]) -> Any:
    """Return `call()`, made in a thread with a deep stack."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-compile", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()


def _failed(message: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(UserError(message))
    return future


def _named(wanted: ResponseFormat) -> str:
    return f"response_format: the {KINDS[wanted.kind]}"
