"""Reuse policies: whose scalings each input of a request uses.

Contract: a policy is a pure function of positions, decided before the row runs. `source(p) <= p`, never decreasing;
`source(p) == p` means "its own". Everything the engine does (which scaling rows run, when the scaling stream is freed,
what is drafted) follows from it, so a new policy needs no change in the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.errors import UserError, names, nearest


class ReusePolicy(Protocol):
    """Which position's scalings the input at a position uses."""

    @property
    def name(self) -> str:
        """Short label for plots and metadata."""
        ...

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return the position whose scalings the input at `position` uses."""
        ...

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return the last position that ever gets its own scalings; None when there is no last."""
        ...


@dataclass(frozen=True)
class exact:
    """Every input gets its own scalings."""

    name: str = "exact"

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return `position`."""
        return position

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return None."""
        return None


@dataclass(frozen=True)
class non_granular:
    """The prompt and the first k generated tokens get their own scalings; later inputs reuse those of the k-th.

    k = 0 reuses the last prompt token's. The prompt never counts, whatever its length (mistral.rs counts a one-token
    prompt as the first generated token: its k is k - 1 here).
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise UserError(
                f"tgt_non_granular_index must be a whole number of at least 0, not {self.k!r}; "
                "leave it out to compute every token's scalings"
            )

    @property
    def name(self) -> str:
        """Short label for plots and metadata."""
        return f"non_granular({self.k})"

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return `position`, but never past the k-th generated token."""
        return min(position, prompt_tokens + self.k - 1)

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return the k-th generated token's position (the last prompt token's for k = 0)."""
        return prompt_tokens + self.k - 1


@dataclass(frozen=True)
class periodic:
    """The prompt and every n-th generated token get their own scalings; those between reuse the newest.

    The scaling rows of n tokens run together, so that this costs about 1 + 1/n forwards a token; n = 1 is `exact`.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count("periodic", "n", self.n)

    @property
    def name(self) -> str:
        """Short label for plots and metadata."""
        return f"periodic({self.n})"

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return the newest position that is a whole number of periods after the prompt's last token."""
        last = prompt_tokens - 1
        return position if position <= last else last + (position - last) // self.n * self.n

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return None."""
        return None


@dataclass(frozen=True)
class lagged:
    """The prompt gets its own scalings; each generated token reuses those of the token d places before it.

    A token's scaling row runs in the same forward as the adapted row of a later token: one forward a token, and the
    scalings are never more than d tokens old.
    """

    d: int = 1

    def __post_init__(self) -> None:
        _require_count("lagged", "d", self.d)

    @property
    def name(self) -> str:
        """Short label for plots and metadata."""
        return f"lagged({self.d})"

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return the position d before, but none before the prompt's last."""
        last = prompt_tokens - 1
        return position if position <= last else max(last, position - self.d)

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return None."""
        return None


POLICIES = {"exact": exact, "non_granular": non_granular, "periodic": periodic, "lagged": lagged}


def policy_named(text: Any) -> ReusePolicy:
    """Return the policy that a name such as "exact", "non_granular(4)" or "lagged(1)" says.

    Raises:
        UserError: no such policy, or a number that it cannot have.
    """
    examples = "exact, non_granular(4), periodic(8) or lagged(1)"
    found = re.fullmatch(r"\s*([a-z_]+)\s*(?:\(\s*(\d*)\s*\))?\s*", text) if isinstance(text, str) else None
    if found is None:
        raise UserError(f"a reuse policy is written {examples}, not {text!r}")
    kind, number = found.groups()
    if kind not in POLICIES:
        raise UserError(f"no reuse policy {kind!r}{nearest(kind, POLICIES)}; there are {names(list(POLICIES))}")
    if (kind == "exact") == bool(number):
        raise UserError(f"policy {text!r} needs {'no number' if number else 'its number'}; examples: {examples}")
    return POLICIES[kind](int(number)) if number else POLICIES[kind]()


def _require_count(policy: str, letter: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{policy}: {letter} must be a whole number of at least 1, not {value!r}")
