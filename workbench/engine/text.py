"""Token ids to text while they arrive: whole characters only, stop strings held back until decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Detokenizer:
    """Turns token ids into the text each adds.

    A token that ends inside a UTF-8 character adds "" until the character is complete.
    """

    def __init__(self, tokenizer: Any, skip_special: bool):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._start, self._read = 0, 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """Return what an unfinished character at the end shows as."""
        if self._tokenizer is None:
            return ""
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> tuple[str, ...]:
    """Return the text each token adds, special tokens shown; together they are the decoded text."""
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += "" if pieces[-1] else detokenizer.flush()
    return tuple(pieces)


class StopText:
    """Output text as it grows, up to the first stop string.

    Attributes:
        text: what may be shown: never part of a stop string.
        stopped: a stop string was met; the text ends before it.
    """

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Add text and return what has become certain; before it `may_stop`, stop strings are text like any other."""
        held = self._held + piece
        if not may_stop:
            return self._show(held, "")
        cuts = [at for stop in self._stop if (at := held.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            return self._show(held[: min(cuts)], "")
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        return self._show(held[: len(held) - keep], held[len(held) - keep :])

    def finish(self, piece: str = "") -> str:
        """Add the last text and return everything still held back."""
        shown = self.push(piece)
        return shown if self.stopped else shown + self._show(self._held, "")

    def _show(self, shown: str, held: str) -> str:
        self.text += shown
        self._held = held
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
