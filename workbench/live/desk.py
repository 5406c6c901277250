"""Desk: the faders of a console: where they stand, whom they act on, and what was moved when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.engine import Engine

KEY = "classifier:scalings"
RANGES = {"bias": (-4.0, 4.0), "force": (0.0, 1.0)}


@dataclass(frozen=True)
class Move:
    """One movement of one fader that a running request felt.

    Attributes:
        run: which run of the console, from 1.
        request_id: whose scalings it changed.
        time_s: seconds after the request's submission; 0 for a fader that stood there already.
        token: how many tokens had been generated.
        adapter, mode, value: what was set; a value of None let the adapter alone again.
    """

    run: int
    request_id: str
    time_s: float
    token: int
    adapter: str
    mode: str
    value: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


class Desk:
    """Faders over the adapters of one mixture. They stay where they are between runs, and act from a run's first token.

    The edit of a request is opened with the first fader that is off its rest: a request nobody touches is not edited.
    """

    def __init__(self, engine: Engine):
        from workbench.edits import Faders

        self._engine, self._faders = engine, Faders()
        self.adapters: tuple[str, ...] = ()
        self.mode = "bias"
        self.moves: list[Move] = []
        self._run: tuple[int, str] | None = None
        self._edits: Any = None

    @property
    def values(self) -> list[float | None]:
        """Where each adapter's fader stands; None at rest."""
        settings = self._faders.settings
        return [settings[name][1] if name in settings else None for name in self.adapters]

    def choose(self, adapters: Sequence[str]) -> None:
        """Put these adapters on the desk; other ones than before start at rest."""
        if tuple(adapters) != self.adapters:
            self.adapters = tuple(adapters)
            self._faders.clear()

    def begin(self, run: int, request_id: str) -> None:
        """A request of a mixture is about to start; faders that are off their rest act on all of it."""
        self._run = (run, request_id)
        if self._faders.settings:
            self._open()
            for name, (_, value) in self._faders.settings.items():
                self._note(name, value, 0.0, 0)

    def end(self) -> int:
        """The request is over; return how many of its rows were changed."""
        edits, self._edits, self._run = self._edits, None, None
        if edits is None:
            return 0
        edits.close()
        return edits[KEY].fired

    def set(self, name: str, value: float, mode: str, time_s: float, token: int) -> None:
        """Move a fader; another mode than before puts the others to rest.

        Raises:
            UserError: no such adapter or mode, or a value outside the fader's range.
        """
        self._require(name)
        if mode not in RANGES:
            raise UserError(f"a fader's mode is one of {names(list(RANGES))}, not {mode!r}{nearest(mode, RANGES)}")
        low, high = RANGES[mode]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise UserError(f"a {mode} fader goes from {low:g} to {high:g}, not {value!r}")
        if mode != self.mode:
            self.clear(None, time_s, token)
            self.mode = mode
        # at rest: a request that nobody touches is not edited
        if mode == "bias" and value == 0:
            return self.clear(name, time_s, token)
        self._faders.set(name, float(value), mode)
        if self._run is not None:
            self._open()
            self._note(name, float(value), time_s, token)

    def clear(self, name: str | None, time_s: float, token: int) -> None:
        """Put one fader, or all, to rest."""
        if name is not None:
            self._require(name)
        moved = [each for each in self._faders.settings if name in (None, each)]
        self._faders.clear(name)
        for each in moved if self._run is not None else ():
            self._note(each, None, time_s, token)

    def _require(self, name: str) -> None:
        if not self.adapters:
            raise UserError("faders move the adapters of a mixture; choose one")
        if name not in self.adapters:
            raise UserError(f"no adapter {name!r} on the faders{nearest(name, self.adapters)}; "
                            f"there are {names(self.adapters)}")

    def _open(self) -> None:
        if self._edits is None:
            self._edits = self._engine.edit({KEY: self._faders}, requests=[self._run[1]])

    def _note(self, name: str, value: float | None, time_s: float, token: int) -> None:
        last = self.moves[-1] if self.moves else None
        if last is not None and (last.run, last.adapter, last.token) == (self._run[0], name, token):
            self.moves.pop()  # dragged on before the next token: only where it came to rest was felt
        self.moves.append(Move(*self._run, round(time_s, 3), token, name, self.mode, value))
