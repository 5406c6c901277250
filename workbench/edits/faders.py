"""Faders: an edit that is moved while requests run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.edits.changes import with_sums_of
from workbench.edits.edit import Edit, Positions, Tap, finite
from workbench.errors import UserError, names, nearest

MODES = ("bias", "force")


class Faders(Edit):
    """An edit whose settings may change while requests run, from any thread: each new row uses the newest ones.

    "bias" multiplies an adapter's weight by exp(value) and rescales each site and token to the sum it had, which is
    what adding `value` to the adapter's logit would do; "force" fixes the weight and rescales nothing.
    """

    def __init__(self, *, sites: str | Sequence[str] | None = None, positions: Positions = None):
        super().__init__(sites, positions)
        self._lock = threading.Lock()
        self._settings: dict[str, tuple[str, float]] = {}

    @property
    def settings(self) -> dict[str, tuple[str, float]]:
        """Adapter -> mode and value; adapters left alone are absent."""
        return dict(self._settings)

    def set(self, name: str, value: float, mode: str = "bias") -> None:
        """Move one adapter's fader.

        Args:
            name: the adapter.
            value: a finite number.
            mode: "bias" or "force".
        """
        if not isinstance(name, str):
            raise UserError(f"a fader is of an adapter, named by text, not {name!r}")
        if mode not in MODES:
            raise UserError(f"a fader's mode is one of {names(MODES)}, not {mode!r}{nearest(mode, MODES)}")
        value = finite(value, f"the fader of {name!r}")
        with self._lock:
            self._settings = {**self._settings, name: (mode, value)}

    def clear(self, name: str | None = None) -> None:
        """Leave one adapter alone again, or all of them."""
        with self._lock:
            kept = {key: value for key, value in self._settings.items() if name is not None and key != name}
            self._settings = kept

    @property
    def what(self) -> str:
        """The change, without where and when."""
        return "faders"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return tuple(self._settings)

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the scalings as the faders stand now."""
        settings = self._settings
        biases = {name: value for name, (mode, value) in settings.items() if mode == "bias" and value != 0}
        forced = {name: value for name, (mode, value) in settings.items() if mode == "force"}
        if not biases and not forced:
            return scalings
        new = scalings
        if biases:
            shift = torch.zeros(len(tap.adapters))
            for name, value in biases.items():
                shift[tap.adapter(name)] = value
            # the largest factor is 1: what a bias of 1000 does is finite
            new = with_sums_of(scalings * (shift - shift.max()).exp(), scalings)
        new = new.clone()
        for name, value in forced.items():
            new[..., tap.adapter(name)] = value
        return new
