"""Playing: one request of a widget on its way: its feed, what it records, and what the page is told of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from workbench.engine.result import Completion, completion_of
from workbench.errors import UserError
from workbench.live.feed import Feed
from workbench.live.voices import Voice

if TYPE_CHECKING:
    from workbench.engine import Engine
    from workbench.engine.request import Request
    from workbench.instrument.trace import Trace


class Playing:
    """One request, from the moment before it is submitted.

    Args:
        engine: runs it.
        number: which run of its widget, from 1.
        request_id: its name.
        voice: who answers.
        record: what `engine.record` records of it.

    Attributes:
        sent: how many tokens and rows every page knows.
        ended: what the pages were told at the end; None until then.
        done: set once the result can be read.
    """

    def __init__(self, engine: Engine, number: int, request_id: str, voice: Voice, record: Sequence[str]):
        self.number, self.request_id, self.voice, self._engine = number, request_id, voice, engine
        # without scalings it is the entropy that gives the base model's answer a trace
        kinds = dict.fromkeys([*record, *(["entropy"] if voice.kind == "base" else [])])
        self._recorder, self.resources = engine.record(*kinds, requests=[request_id]), ExitStack()
        self.resources.callback(self._end_recording)
        self.request: Request | None = None
        self.feed: Feed | None = None
        self.sent = (0, 0)
        self.ended: dict[str, Any] | None = None
        self.done, self._has_caught_up, self._is_fault_told = threading.Event(), False, False
        self.poke = lambda: None

    def begin(self, prompt: Any, options: Mapping[str, Any], is_last: bool = True) -> None:
        """Queue the request; the engine's thread is woken by the last of several, so that they start together."""
        asked = {"request_id": self.request_id, **self.voice.options, **options}
        if is_last:
            self.request = self._engine.submit(prompt, **asked).request
        else:
            self.request = self._engine.enqueue(prompt, **asked)
        self.feed = Feed(self.request, self._engine.tokenizer, self.voice.weights, lambda: self.poke())

    def catch_up(self) -> None:
        """Take what happened before the feed listened, once; waits for the step under way."""
        if not self._has_caught_up:
            self._has_caught_up = True
            with self._engine.adapters.turn:
                self.feed.catch_up()

    def cancel(self) -> None:
        """End it now; what it has said stays."""
        if self.request is not None:
            self._engine.cancel(self.request)

    @property
    def completion(self) -> Completion:
        """The result, once it has ended."""
        return completion_of(self.request)

    def trace(self) -> tuple[Trace | None, str]:
        """Return the trace, or None and the reason."""
        try:
            return self._recorder.trace(self.request_id), ""
        except UserError as error:
            return None, str(error)

    def fault(self) -> str:
        """Return, the first time that anyone asks, why nothing of it is heard any more; else nothing."""
        said = self.feed.error if self.feed is not None and not self._is_fault_told else None
        if said is None:
            return ""
        self._is_fault_told = True
        return f"what is written can no longer be followed here, but it goes on to its end: {said}"

    def close(self) -> None:
        """Stop recording and listening."""
        self.resources.close()
        if self.feed is not None:
            self.feed.close()

    def _end_recording(self) -> None:
        # what it complains of, a request that never ran, its submission has said already
        with suppress(UserError):
            self._recorder.close()

    def now(self) -> tuple[float, int]:
        """Return seconds since submission, and how many tokens have been generated."""
        return time.perf_counter() - self.request.submitted_s, len(self.feed.generated_ids)

    def started(self, palette: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what a page is told first."""
        feed = self.feed
        return {
            "type": "start", "run": self.number, "voice": self.voice.to_json(palette), "hidden": feed.hidden,
            "prompt_tokens": feed.prompt_tokens - feed.hidden, "max_tokens": feed.request.sampling.max_tokens,
        }

    def news(self, is_whole: bool = False) -> tuple[dict[str, Any], list[bytes]]:
        """Return what is new since the last time, or everything, as a message and its buffers."""
        news = self.feed.news(*((0, 0) if is_whole else self.sent))
        if not is_whole:
            self.sent = (news.first + len(news.texts), news.first_row + len(news.means))
        content = {
            "type": "more", "run": self.number, "first": news.first, "texts": list(news.texts),
            "first_row": news.first_row, "num_rows": len(news.means), "stats": self.feed.stats(),
        }
        return content, [news.means.tobytes(), news.sources.tobytes()]

    def ending(self, **more: Any) -> dict[str, Any]:
        """Return what a page is told at the end."""
        completion = self.completion
        return {
            "type": "end", "run": self.number, "reason": completion.finish_reason, "error": completion.error or "",
            "seed": str(completion.seed), "stats": self.feed.stats(), **more,
        }
