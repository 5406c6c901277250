"""The usual interventions: force, ablate, scale, swap and freeze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.edits.edit import Edit, Positions, Tap, finite
from workbench.errors import UserError, names


class force(Edit):
    """Fix the weights of the named adapters.

    Args:
        weights: adapter -> weight.
        rest: the weight of all others; None leaves them as they are.
        sites, positions: see `Edit`.
    """

    def __init__(self, weights: Mapping[str, float], *, rest: float | None = 0.0,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        if not isinstance(weights, Mapping) or not weights:
            raise UserError(f"force takes adapters with their weights, such as {{'german': 1.0}}, not {weights!r}")
        self.weights = {name: finite(value, f"force: the weight of {name!r}") for name, value in weights.items()}
        self.rest = None if rest is None else finite(rest, "force: rest")

    @property
    def what(self) -> str:
        """The change, without where and when."""
        rest = "" if self.rest == 0 else ", rest as it is" if self.rest is None else f", rest {self.rest:g}"
        return "force " + ", ".join(f"{name}={value:g}" for name, value in self.weights.items()) + rest

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return tuple(self.weights)

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the fixed weights."""
        new = scalings.clone() if self.rest is None else torch.full_like(scalings, self.rest)
        for name, value in self.weights.items():
            new[..., tap.adapter(name)] = value
        return new


class ablate(Edit):
    """Take the named adapters out: weight 0.

    Args:
        *removed: adapters.
        renormalise: share what they had among the others, in proportion (rows where only they had weight become 0).
        sites, positions: see `Edit`.
    """

    def __init__(self, *removed: str, renormalise: bool = False,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        if not removed or not all(isinstance(name, str) for name in removed):
            raise UserError(f"ablate takes names of adapters, such as ablate('german'), not {names(removed)}")
        self.removed, self.renormalise = removed, renormalise

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return f"ablate {', '.join(self.removed)}" + (", renormalised" if self.renormalise else "")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return self.removed

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the scalings without the removed adapters."""
        new = scalings.clone()
        new[..., [tap.adapter(name) for name in self.removed]] = 0
        return with_sums_of(new, scalings) if self.renormalise else new


class scale(Edit):
    """Multiply one adapter's weights.

    Args:
        name: the adapter.
        factor: any finite number.
        sites, positions: see `Edit`.
    """

    def __init__(self, name: str, factor: float, *,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        self.name, self.factor = name, finite(factor, f"scale: the factor of {name!r}")

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return f"scale {self.name} × {self.factor:g}"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return (self.name,)

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the scalings with one adapter's multiplied."""
        new = scalings.clone()
        new[..., tap.adapter(self.name)] *= self.factor
        return new


class swap(Edit):
    """Let two adapters change places: each gets the other's weights."""

    def __init__(self, one: str, other: str, *,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        if one == other:
            raise UserError(f"swap takes two different adapters, not {one!r} twice")
        self.one, self.other = one, other

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return f"swap {self.one} ↔ {self.other}"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return (self.one, self.other)

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the scalings with two adapters' exchanged."""
        order = list(range(len(tap.adapters)))
        one, other = tap.adapter(self.one), tap.adapter(self.other)
        order[one], order[other] = other, one
        return scalings[..., order]


class freeze(Edit):
    """Let every input after one position use that position's scalings, as they are unedited.

    In a list after other edits, too: what those made of that position is not what stays.

    Args:
        at: the position, or "prompt" for the prompt's last token.
        sites, positions: see `Edit`.
    """

    def __init__(self, at: int | str = "prompt", *,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        if at != "prompt" and (isinstance(at, bool) or not isinstance(at, int) or at < 0):
            raise UserError(f"freeze takes the position whose scalings stay, from 0, or 'prompt', not {at!r}")
        self.at = at

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return f"freeze at {self.at}" if self.at != "prompt" else "freeze at the end of the prompt"

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the scalings with those of later rows replaced."""
        at = tap.prompt_tokens - 1 if self.at == "prompt" else self.at
        later = tap.positions > at
        if not later.any():
            return scalings
        new = scalings.clone()
        new[later] = tap.scalings_at(at)
        return new


def with_sums_of(new: Tensor, old: Tensor) -> Tensor:
    """Return `new` rescaled over adapters to the sums of `old`; 0 where nothing is left to rescale."""
    total = new.sum(-1, keepdim=True)
    return torch.where(total != 0, new * (old.sum(-1, keepdim=True) / torch.where(total != 0, total, 1)), 0)
