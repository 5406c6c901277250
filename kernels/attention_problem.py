"""Problems of paged_attention: rows of given lengths, whose KV lies in blocks that are scattered over a pool.

As in lora_kernels.problems, a problem knows its result in float64. Slots that no row may read hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_kernels.paged_attention import BLOCK_TOKENS
from lora_kernels.problems import normal

_NO_BLOCK = 10**8  # where a table says nothing: whoever reads there leaves the pool


@dataclass(frozen=True)
class AttentionProblem:
    """Operands of paged_attention.

    x `[row, head, key]` is the query; keys and values `[kv_head, slot, key]`; blocks int32 `[row, block]`; `lengths`
    are positions of each row. `settings` are the op's keyword arguments, `scale` among them.
    """

    op: str
    x: Tensor
    keys: Tensor
    values: Tensor
    blocks: Tensor
    lengths: tuple[int, ...]
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def operand(self) -> Tensor:
        """The operand whose dtype and device are the op's."""
        return self.x

    @property
    def lengths_there(self) -> Tensor:
        """The lengths as int32 on the operands' device."""
        return torch.tensor(self.lengths, dtype=torch.int32).to(self.x.device)

    @property
    def args(self) -> tuple:
        """The op's positional operands."""
        longest = max(self.lengths, default=0)
        return self.x, self.keys, self.values, self.blocks, self.lengths_there, longest

    def rows(self, rows: Sequence[int]) -> AttentionProblem:
        """Return the problem of some of its rows alone."""
        rows = list(rows)
        return replace(self, x=self.x[rows], blocks=self.blocks[rows], lengths=tuple(self.lengths[i] for i in rows))

    def exact(self) -> Tensor:
        """Return the op's result in float64, row by row."""
        out = torch.zeros(*self.x.shape[:2], self.values.shape[2], dtype=torch.float64, device=self.x.device)
        window, softcap = self.settings.get("window"), self.settings.get("softcap")
        for row, length in enumerate(self.lengths):
            if not length:
                continue
            seen = torch.arange(max(0, length - (window or length)), length, device=self.x.device)
            slots = self.blocks[row, seen // BLOCK_TOKENS].long() * BLOCK_TOKENS + seen % BLOCK_TOKENS
            keys, values = self.keys[:, slots].double(), self.values[:, slots].double()
            query = self.x[row].double().reshape(len(keys), -1, self.x.shape[2])
            scores = query @ keys.mT * self.settings["scale"]
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            out[row] = (scores.softmax(-1) @ values).flatten(0, 1)
        return out

    def corrupted(self) -> AttentionProblem | None:
        """Return a copy in which the values of one block that a row reads are doubled; None where no row reads."""
        row = max(range(len(self.lengths)), key=self.lengths.__getitem__, default=None)
        if row is None or not self.lengths[row]:
            return None
        last = int(self.blocks[row, (self.lengths[row] - 1) // BLOCK_TOKENS])
        values = self.values.clone()
        values[:, last * BLOCK_TOKENS : (last + 1) * BLOCK_TOKENS] *= 2
        return replace(self, values=values)


def attention_problem(
    op: str,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    value_dim: int | None = None,
    **settings: object,
) -> AttentionProblem:
    """Return a problem of rows of these lengths; scores have a standard deviation near 2, so that positions differ.

    Args:
        op: "paged_attention".
        lengths: positions of each row's sequence, its own included; may be 0.
        num_heads, num_kv_heads: the second divides the first.
        head_dim: width of queries and keys.
        dtype, device: of query, keys and values.
        seed: of every random number.
        value_dim: width of values; None is `head_dim`.
        **settings: `window` and `softcap` of the op.
    """
    window = settings.get("window")
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    places = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    blocks = torch.full((len(lengths), max([*counts, 1])), _NO_BLOCK, dtype=torch.int32)
    free = torch.ones(max(1, sum(counts)) * BLOCK_TOKENS, dtype=torch.bool)
    first = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        begin = 0 if window is None else max(0, length - window)
        # blocks before the window may be another stream's by now
        kept = begin // BLOCK_TOKENS
        blocks[row, kept:count] = places[first + kept : first + count]
        first += count
        seen = torch.arange(begin, length)
        free[blocks[row, seen // BLOCK_TOKENS].long() * BLOCK_TOKENS + seen % BLOCK_TOKENS] = False
    randn = normal(device, seed)
    query = randn(len(lengths), num_heads, head_dim).to(dtype)
    widths = head_dim, value_dim or head_dim
    keys, values = (randn(num_kv_heads, len(free), width).to(dtype) for width in widths)
    for side in (keys, values):
        side.masked_fill_(free.to(side.device)[:, None], math.nan)
    return AttentionProblem(
        op, query, keys, values, blocks.to(device), tuple(lengths), {"scale": 2 * head_dim**-0.5, **settings}
    )
