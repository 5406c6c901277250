"""Replay: a stored trace as forced scalings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.edits.edit import Edit, Positions, Tap
from workbench.errors import UserError, names
from workbench.instrument.sites import matching
from workbench.instrument.trace import Trace


class replay(Edit):
    """Use the scalings of a trace, position by position, instead of the classifier's.

    Args:
        trace: of a mixture with the same adapters and sites, in any order.
        extend: "last" goes on with the last recorded ones where the trace ends; None refuses to run beyond it.
        sites, positions: see `Edit`.
    """

    def __init__(self, trace: Trace, *, extend: str | None = None,
                 sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        if not isinstance(trace, Trace):
            raise UserError(f"replay takes a Trace (rec.trace(request_id) or Trace.load(path)), not {trace!r}")
        if extend not in (None, "last"):
            raise UserError(f"replay: extend is 'last' or None, not {extend!r}")
        usable = trace.source >= 0
        if not usable.any():
            raise UserError("replay: this trace has no scalings")
        self.extend, self._adapters, self._sites = extend, trace.adapters, trace.sites
        self._name = trace.metadata.get("request_id", "a trace")
        self._values = torch.from_numpy(np.array(trace.values[usable], dtype=np.float32))
        self._place = {int(position): row for row, position in enumerate(trace.positions[usable])}
        self._end = int(trace.positions[usable][-1])

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return f"replay {self._name} ({len(self._place)} tokens{', then the last' if self.extend else ''})"

    def check(self, adapters: tuple[str, ...], sites: tuple[str, ...], key: str) -> None:
        """Raise a UserError unless the trace has exactly these adapters, and all of the sites."""
        super().check(adapters, sites, key)
        if set(self._adapters) != set(adapters):
            raise UserError(f"{key}: the trace was made with adapters {names(self._adapters)}, this mixture has "
                            f"{names(adapters)}; replay needs the same ones")
        wanted = [sites[i] for i in matching(sites, self.sites, f"{key}: no site")]
        if lacking := [site for site in wanted if site not in set(self._sites)]:
            raise UserError(f"{key}: the trace has no scalings of {len(lacking)} sites: {names(lacking, 3)}; replay "
                            "one of the same base and ordering, or name the sites")

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the trace's scalings of these positions."""
        self.check(tap.adapters, tap.sites, tap.name)
        rows = [self._row(int(position)) for position in tap.positions]
        adapters = [self._adapters.index(name) for name in tap.adapters]
        at = {site: i for i, site in enumerate(self._sites)}
        sites = torch.tensor([at[site] for site in tap.sites])
        return self._values[torch.tensor(rows)[:, None], sites][..., adapters]

    def _row(self, position: int) -> int:
        row = self._place.get(position)
        if row is None and position > self._end and self.extend == "last":
            row = self._place[self._end]
        if row is None:
            fix = "; extend='last' goes on with its last scalings" if position > self._end else ""
            raise UserError(f"replay: the trace of {self._name} has no scalings of position {position} (it ends at "
                            f"{self._end}){fix}")
        return row
