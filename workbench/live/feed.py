"""Feed: what one running request has done so far, copied out while it runs.

Contract: the engine's thread only copies (in `_hear`, inside a step, where the request stands still) and goes on;
turning tokens into text, counting and sending are the reader's work, on the reader's thread. Nothing of the request is
ever changed. A fault here ends the listening, never the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.display.labels import visible
from workbench.engine.batch import ADAPTED, SCALING
from workbench.engine.text import Detokenizer
from workbench.instrument.trace import nan_mean

if TYPE_CHECKING:
    from workbench.engine.request import Request

MOST_PROMPT_SHOWN = 800  # tokens: a longer prompt's beginning is in the trace, and would bury what is being written


@dataclass(frozen=True)
class News:
    """Part of a request: tokens from `first` on, and rows of scalings from `first_row` on, both counted as shown.

    Attributes:
        texts: what each token adds, control characters spelled out.
        means: float32 `[row, adapter]`, scalings averaged over the sites.
        sources: int32 `[row]`, the position whose scalings the row used; its own is `row`.
    """

    first: int
    texts: tuple[str, ...]
    first_row: int
    means: np.ndarray
    sources: np.ndarray


class Feed:
    """Follows one request from the moment it is made.

    Args:
        request: queued or running; whoever listens to it already goes on hearing it.
        tokenizer: the engine's, or None.
        weights: `[adapter]`, scalings that are the same for every input; None where a mixture's are computed.
        changed: called after each step, on the thread that runs it: must return at once.
    """

    def __init__(self, request: Request, tokenizer: Any, weights: tuple[float, ...] | None,
                 changed: Callable[[], None]):
        self.request, self._weights, self._changed = request, weights, changed
        self.error: str | None = None
        self.num_forwards, self.is_ended = 0, False
        self.prompt_tokens = len(request.prompt_ids)
        self.hidden = max(0, self.prompt_tokens - MOST_PROMPT_SHOWN)
        self._ids: list[int] = []
        self._means: list[np.ndarray] = []
        self._num_rows = 0
        self._lock, self._text_lock = threading.Lock(), threading.Lock()
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, skip_special=False)
        self._texts: list[str] = []
        self._heard_before = request.on_progress
        request.on_progress = self._hear

    @property
    def num_adapters(self) -> int:
        """The adapter axis of the rows; 0 for the base model."""
        mixture = self.request.mixture
        return len(mixture.adapters) if mixture is not None else len(self._weights or ())

    @property
    def generated_ids(self) -> list[int]:
        """Tokens generated so far."""
        with self._lock:
            return self._ids[self.prompt_tokens :]

    def news(self, first: int, first_row: int) -> News:
        """Return everything from token `first` and row `first_row` on; positions count from `hidden`."""
        texts = self._texts_so_far()
        with self._lock:
            means = np.concatenate([np.zeros((0, self.num_adapters), "<f4"), *self._means])
            self._means = [means]
            sources = np.arange(self._num_rows)
            if self.request.mixture is not None:
                sources = np.asarray(self.request.sources[: self._num_rows])
        start = self.hidden + first_row
        return News(first, tuple(texts[self.hidden + first :]), first_row, means[start:],
                    (sources[start:] - self.hidden).astype("<i4"))

    def stats(self) -> dict[str, Any]:
        """Return the request's counts and rates as JSON-able numbers; a rate is None until there is one."""
        request, times = self.request, list(self.request.token_times_s)
        decoding = times[-1] - times[0] if len(times) > 1 else 0.0
        sources = request.sources[: self._num_rows]
        computed = sum(source == position for position, source in enumerate(sources))
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated": len(times),
            "tok_s": (len(times) - 1) / decoding if decoding > 0 else None,
            "ttft_s": times[0] if times else None,
            "forwards": self.num_forwards,
            "computed": computed,
            "reused": len(sources) - computed,
            "accepted": request.drafts.count(1),
            "rejected": request.drafts.count(0),
            "cached": request.cached.get(ADAPTED, 0),
            "cached_scaling": request.cached.get(SCALING, 0),
            "preemptions": request.num_preemptions,
            "edited": bool(request.edits),
        }

    def catch_up(self) -> None:
        """Take what happened before this listened; between two steps."""
        self._note(self.request, is_step=False)

    def close(self) -> None:
        """Stop listening."""
        if self.request.on_progress == self._hear:
            self.request.on_progress = self._heard_before

    def _hear(self, request: Request) -> None:
        if self._heard_before is not None:
            self._heard_before(request)
        self._note(request, is_step=True)

    def _note(self, request: Request, is_step: bool) -> None:
        try:
            with self._lock:
                self._take(request, is_step)
        except Exception as error:  # inside a step of the engine, where it would end everybody's requests
            self.error = f"{type(error).__name__}: {error}"
        self.is_ended = request.finish_reason is not None
        self._changed()

    def _take(self, request: Request, is_step: bool) -> None:
        if self.error is not None:
            return
        before = len(self._ids), self._num_rows
        self._ids += request.tokens[len(self._ids) :]
        self._take_rows(request)
        # the last call may come from a cancellation, between two steps
        is_forward = request.finish_reason is None or before != (len(self._ids), self._num_rows)
        self.num_forwards += is_step and is_forward

    def _take_rows(self, request: Request) -> None:
        first = self._num_rows
        if request.mixture is not None:
            stop = len(request.sources)
        else:
            stream = request.streams.get(ADAPTED)
            # the last generated token is never an input
            stop = max(len(request.tokens) - 1 if request.choices else 0, stream.length if stream is not None else 0)
            stop = min(stop, len(request.tokens))
        if stop <= first:
            return
        if request.mixture is not None:
            new = nan_mean(request.used(first, stop).numpy(), 1)
        else:
            new = np.broadcast_to(np.asarray(self._weights or (), np.float32), (stop - first, self.num_adapters))
        self._means.append(new.astype("<f4"))
        self._num_rows = stop

    def _texts_so_far(self) -> list[str]:
        with self._text_lock:
            with self._lock:
                new = self._ids[len(self._texts) :]
            self._texts += map(self._text_of, new)
            return list(self._texts)

    def _text_of(self, token: int) -> str:
        if self._tokenizer is None:
            return f"<{token}>"
        return visible(self._detokenizer.push(token))
