"""Voices: who can answer on an engine, and the settings of a request as a person types them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.display.labels import visible
from workbench.display.palette import adapter_colour, adapter_key
from workbench.engine.options import split_options
from workbench.engine.sampling import Sampling
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.adapters.merge import MergedAdapters
    from workbench.engine import Engine

BASE = "base"
K = "tgt_non_granular_index"
# name -> what it is called on the panel, kind, what an empty box means
NUMBERS: dict[str, tuple[str, type, str]] = {
    K: ("reuse after k", int, "exact"),
    "max_tokens": ("max tokens", int, "128"),
    "temperature": ("temperature", float, "0, greedy"),
    "top_p": ("top p", float, "1, off"),
    "top_k": ("top k", int, "off"),
    "repetition_penalty": ("repetition", float, "1, off"),
    "seed": ("seed", int, "next"),
}
_WHO = ("mixture", "adapter", "merged_adapters")
_NOT_HERE = {
    "n": "a console shows one answer", "best_of": "a console shows one answer",
    "request_id": "a console names its own requests", "on_text": "a console shows the text itself",
    "continuation": "engine.score scores a continuation", "distributions": "engine.score keeps distributions",
}  # fmt: skip


@dataclass(frozen=True)
class Voice:
    """One that can answer: a mixture, an adapter, several merged, or the base model.

    Attributes:
        id: names it on the panel.
        kind: "mixture", "adapter", "merged" or "base".
        name: the mixture's or adapter's, "" for the base.
        adapters: the adapter axis of its scalings.
        options: what `Engine.submit` is asked with.
        weights: `[adapter]`, where they are the same for every token; None for a mixture's.
    """

    id: str
    kind: str
    name: str
    adapters: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[float, ...] | None = ()

    @property
    def is_mixture(self) -> bool:
        """Whether its scalings are computed token by token."""
        return self.kind == "mixture"

    def to_json(self, palette: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what the panel is told; `palette` are the adapters that colours go by, its own by default."""
        order = list(palette or self.adapters)
        places = [order.index(name) for name in self.adapters]
        label = {"mixture": "mixture ", "adapter": "adapter ", "merged": "merged ", "base": "the base model alone"}
        return {
            "id": self.id, "kind": self.kind, "label": label[self.kind] + visible(self.name) * bool(self.name),
            "adapters": [visible(name) for name in self.adapters],
            "keys": [adapter_key(place) for place in places],
            "colours": [adapter_colour(place) for place in places],
        }


def voices(engine: Engine, merged: MergedAdapters | None = None) -> list[Voice]:
    """Return who can answer on an engine now: mixtures first, the base model last."""
    found = [
        Voice(f"mixture:{name}", "mixture", name, mixture.adapter_names, {"mixture": name}, None)
        for name, mixture in list(engine.mixtures.items())
    ]
    if merged is not None:
        weights = tuple(merged.weights) if merged.is_constant_row else (1.0,)
        adapters = merged.ids if merged.is_constant_row else (" + ".join(merged.ids),)
        found.append(Voice("merged:", "merged", " + ".join(merged.ids), adapters, {"merged_adapters": merged}, weights))
    found += [
        Voice(f"adapter:{name}", "adapter", name, (name,), {"adapter": name}, (1.0,))
        for name in engine.adapters.names()
    ]
    return [*found, Voice(BASE, "base", "")]


def voice_of(given: Mapping[str, Any], known: Sequence[Voice]) -> Voice:
    """Return the voice that options of `submit` name, by default the first one.

    Raises:
        UserError: two are named, or one that is not loaded.
    """
    named = [(kind, given[kind]) for kind in _WHO if given.get(kind) is not None]
    if len(named) > 1:
        raise UserError(f"name one of {names([kind for kind, _ in named])}, not both")
    if not named:
        return known[0]
    kind, name = named[0]
    if kind == "merged_adapters":
        return next(voice for voice in known if voice.kind == "merged")
    if not isinstance(name, str):
        raise UserError(f"{kind} must be a name, not {name!r}")
    return find(f"{kind}:{name}", known)


def find(voice_id: str, known: Sequence[Voice]) -> Voice:
    """Return the voice of an id; a UserError that says it is not loaded."""
    for voice in known:
        if voice.id == voice_id:
            return voice
    kind, _, name = str(voice_id).partition(":")
    loaded = [voice.name for voice in known if voice.kind == kind]
    raise UserError(f"no {kind} {name!r} is loaded{nearest(name, loaded)}; loaded: {names(loaded)}")


def defaults_of(options: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """Return the sampling and the other options that a widget was made with.

    Raises:
        UserError: an unknown one, one out of its range, or one that a widget has no use for.
    """
    for name, reason in _NOT_HERE.items():
        if options.get(name) is not None:
            raise UserError(f"{name} is not for here: {reason}")
    sampling, others = split_options(options)
    if sampling.num_answers > 1:
        raise UserError(f"n is not for here: {_NOT_HERE['n']}")
    return sampling, others


def typed(sampling: Sampling, others: Mapping[str, Any], controls: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `submit`: the defaults, changed by what was typed.

    Args:
        sampling, others: as `defaults_of` gave them.
        controls: name in `NUMBERS` -> text, or a number; "" and None take the setting's own default.

    Raises:
        UserError: what was typed is no number, or out of its range.
    """
    fields, own = {}, dict(others)
    for name, text in controls.items():
        if name not in NUMBERS:
            raise UserError(f"unknown setting {name!r}{nearest(name, NUMBERS)}; there are {names(list(NUMBERS))}")
        value = number(name, text)
        if name == K:
            own.pop(K, None)
            if value is not None:
                own.pop("policy", None)
                own[K] = value
        else:
            fields[name] = Sampling.__dataclass_fields__[name].default if value is None else value
    changed, _ = split_options({"sampling": sampling, **fields})
    return {**own, "sampling": changed}


def number(name: str, given: Any) -> int | float | None:
    """Return a typed number, None for an empty box.

    Raises:
        UserError: it is no number of this setting's kind.
    """
    label, kind, _ = NUMBERS[name]
    if given is None or given == "":
        return None
    if isinstance(given, str):
        text = given.strip().replace("\u2212", "-")
        try:
            return kind(text) if text else None
        except ValueError:
            wanted = "a whole number" if kind is int else "a number, such as 0.7"
            raise UserError(f"{label}: {given!r} is not {wanted}") from None
    return given


def shown_values(sampling: Sampling, others: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the panel's number boxes: name, label, text, what an empty one means, and which keyboard it takes."""
    boxes = []
    for name, (label, kind, empty) in NUMBERS.items():
        value = others.get(name) if name == K else getattr(sampling, name)
        is_plain = name != K and value == Sampling.__dataclass_fields__[name].default
        text = "" if value is None or is_plain else str(value) if kind is int else f"{value:g}"
        boxes.append({"name": name, "label": label, "value": text, "empty": empty,
                      "keyboard": "numeric" if kind is int else "decimal"})
    return boxes


def also(sampling: Sampling, others: Mapping[str, Any]) -> str:
    """Return in words the settings that have no box on the panel."""
    plain = Sampling()
    set_here = [f"{name}={getattr(sampling, name)!r}" for name in Sampling.__dataclass_fields__
                if name not in NUMBERS and getattr(sampling, name) != getattr(plain, name)]
    rest = [f"{name}={getattr(value, 'name', value)!r}" for name, value in others.items()
            if name != K and name not in _WHO]
    return ", ".join([*set_here, *rest])
