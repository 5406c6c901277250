"""Edits: what a mixture's scalings are changed to before the adapters see them.

An edit is a function `edit(scalings, tap) -> Tensor | None`: it gets float32 `[row, site, adapter]` of rows that are
about to run for the first time (one row per input token, sites and adapters as `tap` names them) and returns what
those rows use instead, of the same shape, or None to leave them. It must not change what it is given. The ones here
know the usual interventions; `Engine.edit` takes any of them, a function of your own, or a list applied in order.

What is edited is what a row *uses*: the reuse policy has already said whose scalings that is.
"""

from workbench.edits.changes import ablate, force, freeze, scale, swap
from workbench.edits.edit import Edit, Tap
from workbench.edits.faders import Faders
from workbench.edits.replay import replay

__all__ = ["Edit", "Faders", "Tap", "ablate", "force", "freeze", "replay", "scale", "swap"]
