"""What may be compared, and on which axes: the checks and the common adapters and sites of several traces.

Settings may differ in everything but the model, the ordering and the prompt. A request of one adapter, of merged ones
or of none stands beside a mixture: its weights are constant, and 0 where none of its adapters acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace

FEWEST, MOST = 2, 8
# facts in which a setting and itself in another batch shape agree
_SAME = ("mixture", "adapter", "policy", "seed", "temperature", "dtype", "mixture_key", "adapter_keys", "edits")


@dataclass(frozen=True)
class Axes:
    """The axes all settings share.

    Attributes:
        adapters: the mixture's, then those that only other settings have.
        sites: the mixture's; without a mixture, every setting's.
        columns: label -> for each adapter of that trace, its place among `adapters`.
    """

    adapters: tuple[str, ...]
    sites: tuple[str, ...]
    columns: Mapping[str, tuple[int, ...]]

    def aligned(self, label: str, trace: Trace, rows: slice = slice(None)) -> np.ndarray:
        """Return `[token, site, adapter]` float32 scalings of `rows` on these axes; NaN where a token was no input."""
        values, columns = trace.values[rows], self.columns[label]
        if trace.sites == self.sites and columns == tuple(range(len(self.adapters))):
            return np.asarray(values, dtype=np.float32)
        inputs = _inputs(trace)[rows]
        found = np.full((len(values), len(self.sites), len(self.adapters)), np.nan, dtype=np.float32)
        found[inputs] = 0
        index = {site: place for place, site in enumerate(self.sites)}
        own = [place for place, site in enumerate(trace.sites) if site in index]
        if own and columns:
            places = [index[trace.sites[place]] for place in own]
            found[:, np.asarray(places)[:, None], np.asarray(columns)] = values[:, own]
        return found


def common_axes(traces: Mapping[str, Trace]) -> Axes:
    """Return the axes of checked traces."""
    mixtures = [label for label, trace in traces.items() if is_mixture(trace)]
    order = [*mixtures, *(label for label in traces if label not in mixtures)]
    adapters: list[str] = []
    keys: list[str | None] = []
    columns = {}
    for label in order:
        found = []
        for name, key in zip(traces[label].adapters, adapter_keys(traces[label]), strict=True):
            place = _place(name, key, adapters, keys)
            if place is None or place in found:  # two adapters of one request may have equal content
                place = len(adapters)
                adapters.append(name if name not in adapters else _free(f"{name} of {label}", adapters))
                keys.append(key)
            found.append(place)
        columns[label] = tuple(found)
    sites: dict[str, None] = {}
    for label in mixtures[:1] or order:
        sites |= dict.fromkeys(traces[label].sites)
    return Axes(tuple(adapters), tuple(sites), {label: columns[label] for label in traces})


def is_mixture(trace: Trace) -> bool:
    """Whether a classifier made the scalings; a trace that does not say where they come from counts as one."""
    return trace.has_scalings and trace.metadata.get("mixture", "") is not None


def adapter_keys(trace: Trace) -> list[str | None]:
    """Return what each adapter's content is known by, None where the trace does not say."""
    keys = trace.metadata.get("adapter_keys")
    if isinstance(keys, Mapping):
        return [keys.get(name) for name in trace.adapters]
    if isinstance(keys, list) and len(keys) == len(trace.adapters):
        return list(keys)
    return [None] * len(trace.adapters)


def checked(traces: Any, null: Trace | None) -> dict[str, Trace]:
    """Return the traces by label.

    Raises:
        UserError: too few or too many, something that is no trace, or traces of another model, ordering or prompt than
            the first one's; the message names the two and what differs.
    """
    if not isinstance(traces, Mapping):
        raise UserError(f"a comparison takes a dict of label -> Trace, not {type(traces).__name__}")
    if not FEWEST <= len(traces) <= MOST:
        raise UserError(
            f"a comparison takes {FEWEST} to {MOST} settings, not {len(traces)} ({names(list(traces), MOST + 1)})"
        )
    for label, trace in traces.items():
        if not isinstance(label, str) or not label.strip() or any("\ud800" <= char <= "\udfff" for char in label):
            raise UserError(f"the label of a setting must be text that can be read, not {label!r}")
        _require_trace(f"setting {label!r}", trace)
    first, *others = traces
    for label in others:
        _require_same(first, traces[first], label, traces[label])
    mixtures = [label for label in traces if is_mixture(traces[label])]
    for label in mixtures[1:]:
        _require_same_ordering(mixtures[0], traces[mixtures[0]], label, traces[label])
    if null is not None:
        _require_trace("the null pair", null)
        _require_same(first, traces[first], "the null pair", null)
        if null.adapters != traces[first].adapters or null.sites != traces[first].sites:
            raise UserError(f"the null pair must be {first!r} once more; it has other adapters or sites")
        for key in _SAME:
            one, other = traces[first].metadata.get(key), null.metadata.get(key)
            if one != other:
                raise UserError(f"the null pair must be {first!r} once more; its {key} is {other!r}, not {one!r}")
    return dict(traces)


