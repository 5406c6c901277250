"""BlockPool: the memory that all KV streams of an engine share, in blocks of `BLOCK_TOKENS` tokens.

Contract: a block with one reference and no key belongs to one stream, which may write it; any other block is read
only. A block without references is free, or, if it was published under a key, kept until its memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lora_kernels.paged_attention import BLOCK_TOKENS

_EVICTED_TOGETHER = 16  # at most: one at a time they leave holes, all that a stream might ever need empty the cache
# states of a block in the map: claimed ones are free too, but lie where some stream is going to grow
_FREE, _CLAIMED, _USED = 0, 1, 2


@dataclass(frozen=True)
class KVShape:
    """What one token's KV takes.

    Attributes:
        layers: layer index -> (KV heads, key width, value width).
        hidden_size: width of the hidden row kept beside it.
        dtype: of all of them.
    """

    layers: Mapping[int, tuple[int, int, int]]
    hidden_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, its hidden row included."""
        numbers = sum(heads * (key + value) for heads, key, value in self.layers.values())
        return (numbers + self.hidden_size) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return BLOCK_TOKENS * self.token_bytes


@dataclass
class BlockCounts:
    """Whole blocks of looked-up sequences that were cached, those that were not, and blocks dropped to make room."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class BlockPool:
    """Blocks, their reference counts, and the cache of those published.

    Args:
        shape: what a token takes.
        num_blocks: how many blocks there are, for good.
        device: where they lie.

    Attributes:
        keys, values: layer -> `[kv_head, slot, width]`; block b holds the slots from `b * BLOCK_TOKENS`.
        hidden: `[slot, hidden]`, the hidden state after the final norm of every token written.
        counts: of the cache, in blocks.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device | str):
        assert num_blocks > 0, "a pool needs a block"
        slots = num_blocks * BLOCK_TOKENS
        options = {"dtype": shape.dtype, "device": device}
        self.shape, self.num_blocks, self.device = shape, num_blocks, torch.device(device)
        # head-major: one head's keys lie side by side, which attention on a CPU reads nearly twice as fast;
        # never filled: pages that are not touched cost nothing there
        layers = shape.layers.items()
        self.keys = {layer: torch.empty(heads, slots, key, **options) for layer, (heads, key, _) in layers}
        self.values = {layer: torch.empty(heads, slots, value, **options) for layer, (heads, _, value) in layers}
        self.hidden = torch.empty(slots, shape.hidden_size, **options)
        self.counts = BlockCounts()
        self._references = [0] * num_blocks
        self._map = bytearray(num_blocks)
        self._claims: dict[int, int] = {}  # first claimed block -> end; the block before it is its stream's last
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # published, least recently used first
        self._num_unused = num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.shape.block_bytes

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: unused ones and cached ones without references."""
        return self._num_unused + len(self._unreferenced)

    @property
    def num_cached(self) -> int:
        """Cached blocks without references."""
        return len(self._unreferenced)

    @property
    def num_referenced(self) -> int:
        """Blocks that some stream holds."""
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        """Return how many streams hold a block."""
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Whether the block has one owner and is in nobody's cache."""
        return self._references[block] == 1 and block not in self._key_of

    def take(self, after: int | None = None, hint: int = 1) -> int | None:
        """Return one more block with one reference; None when every block is referenced.

        Streams stay contiguous, as far as there is room: then attention reads them without a copy.

        Args:
            after: the stream's last block; the next one is preferred.
            hint: blocks the stream will need, this one included. A stream that cannot go on where it is starts
                in a gap that holds them, and other streams keep out of the rest as long as they can. When no block is
                unused, some of that many cached ones are dropped together, least recently used first: streams that
                were contiguous leave contiguous gaps.
        """
        if not self.num_free:
            return None
        hint = max(hint, 1)
        if not self._num_unused:
            for _ in range(min(hint, _EVICTED_TOGETHER, len(self._unreferenced))):
                self._forget(next(iter(self._unreferenced)))
                self.counts.evictions += 1
        block = self._place(after, hint)
        self._map[block] = _USED
        self._num_unused -= 1
        self._references[block] = 1
        self._claim(block, hint)
        return block

    def hold(self, block: int) -> None:
        """Add a reference to a block that has one, or that is cached."""
        assert self._map[block] == _USED, f"block {block} is free, and was held"
        self._unreferenced.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give a reference back; without any, the block is free, or kept if it is published."""
        assert self._references[block] > 0, f"block {block} was released more often than held"
        self._references[block] -= 1
        if self._references[block]:
            return
        self._unclaim(block + 1)
        if block in self._key_of:
            self._unreferenced[block] = None
        else:
            self._map[block] = _FREE
            self._num_unused += 1

    def find(self, key: bytes) -> int | None:
        """Return the block published under a key, held once more, or None."""
        block = self._block_of.get(key)
        if block is not None:
            self.hold(block)
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full block; where the key has a block already, this one stays private."""
        assert self.is_writable(block), f"block {block} is not its stream's own, and was published"
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def clear(self) -> None:
        """Forget every cached block that nobody holds."""
        while self._unreferenced:
            self._forget(next(iter(self._unreferenced)))

    def _forget(self, block: int) -> None:
        del self._unreferenced[block], self._block_of[self._key_of.pop(block)]
        self._map[block] = _FREE
        self._num_unused += 1

    def _place(self, after: int | None, hint: int) -> int:
        follows = None if after is None else after + 1
        if follows in self._claims or (follows is not None and self._map[follows : follows + 1] == bytes([_FREE])):
            return follows
        size = hint
        while size:
            start = self._map.find(bytes([_FREE]) * size)
            if start >= 0:
                return start
            size //= 2
        # every unused block is claimed: the last one is the one its stream reaches last, or another stream's next
        block = self._map.rfind(bytes([_CLAIMED]))
        start = next(first for first, end in self._claims.items() if end == block + 1)
        self._shorten(start, block)
        return block

    def _claim(self, block: int, hint: int) -> None:
        end = self._claims.pop(block, block + 1)
        last = min(block + hint, self.num_blocks)
        while end < last and self._map[end] == _FREE:
            end += 1
        self._map[block + 1 : end] = bytes([_CLAIMED]) * (end - block - 1)
        if end > block + 1:
            self._claims[block + 1] = end

    def _unclaim(self, start: int) -> None:
        if start in self._claims:
            self._shorten(start, start)

    def _shorten(self, start: int, end: int) -> None:
        old = self._claims.pop(start)
        self._map[end:old] = bytes([_FREE]) * (old - end)
        if end > start:
            self._claims[start] = end
