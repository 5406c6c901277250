"""A trace: what one request did, token by token: the scalings it used, and whatever else was recorded of it.

It is data, not a tool: numpy arrays, tuples and a JSON-able dict. Axis order is always `[token, site, adapter]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names, nearest
from workbench.instrument import trace_checks, trace_file
from workbench.instrument.files import path_of
from workbench.instrument.recorded import Recorded
from workbench.instrument.sites import matching, patterns_of
from workbench.instrument.wanted import KINDS, OF_STEPS

if TYPE_CHECKING:
    import pandas

_BLOCK_CELLS = 1 << 22  # values taken at once
TokenIndex = slice | Sequence[int] | Sequence[bool] | np.ndarray | None


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Scalings `values[token, site, adapter]` of one request. A NaN row was never an input of the model.

    `extras` has what was recorded beside them, by name. A request that recorded no scalings has no sites and no
    adapters: `values` is then `[token, 0, 0]`.

    Raises:
        UserError: an axis has the wrong length, dtype or content; the message names it.
    """

    values: np.ndarray  # [token, site, adapter] float32 or float16
    adapters: tuple[str, ...]
    sites: tuple[str, ...]
    token_ids: np.ndarray  # [token] int64
    tokens: tuple[str, ...]  # the text each token adds; "" while a character is incomplete
    positions: np.ndarray  # [token] int64, increasing
    generated: np.ndarray  # [token] bool; False = prompt
    source: np.ndarray  # [token] int64: position whose scalings were used; own = computed; -1 = never an input
    draft: np.ndarray  # [token] int8: 1 drafted and accepted, 0 drafted and rejected, -1 not drafted
    time_s: np.ndarray  # [token] float64: seconds after submission at which the token was known
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Recorded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in trace_checks.checked(self).items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        tokens, sites, adapters = self.values.shape
        counts = f"{int(self.computed.sum())} computed, {int(self.reused.sum())} reused, {self.values.dtype}"
        shape = f" × {sites} sites × {adapters} adapters, {counts}" if self.has_scalings else ", no scalings"
        more = f"; {', '.join(self.extras)}" if self.extras else ""
        return f"Trace({tokens} tokens ({self.prompt_tokens} prompt){shape}{more})"

    @property
    def has_scalings(self) -> bool:
        """Whether there are scalings: False for a request that recorded other things only, or ran the base model."""
        return bool(self.adapters)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """How many of the tokens belong to the prompt."""
        return int((~self.generated).sum())

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def computed(self) -> np.ndarray:
        """[token] bool: the token used the scalings of its own position."""
        return self.source == self.positions

    @property
    def reused(self) -> np.ndarray:
        """[token] bool: the token used the scalings of an earlier position."""
        return (self.source >= 0) & ~self.computed

    def extra(self, name: str) -> Recorded:
        """Return what was recorded under a name, such as "entropy" or "logits:top.ids".

        Raises:
            UserError: nothing of that name was recorded.
        """
        if not isinstance(name, str) or name not in self.extras:
            raise UserError(_no_extra(name, self.extras))
        return self.extras[name]

    def token_means(self) -> np.ndarray:
        """Return the mean over sites, `[token, adapter]` float64; NaN where a token has no value."""
        return nan_mean(self.values, 1)

    def share(self, tokens: TokenIndex = None) -> dict[str, float]:
        """Return each adapter's mean scaling over sites and over `tokens` (a slice, mask or indices; None = all)."""
        rows = trace_checks.as_slice(trace_checks.token_index(tokens, self.num_tokens))
        values = self.values[rows]
        return dict(zip(self.adapters, nan_mean(values, (0, 1)).tolist(), strict=True))

    def leading(self) -> np.ndarray:
        """Return `[token]` int64: the adapter with the largest mean over sites; -1 where the token has no values."""
        means = self.token_means()
        if not self.has_scalings:
            return np.full(self.num_tokens, -1)
        return np.where(np.isnan(means).all(1), -1, np.where(np.isnan(means), -np.inf, means).argmax(1))

    def scaling_entropy(self) -> np.ndarray:
        """Return `[token]` float64, nats: the entropy of the adapters' shares at a site, mean over the sites.

        0 where one adapter has all the weight, ln(adapters) where all have the same. Shares are the scalings over their
        sum; what is below 0 counts as 0. NaN where a token has no value.
        """
        found = np.full(self.num_tokens, np.nan)
        for rows in _blocks(self.values):
            values = np.maximum(self.values[rows].astype(np.float64), 0)
            total = values.sum(2, keepdims=True)
            share = np.divide(values, total, out=np.full_like(values, np.nan), where=total > 0)
            logs = np.log(share, out=np.zeros_like(share), where=share > 0)
            found[rows] = nan_mean(-(share * logs).sum(2), 1)
        return found + 0.0

    def select(
        self,
        tokens: TokenIndex = None,
        sites: str | Sequence[str] | None = None,
        adapters: str | Sequence[str] | None = None,
    ) -> Trace:
        """Return the part with these tokens, the sites matching any of these patterns (`*.q_proj`), these adapters.

        What was recorded beside the scalings is cut alike; what is left without a site or an adapter is left out.

        Raises:
            UserError: a pattern or name matches nothing, or an index is out of range.
        """
        rows = trace_checks.as_slice(trace_checks.token_index(tokens, self.num_tokens))
        patterns = patterns_of(sites, "selects")
        columns = matching(self._all("site", self.sites), patterns, "no site of this trace")
        chosen = _adapter_indices(self._all("adapter", self.adapters), adapters)
        kept_sites = tuple(self._all("site", self.sites)[i] for i in columns)
        kept_adapters = tuple(self._all("adapter", self.adapters)[i] for i in chosen)
        values = self.values[rows]
        if self.has_scalings:
            values = values[:, trace_checks.as_slice(np.asarray(columns))]
            values = values[:, :, trace_checks.as_slice(np.asarray(chosen))]
        extras = {name: each.at(rows) for name, each in self.extras.items()}
        for axis, kept, asked in (("site", kept_sites, sites), ("adapter", kept_adapters, adapters)):
            if asked is not None:
                extras = {name: part for name, each in extras.items() if (part := each.keep(axis, kept)) is not None}
        index = np.arange(self.num_tokens)[rows]
        return replace(
            self,
            values=values,
            adapters=kept_adapters if self.has_scalings else (),
            sites=kept_sites if self.has_scalings else (),
            tokens=tuple(self.tokens[i] for i in index),
            extras=extras,
            **{name: getattr(self, name)[rows] for name in trace_checks.PER_TOKEN},
        )

    def _all(self, axis: str, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels of the scalings' axis; without scalings, those of whatever else has that axis."""
        if self.has_scalings:
            return own
        return tuple(dict.fromkeys(label for each in self.extras.values() for label in each.labels.get(axis, ())))

    def to_frame(self) -> pandas.DataFrame:
        """Return one line per token, site and adapter.

        Columns: token, position, text, generated, computed, site, adapter, scaling.
        """
        import pandas as pd

        tokens, sites, adapters = self.values.shape
        token = np.repeat(np.arange(tokens), sites * adapters)
        site = np.tile(np.repeat(np.arange(sites), adapters), tokens)
        adapter = np.tile(np.arange(adapters), tokens * sites)
        return pd.DataFrame(
            {
                "token": token,
                "position": self.positions[token],
                "text": pd.Series(self.tokens, dtype=object).take(token).to_numpy(),
                "generated": self.generated[token],
                "computed": self.computed[token],
                "site": pd.Categorical.from_codes(site, categories=list(self.sites)),
                "adapter": pd.Categorical.from_codes(adapter, categories=list(self.adapters)),
                "scaling": self.values.reshape(-1),
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file, whole or not at all, and return its path."""
        return trace_file.write(self, path_of(path, "the file of a trace"))

    @classmethod
    def load(cls, path: str | Path, lazy: bool = False) -> Trace:
        """Read a trace that `save` wrote.

        Args:
            path: the file.
            lazy: leave the values in the file and read each when it is used; they cannot be changed.

        Raises:
            UserError: no such file, another kind of file, a truncated one, or one from a newer version.
        """
        fields = trace_file.read(path_of(path, "the file of a trace"), lazy)
        try:
            return cls(**fields)
        except UserError as error:
            raise UserError(f"{path} is not a usable trace: {error}") from None


def nan_mean(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Return the float64 mean over `axis` ignoring NaN; NaN (without a warning) where nothing is left."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    totals, counts = [], []
    for rows in _blocks(values):
        missing = np.isnan(values[rows])
        totals.append(np.where(missing, 0, values[rows]).sum(axes, dtype=np.float64))
        counts.append((~missing).sum(axes))
    joined = sum if 0 in axes else np.concatenate
    total, count = joined(totals), joined(counts)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _blocks(values: np.ndarray) -> list[slice]:
    """Return slices of the first axis, each of at most `_BLOCK_CELLS` cells: a file of any size fits in memory."""
    length = max(1, _BLOCK_CELLS * len(values) // max(1, values.size))
    return [slice(first, first + length) for first in range(0, max(1, len(values)), length)]


def _no_extra(name: Any, extras: Mapping[str, Recorded]) -> str:
    """Return what is said of something that was not recorded, with the nearest that there is, or that could be."""
    found = f"this trace has no {name!r}{nearest(name, extras)}; beside scalings it has {names(list(extras))}"
    kinds = [kind for kind in KINDS if kind != "scalings" and kind not in OF_STEPS]
    kind = name.partition(".")[0] if isinstance(name, str) else name
    if kind in kinds:
        return f"{found}. Record it with engine.record('scalings', {kind!r})"
    hint = "" if nearest(name, extras) else nearest(name, kinds)
    return f"{found}. What engine.record can record beside them is {names(kinds)}{hint}"


def _adapter_indices(adapters: tuple[str, ...], wanted: Any) -> list[int]:
    """Return the indices of the wanted adapters, in the order they were asked for."""
    if wanted is None:
        return list(range(len(adapters)))
    given = wanted
    wanted = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    if not all(isinstance(name, str) for name in wanted):
        raise UserError(f"adapters must be the name of an adapter, or a list of names, not {given!r}")
    if not wanted:
        raise UserError("adapters=[] selects nothing; leave adapters out to keep all of them")
    for name in wanted:
        if name not in adapters:
            raise UserError(f"no adapter {name!r} in this trace{nearest(name, adapters)}; it has {names(adapters)}")
    return [adapters.index(name) for name in wanted]
