"""What the settings of an explore view may be, given the axes of the trace that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.display.explore_state import DELTA_NORM, SCALINGS
from workbench.display.labels import layer_of
from workbench.errors import UserError, names, nearest

WHO_LEADS, EVERY_ADAPTER = "who leads", "every adapter"
THEMES = ("auto", "light", "dark")
SETTINGS = ("selection", "shown_adapters", "projection", "layers", "mode", "visible", "request", "quantity", "theme")
SPANS = ("selection", "visible")
# what the picker says
QUIET = {SCALINGS: "scalings", DELTA_NORM: "how far the output is moved"}


@dataclass(frozen=True)
class Settings:
    """The axes; every check returns the setting in the form in which it is kept and sent."""

    num_tokens: int
    site_names: tuple[str, ...]
    adapters: tuple[str, ...]
    quantities: tuple[str, ...]

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return `given`, checked, with a value for what is not given.

        Raises:
            UserError: a setting does not fit.
        """
        mode = WHO_LEADS if len(self.adapters) > 1 else self.adapters[0]
        made = {"selection": (), "shown_adapters": self.adapters, "projection": "", "layers": (), "mode": mode}
        made |= {"visible": (), "theme": "auto", **given}
        return {name: self.checked(name, value, made) for name, value in made.items()}

    def fitting(self, settings: Mapping[str, Any], is_same_trace: bool) -> dict[str, Any]:
        """Return the settings of another trace or quantity that fit this one, and the usual ones for the others."""
        kept: dict[str, Any] = {}
        spans = SPANS if is_same_trace else ()
        for name in ("theme", "shown_adapters", "projection", "layers", "mode", *spans):
            value = settings[name]
            if name == "shown_adapters":
                value = [one for one in value if one in self.adapters] or self.adapters
            try:
                kept[name] = self.checked(name, value, {"projection": "", "layers": (), **kept})
            except UserError:
                continue
        return self.completed(kept)

    def checked(self, name: str, value: Any, others: Mapping[str, Any]) -> Any:
        """Return one setting in its kept form; `others` are the ones it must go with.

        Raises:
            UserError: it does not fit; the message says what would.
        """
        if name in SPANS:
            return self._span(name, value)
        if name == "shown_adapters":
            return self._adapters(value)
        if name == "layers":
            value = self._layers(value)
            self.sites(others["projection"], value)
            return value
        if name == "projection":
            options = ("", *dict.fromkeys(site.rpartition(".")[2] for site in self.site_names))
            self.sites(self._option(name, value, options), others["layers"])
            return value
        if name == "quantity":
            return require_quantity(value, self.quantities)
        options = {"mode": (WHO_LEADS, EVERY_ADAPTER, *self.adapters), "theme": THEMES}
        return self._option(name, value, options[name])

    def fits(self, name: str, value: Any, others: Mapping[str, Any]) -> bool:
        """Return whether `checked` takes a setting."""
        try:
            self.checked(name, value, others)
        except UserError:
            return False
        return True

    def sites(self, projection: str, layers: Sequence[int]) -> list[int]:
        """Return the indices of the sites that both leave.

        Raises:
            UserError: none.
        """
        chosen = [
            index
            for index, site in enumerate(self.site_names)
            if (not projection or site.rpartition(".")[2] == projection) and _is_within(layer_of(site), layers)
        ]
        if not chosen:
            raise UserError(f"no site of this trace is {projection or 'anything'} in layers {layers[0]} to {layers[1]}")
        return chosen

    def _option(self, name: str, value: Any, options: Sequence[str]) -> str:
        if value not in options:
            raise UserError(f"{name} cannot be {value!r}{nearest(value, options)}; it is one of {names(options)}")
        return value

    def _adapters(self, value: Any) -> tuple[str, ...]:
        wanted = [value] if isinstance(value, str) else value
        if not isinstance(wanted, Sequence) or not wanted:
            raise UserError(f"shown_adapters needs at least one of {names(self.adapters)}, not {value!r}")
        for name in wanted:
            if name not in self.adapters:
                hint = nearest(name, self.adapters)
                raise UserError(f"no adapter {name!r} here{hint}; there are {names(self.adapters)}")
        return tuple(name for name in self.adapters if name in wanted)

    def _span(self, name: str, value: Any) -> tuple[float, ...]:
        """Return two numbers: whole ones for a selection."""
        kind = int if name == "selection" else float
        pair = _pair(value, f"{name} is (start, stop) in tokens, or () for none")
        if pair and not 0 <= pair[0] < pair[1] <= self.num_tokens:
            raise UserError(f"{name} {value!r} is no span of the {self.num_tokens} tokens: 0 ≤ start < stop is needed")
        return tuple(map(kind, pair))

    def _layers(self, value: Any) -> tuple[int, ...]:
        return tuple(map(int, _pair(value, "layers is (first, last), or () for all")))


def require_quantity(name: Any, known: Iterable[str]) -> str:
    """Return the name of something that a trace can be explored by.

    Raises:
        UserError: it was not recorded.
    """
    if name not in known:
        raise UserError(
            f"this trace has no {name!r} to explore{nearest(name, known)}; it has {names(list(known))}. "
            "engine.record('scalings', 'delta_norm') records both"
        )
    return name


def _pair(value: Any, expected: str) -> tuple[Any, ...]:
    """Return two numbers, or none for None and ().

    Raises:
        UserError: anything else; the message begins with `expected`.
    """
    if value is None:
        return ()
    try:
        pair = tuple(value)
        fits = not isinstance(value, str) and len(pair) in (0, 2) and all(float(one) == float(one) for one in pair)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise UserError(f"{expected}, not {value!r}")
    return pair


def _is_within(layer: int | None, layers: Sequence[int]) -> bool:
    return not layers or (layer is not None and layers[0] <= layer <= layers[1])
