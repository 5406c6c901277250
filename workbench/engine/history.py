"""What the penalties of a request need to know of its tokens, kept as they come.

Contract: `push` is the only change. What is asked with `extra` tokens is as if they had been pushed, and leaves no
trace, so a draft costs no copy. A preempted request keeps its history: recomputed tokens are not pushed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.engine.sampling import Sampling
from workbench.errors import UserError

# repetitions count up to this length (or the allowed one): beyond it the penalty has long decided, and would overflow
LONGEST_REPETITION = 50
_NOTHING = np.empty(0, np.int64)


class History:
    """The tokens of one request as its penalties see them; a setting that is off keeps nothing.

    Args:
        sampling: the request's settings.
        prompt_ids: at least one token.
        vocab_size: ids are below it.
        breaker_ids: tokens that end a repetition, from `DryBreakers.ids`.

    Raises:
        UserError: a prompt token is outside the vocabulary.

    Attributes:
        num_prompt, num_output: tokens of each kind.
    """

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], vocab_size: int, breaker_ids: frozenset[int] = frozenset()
    ):
        self.num_prompt, self.num_output = len(prompt_ids), 0
        self._seen = self._said = self._dry = None
        if sampling.repetition_penalty == 1 and not sampling.dry_multiplier:
            prompt = _NOTHING
        else:
            prompt = np.asarray(prompt_ids, np.int64)
            if wrong := prompt[(prompt < 0) | (prompt >= vocab_size)].tolist():
                raise UserError(f"prompt tokens must be from 0 to {vocab_size - 1}, not {wrong[0]}")
        if sampling.repetition_penalty != 1:
            self._seen = _Counts()
            for token in np.unique(prompt).tolist():
                self._seen.push(token)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._said = _Counts()
        if sampling.dry_multiplier:
            self._dry = _Repetitions(sampling, prompt, vocab_size, breaker_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.num_prompt + self.num_output

    def push(self, token: int) -> None:
        """Add a generated token."""
        self.num_output += 1
        for part in (self._seen, self._said, self._dry):
            if part is not None:
                part.push(token)

    def seen(self, extra: Sequence[int] = ()) -> np.ndarray:
        """Return the distinct tokens of prompt, output and `extra`, int64."""
        return self._seen.after(extra)[0]

    def said(self, extra: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens of output and `extra`, and how often each was said, int64."""
        return self._said.after(extra)

    def repetitions(self, extra: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that would lengthen a repetition, int64, and DRY's penalty of each, float64."""
        return self._dry.after(extra)


class _Counts:
    """Distinct tokens and their counts."""

    def __init__(self):
        self._tokens, self._counts = np.empty(64, np.int64), np.empty(64, np.int64)
        self._places: dict[int, int] = {}

    def push(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token] = len(self._places)
        if place == len(self._tokens):
            self._tokens, self._counts = _doubled(self._tokens), _doubled(self._counts)
        self._tokens[place], self._counts[place] = token, 1

    def after(self, extra: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        num = len(self._places)
        tokens, counts = self._tokens[:num], self._counts[:num]
        if not extra:
            return tokens, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in extra:
            if token in self._places:
                counts[self._places[token]] += 1
            else:
                new[token] = new.get(token, 0) + 1
        return np.append(tokens, list(new)).astype(np.int64), np.append(counts, list(new.values())).astype(np.int64)


class _Repetitions:
    """DRY: for each earlier place of the last token, how many tokens up to there equal those up to the last one.

    The lengths at a token follow from those at the one before: a place's is one more than the previous place's.
    """

    def __init__(self, sampling: Sampling, prompt: np.ndarray, vocab_size: int, breaker_ids: frozenset[int]):
        self._multiplier, self._base = float(sampling.dry_multiplier), float(sampling.dry_base)
        self._allowed, self._range = sampling.dry_allowed_length, sampling.dry_range
        self._longest = max(LONGEST_REPETITION, self._allowed)
        self._is_breaker = np.zeros(vocab_size, bool)
        self._is_breaker[np.fromiter(breaker_ids, np.int64, len(breaker_ids))] = True
        self._num = len(prompt)
        self._tokens = np.concatenate([prompt, np.empty(max(64, len(prompt)), np.int64)])
        self._places, self._lengths = self._first(prompt)

    def push(self, token: int) -> None:
        self._reserve(1)
        self._places, self._lengths = self._step(self._num, token, self._places, self._lengths)
        self._tokens[self._num] = token
        self._num += 1

    def after(self, extra: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        num, places, lengths = self._num, self._places, self._lengths
        self._reserve(len(extra))
        for token in extra:
            places, lengths = self._step(num, token, places, lengths)
            # beyond `_num`: not part of the history
            self._tokens[num] = token
            num += 1
        return self._penalties(num, places, lengths)

    def _reserve(self, num: int) -> None:
        while self._num + num > len(self._tokens):
            self._tokens = _doubled(self._tokens)

    def _first(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What stepping through the whole prompt would end with."""
        if not len(prompt) or self._is_breaker[prompt[-1]]:
            return _NOTHING, _NOTHING
        places = np.flatnonzero(prompt[:-1] == prompt[-1])
        lengths = np.ones(len(places), np.int64)
        growing = np.arange(len(places))
        for back in range(1, min(self._longest, len(prompt))):
            if self._is_breaker[prompt[-1 - back]]:
                break
            growing = growing[places[growing] >= back]
            growing = growing[prompt[places[growing] - back] == prompt[-1 - back]]
            lengths[growing] += 1
        return places, lengths

    def _step(self, num: int, token: int, places: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._is_breaker[token]:
            return _NOTHING, _NOTHING
        found = np.flatnonzero(self._tokens[:num] == token)
        grown = np.ones(len(found), np.int64)
        if len(places) and len(found):
            at = np.minimum(np.searchsorted(places, found - 1), len(places) - 1)
            grown += np.where(places[at] == found - 1, lengths[at], 0)
        return found, np.minimum(grown, self._longest)

    def _penalties(self, num: int, places: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start = 0 if self._range is None else max(0, num - self._range)
        following = self._tokens[places + 1]
        lengths = np.minimum(lengths, places - start + 1)
        is_long = (lengths >= self._allowed) & ~self._is_breaker[following]
        following, lengths = following[is_long], lengths[is_long]
        # the longest last, where a dict keeps it
        order = np.argsort(lengths, kind="stable")
        longest = dict(zip(following[order].tolist(), lengths[order].tolist(), strict=True))
        tokens = np.fromiter(longest, np.int64, len(longest))
        with np.errstate(over="ignore"):
            grown = self._base ** (np.fromiter(longest.values(), np.float64, len(longest)) - self._allowed)
        return tokens, self._multiplier * grown


def _doubled(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values, np.empty_like(values)])
