"""paged_attention: decoded rows attend to KV that lies in blocks, each row to its own.

    s[t]  = scale * q[head] . k[kv_head, slot(t)]       softcap * tanh(s / softcap) if there is a softcap
    p     = softmax of s over the positions t that the row sees: length - window <= t < length
    out   = sum over t of p[t] v[kv_head, slot(t)]      slot(t) = blocks[t // 16] * 16 + t % 16

A sequence is cut into chunks of a fixed number of positions, a program each; a second launch merges a row's chunks in
their order. Where the cuts lie depends on the row's own length and window alone, so its result is the same, bitwise,
in any company and in any replay. `heads / kv_heads` query heads read one KV head together.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lora_kernels.checks import DTYPES, Cost, check_no_gradient
from lora_kernels.tiles import div, power_of_2
from lora_kernels.triton_support import jit, launch, runs_triton, tl

BLOCK_TOKENS = 16
# 8 KV heads of one row of 1024 tokens are 32 programs; merging moves 8 / width of what a chunk reads, per query head
CHUNK = 256
_GROUP = 16  # query heads of a program: the fewest rows a tensor core takes
_TILE = 8192  # elements of a tile of keys: 16 KiB in half precision, twice in flight


def paged_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, longest: int, *, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return what every row attends to in float32, row by row; the specification of `paged_attention`."""
    out = query.new_zeros(*query.shape[:2], values.shape[2], dtype=torch.float32)
    for row, length in enumerate(lengths.tolist()):
        seen = torch.arange(max(0, length - (window or length)), length, device=query.device)
        slots = blocks[row, seen // BLOCK_TOKENS].long() * BLOCK_TOKENS + seen % BLOCK_TOKENS
        k, v = (side[:, slots].float() for side in (keys, values))
        scores = torch.einsum("hgd,htd->hgt", query[row].float().unflatten(0, (len(k), -1)), k) * scale
        scores = scores if not softcap else torch.tanh(scores / softcap) * softcap
        if length:
            out[row] = torch.einsum("hgt,htd->hgd", scores.softmax(-1), v).flatten(0, 1)
    return out


@jit
def _first_seen(length, window):
    """Return the first position that a row of this length sees; a window of 0 is none."""
    return tl.where(window > 0, tl.maximum(length - window, 0), 0)


@jit
def _attend(
    q, keys_at, values_at, blocks_at, begin, end, keys_slot, values_slot, scale, softcap,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the peak score of the positions begin:end per query head, and powers relative to it: sum, sum with v."""
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    peak = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([GROUP], dtype=tl.float32)
    sums = tl.zeros([GROUP, BLOCK_VALUE], dtype=tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = position < end
        block = tl.load(blocks_at + position // BLOCK_TOKENS, is_seen, 0)
        # int64: a slot times its stride passes 2^31 at 2M slots of 1024
        slot = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
        k = tl.load(keys_at + slot[None, :] * keys_slot + key[:, None], is_seen[None, :] & (key < KEY)[:, None], 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh; an exponential that overflows gives 1
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        powers, fading = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        v_at = values_at + slot[:, None] * values_slot + value[None, :]
        v = tl.load(v_at, is_seen[:, None] & (value < VALUE)[None, :], 0.0)
        sums = tl.dot(powers.to(v.dtype), v, sums * fading[:, None], input_precision="ieee")
        weight = weight * fading + tl.sum(powers, axis=1)
        peak = higher
    return peak, weight, sums


@jit
def _chunk_kernel(
    query_ptr, keys_ptr, values_ptr, blocks_ptr, lengths_ptr, sums_ptr, peaks_ptr,
    num_heads, group, group_tiles, num_chunks, window, scale_bits, softcap_bits,
    query_row, query_head, keys_head, keys_slot, values_head, values_slot, blocks_row,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, for query heads of one KV head: sums and peaks are [row, chunk, head]."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // group_tiles).to(tl.int64)
    member = (tl.program_id(1) % group_tiles) * GROUP + tl.arange(0, GROUP)
    is_head, head = member < group, kv_head * group + member
    length, chunk = tl.load(lengths_ptr + row), tl.program_id(2)
    first = _first_seen(length, window)
    chunk_begin = (first // CHUNK + chunk) * CHUNK
    begin, end = tl.maximum(chunk_begin, first), tl.minimum(chunk_begin + CHUNK, length)
    if (begin >= end) & (not IS_WHOLE):
        return
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    q_at = query_ptr + row * query_row + head[:, None] * query_head + key[None, :]
    q = tl.load(q_at, is_head[:, None] & (key < KEY)[None, :], 0.0)
    peak, weight, sums = _attend(
        q, keys_ptr + kv_head * keys_head, values_ptr + kv_head * values_head, blocks_ptr + row * blocks_row,
        begin, end, keys_slot, values_slot, scale_bits.to(tl.int32).to(tl.float32, bitcast=True),
        softcap_bits.to(tl.int32).to(tl.float32, bitcast=True),
        KEY, VALUE, BLOCK_KEY, BLOCK_VALUE, BLOCK_TOKENS, TILE, GROUP, HAS_SOFTCAP,
    )  # fmt: skip
    place = (row * num_chunks + chunk) * num_heads + head
    if IS_WHOLE:
        # without other chunks the mean is the result
        sums = tl.where(weight[:, None] > 0, sums / weight[:, None], 0.0)
    else:
        tl.store(peaks_ptr + 2 * place, peak, is_head)
        tl.store(peaks_ptr + 2 * place + 1, weight, is_head)
    sums_at = sums_ptr + place[:, None] * VALUE + value[None, :]
    tl.store(sums_at, sums.to(sums_ptr.dtype.element_ty), is_head[:, None] & (value < VALUE)[None, :])


@jit
def _merge_kernel(
    sums_ptr, peaks_ptr, lengths_ptr, out_ptr, num_heads, num_chunks, window,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out[row, head] = the weighted mean of the row's chunks, added in their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    value = tl.arange(0, BLOCK_VALUE)
    length = tl.load(lengths_ptr + row)
    first = _first_seen(length, window)
    chunks = tl.where(length > 0, (length - 1) // CHUNK - first // CHUNK + 1, 0)
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([1], dtype=tl.float32)
    sums = tl.zeros([BLOCK_VALUE], dtype=tl.float32)
    for chunk in range(0, chunks):
        place = (row * num_chunks + chunk) * num_heads + head
        its_peak = tl.load(peaks_ptr + 2 * place)
        higher = tl.maximum(peak, its_peak)
        fading, share = tl.exp(peak - higher), tl.exp(its_peak - higher)
        part = tl.load(sums_ptr + place * VALUE + value, value < VALUE, 0.0)
        sums = sums * fading + part * share
        weight = weight * fading + tl.load(peaks_ptr + 2 * place + 1) * share
        peak = higher
    sums = tl.where(weight > 0, sums / weight, 0.0)
    tl.store(out_ptr + (row * num_heads + head) * VALUE + value, sums.to(out_ptr.dtype.element_ty), value < VALUE)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, longest: int, *, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one query row per sequence; Triton on CUDA, torch elsewhere.

    Args:
        query: `[row, head, key]`; float32, float16 or bfloat16, as are keys and values.
        keys: `[kv_head, slot, key]`; block b holds the slots from `16 b`.
        values: `[kv_head, slot, value]`.
        blocks: int32 `[row, block]`, each sequence's blocks in token order. Those before its window, and past its
            length, may be anything.
        lengths: int32 `[row]`, positions of each sequence, the row's own included; 0 gives a row of zeros.
        longest: at least the largest of `lengths`, known to the host: the launch depends on it, the result does not.
        scale: of the scores.
        window: a row sees at most this many positions; None sees all.
        softcap: bounds the scores.

    Returns:
        `[row, head, value]` in the query's dtype.

    Raises:
        ValueError: operands or settings that do not fit, or a gradient that would be lost.
    """
    _check(query, keys, values, blocks, lengths, longest, window, softcap)
    if not runs_triton(query):
        return _gathered(query, keys, values, blocks, lengths, longest, scale, window, softcap)
    check_no_gradient("paged_attention", query, keys, values)
    out = query.new_empty(*query.shape[:2], values.shape[2])
    if out.numel():
        _launch(out, query, keys, values, blocks, lengths, longest, scale, window, softcap)
    return out


def _launch(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, longest: int,
    scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    num_rows, num_heads, value = out.shape
    kv_heads, key, group = keys.shape[0], keys.shape[2], num_heads // keys.shape[0]
    chunks = max(1, div(longest, CHUNK))
    if window is not None:
        # a window that begins inside a chunk reaches into one more
        chunks = min(chunks, div(window - 1, CHUNK) + 1)
    is_whole = chunks == 1
    shape = (num_rows, chunks, num_heads)
    sums = out if is_whole else torch.empty(*shape, value, dtype=torch.float32, device=out.device)
    peaks = out if is_whole else torch.empty(*shape, 2, dtype=torch.float32, device=out.device)
    widths = {"VALUE": value, "BLOCK_VALUE": max(16, power_of_2(value))}
    block_key = max(16, power_of_2(key))
    widest = max(block_key, widths["BLOCK_VALUE"])
    is_half = query.element_size() == 2
    # float32 is multiplied outside the tensor cores, in registers; larger tiles spill, and so do other numbers of warps
    tile = min(64, _TILE // widest) if is_half else 16
    tiles = div(group, _GROUP)
    launch(
        "paged_attention.chunk", _chunk_kernel, (num_rows, kv_heads * tiles, chunks),
        (query, keys, values, blocks, lengths, sums, peaks, num_heads, group, tiles, chunks, window or 0,
         _bits(scale), _bits(softcap or 1.0), query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
         values.stride(0), values.stride(1), blocks.stride(0)),
        {"KEY": key, **widths, "BLOCK_KEY": block_key, "BLOCK_TOKENS": BLOCK_TOKENS, "CHUNK": CHUNK, "TILE": tile,
         "GROUP": _GROUP, "HAS_SOFTCAP": bool(softcap), "IS_WHOLE": is_whole},
        num_warps=8 if widest == 128 else 4, num_stages=2,
    )  # fmt: skip
    if not is_whole:
        launch(
            "paged_attention.merge", _merge_kernel, (num_rows, num_heads),
            (sums, peaks, lengths, out, num_heads, chunks, window or 0), {**widths, "CHUNK": CHUNK},
            num_warps=1 if value <= 64 else 4, num_stages=2,
        )  # fmt: skip


def _bits(number: float) -> int:
    # launches take integers: the bits of a float32
    return struct.unpack("i", struct.pack("f", number))[0]


def _gathered(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, longest: int, scale: float,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Return the same by torch, on a padded copy of what each row sees."""
    position = torch.arange(min(longest, blocks.shape[1] * BLOCK_TOKENS), device=query.device)
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    slots = blocks[:, position // BLOCK_TOKENS].long() * BLOCK_TOKENS + position % BLOCK_TOKENS
    # what is not seen may be NaN, which no weight of 0 takes away
    k, v = (side[:, torch.where(seen, slots, 0)].float().where(seen[..., None], 0.0) for side in (keys, values))
    grouped = query.float().unflatten(1, (len(keys), query.shape[1] // len(keys)))
    scores = torch.einsum("rhgd,hrtd->rhgt", grouped, k) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    weights = weights.where(seen[:, None, None], 0.0)
    return torch.einsum("rhgt,hrtd->rhgd", weights, v).flatten(1, 2).to(query.dtype)


def cost(
    lengths: list[int], num_heads: int, kv_heads: int, key: int, value: int, itemsize: int, window: int | None = None
) -> Cost:
    """Return the least work of rows of these lengths: what each sees is read once."""
    seen = sum(length if window is None else min(length, window) for length in lengths)
    moved = seen * kv_heads * (key + value) + len(lengths) * num_heads * (key + value)
    return Cost(2 * seen * num_heads * (key + value), moved * itemsize)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, longest: int, window: int | None,
    softcap: float | None,
) -> None:  # fmt: skip
    for name, tensor, dims in (("query", query, 3), ("keys", keys, 3), ("values", values, 3), ("blocks", blocks, 2),
                               ("lengths", lengths, 1)):  # fmt: skip
        if tensor.dim() != dims:
            raise ValueError(f"paged_attention: {name} must have {dims} dimensions, not shape {list(tensor.shape)}")
        if tensor.device != query.device:
            raise ValueError(f"paged_attention: {name} is on {tensor.device}, but query is on {query.device}")
        wanted = query.dtype if dims == 3 else torch.int32
        if tensor.dtype != wanted or (dims == 3 and wanted not in DTYPES):
            kinds = "int32" if dims < 3 else "float32, float16 or bfloat16, and of query's dtype"
            raise ValueError(f"paged_attention: {name} must be {kinds}, not {tensor.dtype}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"paged_attention: the last axis of {name} must be contiguous")
    if keys.shape[:2] != values.shape[:2]:
        raise ValueError(f"paged_attention: keys are {list(keys.shape)}, but values {list(values.shape)}")
    if query.shape[2] != keys.shape[2] or not len(keys) or query.shape[1] % len(keys):
        raise ValueError(
            f"paged_attention: query has {query.shape[1]} heads of {query.shape[2]}, which do not share "
            f"{len(keys)} KV heads of {keys.shape[2]}"
        )
    if keys.shape[1] % BLOCK_TOKENS:
        raise ValueError(
            f"paged_attention: keys have {keys.shape[1]} slots, which are no whole blocks of {BLOCK_TOKENS}"
        )
    if len(blocks) != len(query) or len(lengths) != len(query):
        raise ValueError(
            f"paged_attention: query has {len(query)} rows, but blocks has {len(blocks)} and lengths {len(lengths)}"
        )
    if not 0 <= longest <= blocks.shape[1] * BLOCK_TOKENS:
        raise ValueError(f"paged_attention: longest is {longest}, but {blocks.shape[1]} blocks a row hold "
                         f"{blocks.shape[1] * BLOCK_TOKENS} positions")  # fmt: skip
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, or None, not {window}")
    if softcap is not None and softcap < 0:
        raise ValueError(f"paged_attention: softcap must be above 0, or None, not {softcap}")
