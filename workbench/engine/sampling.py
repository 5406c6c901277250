"""How a request chooses its tokens: the settings, checked when they are made, and what only an engine can check.

What the settings mean, in the order they act, is in `choosing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np

from workbench.errors import UserError, names

MOST_ALTERNATIVES = 20
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; above 0 divides the logits.
        top_k: keep the k most likely tokens (and those as likely as the last of them); None keeps all.
        top_p: keep the most likely tokens whose probabilities reach p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1).
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt or output; 1 is off.
        presence_penalty: subtracted from logits of tokens seen in the output.
        frequency_penalty: subtracted once per time a token was seen in the output.
        seed: fixes the noise; None takes the engine's next one (reported with the result).
        stop: strings that end generation; none of them is part of the text.
        ignore_eos: go on past the end-of-sequence token.
        min_tokens: no end-of-sequence token, stop token or stop string ends the request before that many tokens; the
            tokens that would cannot be chosen until then.
        stop_token_ids: tokens that end generation, besides the end-of-sequence tokens.
        typical_p: keep the tokens whose surprise is nearest to the expected one until they reach this probability;
            None or 1 is off. It may drop the most likely token, so it needs a temperature above 0.
        logit_bias: token id -> added to its logit; -inf rules it out.
        dry_multiplier: strength of the DRY penalty against repeated sequences; 0 is off, whatever the other `dry_`
            settings. A token that would lengthen a repetition of L tokens, `dry_allowed_length` or more, loses
            dry_multiplier * dry_base ** (L - dry_allowed_length).
        dry_base: how fast that grows, at least 1.
        dry_allowed_length: shortest repetition that is penalised.
        dry_sequence_breakers: a token whose text holds one of these ends a repetition, and is never penalised.
        dry_range: how many of the last tokens of prompt and output to look at; None looks at all.
        top_logprobs: alternatives reported with each generated token, 0 to 20.
        prompt_logprobs: report the log-probability of each prompt token after the first.
        n: answers to return. At temperature 0 they are all alike.
        best_of: answers to generate, of which the n most likely are returned; None is n.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    typical_p: float | None = None
    # a dict has no hash, and equal settings have equal hashes without it
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_range: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "dry_sequence_breakers"):
            self._set(name, _strings(name, getattr(self, name)))
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise UserError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name, (kind, fits, wanted, default) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or default is not None:
                self._set(name, _number(name, value, kind, fits, wanted))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._check_together()

    @property
    def num_answers(self) -> int:
        """Answers to generate: `best_of`, else `n`."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits change before temperature, grammar and `min_tokens` aside."""
        return bool(
            self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
            or self.dry_multiplier
        )

    @cached_property
    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """`logit_bias` as token ids, int64, and what to add, float32."""
        values = np.fromiter(self.logit_bias.values(), np.float64, len(self.logit_bias))
        values = np.where(np.isinf(values), values, np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX))
        return np.fromiter(self.logit_bias, np.int64, len(self.logit_bias)), values.astype(np.float32)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.typical_p is not None and self.typical_p < 1 and self.temperature == 0:
            raise UserError(
                f"typical_p ({self.typical_p}) may drop the most likely token, which temperature 0 always takes; "
                "set a temperature above 0, or leave typical_p out"
            )
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise UserError(f"best_of ({self.best_of}) is below n ({self.n}): there would be too few answers to return")
        if self.best_of > self.n and self.temperature == 0:
            raise UserError(
                f"best_of ({self.best_of}) is above n ({self.n}) at temperature 0, where all answers are alike; "
                "set a temperature above 0, or leave best_of out"
            )


