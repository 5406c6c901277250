"""How reuse policies are told apart in figures: a colour, a marker and a line for each family, a short label for each.

Names only ("non_granular(4)"): the display knows nothing of the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from workbench.display.marks import DASHES, edge
from workbench.display.palette import LIGHT, adapter_colour

EXACT = "exact"


@dataclass(frozen=True)
class Family:
    """Policies that differ in a number.

    Attributes:
        name: as in a policy's name.
        letter: of the number.
        colour, marker: of its points.
        dashes: of its line.
        meaning: what the number says.
    """

    name: str
    letter: str
    colour: str
    marker: str
    dashes: Any
    meaning: str

    @property
    def title(self) -> str:
        """Its name with the letter."""
        return f"{self.name}({self.letter})" if self.letter else self.name

    def line(self, width: float = 1.2) -> dict[str, Any]:
        """Return how its line is drawn."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": width, "solid_capstyle": "butt"}

    def point(self, is_filled: bool = True, size: float = 6.5) -> dict[str, Any]:
        """Return how one of its points is drawn."""
        face = self.colour if is_filled else LIGHT.page
        size = size * 1.5 if self.marker == "*" else size
        return {"marker": self.marker, "markersize": size, "markerfacecolor": face, "linestyle": "none",
                "markeredgecolor": edge(self.colour) if is_filled else self.colour, "markeredgewidth": 1.1}


FAMILIES = {
    each.name: each
    for each in (
        Family(EXACT, "", LIGHT.ink, "*", "-", "every token's own scalings"),
        Family("non_granular", "k", adapter_colour(0), "o", "-", "the first k generated tokens' own, then the k-th's"),
        Family("periodic", "n", adapter_colour(5), "s", DASHES[1], "every n-th token's own"),
        Family("lagged", "d", adapter_colour(2), "^", DASHES[2], "those of d tokens before"),
    )
}


def family_of(policy: str) -> Family:
    """Return a policy's family; one for names that nobody knows."""
    name = policy.partition("(")[0].strip()
    return FAMILIES.get(name) or Family(name, "", LIGHT.muted, "D", DASHES[3], "")


def number_of(policy: str) -> int:
    """Return a policy's number, 0 without one."""
    found = re.search(r"\((\d+)\)", policy)
    return int(found[1]) if found else 0


def short_label(policy: str) -> str:
    """Return "k=4" for "non_granular(4)"; a policy without a letter keeps its name."""
    family = family_of(policy)
    return f"{family.letter}={number_of(policy)}" if family.letter else policy


def ordered(policies: Any) -> list[str]:
    """Return different policies by family, then by number."""
    known = list(FAMILIES)

    def key(policy: str) -> tuple:
        family = family_of(policy).name
        return known.index(family) if family in known else len(known), family, number_of(policy), policy

    return sorted(set(policies), key=key)
