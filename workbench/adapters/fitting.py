"""An adapter meets a base: its sites get the base's module paths, its factors the base's shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.adapters.config import AdapterConfig
from workbench.adapters.modules import LoRATargetModule, row_norms
from workbench.adapters.projections import AMBIGUOUS, Part, separate_groups
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.adapters.model import LoRAModel

_Targets = Mapping[str, LoRATargetModule]


@dataclass(frozen=True)
class _Piece:
    """What one site of the adapter adds to one module of the base.

    Attributes:
        site: the adapter's.
        target: the base's.
        part: the projection inside the target, None for all of it.
        outputs: which of the site's own outputs, None for all.
    """

    site: str
    target: str
    part: Part | None = None
    outputs: slice | None = None


class _Places:
    """Every path by which an adapter may name a module of a base, or a part of one, or several at once."""

    def __init__(self, targets: _Targets):
        self.targets = targets
        self.groups = separate_groups(targets)
        self.parts: dict[str, tuple[str, Part]] = {}
        for name, target in targets.items():
            parent, dot, _ = name.rpartition(".")
            for part in target.parts:
                if (path := f"{parent}{dot}{part.name}") not in targets:
                    self.parts[path] = (name, part)
        self._paths = [*targets, *self.parts, *self.groups]

    def path_of(self, site: str) -> str | None:
        """Return the path that a site of the adapter means."""
        if site in self.targets or site in self.parts or site in self.groups:
            return site
        # other wrappers around the base give other prefixes: accept the one module path that ends alike
        alike = [path for path in self._paths if path.endswith("." + site) or site.endswith("." + path)]
        return alike[0] if len(alike) == 1 else None

    def pieces(self, site: str, path: str) -> Iterator[_Piece]:
        """Yield what the adapter's `site`, which means `path`, adds where."""
        if path in self.targets:
            yield _Piece(site, path)
        elif path in self.parts:
            target, part = self.parts[path]
            yield _Piece(site, target, part)
        else:
            at = 0
            for target in self.groups[path]:
                width = self.targets[target].out_features
                yield _Piece(site, target, outputs=slice(at, at + width))
                at += width

    def widths(self, path: str) -> tuple[int, int]:
        """Return (in, out) of a path."""
        if path in self.groups:
            members = [self.targets[name] for name in self.groups[path]]
            return members[0].in_features, sum(member.out_features for member in members)
        name, part = self.parts.get(path, (path, None))
        target = self.targets[name]
        return target.in_features, target.out_features if part is None else part.width

    def expected(self, adapter: LoRAModel, paths: set[str]) -> list[str]:
        """Return the paths that the adapter must have if its config targets them."""
        sweeping = str(adapter.config.target_modules).lower() == "all-linear"
        whole_groups = {member for path in paths & self.groups.keys() for member in self.groups[path]}
        found = []
        for name, target in self.targets.items():
            parts = [path for path, (fused, _) in self.parts.items() if fused == name] if target.parts else []
            if paths.intersection(parts):
                found += parts
            elif not (name in whole_groups or sweeping and target.is_embedding):
                found += [name, *([] if sweeping or name in paths else parts)]
        if paths & self.groups.keys():
            found += [] if sweeping else self.groups
        return found


def fit(adapter: LoRAModel, targets: _Targets, base: str) -> LoRAModel:
    """Return an adapter with the sites of a base (see `LoRAModel.fit`)."""
    places = _Places(targets)
    paths = {site: places.path_of(site) for site in adapter.a}
    if missing := [site for site, path in paths.items() if path is None]:
        why = _why_missing(missing, targets) or nearest(missing[0], targets)
        raise UserError(
            f"adapter {adapter.name!r} does not fit base {base!r}: {len(missing)} of its {len(adapter.a)} sites are "
            f"not in the model: {names(missing, 4)}{why}"
        )
    _check_widths(adapter, paths, places, base)
    if left_out := adapter.config.sites_left_out(places.expected(adapter, set(paths.values())), paths.values()):
        raise UserError(
            f"adapter {adapter.name!r}: its weights lack {len(left_out)} of the sites that its config targets in base "
            f"{base!r}: {names(left_out, 4)} (PEFT 0.20 and later lose them when they save an X-LoRA model)"
        )
    _check_copies(adapter, places, base)
    by_target: dict[str, list[_Piece]] = {}
    for site, path in paths.items():
        for piece in places.pieces(site, path):
            by_target.setdefault(piece.target, []).append(piece)
    for target, pieces in by_target.items():
        kinds = [piece.part.name if piece.part else None for piece in pieces]
        if len(set(kinds)) < len(kinds) or None in kinds[1:] or (None in kinds and len(kinds) > 1):
            raise UserError(
                f"adapter {adapter.name!r}: two of its sites name the same module of base {base!r}, {target!r}: "
                f"{names([piece.site for piece in pieces])}"
            )
    return _scaled_rows(_joined(adapter, by_target, targets), targets, base)


def _why_missing(missing: list[str], targets: _Targets) -> str:
    site = missing[0]
    parent, _, name = site.rpartition(".")
    if ".experts." in f"{site}.":
        return ("; the experts of this base are fused into parameters, which are no linear modules, and LoRA on fused "
                "experts is not supported")
    if name in AMBIGUOUS and any(target.startswith(f"{parent}.") for target in targets):
        return (f"; {name!r} fuses projections that this base keeps apart, and in which order its outputs lie differs "
                "from model to model, so they are not split; export the adapter on separate projections")
    return ""


