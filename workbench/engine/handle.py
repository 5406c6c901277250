"""Handle: a submitted request, as its submitter sees it: tokens as they come, the result, and a way to stop it.

Safe from any thread, and from asyncio. Nobody has to read: what a reader has not taken is kept (at most
`max_tokens` tokens), and the request runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.engine.result import Completion, completion_of
from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.request import Request


def hear(request: Request, listener: Callable[[str], None]) -> None:
    """Tell a listener every piece of a request's text, before whoever is told already."""
    say = request.on_text

    def on_text(piece: str) -> None:
        listener(piece)
        if say is not None:
            say(piece)

    request.on_text = on_text


@dataclass(frozen=True)
class Token:
    """One step of a stream.

    Attributes:
        id: the token; None for text alone, held back until the end.
        text: what became certain with it; may be "".
        logprob: the model's log-probability of it (natural log).
        top: the likeliest tokens here with theirs, if `top_logprobs` asked for them.
        time_s: when it was known, seconds after submission.
    """

    id: int | None
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]
    time_s: float


class Handle:
    """A request on its way.

    Args:
        engine: whose.
        request: the request, not yet queued: the handle listens to it.
    """

    def __init__(self, engine: Engine, request: Request):
        self.request, self._engine = request, engine
        self._tokens: list[Token] = []
        self._pieces: list[str] = []
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._num_choices, self._is_done = 0, False
        hear(request, self._pieces.append)
        request.on_progress = self._progress

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._is_done

    def cancel(self) -> None:
        """End it now; what it has said stays. No error if it has ended."""
        self._engine.cancel(self.request)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end and return it; an interrupt cancels the request.

        Raises:
            TimeoutError: it has not ended after `timeout_s` seconds; it goes on.
            UserError: called from a request's callback, where nothing can be waited for.
        """
        self._engine.require_outside()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_done, timeout_s):
                    raise TimeoutError(f"request {self.id!r} has not ended after {timeout_s} s; it goes on")
        except KeyboardInterrupt:
            self.cancel()
            raise
        return completion_of(self.request)

    def tokens(self) -> Iterator[Token]:
        """Yield every token from the first on, as it comes; leaving the loop early cancels the request.

        Raises:
            UserError: the request failed; after the tokens it had.
        """
        self._engine.require_outside()
        read, finished = 0, False
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda read=read: len(self._tokens) > read or self._is_done)
                    new, is_done = self._tokens[read:], self._is_done
                yield from new
                read += len(new)
                if is_done:
                    finished = True
                    return
        finally:
            if not finished:
                self.cancel()
            elif self.request.error:
                raise UserError(self.request.error)

    def text(self) -> Iterator[str]:
        """Yield pieces of text as they become certain; leaving the loop early cancels the request."""
        for token in self.tokens():
            if token.text:
                yield token.text

    def __await__(self) -> Generator[None, None, Completion]:
        return self._result().__await__()

    async def __aiter__(self) -> AsyncIterator[Token]:
        read = 0
        try:
            while True:
                await self._until(lambda read=read: len(self._tokens) > read)
                new, is_done = self._tokens[read:], self._is_done
                for token in new:
                    yield token
                read += len(new)
                if is_done and read == len(self._tokens):
                    return
        finally:
            self.cancel()

    async def _result(self) -> Completion:
        try:
            await self._until(lambda: False)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return completion_of(self.request)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait, in the running event loop, until `ready` or the end."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._listeners.append(listen)
        try:
            while not (ready() or self._is_done):
                await changed.wait()
                changed.clear()
        finally:
            self._listeners.remove(listen)

    def _progress(self, request: Request) -> None:
        """Take what a step has done to the request; on the thread that runs the step."""
        text = "".join(self._pieces)
        self._pieces.clear()
        with self._changed:
            first = self._num_choices
            for index, choice in enumerate(request.choices[first:], first):
                own = text if index == len(request.choices) - 1 else ""
                self._tokens.append(Token(choice.token, own, choice.logprob, choice.top, request.token_times_s[index]))
            if text and len(request.choices) == first:
                time_s = (request.ended_s or request.submitted_s) - request.submitted_s
                self._tokens.append(Token(None, text, 0.0, (), time_s))
            self._num_choices = len(request.choices)
            self._is_done = request.finish_reason is not None
            self._changed.notify_all()
        for listener in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits there
                listener()
