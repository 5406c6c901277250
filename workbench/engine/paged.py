"""PagedStream: the KV sequence of one kind of row of one request, in blocks of a pool.

Contract: rows written past `length` do not exist until `commit` grows `length` over them. A forward writes, the commit
decides; so a step that fails, and a draft that is rejected, leave the stream as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from workbench.engine.blocks import BLOCK_TOKENS, BlockPool

_KEY_BYTES = 16
_DROPPED = -1


class PagedStream:
    """Blocks of one sequence, in token order.

    Args:
        pool: where the blocks lie.
        producer: what makes the KV: the base, an adapter's content, a mixture's content and settings. Streams share
            blocks if both this and their tokens are equal; None: with nobody.

    Attributes:
        length: tokens whose KV is valid; changed by `lookup`, `commit` and `free` alone.
    """

    def __init__(self, pool: BlockPool, producer: bytes | None):
        self.pool, self.producer = pool, producer
        self.length = 0
        self._reset()

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        return len(self._table) - self._num_dropped

    @property
    def blocks(self) -> tuple[int, ...]:
        """Its blocks in token order, -1 where one was dropped."""
        return tuple(self._table)

    def lookup(self, tokens: Sequence[int], limit: int) -> int:
        """Attach the longest chain of cached blocks of `tokens[:limit]` and return the new length.

        Whole blocks only; the stream must be empty.
        """
        assert not self._table, "a stream that holds blocks was looked up"
        if self.producer is None:
            return 0
        wanted = min(limit, len(tokens)) // BLOCK_TOKENS
        for index in range(wanted):
            key = self._next_key(tokens, index * BLOCK_TOKENS)
            block = self.pool.find(key)
            if block is None:
                break
            self._table.append(block)
            self._keys.append(key)
        self.pool.counts.hits += len(self._table)
        self.pool.counts.misses += wanted - len(self._table)
        self.length = len(self._table) * BLOCK_TOKENS
        return self.length

    def missing(self, stop: int) -> int:
        """Return how many blocks `reserve(stop)` would take."""
        return max(0, _blocks(stop) - len(self._table))

    def reserve(self, stop: int, hint: int = 0) -> bool:
        """Hold blocks for every position below `stop`; False, and nothing changed, when the pool has too few.

        Args:
            stop: position after the last one needed now.
            hint: position after the last one the stream may ever need; it will lie in one piece if it can.
        """
        need = self.missing(stop)
        if need > self.pool.num_free:
            return False
        wanted = max(_blocks(hint), _blocks(stop))
        for _ in range(need):
            after = self._table[-1] if self._table else None
            block = self.pool.take(None if after == _DROPPED else after, wanted - len(self._table))
            assert block is not None, "the pool has fewer blocks than it said"
            self._table.append(block)
        return True

    def rows(self, first: int, stop: int) -> list[int]:
        """Return the pool's slots of the positions `first:stop`."""
        return [slot for start, end in self.extents(first, stop) for slot in range(start, end)]

    def extents(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the positions `first:stop` as ranges of the pool's slots, in order; adjacent ones are one."""
        if first >= stop:
            return []
        assert first >= self._num_dropped * BLOCK_TOKENS, f"position {first} was dropped, and is read"
        assert stop <= len(self._table) * BLOCK_TOKENS, f"position {stop - 1} is not reserved, and is used"
        found: list[tuple[int, int]] = []
        at = first
        for block in self._table[first // BLOCK_TOKENS : _blocks(stop)]:
            start = block * BLOCK_TOKENS + at % BLOCK_TOKENS
            end = start + min(BLOCK_TOKENS - at % BLOCK_TOKENS, stop - at)
            at += end - start
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return found

    def require_writable(self, first: int, stop: int) -> None:
        """Assert that no block of the positions `first:stop` is shared or published."""
        assert first >= self.num_published * BLOCK_TOKENS, f"position {first} is in a published block, and is written"
        for block in self._table[first // BLOCK_TOKENS : _blocks(stop)]:
            assert self.pool.is_writable(block), f"block {block} is shared, and is written"

    def commit(self, length: int) -> None:
        """Make `length` tokens valid: more, if they were written, or fewer.

        Fewer may reach into blocks that are published or came from the cache: those are let go, so `length` must
        then be a whole number of blocks.
        """
        assert length <= len(self._table) * BLOCK_TOKENS, f"{length} tokens were committed, but not reserved"
        assert length >= self._num_dropped * BLOCK_TOKENS, f"length {length} ends among dropped blocks"
        if length < self.num_published * BLOCK_TOKENS:
            assert length % BLOCK_TOKENS == 0, f"length {length} ends inside a published block"
            self._cut(length // BLOCK_TOKENS)
        self.length = length

    def publish(self, tokens: Sequence[int], until: int) -> None:
        """Let other streams find every whole block below both `length` and `until`.

        Args:
            tokens: the sequence's, at least that many.
            until: position of the first token whose KV is not what `producer` says.
        """
        if self.producer is None:
            return
        stop = min(self.length, until)
        assert stop <= len(tokens), f"{stop} tokens are to be published, but only {len(tokens)} are given"
        for start in range(self.num_published * BLOCK_TOKENS, stop // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            key = self._next_key(tokens, start)
            block = self._table[start // BLOCK_TOKENS]
            if block != _DROPPED:
                self.pool.publish(block, key)
            self._keys.append(key)

    @property
    def num_published(self) -> int:
        """Blocks, from the first, that came from the cache or were offered to it; they are never written again."""
        return len(self._keys)

    def drop_before(self, position: int) -> None:
        """Release every block that lies below `position` as a whole: no later row sees it. `length` stays."""
        stop = min(position, self.length) // BLOCK_TOKENS
        for index in range(self._num_dropped, stop):
            self.pool.release(self._table[index])
            self._table[index] = _DROPPED
        self._num_dropped = max(self._num_dropped, stop)

    def free(self) -> None:
        """Release every block; `length` is 0."""
        self._cut(self._num_dropped)
        self._reset()
        self.length = 0

    def _reset(self) -> None:
        self._table: list[int] = []
        self._keys: list[bytes] = []
        self._num_dropped = 0

    def _cut(self, num_blocks: int) -> None:
        # the last block first: it is then the first that the cache drops, and the rest of the chain can still be found
        while len(self._table) > num_blocks:
            self.pool.release(self._table.pop())
        del self._keys[num_blocks:]

    def _next_key(self, tokens: Sequence[int], start: int) -> bytes:
        # each part but the first has a fixed size, so no two sequences of parts read alike
        previous = self._keys[-1] if self._keys else _digest(self.producer)
        return _digest(previous + array("q", tokens[start : start + BLOCK_TOKENS]).tobytes())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_KEY_BYTES).digest()


def _blocks(stop: int) -> int:
    return -(-stop // BLOCK_TOKENS)
