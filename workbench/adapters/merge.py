"""Several adapters merged into one per request: linear, TIES, DARE, and DARE before TIES.

TIES is Yadav et al. 2023 (arXiv:2306.01708), DARE is Yu et al. 2023 (arXiv:2311.03099); which tensors they see, and
where weight and scale enter, follows PEFT 0.21 (`peft.utils.merge_utils`, `LoraModel.add_weighted_adapter`).
Contract: `linear` is never merged, it runs as a constant row of weights over the adapters' slots; every other merge is
a function of the adapters' content and the settings alone, so `content_key` may name it in a cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from workbench.adapters.config import AdapterConfig
from workbench.adapters.model import LoRAModel
from workbench.config import check_types, require_choice, require_range
from workbench.errors import UserError, names, nearest

_WHERE = "merged_adapters"
_MERGES = ("ties", "dare_linear", "dare_ties")
_CHOICES = {
    "merge_strategy": ("linear", *_MERGES),
    "majority_sign_method": ("total", "frequency"),
    "space": ("factors", "delta"),
    "compat": ("lorax",),
}
# setting -> the strategies that read it; elsewhere only its default passes, so that nothing is silently ignored
_READ_BY = {"density": _MERGES, "space": _MERGES, "seed": _MERGES[1:], "majority_sign_method": ("ties", "dare_ties")}
_Weighted = Sequence[tuple[LoRAModel, float]]  # the adapters that change a site, each with its weight


@dataclass(frozen=True)
class MergedAdapters:
    """Which adapters to merge, and how: over tensors `T_i` of N entries with weights `v_i` (`merge` says which), by

        ties          T'_i = T_i at its int(density N) entries of largest magnitude (the first of equals), else 0
                      elected = +1 where sum_i T'_i >= 0 ("total") or sum_i sign T'_i >= 0 ("frequency"), else -1
                      sum_i v_i T'_i m_i / max(1, sum_i m_i),  m_i = [sign T'_i = elected]
        dare_linear   T'_i = T_i times a random 0/1 mask of mean density, over density;  sum_i v_i T'_i
        dare_ties     T'_i as in dare_linear, then as in ties

    Weights take no part in election and count: in ties and dare_ties an adapter of weight 0 still votes.

    Attributes:
        ids: adapter names, each once.
        weights: one finite float32 number per id, of either sign; none given means 1.0 for each.
        merge_strategy: "linear", "ties", "dare_linear" or "dare_ties".
        density: share of entries kept, in (0, 1]; required by all but `linear`, which does not read it.
        majority_sign_method: how TIES elects a sign: "total" by the sum of values, "frequency" by the count of signs.
        seed: which random entries DARE keeps.
        space: "factors" merges the A's and the B's, as PEFT's `ties`, ...; "delta" merges their products, as PEFT's
            `ties_svd`, ..., and factorises the sum again.
        svd_rank: rank of that factorisation, and the rest is lost; None is the sum of the ranks at the site (PEFT: the
            largest), which loses nothing of dare_linear at density 1. Never more than the site's smaller width.
        compat: "lorax" merges as LoRAX does (see `merge`).
    """

    ids: tuple[str, ...]
    weights: tuple[float, ...] = ()
    merge_strategy: str = "linear"
    density: float | None = None
    majority_sign_method: str = "total"
    seed: int = 0
    space: str = "factors"
    svd_rank: int | None = None
    compat: str | None = None

    def __post_init__(self) -> None:
        for key, kind, what in (("ids", str, "adapter names"), ("weights", (int, float), "numbers")):
            value = getattr(self, key)
            plain = isinstance(value, (list, tuple)) and not any(isinstance(item, bool) for item in value)
            if not (plain and all(isinstance(item, kind) for item in value)):
                raise _error(f"{key!r} is {value!r}, expected a list of {what}")
            object.__setattr__(self, key, tuple(value) or (1.0,) * len(self.ids))
        check_types(self, _WHERE)
        for key, choices in _CHOICES.items():
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, value.lower())
                require_choice(_WHERE, key, value.lower(), choices)
        self._check_ids()
        self._check_settings()

    def _check_ids(self) -> None:
        if not self.ids:
            raise _error("'ids' is empty, expected at least one adapter name")
        if twice := [name for name in dict.fromkeys(self.ids) if self.ids.count(name) > 1]:
            raise _error(f"'ids' has {names(twice)} more than once; give it once, with one weight")
        if len(self.weights) != len(self.ids):
            given = f"{len(self.ids)} 'ids' but {len(self.weights)} 'weights'"
            raise _error(f"{given}; give one weight per id, or no weights for 1.0 each")
        for name, weight in zip(self.ids, self.weights, strict=True):
            if not abs(weight) <= torch.finfo(torch.float32).max:
                raise _error(f"the weight of {name!r} is {weight}, expected a finite float32 number")
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))

    def _check_settings(self) -> None:
        for key, strategies in _READ_BY.items():
            value, default = getattr(self, key), getattr(type(self), key)
            if self.merge_strategy not in strategies and value != default:
                why = f"merge_strategy {self.merge_strategy!r} does not read it, only {names(strategies)} do"
                raise _error(f"{key!r} is {value!r}, but {why}; leave it out")
        if self.merge_strategy != "linear" and not (self.density and 0 < self.density <= 1):
            needs = f"merge_strategy {self.merge_strategy!r} needs a number above 0 and at most 1"
            raise _error(f"'density' is {self.density}, but {needs}")
        if self.svd_rank is not None:
            require_range(_WHERE, "svd_rank", self.svd_rank, 1)
            if self.space != "delta":
                raise _error(f"'svd_rank' is {self.svd_rank}, but only space 'delta' reads it; leave it out")
        if self.compat == "lorax" and self.space != "factors":
            raise _error(f"'space' is {self.space!r}, but compat 'lorax' merges factors; leave one of the two out")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MergedAdapters:
        """Make it from a request's JSON with LoRAX's keys or ours, no others; null means not given.

        So does, for `linear`, LoRAX's default density 0.0.
        """
        if not isinstance(given, Mapping):
            raise _error(f"it is {given!r}, expected an object with 'ids' and 'merge_strategy'")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise _error(f"unknown key {key!r}{nearest(key, known)}; the keys are {names(known, len(known))}")
        values = {"ids": ()} | {key: value for key, value in given.items() if value is not None}
        if str(values.get("merge_strategy", "linear")).lower() == "linear" and values.get("density") == 0:
            del values["density"]
        return cls(**values)

    @property
    def is_constant_row(self) -> bool:
        """Whether it runs without a merge, as `constant_weights` over the adapters' slots."""
        return self.merge_strategy == "linear" and self.compat is None


