"""Reuse policies: whose scalings each input of a request uses.

Contract: a policy is a pure function of positions, decided before the row runs. `source(p) <= p`, never decreasing;
`source(p) == p` means "its own". Everything the engine does (which scaling rows run, when the scaling stream is freed,
what is drafted) follows from it, so a new policy needs no change in the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral
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


def trusted(policy: Any) -> ReusePolicy:
    """Return a policy that keeps the contract or raises: ours as they are, any other behind a check of what it says.

    Raises:
        UserError: no policy, or the class of one.
    """
    if isinstance(policy, type):
        kind = policy.__name__
        example = {"exact": "exact()", "non_granular": "non_granular(4)", "periodic": "periodic(8)"}.get(kind)
        example = example or ("lagged(1)" if kind == "lagged" else f"{kind}(...)")
        raise UserError(f"policy is the class {kind!r}; a request needs a policy made of it, such as {example}")
    if type(policy) in POLICIES.values() or isinstance(policy, _Checked):
        return policy
    if not all(callable(getattr(policy, name, None)) for name in ("source", "last_own")):
        raise UserError(f"policy must be a reuse policy such as exact() or non_granular(4), not {policy!r}")
    return _Checked(policy)


class _Checked:
    """A policy of the user's own: each position is asked once, in order, and what it says is checked and kept."""

    def __init__(self, policy: Any):
        self._policy, self._kind = policy, type(policy).__name__
        self._known: dict[int, list[int]] = {}
        self._last: dict[int, int | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # a copy that has no policy yet
        return getattr(self._policy, name)

    def source(self, position: int, prompt_tokens: int) -> int:
        """Return what the policy says of `position`."""
        sources = self._known.setdefault(prompt_tokens, [])
        while len(sources) <= position:
            sources.append(self._asked(len(sources), prompt_tokens, sources[-1] if sources else 0))
        return sources[position]

    def last_own(self, prompt_tokens: int) -> int | None:
        """Return what the policy says."""
        if prompt_tokens in self._last:
            return self._last[prompt_tokens]
        last = self._told(f"last_own({prompt_tokens})", lambda: self._policy.last_own(prompt_tokens))
        if last is not None and (isinstance(last, bool) or not isinstance(last, Integral)):
            raise UserError(f"policy {self._kind}: last_own({prompt_tokens}) is a position or None, not {last!r}")
        self._last[prompt_tokens] = last
        return last

    def _asked(self, position: int, prompt_tokens: int, before: int) -> int:
        said = f"source({position}, {prompt_tokens})"
        found = self._told(said, lambda: self._policy.source(position, prompt_tokens))
        said = f"policy {self._kind}: {said} is {found!r}"
        if isinstance(found, bool) or not isinstance(found, Integral):
            raise UserError(f"{said}, not a whole number")
        if not 0 <= found <= position:
            raise UserError(f"{said}; a source is a position from 0 to {position}, the input itself")
        if found < before:
            raise UserError(f"{said}, and that of the input before is {before}; a source never goes back")
        last = self.last_own(prompt_tokens)
        if last is not None and found > last:
            raise UserError(f"{said}, which is after the last that has scalings of its own, last_own: {last}")
        return int(found)

    def _told(self, said: str, ask: Any) -> Any:
        try:
            return ask()
        except Exception as error:  # the user's own code, whatever it raises
            raise UserError(f"policy {self._kind}: {said} raised {type(error).__name__}: {error}") from error


def _require_count(policy: str, letter: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{policy}: {letter} must be a whole number of at least 1, not {value!r}")
