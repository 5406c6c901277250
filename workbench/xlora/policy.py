"""Reuse policies: whose scalings each input of a request uses.

Contract: a policy is a pure function of positions, decided before the row runs. `source(p) <= p`, never decreasing;
`source(p) == p` means "its own". Everything the engine does (which scaling rows run, when the scaling stream is freed,
what is drafted) follows from it, so a new policy needs no change in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workbench.errors import UserError


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