def constant_weights(merged: MergedAdapters) -> tuple[float, ...]:
    """Return the weights of a `linear` merge over the slots of its ids, the same in every row and at every site.

    With the scale s_i folded into B, the rows compute `sum_i w_i s_i B_i A_i`: exact, for any ranks, and what PEFT's
    `combination_type="cat"` computes. PEFT's and LoRAX's own `linear` have cross terms (see `merge`).

    Raises:
        UserError: another strategy, or LoRAX's `linear`: these need `merge`.
    """
    if not merged.is_constant_row:
        what = f"merge_strategy {merged.merge_strategy!r}{' of LoRAX' if merged.compat else ''}"
        raise _error(f"{what} is no constant row of weights; merge the adapters")
    return merged.weights


def merge(adapters: Sequence[LoRAModel], merged: MergedAdapters, name: str) -> LoRAModel:
    """Merge adapters that fit one base (`LoRAModel.fit`) into one called `name`; its scale is 1, its sites their union.

    At each site the adapters that change it take part, by the formulas of `MergedAdapters`.
    `space="factors"` (equal ranks at each site): T_i are the A_i, with `v_i = sign(w_i s_i) sqrt|w_i s_i|`, and apart
    from them the B_i without their scale s_i, with `v_i = sqrt|w_i s_i|`. The product has cross terms `B_i A_j`:
    dare_linear of two equal adapters is 4 times their delta at weights (1, 1), twice at (.5, .5).
    `space="delta"` (any ranks): T_i are the `s_i B_i A_i`, with `v_i = w_i`; an SVD of `[out, in]` at every site cuts
    the result to `svd_rank` (A: right singular vectors, B: left ones times the singular values).
    `compat="lorax"`: T_i are the A_i and the B_i without scale, `v_i = w_i` on both sides; the result takes the scale
    of the first adapter; DARE does not divide by density, so deltas shrink; `linear` is `sum_i v_i T_i` on each side;
    a single adapter is itself, whatever its weight (without compat it is trimmed like several; by PEFT, not at all).

    Returns:
        a float32 `[rank, in]` and b float32 `[rank, out]` per site; its content hash is `content_key`.

    Raises:
        UserError: adapters other than `merged.ids` in order, `linear` (but LoRAX's), ranks that differ in factors,
            widths that differ, a density that keeps nothing of a tensor, a scale of 0 in factors, overflow.
    """
    key = content_key(adapters, merged)
    if merged.is_constant_row:
        raise _error("merge_strategy 'linear' is not merged: it runs exactly, as a constant row of weights")
    a, b = {}, {}
    for site in dict.fromkeys(site for adapter in adapters for site in adapter.sites):
        here = [(adapter, w) for adapter, w in zip(adapters, merged.weights, strict=True) if site in adapter.a]
        _check_widths(site, here)
        if merged.compat == "lorax" and len(adapters) == 1:
            a[site], b[site] = adapters[0].a[site], adapters[0].b[site]
        elif merged.space == "delta":
            a[site], b[site] = _merge_deltas(site, here, merged)
        else:
            a[site], b[site] = _merge_factors(site, here, merged, adapters[0].config)
    return LoRAModel(name=name, config=_unit_scale(a, adapters[0].config), a=a, b=b, content_hash=key)


