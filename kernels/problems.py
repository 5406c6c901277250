"""Problems for the ops: the same operands for tests, benches and checks, with the popularities that break things.

A problem holds plain tensors, slots and spans, and its own result in float64. Outputs have unit scale, so an error
relative to their RMS means the same for every shape. The stack of factors is in another order than the slots.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_kernels.segments import BASE_SLOT, Segment, segments

POPULARITY = ("identical", "distinct", "uniform", "zipf:1.5", "skewed", "all_base", "half_base")
_SKEW = 1.5  # one adapter's rows over those of the next popular one, as in punica's figures
MIXTURE_SIZE = 4


@dataclass(frozen=True)
class RowsProblem:
    """Operands of bgmv, sgmv, mix and blend at one site.

    y `[row, out]`, x `[row, in]`, a `[rank, in]`, b `[rank, out]`: one dtype and device; `slots` has one slot per row
    (-1 = base); `spans` maps a slot to its `(first, last)` rank rows; `owner` int64 `[rank]` names the adapter of each
    rank row; `weights` float32 `[row, adapter]` sum to one in each row. `rank` is the largest of one adapter.
    """

    op: str
    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    slots: tuple[int, ...]
    spans: dict[int, tuple[int, int]]
    owner: Tensor
    weights: Tensor
    popularity: str

    @property
    def operand(self) -> Tensor:
        """The operand whose dtype and device are the op's."""
        return self.x

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of equal slots, base rows left out."""
        return segments(self.slots)

    @property
    def rank(self) -> int:
        """The largest rank of one adapter, 0 without any."""
        return max((last - first for first, last in self.spans.values()), default=0)

    def to(self, dtype: torch.dtype) -> RowsProblem:
        """Return the problem with y, x, a and b in another dtype."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name in ("y", "x", "a", "b")})

    def corrupted(self) -> RowsProblem | None:
        """Return a copy with one adapter in use a tenth too strong, which no check may pass; None without adapters."""
        used = [slot for slot in self.slots if slot in self.spans and self.spans[slot][0] < self.spans[slot][1]]
        if self.op == "mix" and len(self.owner) and len(self.weights):
            owners = self.owner.unique()
            used = [int(owners[self.weights[:, owners].sum(0).argmax()])]
        if not used:
            return None
        first, last = self.spans[used[0]]
        b = self.b.clone()
        b[first:last] *= 1.1
        return replace(self, y=self.y.clone(), b=b)

    def exact(self) -> Tensor:
        """Return the op's result in float64, from slots and spans without segments."""
        x, a, b = self.x.double(), self.a.double(), self.b.double()
        out = self.y.double()
        if self.op == "mix":
            return out + ((x @ a.T) * self.weights.double()[:, self.owner]) @ b
        row_slots = torch.tensor(self.slots, dtype=torch.int64, device=x.device)
        for slot, (first, last) in self.spans.items():
            rows = (row_slots == slot).nonzero()[:, 0]
            out[rows] += (x[rows] @ a[first:last].T) @ b[first:last]
        return out


@dataclass(frozen=True)
class HeadProblem:
    """Operands of the classifier's fused head: hidden `[row, width]`, weight `[site * adapter, width]`, bias or None.

    `settings` are the keyword arguments of `lora_kernels.scalings.scalings`.
    """

    op: str
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    num_adapters: int
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def operand(self) -> Tensor:
        """The operand whose dtype and device are the op's."""
        return self.hidden

    @property
    def num_sites(self) -> int:
        """Sites the head has outputs for."""
        return self.weight.shape[0] // self.num_adapters

    def to(self, dtype: torch.dtype) -> HeadProblem:
        """Return the problem with its tensors in another dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def corrupted(self) -> HeadProblem | None:
        """Return a copy in which one adapter's outputs are a tenth too large; None where no scaling could differ."""
        if not len(self.hidden) or not self.num_sites or self.num_adapters == 1:
            return None
        weight = self.weight.clone()
        weight[:: self.num_adapters] *= 1.1
        return replace(self, weight=weight)

    def logits(self) -> Tensor:
        """Return the head's outputs in float64, `[row, site, adapter]`."""
        out = self.hidden.double() @ self.weight.double().T
        out = out if self.bias is None else out + self.bias.double()
        return out.reshape(len(out), self.num_sites, self.num_adapters)

    def exact(self) -> Tensor:
        """Return the scalings in float64, `[row, site, adapter]`; of equal weights top-k keeps the lower adapters."""
        softmax, temperature = self.settings.get("softmax", True), self.settings.get("temperature", 1.0)
        top_k, softmax_topk = self.settings.get("top_k"), self.settings.get("softmax_topk", False)
        weights = self.logits()
        if softmax:
            weights = torch.softmax(weights / temperature, dim=-1)
        if top_k is None and not softmax_topk:
            return weights
        order = weights.argsort(dim=-1, descending=True, stable=True)[..., : top_k or self.num_adapters]
        kept = weights.gather(-1, order)
        kept = torch.softmax(kept, dim=-1) if softmax_topk else kept
        return torch.zeros_like(weights).scatter_(-1, order, kept)