def _check_widths(adapter: LoRAModel, paths: Mapping[str, str], places: _Places, base: str) -> None:
    wrong = []
    for site, path in paths.items():
        want, have = places.widths(path), (adapter.a[site].shape[1], adapter.b[site].shape[1])
        if want != have:
            wrong.append(f"{path} is {want[0]} -> {want[1]} in the base, {have[0]} -> {have[1]} in the adapter")
        is_embedding = path in places.targets and places.targets[path].is_embedding
        if is_embedding != (site in adapter.embeddings):
            kinds = ("an embedding", "a linear module") if is_embedding else ("a linear module", "an embedding")
            wrong.append(f"{path} is {kinds[0]} in the base, its factors are those of {kinds[1]}")
    if wrong:
        raise UserError(
            f"adapter {adapter.name!r} does not fit base {base!r} at {len(wrong)} sites: {'; '.join(wrong[:4])}"
        )


def _check_copies(adapter: LoRAModel, places: _Places, base: str) -> None:
    """Refuse copies of base weights that say something else than the base does: they would have to replace it."""
    for site, copy in adapter.base_copies.items():
        path = places.path_of(site)
        target = places.targets.get(path or "")
        if target is None:
            raise UserError(f"adapter {adapter.name!r}: it holds a base weight of {site!r}, which base {base!r} lacks")
        if target.weight is None:
            continue
        weight = target.weight()
        weight = weight.T if target.is_embedding else weight
        # whichever of the two was stored in a lower precision, the other rounds to it
        kinds = sorted((weight.dtype, copy.dtype), key=lambda dtype: dtype.itemsize)[:1]
        if weight.shape != copy.shape or not torch.equal(weight.to(kinds[0]), copy.to(weight.device).to(kinds[0])):
            raise UserError(
                f"adapter {adapter.name!r} is refused: it holds a base weight of {path!r} that differs from that of "
                f"base {base!r}, so it replaces weights (were tokens added?)"
            )


def _joined(adapter: LoRAModel, by_target: Mapping[str, list[_Piece]], targets: _Targets) -> LoRAModel:
    """Return the adapter with one pair of factors per target."""
    a, b, magnitudes = {}, {}, {}
    scales: dict[str, tuple[int, float]] = {}
    for target, pieces in by_target.items():
        first = pieces[0]
        if first.part is None:
            chosen = first.outputs or slice(None)
            a[target], b[target] = adapter.a[first.site], adapter.b[first.site]
            if first.outputs is not None:
                b[target] = b[target][:, chosen].contiguous()
            if adapter.magnitudes:
                magnitudes[target] = adapter.magnitudes[first.site][chosen]
        else:
            a[target] = torch.cat([adapter.a[piece.site] for piece in pieces])
            b[target] = adapter.b[first.site].new_zeros(a[target].shape[0], targets[target].out_features)
            # rows of projections that the adapter leaves alone keep their own length
            magnitude = torch.full((targets[target].out_features,), math.nan)
            at = 0
            for piece in pieces:
                factor = adapter.b[piece.site]
                b[target][at : at + len(factor), piece.part.outputs] = factor
                at += len(factor)
                if adapter.magnitudes:
                    magnitude[piece.part.outputs] = adapter.magnitudes[piece.site]
            if adapter.magnitudes:
                magnitudes[target] = magnitude
        if first.part or first.outputs:
            found = {adapter.config.scale_at(piece.site, adapter.a[piece.site].shape[0]) for piece in pieces}
            scales[target] = (a[target].shape[0], found.pop() if len(found) == 1 else 1.0)
    return replace(
        adapter, config=_with_scales(adapter.config, scales), a=a, b=b, magnitudes=magnitudes, base_copies={},
        embeddings=frozenset(name for name in a if targets[name].is_embedding), joined_from=adapter.rank,
    )


def _with_scales(config: AdapterConfig, scales: Mapping[str, tuple[int, float]]) -> AdapterConfig:
    """Return the config with patterns for sites it does not name: target -> its rank and the scale folded into B."""
    if not scales:
        return config
    ranks = {f"^{re.escape(site)}": rank for site, (rank, _) in scales.items()}
    alphas = {
        f"^{re.escape(site)}": scale * (math.sqrt(rank) if config.use_rslora else rank)
        for site, (rank, scale) in scales.items()
    }
    # the first pattern that matches wins
    return replace(
        config, rank_pattern={**ranks, **config.rank_pattern}, alpha_pattern={**alphas, **config.alpha_pattern}
    )


def _scaled_rows(adapter: LoRAModel, targets: _Targets, base: str) -> LoRAModel:
    """Return the adapter with DoRA's row factors in B and in `gains`, if the base's weights are there to compute them.

    y = m / ||W + BA|| * (W + BA) x, row by row: `g = m / ||W + BA||` does not depend on x.
    """
    if not adapter.magnitudes or any(targets[site].weight is None for site in adapter.magnitudes):
        return adapter
    gains: dict[str, Tensor] = {}
    b = dict(adapter.b)
    for site, magnitude in adapter.magnitudes.items():
        try:
            weight = targets[site].weight()
        except UserError as error:
            raise UserError(
                f"adapter {adapter.name!r} is refused on base {base!r}: it uses use_dora, which needs the base's "
                f"weight at {site!r}, but {error}"
            ) from None
        gain = magnitude / row_norms(weight, adapter.a[site], adapter.b[site])
        gain = torch.where(magnitude.isnan(), 1.0, gain)
        if not gain.isfinite().all():
            raise UserError(f"adapter {adapter.name!r}: at {site!r} a row of the base's weight plus its delta is zero, "
                            "so that DoRA cannot divide by its length")
        gains[site], b[site] = gain, adapter.b[site] * gain
    return replace(adapter, b=b, magnitudes={}, gains=gains)