def _require_trace(what: str, trace: Any) -> None:
    if not isinstance(trace, Trace):
        hint = "; read files with Trace.load(path)" if isinstance(trace, str) or hasattr(trace, "__fspath__") else ""
        raise UserError(f"{what} must be a Trace, not {type(trace).__name__}{hint}")


def _require_same(first: str, one: Trace, label: str, other: Trace) -> None:
    """Raise unless two traces are of one base model and one prompt."""
    bases = one.metadata.get("base"), other.metadata.get("base")
    if None not in bases and bases[0] != bases[1]:
        raise UserError(f"{first!r} ran on base {bases[0]!r}, {label!r} on {bases[1]!r}: compare settings of one model")
    length = min(one.prompt_tokens, other.prompt_tokens)
    differ = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    if differ.size:
        at = int(differ[0])
        raise UserError(
            f"{first!r} and {label!r} are of different prompts: token {at} is {one.tokens[at]!r} in one and "
            f"{other.tokens[at]!r} in the other; compare settings of one prompt"
        )
    if one.prompt_tokens != other.prompt_tokens:
        raise UserError(
            f"{first!r} has a prompt of {one.prompt_tokens} tokens, {label!r} one of {other.prompt_tokens}; "
            "compare settings of one prompt"
        )
    both = min(one.num_tokens, other.num_tokens)
    if (one.positions[:both] != other.positions[:both]).any():
        raise UserError(f"{first!r} and {label!r} hold different positions of the text; select the same tokens of each")


def _require_same_ordering(first: str, one: Trace, label: str, other: Trace) -> None:
    """Raise unless two mixtures have the same adapters at the same sites; their order may differ."""
    strange = [name for name in other.adapters if name not in one.adapters]
    lacking = [name for name in one.adapters if name not in other.adapters]
    if strange or lacking:
        what = f"{label!r} has {names(strange)}" if strange else f"{label!r} lacks {names(lacking)}"
        hint = nearest(strange[0], one.adapters) if strange else ""
        raise UserError(
            f"{first!r} and {label!r} are mixtures of different adapters: {what}, {first!r} has "
            f"{names(one.adapters)}{hint}"
        )
    keys = dict(zip(one.adapters, adapter_keys(one), strict=True))
    for name, key in zip(other.adapters, adapter_keys(other), strict=True):
        if None not in (key, keys[name]) and key != keys[name]:
            raise UserError(f"adapter {name!r} has other weights in {label!r} than in {first!r}; name it differently")
    missing = [site for site in one.sites if site not in set(other.sites)]
    extra = [site for site in other.sites if site not in set(one.sites)]
    if missing or extra:
        what = f"lacks {names(missing, 2)}" if missing else f"has {names(extra, 2)} beside {first!r}'s"
        hint = nearest(extra[0], one.sites) if extra else ""
        raise UserError(f"{label!r} {what}: compare mixtures of one ordering, recorded at the same sites{hint}")


def _place(name: str, key: str | None, adapters: list[str], keys: list[str | None]) -> int | None:
    """Return where an adapter has its place already: by its content, else by its name."""
    if key is not None and key in keys:
        return keys.index(key)
    if name in adapters and None in (key, keys[adapters.index(name)]):
        return adapters.index(name)
    return None


def _free(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "'"
    return name


def _inputs(trace: Trace) -> np.ndarray:
    """Return `[token]` bool: the model's inputs. Of a request without scalings, every token but the last."""
    if trace.has_scalings:
        return trace.source >= 0
    return np.arange(trace.num_tokens) < trace.num_tokens - 1