def slots_for(popularity: str, num_rows: int, num_adapters: int | None = None, seed: int = 0) -> tuple[int, ...]:
    """Return a slot per row; rows of one slot lie together, in an order of slots drawn by `seed`.

    identical: one adapter; distinct: each row its own; uniform: ceil(sqrt(rows)) adapters evenly; skewed: each
    adapter has 1.5 times the rows of the next; zipf:S: drawn, the i-th adapter with weight i^-S; all_base: none;
    half_base: half the rows (rounded up) are the base's, the rest uniform. With `num_adapters`, slots stay below it:
    further ones are dealt over those there are.

    Raises:
        ValueError: an unknown popularity, or no adapters.
    """
    if num_adapters is not None and num_adapters < 1:
        raise ValueError(f"slots_for: num_adapters must be at least 1, not {num_adapters}")
    generator = torch.Generator().manual_seed(seed)
    slots = _popular(popularity, num_rows, generator)
    if num_adapters is not None:
        slots = [slot if slot == BASE_SLOT else slot % num_adapters for slot in slots]
    used = sorted(set(slots))
    place = dict(zip(used, torch.randperm(len(used), generator=generator).tolist(), strict=True))
    return tuple(sorted(slots, key=place.__getitem__))


def _popular(popularity: str, num_rows: int, generator: torch.Generator) -> list[int]:
    if popularity == "identical":
        return [0] * num_rows
    if popularity == "distinct":
        return list(range(num_rows))
    if popularity == "uniform":
        return [row % max(1, math.ceil(math.sqrt(num_rows))) for row in range(num_rows)]
    if popularity == "skewed":
        return _skewed(num_rows)
    if popularity == "all_base":
        return [BASE_SLOT] * num_rows
    if popularity == "half_base":
        lora = _popular("uniform", num_rows // 2, generator)
        return lora + [BASE_SLOT] * (num_rows - len(lora))
    power = _zipf_power(popularity)
    weights = torch.arange(1, max(1, num_rows) + 1, dtype=torch.float64) ** -power
    return torch.multinomial(weights, num_rows, replacement=True, generator=generator).tolist() if num_rows else []


def _zipf_power(popularity: str) -> float:
    kind, _, power = popularity.partition(":")
    try:
        value = float(power)
    except ValueError:
        value = -1.0
    if kind == "zipf" and 0 <= value < math.inf:
        return value
    near = difflib.get_close_matches(popularity, POPULARITY, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"popularity must be one of {', '.join(POPULARITY)} (or zipf:S), not {popularity!r}{hint}")


def _skewed(num_rows: int) -> list[int]:
    counts: list[int] = []
    while (left := num_rows - sum(counts)) > 0:
        counts.append(min(left, math.ceil(_SKEW ** len(counts))))
    counts.sort(reverse=True)
    return [slot for slot, count in enumerate(counts) for _ in range(count)]


def make_problem(op: str, num_rows: int, *args, **kwargs) -> RowsProblem | HeadProblem:
    """Return a problem of an op: `head_problem` for scalings, else `rows_problem`."""
    makers = dict.fromkeys(("bgmv", "sgmv", "mix", "blend", "blend_groups"), rows_problem) | {"scalings": head_problem}
    if op not in makers:
        raise ValueError(f"make_problem: op must be one of {', '.join(makers)}, not {op!r}")
    return makers[op](op, num_rows, *args, **kwargs)


def rows_problem(
    op: str,
    num_rows: int,
    rank: int | Sequence[int],
    in_features: int,
    out_features: int,
    popularity: str = "uniform",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    num_adapters: int | None = None,
    absent: Sequence[int] = (),
) -> RowsProblem:
    """Return a problem of bgmv, sgmv, mix, or (one-hot rows) blend, in one group or several.

    Args:
        op: "bgmv", "sgmv", "mix", "blend" or "blend_groups".
        num_rows: rows of the forward; may be 0.
        rank: of every adapter, or a rank per adapter, repeated as needed; 0 is a slot without rank rows.
        in_features, out_features: widths of the layer.
        popularity: see `slots_for`; mix has no slots to choose, all rows share the mixture.
        dtype, device: of y, x, a and b.
        seed: of every random number.
        num_adapters: adapters in the stack; None is as many as the popularity asks for (mix: 4).
        absent: slots without a span at this site.
    """
    slots = slots_for(popularity, num_rows, num_adapters, seed)
    if num_adapters is None:
        num_adapters = MIXTURE_SIZE if op == "mix" else max(slots, default=BASE_SLOT) + 1
    ranks = [rank] if isinstance(rank, int) else list(rank)
    sizes = [0 if slot in absent else ranks[slot % len(ranks)] for slot in range(num_adapters)]
    randn = normal(device, seed)
    spans, owner = _stacked(sizes, absent, seed)
    total = len(owner)
    scale = torch.tensor([max(1, sizes[i]) for i in owner], dtype=torch.float32, device=device)[:, None].rsqrt()
    return RowsProblem(
        op, randn(num_rows, out_features).to(dtype), randn(num_rows, in_features).to(dtype),
        (randn(total, in_features) * in_features**-0.5).to(dtype), (randn(total, out_features) * scale).to(dtype),
        slots, spans, torch.tensor(owner, dtype=torch.int64, device=device),
        torch.softmax(2 * randn(num_rows, num_adapters), dim=-1), popularity,
    )  # fmt: skip


def _stacked(sizes: list[int], absent: Sequence[int], seed: int) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return each slot's rank rows in the stack, and the adapter of each rank row."""
    spans: dict[int, tuple[int, int]] = {}
    owner: list[int] = []
    for slot in torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist():
        if slot not in absent:
            spans[slot] = (len(owner), len(owner) + sizes[slot])
        owner += [slot] * sizes[slot]
    return spans, owner


def head_problem(
    op: str,
    num_rows: int,
    width: int,
    num_sites: int,
    num_adapters: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    bias: bool = True,
    **settings: object,
) -> HeadProblem:
    """Return a problem of the fused head; `settings` are those of `lora_kernels.scalings.scalings`."""
    randn = normal(device, seed)
    weight = randn(num_sites * num_adapters, width) * (2 * width**-0.5)
    shift = randn(num_sites * num_adapters).to(dtype) if bias else None
    return HeadProblem(op, randn(num_rows, width).to(dtype), weight.to(dtype), shift, num_adapters, settings)


def normal(device: torch.device | str, seed: int) -> Callable[..., Tensor]:
    """Return a maker of normal float32 tensors of given shapes; on `meta` they have no values."""
    if torch.device(device).type == "meta":
        return functools.partial(torch.randn, device=device)
    return functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device)


def error_ratio(found: Tensor, exact: Tensor) -> float:
    """Return the RMS error relative to the RMS of `exact`; NaN anywhere gives NaN, no elements give 0."""
    if found.shape != exact.shape:
        raise ValueError(f"error_ratio: found has shape {list(found.shape)}, exact {list(exact.shape)}")
    if not exact.numel():
        return 0.0
    scale = float(exact.double().pow(2).mean().sqrt())
    return float((found.double() - exact.double()).pow(2).mean().sqrt()) / (scale or 1.0)


def row_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest RMS error of a row relative to the RMS of all of `exact`; NaN anywhere gives NaN."""
    if found.shape != exact.shape:
        raise ValueError(f"row_error: found has shape {list(found.shape)}, exact {list(exact.shape)}")
    if not exact.numel():
        return 0.0
    scale = float(exact.double().pow(2).mean().sqrt())
    rows = (found.double() - exact.double()).reshape(len(exact), -1).pow(2).mean(-1).sqrt()
    return float(rows.max()) / (scale or 1.0)