def content_key(adapters: Sequence[LoRAModel], merged: MergedAdapters) -> str:
    """Return the SHA-256, in hex, of the adapters' content hashes and all settings: equal keys are equal merges."""
    given = tuple(adapter.name for adapter in adapters)
    if given != merged.ids:
        raise _error(f"its ids are {names(merged.ids)}, but the adapters given are {names(given)}")
    density = merged.density and float(merged.density)  # 1 and 1.0 are one setting
    facts = {**asdict(merged), "density": density, "hashes": [adapter.content_hash for adapter in adapters]}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def sign_agreement(tensors: Sequence[Tensor], method: str) -> list[Tensor]:
    """Return, for each of some tensors of one shape, where its sign is the elected one (bool; never at a zero)."""
    votes = sum(tensor if method == "total" else tensor.sign() for tensor in tensors)
    elected = torch.where(votes >= 0, 1.0, -1.0)
    return [tensor.sign() == elected for tensor in tensors]


def dare_mask(shape: Sequence[int], density: float, seed: int, site: str, adapter: str, part: str) -> Tensor:
    """Return which entries of `part` ("A", "B", "delta") of an adapter DARE keeps, whatever else is merged; bool."""
    digest = hashlib.sha256(json.dumps([seed, site, adapter, part]).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(tuple(shape), generator=generator) < density


def _merge_factors(site: str, here: _Weighted, merged: MergedAdapters, first: AdapterConfig) -> tuple[Tensor, Tensor]:
    ranks = {adapter.name: adapter.a[site].shape[0] for adapter, _ in here}
    if len(set(ranks.values())) > 1:
        listed = ", ".join(f"{rank} of {name!r}" for name, rank in ranks.items())
        fix = f"space='delta'{' and without compat' if merged.compat else ''}"
        raise _error(f"factors of different ranks cannot be added: at {site} {listed}; merge with {fix}")
    scales = [adapter.config.scale_at(site, ranks[adapter.name]) for adapter, _ in here]
    if 0 in scales:
        erased = here[scales.index(0)][0].name
        raise _error(f"adapter {erased!r} has scale 0 at {site}, which erases its B; leave the adapter out")
    raw_a = {adapter.name: adapter.a[site] for adapter, _ in here}
    raw_b = {adapter.name: adapter.b[site] / scale for (adapter, _), scale in zip(here, scales, strict=True)}
    if merged.compat == "lorax":
        scale = first.scale_at(site, next(iter(ranks.values())))
        weights_a, weights_b = [weight for _, weight in here], [weight * scale for _, weight in here]
    else:
        sizes = [weight * scale for (_, weight), scale in zip(here, scales, strict=True)]
        weights_b = [math.sqrt(abs(size)) for size in sizes]
        # the sign of a subtracted adapter goes to one side only, or it would cancel in the product
        weights_a = [math.copysign(root, size) for root, size in zip(weights_b, sizes, strict=True)]
    return _combine(site, "A", raw_a, weights_a, merged), _combine(site, "B", raw_b, weights_b, merged)


def _merge_deltas(site: str, here: _Weighted, merged: MergedAdapters) -> tuple[Tensor, Tensor]:
    deltas = {adapter.name: adapter.b[site].T @ adapter.a[site] for adapter, _ in here}  # [out, in]
    delta = _combine(site, "delta", deltas, [weight for _, weight in here], merged)
    left, sizes, right = torch.linalg.svd(delta, full_matrices=False)
    rank = min(len(sizes), merged.svd_rank or sum(adapter.a[site].shape[0] for adapter, _ in here))
    return right[:rank].contiguous(), (left * sizes).T[:rank].contiguous()


def _combine(
    site: str, part: str, tensors: Mapping[str, Tensor], weights: Sequence[float], merged: MergedAdapters
) -> Tensor:
    kept = [_thinned(tensor, site, part, name, merged) for name, tensor in tensors.items()]
    weighted = [weight * tensor for weight, tensor in zip(weights, kept, strict=True)]
    total = sum(weighted)
    if merged.merge_strategy.endswith("ties"):
        agrees = sign_agreement(kept, merged.majority_sign_method)
        total = sum(tensor * agree for tensor, agree in zip(weighted, agrees, strict=True))
        total = total / sum(agree.float() for agree in agrees).clamp(min=1)
    if not total.isfinite().all():
        raise _error(f"the merge overflows at {site}; give smaller weights")
    return total


def _thinned(tensor: Tensor, site: str, part: str, name: str, merged: MergedAdapters) -> Tensor:
    if merged.density in (None, 1):
        return tensor
    if merged.merge_strategy == "ties":
        return tensor * _largest(tensor, merged.density, f"{part} of {name!r} at {site}")
    mask = dare_mask(tensor.shape, merged.density, merged.seed, site, name, part).to(tensor.device)
    return tensor * mask / (1.0 if merged.compat == "lorax" else merged.density)


def _largest(tensor: Tensor, density: float, what: str) -> Tensor:
    size, count = tensor.numel(), int(density * tensor.numel())
    if count == 0:
        raise _error(f"'density' {density} keeps none of the {size} entries of {what}; give at least 1/{size}")
    magnitudes = tensor.abs().flatten()
    cut = magnitudes.kthvalue(size - count + 1).values
    keep, equal = magnitudes > cut, magnitudes == cut
    # 16-bit weights often have equal magnitudes: the first ones are kept, so that every device keeps the same
    return (keep | equal & (equal.cumsum(0) <= count - keep.sum())).view_as(tensor)


def _check_widths(site: str, here: _Weighted) -> None:
    widths = {adapter.name: (adapter.a[site].shape[1], adapter.b[site].shape[1]) for adapter, _ in here}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name!r} is {wide_in} -> {wide_out}" for name, (wide_in, wide_out) in widths.items())
        raise _error(f"the adapters are of different bases: at {site} {listed}")


def _unit_scale(a: Mapping[str, Tensor], first: AdapterConfig) -> AdapterConfig:
    """Return the config of factors whose scale is in B already: alpha is the rank, site by site."""
    r = max(tensor.shape[0] for tensor in a.values())
    others = {f"^{re.escape(site)}": tensor.shape[0] for site, tensor in a.items() if tensor.shape[0] != r}
    base = first.base_model_name_or_path
    return AdapterConfig(r, float(r), rank_pattern=others, alpha_pattern=others, base_model_name_or_path=base)


def _error(text: str) -> UserError:
    return UserError(f"{_WHERE}: {text}")
