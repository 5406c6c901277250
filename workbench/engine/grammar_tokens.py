"""The model's tokens as llguidance sees them, and what it says in words for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.errors import UserError


class Vocabulary:
    """What llguidance knows of the model's tokens, and what it does not: ids to spare, and what ends a text."""

    def __init__(self, tokenizer: Any, size: int, eos_ids: Sequence[int]):
        if tokenizer is None:
            raise UserError("response_format needs the base's tokenizer, and this base has none")
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "response_format needs a fast tokenizer (tokenizer.json), and this base's is "
                f"{type(tokenizer).__name__}, a slow one"
            )
        ids = tokenizer.get_vocab().values()
        self.size, self.eos_ids = size, frozenset(i for i in eos_ids if 0 <= i < size)
        ends = sorted(self.eos_ids & set(ids))
        if not ends:
            raise UserError("response_format needs a base with an end-of-sequence token, and this one names none")
        self.tokenizer = _load(tokenizer, max(size, max(ids) + 1), ends)
        self._known = np.zeros(self.tokenizer.vocab_size, dtype=bool)
        self._known[[*ids]] = True
        self._ends = sorted(self.eos_ids)

    def allowed(self, inner: Any) -> np.ndarray | None:
        """Return which tokens may come next, bool `[vocab]`, all False in a dead end; None beyond a limit.

        Args:
            inner: llguidance's matcher.
        """
        packed = np.frombuffer(inner.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, count=len(self._known), bitorder="little").view(bool)
        bits &= self._known
        bits = bits[: self.size]
        # llguidance allows an end in dead ends too, and never an id that the tokenizer lacks
        bits[self._ends] = inner.is_accepting() or [bits[i] and self._closes(inner, i) for i in self._ends]
        if inner.is_error():  # asking whether it accepts may be what reaches a limit
            return np.zeros_like(bits) if is_dead_end(inner) else None
        return bits

    def is_end(self, allowed: np.ndarray) -> bool:
        """Whether tokens that end a text are all there is."""
        return 0 < np.count_nonzero(allowed) == np.count_nonzero(allowed[self._ends])

    def ends(self, allowed: np.ndarray) -> np.ndarray:
        """Return the tokens of a mask that end a text, bool `[vocab]`."""
        only = np.zeros_like(allowed)
        only[self._ends] = allowed[self._ends]
        return only

    def may_lead(self, token: int) -> bool:
        """Whether anything can follow a token: the tokenizer knows it, and it ends no text."""
        return 0 <= token < self.size and bool(self._known[token]) and token not in self.eos_ids

    def _closes(self, inner: Any, token: int) -> bool:
        """Whether the grammar itself names this token as its last."""
        # a copy: neither try_consume_tokens nor rollback knows an end-of-sequence token
        ahead = inner.deep_copy()
        return ahead.consume_token(token) and ahead.is_accepting()


def is_dead_end(inner: Any) -> bool:
    """Whether the error of llguidance's matcher says no more than that nothing may follow."""
    return inner.get_error().startswith("NoExtension")


def _load(tokenizer: Any, size: int, ends: list[int]) -> Any:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise UserError("response_format needs the package llguidance: pip install llguidance") from None
    try:
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except Exception as error:  # the library raises bare Exceptions for tokenizers that it cannot read
        raise UserError(f"response_format does not work with this base's tokenizer: {reason(str(error))}") from None


def reason(message: str) -> str:
    """Return the line of a compiler's message that says what is wrong, without its drawing of where."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line[7:] for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason given")
    if line.startswith("panic"):
        return "it is larger than the compiler can hold"
    if line.startswith("oneOf constraints"):
        return (
            "the branches of a oneOf may overlap; use anyOf, or require in every branch a property with a constant of "
            "its own"
        )
    if within := re.search(r"\(in regex\): (.+)", line):
        return within[1][:240]
    if placed := re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", line):
        line = f"{placed[3]} (line {placed[1]}, column {placed[2]})"
    line = line.partition("; following special tokens")[0]
    return line if len(line) <= 240 else line[:237] + "..."
