"""Problems for paged_attention: sequences of uneven lengths in scattered blocks, and their result in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_kernels.paged_attention import BLOCK_TOKENS

_NO_BLOCK = 10**8  # where a table says nothing; whoever reads there reads far outside the pool


@dataclass(frozen=True)
class AttentionProblem:
    """Operands of paged_attention, named as there; slots that no row may see are NaN.

    `settings` are its keyword arguments.
    """

    op: str
    query: Tensor
    keys: Tensor
    values: Tensor
    blocks: Tensor
    lengths: Tensor
    longest: int
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def operand(self) -> Tensor:
        """The operand whose dtype and device are the op's."""
        return self.query

    @property
    def args(self) -> tuple:
        """The positional operands."""
        return self.query, self.keys, self.values, self.blocks, self.lengths, self.longest

    def rows(self, rows: list[int]) -> AttentionProblem:
        """Return the problem of some of its rows alone."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        return replace(self, query=self.query[rows], blocks=self.blocks[rows], lengths=lengths, longest=longest)

    def corrupted(self) -> AttentionProblem | None:
        """Return a copy in which one KV head's values are a tenth too large; None where no row sees any."""
        if not self.longest:
            return None
        values = self.values.clone()
        values[0] *= 1.1
        return replace(self, values=values)

    def exact(self) -> Tensor:
        """Return the result in float64, one row and head at a time."""
        num_rows, num_heads, _ = self.query.shape
        window, softcap = self.settings.get("window"), self.settings.get("softcap")
        out = torch.zeros(num_rows, num_heads, self.values.shape[2], dtype=torch.float64, device=self.query.device)
        for row, length in enumerate(self.lengths.tolist()):
            first = 0 if window is None else max(0, length - window)
            slots = [int(self.blocks[row, t // BLOCK_TOKENS]) * BLOCK_TOKENS + t % BLOCK_TOKENS
                     for t in range(first, length)]  # fmt: skip
            for head in range(num_heads if slots else 0):
                mine = head // (num_heads // len(self.keys))
                scores = self.keys[mine, slots].double() @ self.query[row, head].double() * self.settings["scale"]
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[row, head] = torch.softmax(scores, 0) @ self.values[mine, slots].double()
        return out


def attention_problem(
    op: str,
    lengths: list[int],
    num_heads: int,
    kv_heads: int,
    key: int,
    value: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    window: int | None = None,
    softcap: float | None = None,
    longest: int | None = None,
) -> AttentionProblem:
    """Return a problem; scores have a standard deviation near 2, so that a few positions matter and all count.

    Args:
        op: "paged_attention".
        lengths: positions of each row's sequence, its own included; may be 0.
        num_heads, kv_heads: the second divides the first.
        key, value: widths of a head's keys and values.
        dtype, device: of query, keys and values; on `meta` nothing has values.
        seed: of every random number.
        window, softcap: see `paged_attention`.
        longest: what the host knows of `lengths`; None is their largest.
    """
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    num_blocks = sum(counts) + 3
    is_meta = torch.device(device).type == "meta"
    generator = None if is_meta else torch.Generator(device).manual_seed(seed)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max([*counts, 1])), _NO_BLOCK, dtype=torch.int32)
    unseen = torch.ones(num_blocks * BLOCK_TOKENS, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for place in range(count):
            first, block = place * BLOCK_TOKENS, order.pop()
            begin = 0 if window is None else max(0, length - window)
            if first + BLOCK_TOKENS > begin:
                table[row, place] = block
            low, high = max(begin - first, 0), min(length - first, BLOCK_TOKENS)
            unseen[block * BLOCK_TOKENS + min(low, high) : block * BLOCK_TOKENS + high] = False

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    sides = drawn(kv_heads, len(unseen), key), drawn(kv_heads, len(unseen), value)
    keys, values = (side.masked_fill_(unseen.to(device)[:, None], math.nan).to(dtype) for side in sides)
    query = drawn(len(lengths), num_heads, key).to(dtype)
    settings = {"scale": 2 * key**-0.5, "window": window, "softcap": softcap}
    known = max([*lengths, 0]) if longest is None else longest
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    return AttentionProblem(op, query, keys, values, table.to(device), sizes, known, settings)
