"""Grid: a TOML file that says which points a sweep has.

    question = "What does it cost that requests use different adapters?"
    repeats = 3

    [fixed]                    # settings that every point has
    mode = "lora"

    [axes]                     # every combination of these
    popularity = ["identical", "skewed", "uniform", "distinct"]

    [[block]]                  # more points: `fixed` and `axes` of their own, on top of `fixed` above
    fixed = { mode = "base" }

Contract: a grid is checked whole before anything runs; a key that nothing reads is an error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UserError, names, nearest
from workbench.sweep.point import SETTINGS, PointSettings
from workbench.sweep.shipped import shipped_grids

_KEYS = ("name", "question", "repeats", "baseline", "fixed", "axes", "block")
_BLOCK_KEYS = ("fixed", "axes")
_MOST_POINTS = 10_000


@dataclass(frozen=True)
class Grid:
    """The points of a sweep.

    Attributes:
        name: of its results.
        question: what it is to answer, in a sentence.
        points: in the order of the file.
        repeats: how often each is measured.
        varied: settings in which points differ, but for those that follow from others (only "lora" has a rank).
        baseline: settings that name the point others are compared with; empty for none.
        path: the file, None for a grid made in memory.
    """

    name: str
    question: str
    points: tuple[PointSettings, ...]
    repeats: int = 3
    varied: tuple[str, ...] = ()
    baseline: tuple[tuple[str, Any], ...] = ()
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Read a grid: a TOML file, or the name of one that comes with the workbench.

        Raises:
            UserError: no such file, no TOML, an unknown key, or a point that contradicts itself.
        """
        path = Path(path)
        if not path.exists():
            path = shipped_grids().get(str(path), path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise UserError(f"grid {str(path)!r} is not UTF-8 text, expected TOML") from None
        except OSError as error:
            raise UserError(f"grid {str(path)!r} cannot be read: {error.strerror}{_other_grids(path)}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"grid {str(path)!r} is not valid TOML: {error}") from None
        return cls.of(data, path.stem, path)

    @classmethod
    def of(cls, data: Mapping[str, Any], name: str = "grid", path: Path | None = None) -> Grid:
        """Return the grid that such a mapping says; `name` unless it names itself."""
        where = f"grid {str(path or data.get('name', name))!r}"
        _require_keys(data, _KEYS, where)
        name = data.get("name", name)
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{where}: 'name' names a folder: letters, digits, '-', '_' and '.', a letter or digit "
                            f"first, not {name!r}")
        repeats = data.get("repeats", 3)
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise UserError(f"{where}: 'repeats' is {repeats!r}, expected a whole number of at least 1")
        question = data.get("question", "")
        if not isinstance(question, str):
            raise UserError(f"{where}: 'question' is {question!r}, expected a sentence")
        found = [point for block in _blocks(data, where) for point in _product(*block, path, where)]
        points = tuple(dict.fromkeys(found))
        varied = _varied(points)
        baseline = data.get("baseline", {})
        if not isinstance(baseline, Mapping):
            raise UserError(f"{where}: 'baseline' is {baseline!r}, expected settings such as {{ mode = 'base' }}")
        grid = cls(name, question, points, repeats, varied, tuple(baseline.items()), path)
        grid.baseline_points()
        return grid

    def baseline_points(self) -> tuple[PointSettings, ...]:
        """Return the points that the baseline's settings fit.

        Raises:
            UserError: there are none.
        """
        if not self.baseline:
            return ()
        found = tuple(point for point in self.points
                      if all(point.settings.get(key) == value for key, value in self.baseline))
        if not found:
            raise UserError(f"grid {self.name!r}: no point fits the baseline {dict(self.baseline)!r}")
        return found

    def label(self, point: PointSettings) -> str:
        """Return what distinguishes a point in this grid."""
        return point.label(self.varied)

    def only(self, wanted: str) -> tuple[PointSettings, ...]:
        """Return the points that a filter fits: an id's beginning, or "key=value,key=value".

        Raises:
            UserError: it fits none, or names no setting.
        """
        if "=" not in wanted:
            found = [point for point in self.points if point.id.startswith(wanted)]
        else:
            found = list(self.points)
            # commas inside brackets belong to a value: prompt_tokens=[8, 64]
            for part in re.split(r",(?![^\[(]*[\])])", wanted):
                key, _, value = (each.strip() for each in part.partition("="))
                if key not in SETTINGS:
                    raise UserError(f"--only {wanted!r}: no setting {key!r}{nearest(key, self.varied)}; points differ "
                                    f"in {names(self.varied, 20)}")
                found = [point for point in found if value in _spellings(point.settings.get(key))]
        if not found:
            raise UserError(f"--only {wanted!r} fits none of the {len(self.points)} points; they differ in "
                            f"{names(self.varied, 20)}")
        return tuple(found)

    @property
    def digest(self) -> str:
        """Hash of its points' ids and repeats."""
        text = json.dumps([sorted(point.id for point in self.points), self.repeats])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _varied(points: Sequence[PointSettings]) -> tuple[str, ...]:
    """Return the settings that tell points apart; one that a point has or has not goes where others do as well."""
    values = {key: {getattr(point, key) for point in points} for key in SETTINGS}
    kept = [key for key in SETTINGS if len(values[key]) > 1]
    for key in list(kept):
        others = [other for other in kept if other != key]
        told = {tuple(getattr(point, other) for other in others) for point in points}
        if len(values[key] - {None}) == 1 and len(told) == len(points):
            kept = others
    return tuple(kept)


def _blocks(data: Mapping[str, Any], where: str) -> list[tuple[dict[str, Any], dict[str, list]]]:
    """Return (fixed, axes) of each block; without any, those of the grid itself."""
    fixed = _table(data.get("fixed", {}), f"{where}: [fixed]")
    blocks = data.get("block", [])
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise UserError(f"{where}: blocks are written [[block]]")
    is_own = "axes" in data or not blocks
    found = [(fixed, _axes(data.get("axes", {}), f"{where}: [axes]"))] if is_own else []
    for number, block in enumerate(blocks, 1):
        place = f"{where}: block {number}"
        _require_keys(block, _BLOCK_KEYS, place)
        own = _table(block.get("fixed", {}), f"{place}: fixed")
        found.append(({**fixed, **own}, _axes(block.get("axes", {}), f"{place}: axes")))
    return found


def _product(fixed: Mapping[str, Any], axes: Mapping[str, list], path: Path | None, where: str) -> list[PointSettings]:
    if both := sorted(set(fixed) & set(axes)):
        raise UserError(f"{where}: {names(both)} are fixed, and axes too; give each once")
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > _MOST_POINTS:
        raise UserError(f"{where}: the axes make {count} points, more than {_MOST_POINTS}")
    found = []
    for values in itertools.product(*axes.values()):
        given = {**fixed, **dict(zip(axes, values, strict=True))}
        said = " ".join(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        folder = None if path is None else path.parent
        found.append(PointSettings.of(given, f"{where}: point {said}" if said else where, folder))
    return found


def _axes(given: Any, where: str) -> dict[str, list]:
    axes = _table(given, where)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: {key!r} is {values!r}, expected a list of values; one value belongs to fixed")
        if len({repr(value) for value in values}) < len(values):
            raise UserError(f"{where}: {key!r} names a value twice")
    return axes


def _table(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UserError(f"{where} is {given!r}, expected a table of settings")
    return dict(given)


def _require_keys(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            hint = nearest(key, [*known, *SETTINGS])
            is_setting = key in SETTINGS
            fix = "; settings of points belong to [fixed] or [axes]" if is_setting else hint
            raise UserError(f"{where}: unknown key {key!r}{fix}; the keys are {names(known)}")


def _spellings(value: Any) -> set[str]:
    """Return how a value may be written in a filter: as Python shows it, as TOML writes it."""
    said = {str(value), json.dumps(value), json.dumps(value, separators=(",", ":"))}
    if isinstance(value, float) and value.is_integer():
        said.add(str(int(value)))
    return said | ({"none"} if value is None else set())


def _other_grids(path: Path) -> str:
    found = sorted(each.name for each in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    if path.name == str(path):
        found += shipped_grids()
    return nearest(path.name, found) if found else ""
