"""A comparison: one prompt under two to eight settings, aligned on tokens, beside what batch shape alone produces.

The null pair is the first setting again in another batch shape: both ran the same arithmetic, so whatever lies between
them is rounding. Contract: nothing at or below that floor, and nothing from where the null pair's own texts part, is
shown as a difference of settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names, nearest
from workbench.instrument import comparison_axes, comparison_file
from workbench.instrument.files import path_of
from workbench.instrument.ranks import rank_correlation
from workbench.instrument.trace import Trace, nan_mean

if TYPE_CHECKING:
    import pandas

_BLOCK_CELLS = 1 << 22  # values taken at once


@dataclass(frozen=True, eq=False)
class Floor:
    """What lies between the first setting and itself in another batch shape.

    Attributes:
        l1: float64 `[token]`, as `Comparison.l1`; NaN from `divergence` on.
        divergence: the first token in which the two texts differ; None if they do not.
    """

    l1: np.ndarray
    divergence: int | None

    @property
    def level(self) -> float:
        """The largest L1 distance of the null pair; 0 where it has no token to compare."""
        return 0.0 if np.isnan(self.l1).all() else float(np.nanmax(self.l1))


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Traces of one prompt under several settings; the first is what the others are compared with.

    Attributes:
        traces: label -> trace, as recorded.
        null: the first setting's trace in another batch shape, or None.
        failed: label -> reason, of settings that gave no trace.
        was_first: of `failed`, the setting that the others were to be compared with; None where it did not fail.
    """

    traces: Mapping[str, Trace]
    null: Trace | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    was_first: str | None = None

    def __post_init__(self) -> None:
        if self.was_first is not None and self.was_first not in self.failed:
            raise UserError(f"was_first is a setting that failed, {names(list(self.failed))}, not {self.was_first!r}")
        for name, value in (
            ("traces", comparison_axes.checked(self.traces, self.null)),
            ("failed", {str(label): str(reason) for label, reason in self.failed.items()}),
        ):
            object.__setattr__(self, name, MappingProxyType(value))

    @classmethod
    def of(
        cls, traces: Mapping[str, Trace], null: Trace | None = None, failed: Mapping[str, str] | None = None,
        was_first: str | None = None,
    ) -> Comparison:
        """Compare traces.

        Args:
            traces: label -> trace, two to eight.
            null: the first one's setting again, in another batch shape.
            failed: label -> reason, of settings that gave no trace; they are named beside the others.
            was_first: of `failed`, the one that the others were to be compared with.

        Raises:
            UserError: traces of another model, ordering or prompt; the message names what differs.
        """
        return cls(traces, null, failed or {}, was_first)

    def __repr__(self) -> str:
        tokens = f"{self.num_tokens} tokens, {self.prompt_tokens} of them the prompt's"
        lines = [f"Comparison of {len(self.labels)} settings over {tokens}"]
        lines += [f"  NOTE: {note}"] if (note := self.stand_in()) else []
        lines += [f"  {label}: {self.says(label)}" for label in self.labels]
        lines.append(f"  null pair: {self.floor_says()}")
        lines += [f"  {label}: failed: {reason}" for label, reason in self.failed.items()]
        return "\n".join(lines)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the settings, the first one's first."""
        return tuple(self.traces)

    @property
    def first(self) -> str:
        """The label of what the others are compared with."""
        return self.labels[0]

    @cached_property
    def axes(self) -> comparison_axes.Axes:
        """The adapters and sites all settings share."""
        return comparison_axes.common_axes(self.traces)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapter axis: the mixture's, then those that only other settings have."""
        return self.axes.adapters

    @property
    def sites(self) -> tuple[str, ...]:
        """The site axis: the mixture's; without a mixture, every setting's."""
        return self.axes.sites

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest text; every `[token]` array below has this length, or its own trace's."""
        return max(trace.num_tokens for trace in self.traces.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt all settings share."""
        return self.traces[self.first].prompt_tokens

    def trace(self, label: str) -> Trace:
        """Return a setting's trace.

        Raises:
            UserError: no such setting.
        """
        if label not in self.traces:
            if label in self.failed:
                raise UserError(f"setting {label!r} failed: {self.failed[label]}")
            raise UserError(f"no setting {label!r}{nearest(label, self.labels)}; compared: {names(self.labels)}")
        return self.traces[label]

    def values(self, label: str) -> np.ndarray:
        """Return a setting's scalings `[token, site, adapter]` float32 on the common axes; NaN: never an input."""
        return self.axes.aligned(label, self.trace(label))

    def token_means(self, label: str) -> np.ndarray:
        """Return the mean over sites on the common axes, float64 `[token, adapter]`."""
        trace = self.trace(label)
        found = [nan_mean(self.axes.aligned(label, trace, rows), 1) for rows in self._blocks(trace.num_tokens)]
        return np.concatenate(found)

    def shares(self, label: str, part: str = "all") -> dict[str, float]:
        """Return each adapter's mean scaling over sites and tokens; NaN where there is none.

        Args:
            label: the setting.
            part: "all" tokens, the "prompt"'s or the "generated" ones.
        """
        trace = self.trace(label)
        parts = {"all": slice(None), "prompt": ~trace.generated, "generated": trace.generated}
        if part not in parts:
            raise UserError(f"part is one of {names(list(parts))}, not {part!r}{nearest(part, parts)}")
        means = nan_mean(self.token_means(label)[parts[part]], 0) if self.adapters else np.empty(0)
        return dict(zip(self.adapters, means.tolist(), strict=True))

    def counts(self, label: str) -> dict[str, int]:
        """Return how many inputs used their own scalings ("computed") and another position's ("reused")."""
        trace = self.trace(label)
        return {"computed": int(trace.computed.sum()), "reused": int(trace.reused.sum())}

    def divergence(self, label: str) -> int | None:
        """Return the first token in which a setting's text differs from the first's; None if it only ends earlier."""
        return _divergence(self.traces[self.first], self.trace(label))

    def l1(self, label: str) -> np.ndarray:
        """Return how far a setting's scalings lie from the first's: float64 `[token]`.

        At a token: the mean over sites of the sum over adapters of |difference|; from 0 to 2 where scalings sum to 1.
        NaN from the divergence on, where the inputs are different tokens, and where either has no scalings.
        """
        self.trace(label)
        return self._l1s[label]

    def rank_correlation(self, label: str) -> np.ndarray:
        """Return Spearman's rank correlation of the adapters with the first's: float64 `[token]`, mean over sites.

        NaN as `l1`, and where the adapters of either setting all have one value at every site.
        """
        return self._pairwise(self.first, self.traces[self.first], label, self.trace(label), rank_correlation)

    @cached_property
    def floor(self) -> Floor | None:
        """What the null pair alone produces; None without one."""
        if self.null is None:
            return None
        first = self.traces[self.first]
        distances = self._pairwise(self.first, first, self.first, self.null, _distance)
        return Floor(distances, _divergence(first, self.null))

    def shown_difference(self, label: str) -> np.ndarray:
        """Return `l1` where it is a difference of the settings, float64 `[token]`; NaN everywhere else.

        Masked is what is 0, at or below the floor's level, or not before the null pair's own divergence.
        """
        found = self.l1(label).copy()
        level, stop = (0.0, None) if self.floor is None else (self.floor.level, self.floor.divergence)
        found[~(found > level)] = np.nan
        if stop is not None:
            found[stop:] = np.nan
        return found

    def shown_means(self, label: str) -> np.ndarray:
        """Return the difference of the means over sites to the first's, `[token, adapter]`, masked as it is shown."""
        found = np.full((self.num_tokens, len(self.adapters)), np.nan)
        both = min(self.traces[self.first].num_tokens, self.trace(label).num_tokens)
        found[:both] = self.token_means(label)[:both] - self.token_means(self.first)[:both]
        found[np.isnan(self.shown_difference(label))] = np.nan
        return found

    def is_attributed(self, label: str) -> bool:
        """Whether a setting's divergence is its own: it has one, before the null pair's if that has one too."""
        at, stop = self.divergence(label), self.floor.divergence if self.floor is not None else None
        return at is not None and (stop is None or at < stop)

    def says(self, label: str) -> str:
        """Return what a setting changed, in a sentence."""
        from workbench.instrument.comparison_words import setting_sentence

        return setting_sentence(self, label)

    def stand_in(self) -> str:
        """Return that the others are compared with another setting than was asked for; "" where they are not."""
        from workbench.instrument.comparison_words import stand_in_sentence

        return stand_in_sentence(self)

    def floor_says(self) -> str:
        """Return what the null pair shows, in a sentence."""
        from workbench.instrument.comparison_words import floor_sentence

        return floor_sentence(self)

    def summary(self) -> pandas.DataFrame:
        """Return one line per setting, and one of the null pair.

        Columns: setting, is_null, tokens, computed, reused, divergence (NaN: none), attributed, l1_mean, l1_max,
        tokens_shown (how many differ above the floor), error, and each adapter's share as `share:ADAPTER`.
        """
        from workbench.instrument.comparison_words import summary

        return summary(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return one line per setting and token, then the null pair's.

        Columns: setting, is_null, token, position, text, generated, computed, reused, diverged (the text differs from
        the first's here or earlier), l1, shown, and the mean scaling of each adapter as `mean:ADAPTER`.
        """
        import pandas as pd

        frames = [self._frame(label, trace, is_null=False) for label, trace in self.traces.items()]
        if self.null is not None:
            frames.append(self._frame(self.first, self.null, is_null=True))
        return pd.concat(frames, ignore_index=True)

    def save(self, path: str | Path) -> Path:
        """Write a folder with one `.safetensors` file per trace, whole or not at all, and return its path.

        Raises:
            UserError: the path holds something else, or cannot be written.
        """
        return comparison_file.write(self, path_of(path, "the folder of a comparison"))

    @classmethod
    def load(cls, path: str | Path, lazy: bool = False) -> Comparison:
        """Read a folder that `save` wrote; `lazy` leaves the scalings in their files until they are used.

        Raises:
            UserError: no such folder, another kind of folder, or a damaged one.
        """
        fields = comparison_file.read(path_of(path, "the folder of a comparison"), lazy)
        try:
            return cls(**fields)
        except UserError as error:
            raise UserError(f"{path} is not a usable comparison: {error}") from None

    @cached_property
    def _l1s(self) -> dict[str, np.ndarray]:
        first = self.traces[self.first]
        return {
            label: self._pairwise(self.first, first, label, trace, _distance) for label, trace in self.traces.items()
        }

    def _pairwise(self, first: str, one: Trace, label: str, other: Trace, measure: Any) -> np.ndarray:
        """Return `measure(values, values)` of the tokens before the divergence, `[token]` float64."""
        found = np.full(self.num_tokens, np.nan)
        stop = _divergence(one, other)
        stop = min(one.num_tokens, other.num_tokens) if stop is None else stop
        for rows in self._blocks(stop):
            found[rows] = measure(self.axes.aligned(first, one, rows), self.axes.aligned(label, other, rows))
        return found

    def _blocks(self, stop: int) -> Iterator[slice]:
        """Yield slices of the tokens before `stop`: texts of any length fit in memory."""
        length = max(1, _BLOCK_CELLS // max(1, len(self.sites) * len(self.adapters)))
        for start in range(0, stop, length):
            yield slice(start, min(start + length, stop))

    def _frame(self, label: str, trace: Trace, is_null: bool) -> pandas.DataFrame:
        import pandas as pd

        if is_null:
            at, distance = self.floor.divergence, self.floor.l1
            shown = np.full(trace.num_tokens, np.nan)
            means = nan_mean(self.axes.aligned(label, trace), 1)
        else:
            at, distance, means = self.divergence(label), self.l1(label), self.token_means(label)
            shown = self.shown_difference(label)[: trace.num_tokens]
        distance = np.pad(distance, (0, max(0, trace.num_tokens - len(distance))), constant_values=np.nan)
        token = np.arange(trace.num_tokens)
        columns = {
            "setting": label, "is_null": is_null, "token": token, "position": trace.positions,
            "text": pd.Series(trace.tokens, dtype=object), "generated": trace.generated, "computed": trace.computed,
            "reused": trace.reused, "diverged": token >= (len(token) if at is None else at),
            "l1": distance[: trace.num_tokens], "shown": shown,
        }  # fmt: skip
        columns |= {f"mean:{name}": means[:, place] for place, name in enumerate(self.adapters)}
        return pd.DataFrame(columns)


def _divergence(one: Trace, other: Trace) -> int | None:
    length = min(one.num_tokens, other.num_tokens)
    differ = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return int(differ[0]) if differ.size else None


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the mean over sites of the sum over adapters of |difference|, `[token]`."""
    return nan_mean(np.abs(one.astype(np.float64) - other).sum(2), 1)
