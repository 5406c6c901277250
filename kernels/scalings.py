"""scalings: classifier outputs -> adapter weights, per token and site.

    S = softmax(logits / T)          over adapters, if softmax is on
    S = S masked to its k largest    per token and site, if top_k; not renormalised
    S = softmax over the survivors   if softmax_topk (no temperature)

`scalings` starts at the logits; `head_scalings` is the classifier's last layer and `scalings` in one launch, so that
logits never reach memory: logits[t, l * n + i] = hidden[t] . weight[l * n + i] + bias[l * n + i].
Source: the X-LoRA paper's layer as PEFT computes it (softmax before top-k; the mask is not renormalised).
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_kernels.checks import DTYPES, Cost
from lora_kernels.tiles import div, power_of_2
from lora_kernels.triton_support import jit, launch, runs_triton, tl

MAX_FUSED_ADAPTERS = 256  # a site's logits are one tile of registers
# normal float32 numbers: 0 / (less than the first) and -inf / inf would be NaN
_TEMPERATURES = (1.2e-38, 3e38)


def scalings(
    logits: Tensor,
    *,
    softmax: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    softmax_topk: bool = False,
) -> Tensor:
    """Turn classifier outputs into scalings.

    Args:
        logits: `[..., adapter]`, any float dtype.
        softmax: normalise over adapters with `temperature`; off, the raw outputs are the weights.
        temperature: > 0.
        top_k: keep the k largest weights of each token and site, set the others to 0; None keeps all.
        softmax_topk: normalise the kept weights (all of them without `top_k`) by a softmax of their own.

    Returns:
        float32 `[..., adapter]`.

    Raises:
        ValueError: a temperature, `top_k` or combination that means nothing.
    """
    _check_settings(temperature, top_k)
    weights = logits.float()
    if softmax:
        weights = torch.softmax(weights / temperature, dim=-1)
    if top_k is not None or softmax_topk:
        weights = keep_top_k(weights, top_k or weights.shape[-1], softmax_topk)
    return weights


def keep_top_k(weights: Tensor, top_k: int, softmax_topk: bool = False) -> Tensor:
    """Keep the `top_k` largest of the last axis, zero the rest; with `softmax_topk` renormalise the kept ones."""
    top = weights.topk(min(top_k, weights.shape[-1]), dim=-1)
    # per token and site: a softmax over the whole masked tensor would mix tokens
    kept = torch.softmax(top.values, dim=-1) if softmax_topk else top.values
    return torch.zeros_like(weights).scatter_(-1, top.indices, kept)


def head_scalings_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, num_adapters: int, **settings: object
) -> Tensor:
    """Return the scalings of a classifier's last layer, computed in float32; the specification of `head_scalings`."""
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return scalings(logits.reshape(len(hidden), weight.shape[0] // num_adapters, num_adapters), **settings)


@jit
def _normalised(weights, temperature):
    """Return the softmax of weights / temperature over the last axis; the peak first, so no quotient overflows."""
    powers = tl.exp((weights - tl.max(weights, axis=1, keep_dims=True)) / temperature)
    return powers / tl.sum(powers, axis=1, keep_dims=True)


@jit
def _largest(weights, top_k, ADAPTERS: tl.constexpr, LANES: tl.constexpr):
    """Return which top_k weights are the largest; of equal ones the lower adapter, and NaN is above all."""
    lane = tl.arange(0, LANES)[None, :]
    # integers that order as the floats do, so that one comparison settles infinities and NaN; -0 is no sum from +0
    bits = weights.to(tl.int32, bitcast=True)
    key = tl.where(weights == weights, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    # below every key of a float: lanes that are no adapter, and those taken already
    key = tl.where(lane < ADAPTERS, key, -0x80000000)
    for _ in range(top_k):
        best = tl.max(key, axis=1, keep_dims=True)
        first = tl.min(tl.where(key == best, lane, LANES), axis=1, keep_dims=True)
        key = tl.where(lane == first, -0x80000000, key)
    return (key == -0x80000000) & (lane < ADAPTERS)


@jit
def _head_kernel(
    hidden_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_sites, width,
    hidden_row, hidden_col, weight_row, weight_col, temperature_bits, top_k,
    ADAPTERS: tl.constexpr, LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTMAX: tl.constexpr, HAS_TOP_K: tl.constexpr, SOFTMAX_TOPK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SITES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of rows and sites; a site's adapters lie in LANES columns, those past ADAPTERS are never read."""
    COLUMNS: tl.constexpr = BLOCK_SITES * LANES
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, COLUMNS)
    site = tl.program_id(1) * BLOCK_SITES + column // LANES
    real = (column % LANES < ADAPTERS) & (site < num_sites)
    # int64: a row times its stride leaves int32 at 70k rows of 32k
    output = site.to(tl.int64) * ADAPTERS + column % LANES
    hidden_base = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_row
    weight_base = weight_ptr + output[None, :] * weight_row
    logits = tl.zeros([BLOCK_ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(hidden_base + k[None, :] * hidden_col, (rows < num_rows)[:, None] & (k < width)[None, :], 0.0)
        w = tl.load(weight_base + k[:, None] * weight_col, (k < width)[:, None] & real[None, :], 0.0)
        logits = tl.dot(h, w, logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(bias_ptr + output, real, 0.0).to(tl.float32)[None, :]
    logits = tl.where((column % LANES < ADAPTERS)[None, :], logits, float("-inf"))
    weights = tl.reshape(logits, [BLOCK_ROWS * BLOCK_SITES, LANES])
    if SOFTMAX:
        weights = _normalised(weights, temperature_bits.to(tl.int32).to(tl.float32, bitcast=True))
    if HAS_TOP_K or SOFTMAX_TOPK:
        kept = _largest(weights, top_k, ADAPTERS, LANES)
        if SOFTMAX_TOPK:
            weights = _normalised(tl.where(kept, weights, float("-inf")), 1.0)
        # a where, not a product: NaN times 0 is NaN
        weights = tl.where(kept, weights, 0.0)
    weights = tl.reshape(weights, [BLOCK_ROWS, COLUMNS])
    out_base = out_ptr + rows.to(tl.int64)[:, None] * (num_sites * ADAPTERS)
    tl.store(out_base + output[None, :], weights, (rows < num_rows)[:, None] & real[None, :])


def head_scalings(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_adapters: int,
    *,
    softmax: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    softmax_topk: bool = False,
) -> Tensor:
    """Return the scalings of a classifier's last layer: one Triton launch on CUDA, torch's linear elsewhere.

    The launch keeps logits in float32; torch's linear rounds them to its dtype. Of equal weights at the edge of
    top-k the launch keeps the lower adapters; torch does not say which it keeps.

    Args:
        hidden: `[row, width]`, what the last layer reads.
        weight: `[site * adapter, width]`, output `l * num_adapters + i` is site l's, adapter i's.
        bias: `[site * adapter]`, or None.
        num_adapters: adapters a site has, n.
        softmax, temperature, top_k, softmax_topk: as for `scalings`.

    Returns:
        float32 `[row, site, adapter]`.

    Raises:
        ValueError: operands or settings that do not fit.
    """
    _check_settings(temperature, top_k)
    _check_head(hidden, weight, bias, num_adapters)
    settings = {"softmax": softmax, "temperature": temperature, "top_k": top_k, "softmax_topk": softmax_topk}
    if _fuses(hidden, weight, num_adapters):
        return _launch(hidden, weight, bias, num_adapters, **settings)
    logits = F.linear(hidden, weight, bias)
    return scalings(logits.reshape(len(hidden), weight.shape[0] // num_adapters, num_adapters), **settings)


def _fuses(hidden: Tensor, weight: Tensor, num_adapters: int) -> bool:
    if num_adapters > MAX_FUSED_ADAPTERS or hidden.dtype not in DTYPES or not runs_triton(hidden):
        return False
    # the launch has no gradient; whoever trains a classifier gets torch's
    return not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))


def _launch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, num_adapters: int, *,
    softmax: bool, temperature: float, top_k: int | None, softmax_topk: bool,
) -> Tensor:  # fmt: skip
    num_rows, width = hidden.shape
    num_sites = weight.shape[0] // num_adapters
    out = torch.empty(num_rows, num_sites, num_adapters, dtype=torch.float32, device=hidden.device)
    if not out.numel():
        return out
    keep = num_adapters if top_k is None else min(top_k, num_adapters)
    low, high = _TEMPERATURES
    # launches take integers: the bits of a float32
    bits = struct.unpack("i", struct.pack("f", min(max(temperature, low), high)))[0]
    blocks, options = _cut(hidden, weight, num_adapters)
    launch(
        "scalings.head", _head_kernel, (div(num_rows, blocks["BLOCK_ROWS"]), div(num_sites, blocks["BLOCK_SITES"])),
        (hidden, weight, hidden if bias is None else bias, out, num_rows, num_sites, width, *hidden.stride(),
         *weight.stride(), bits, keep),
        {"ADAPTERS": num_adapters, "HAS_BIAS": bias is not None, "SOFTMAX": softmax,
         "HAS_TOP_K": keep < num_adapters, "SOFTMAX_TOPK": softmax_topk, **blocks},
        **options,
    )  # fmt: skip
    return out


def _cut(hidden: Tensor, weight: Tensor, num_adapters: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the kernel's tile sizes, and its warps and stages; a row's sums are cut alike among few rows and many."""
    lanes = power_of_2(num_adapters)
    # float32 is multiplied outside the tensor cores, and unaligned elements have an address each: both take registers
    is_lean = hidden.element_size() == 2 and not (hidden.shape[1] | hidden.stride(0) | weight.stride(0)) % 16
    # 16 is the least a tensor core takes; few rows need many programs to read the weights, many rows large tiles
    tile = 16 if len(hidden) <= 64 else 64 if is_lean else 32
    columns = max(lanes, tile)
    blocks = {"LANES": lanes, "BLOCK_ROWS": max(16, min(tile, 4096 // columns)), "BLOCK_SITES": columns // lanes}
    block_k = (128 if lanes <= 64 else 32) if is_lean else (32 if lanes <= 64 else 16)
    return blocks | {"BLOCK_K": block_k}, {"num_warps": 4, "num_stages": 3}


def cost(num_rows: int, width: int, num_sites: int, num_adapters: int, itemsize: int) -> Cost:
    """Return the least work of the head over `num_rows` rows; the scalings are float32."""
    outputs = num_sites * num_adapters
    moved = (outputs * (width + 1) + num_rows * width) * itemsize + num_rows * outputs * 4
    return Cost(2 * num_rows * outputs * width, moved)


def _check_settings(temperature: float, top_k: int | None) -> None:
    if not temperature > 0:
        raise ValueError(f"scalings: temperature must be above 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"scalings: top_k must be at least 1, not {top_k}")


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, num_adapters: int) -> None:
    for name, tensor, dims in (("hidden", hidden, 2), ("weight", weight, 2), ("bias", bias, 1)):
        if tensor is None:
            continue
        if tensor.dim() != dims:
            raise ValueError(f"scalings: {name} must have {dims} dimensions, but its shape is {list(tensor.shape)}")
        if tensor.device != hidden.device or tensor.dtype != hidden.dtype:
            raise ValueError(
                f"scalings: {name} is {tensor.dtype} on {tensor.device}, but hidden is {hidden.dtype} on "
                f"{hidden.device}; move them to one dtype and device"
            )
    if not hidden.dtype.is_floating_point:
        raise ValueError(f"scalings: hidden must have a float dtype, not {hidden.dtype}")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"scalings: weight reads {weight.shape[1]} features, but hidden has {hidden.shape[1]}")
    if num_adapters < 1 or weight.shape[0] % num_adapters:
        raise ValueError(f"scalings: weight has {weight.shape[0]} outputs, which are no whole sites of {num_adapters}")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(f"scalings: bias has {bias.shape[0]} outputs, but weight has {weight.shape[0]}")