# name -> type, range, how to say it, default when it may not be None
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str, Any]] = {
    "max_tokens": (int, lambda v: v >= 1, "a whole number of at least 1", 128),
    "top_k": (int, lambda v: v >= 1, "a whole number of at least 1, or None", None),
    "seed": (int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2**63 - 1, or None", None),
    "temperature": (float, lambda v: v >= 0, "a number of at least 0", 0),
    "top_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1", 1),
    "min_p": (float, lambda v: 0 <= v < 1, "at least 0 and below 1", 0),
    "typical_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1, or None", None),
    "repetition_penalty": (float, lambda v: v > 0, "a number above 0", 1),
    "presence_penalty": (float, lambda v: True, "a finite number", 0),
    "frequency_penalty": (float, lambda v: True, "a finite number", 0),
    "min_tokens": (int, lambda v: v >= 0, "a whole number of at least 0", 0),
    "dry_multiplier": (float, lambda v: v >= 0, "a number of at least 0", 0),
    "dry_base": (float, lambda v: v >= 1, "a number of at least 1", 1.75),
    "dry_allowed_length": (int, lambda v: v >= 1, "a whole number of at least 1", 2),
    "dry_range": (int, lambda v: v >= 1, "a whole number of at least 1, or None", None),
    "top_logprobs": (int, lambda v: 0 <= v <= MOST_ALTERNATIVES, f"a whole number from 0 to {MOST_ALTERNATIVES}", 0),
    "n": (int, lambda v: v >= 1, "a whole number of at least 1", 1),
    "best_of": (int, lambda v: v >= 1, "a whole number of at least 1, or None", None),
}


def check_vocabulary(sampling: Sampling, vocab_size: int) -> None:
    """Raise a UserError when a token id of the settings is not one of `vocab_size`, or `logit_bias` leaves none."""
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if wrong := sorted(token for token in ids if token >= vocab_size):
            raise UserError(f"{name} names token {wrong[0]}, but the vocabulary ends at {vocab_size - 1}")
    if len(sampling.logit_bias) == vocab_size and set(sampling.logit_bias.values()) == {-math.inf}:
        raise UserError(f"logit_bias rules out all {vocab_size} tokens of the vocabulary")


class DryBreakers:
    """Finds the tokens that end a repetition for DRY: those whose own text holds one of the strings.

    Args:
        tokenizer: or None, for a base without one.
        vocab_size: ids are below it.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._texts: list[str] | None = None
        self._found: dict[str, frozenset[int]] = {}

    def ids(self, sampling: Sampling) -> frozenset[int]:
        """Return the token ids of `dry_sequence_breakers`; none when DRY is off.

        Raises:
            UserError: there is no tokenizer, or no token holds one of the strings.
        """
        if not sampling.dry_multiplier:
            return frozenset()
        return frozenset().union(*map(self._ids, sampling.dry_sequence_breakers))

    def _ids(self, text: str) -> frozenset[int]:
        if text not in self._found:
            if self._tokenizer is None:
                raise UserError(
                    "without a tokenizer no token has a text, so dry_sequence_breakers cannot be found; set them to ()"
                )
            if self._texts is None:
                # a vocabulary padded past the tokenizer's has ids that decode to nothing
                self._texts = self._tokenizer.batch_decode(
                    [[token] for token in range(min(self._vocab_size, len(self._tokenizer)))]
                )
            found = frozenset(token for token, own in enumerate(self._texts) if text in own)
            if not found:
                raise UserError(
                    f"no token of the vocabulary holds {text!r}, so it cannot break sequences; "
                    "leave it out of dry_sequence_breakers, or give a shorter string"
                )
            self._found[text] = found
        return self._found[text]


def _number(name: str, value: Any, kind: type, fits: Callable[[Any], bool], wanted: str) -> int | float:
    number = Integral if kind is int else Real
    if isinstance(value, bool) or not isinstance(value, number) or not _is_finite(value) or not fits(value):
        raise UserError(f"{name} must be {wanted}, not {value!r}")
    # numpy's numbers are no JSON
    return value if type(value) in (int, float) else kind(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    listed = tuple(value or ()) if isinstance(value, Iterable) or value is None else (value,)
    if not all(isinstance(each, str) and each for each in listed):
        raise UserError(f"{name} must be non-empty strings, not {list(listed)!r}")
    return listed


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= value < 2**63


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    listed = tuple(value) if isinstance(value, Iterable) else () if value is None else (value,)
    if wrong := [each for each in listed if not _is_token(each)]:
        raise UserError(f"{name} must be token ids, whole numbers of at least 0, not {names(wrong)}")
    return tuple(int(each) for each in listed)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias must map token ids to numbers, not be a {type(value).__name__}")
    for token, amount in value.items():
        if not _is_token(token):
            raise UserError(f"logit_bias must be keyed by token ids, whole numbers of at least 0, not {token!r}")
        is_number = isinstance(amount, Real) and not isinstance(amount, bool)
        if not is_number or not (amount == -math.inf or _is_finite(amount)):
            raise UserError(f"logit_bias of token {token} must be a finite number, or -inf, not {amount!r}")
    return {int(token): float(amount) for token, amount in value.items()}
