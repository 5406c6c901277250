"""The pool of KV blocks, against a model of it that any reader can check: `pytest tests/test_blocks.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workbench.engine.blocks import BLOCK_TOKENS, BlockPool, KVShape

SHAPE = KVShape({0: (1, 2, 2), 1: (3, 4, 5)}, hidden_size=6, dtype=torch.float32)


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(SHAPE, num_blocks, "cpu")


class PoolMachine(RuleBasedStateMachine):
    """References are a list with repeats; the cache is a list, least recently used first."""

    def __init__(self):
        super().__init__()
        self.size = 7
        self.pool = pool_of(self.size)
        self.held: list[int] = []
        self.cached: list[int] = []
        self.key_of: dict[int, bytes] = {}
        self.evictions = 0

    @rule(data=st.data(), hint=st.integers(0, 9))
    def take(self, data, hint):
        after = data.draw(st.none() | st.sampled_from(sorted({*self.held}))) if self.held else None
        unused = set(range(self.size)) - set(self.held) - set(self.cached)
        # kept for other streams: a claim that begins right after a stream's last block is that stream's own
        reserved = {b for first, end in self.pool._claims.items() for b in range(first, end)}
        reserved -= {first for first in self.pool._claims if after is not None and first == after + 1}
        block = self.pool.take(after, hint)
        if len(set(self.held)) == self.size:
            assert block is None
            return
        if not unused:
            for old in self.cached[: max(hint, 1)]:
                self.cached.remove(old)
                del self.key_of[old]
                unused.add(old)
                self.evictions += 1
        assert block in unused, "a block that was in use was given away"
        if after is not None and after + 1 in unused - reserved:
            assert block == after + 1, "there was room to go on where the stream ends"
        self.held.append(block)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def hold(self, data):
        block = data.draw(st.sampled_from(self.cached or sorted({*self.held})))
        self.pool.hold(block)
        self._held_again(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self._release(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: any(self.held.count(b) == 1 and b not in self.key_of for b in self.held))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]), is_released=st.booleans())
    def publish(self, data, key, is_released):
        own = [b for b in self.held if self.held.count(b) == 1 and b not in self.key_of]
        block = data.draw(st.sampled_from(own))
        self.pool.publish(block, key)
        if key not in self.key_of.values():
            self.key_of[block] = key
        if is_released:
            self._release(block)

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def find(self, key):
        block = self.pool.find(key)
        assert block == next((b for b, k in self.key_of.items() if k == key), None)
        if block is not None:
            self._held_again(block)

    @rule()
    def clear(self):
        self.pool.clear()
        for block in self.cached:
            del self.key_of[block]
        self.cached = []

    @invariant()
    def counts_agree(self):
        assert self.pool.num_referenced == len(set(self.held))
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == self.size - len(set(self.held))
        assert self.pool.counts.evictions == self.evictions
        for block in range(self.size):
            assert self.pool.references(block) == self.held.count(block)
            assert self.pool.is_writable(block) == (self.held.count(block) == 1 and block not in self.key_of)

    @invariant()
    def claims_lie_in_unused_memory_behind_a_held_block(self):
        for first, end in self.pool._claims.items():
            assert first < end and first - 1 in self.held
            assert not {*range(first, end)} & {*self.held, *self.cached}

    def teardown(self):
        for block in self.held:
            self.pool.release(block)
        self.pool.clear()
        assert self.pool.num_free == self.size and not self.pool.num_cached and not self.pool._claims
        assert not any(self.pool._map), "an unused block is not marked so"

    def _release(self, block: int):
        self.pool.release(block)
        self.held.remove(block)
        if block not in self.held and block in self.key_of:
            self.cached.append(block)

    def _held_again(self, block: int):
        if block in self.cached:
            self.cached.remove(block)
        self.held.append(block)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def grow(pool: BlockPool, streams: list[list[int]], hint: int) -> None:
    """Add one block to each stream."""
    for blocks in streams:
        blocks.append(pool.take(blocks[-1] if blocks else None, hint - len(blocks)))


def is_contiguous(blocks: list[int]) -> bool:
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def test_streams_that_grow_in_turn_stay_contiguous():
    streams = [[], [], [], []]
    pool = pool_of(32)
    for _ in range(8):
        grow(pool, streams, hint=8)
    assert all(is_contiguous(blocks) for blocks in streams)
    assert pool.num_free == 0 and pool.take() is None


def test_without_hints_streams_that_grow_in_turn_interleave():
    """So the property above is due to the hints."""
    streams = [[], []]
    pool = pool_of(32)
    for _ in range(4):
        grow(pool, streams, hint=0)
    assert not is_contiguous(streams[1])


def test_room_claimed_by_one_stream_is_given_to_another_before_anything_is_refused():
    pool = pool_of(8)
    first = [pool.take(None, 8)]
    others = [pool.take() for _ in range(7)]
    assert sorted(first + others) == list(range(8))


def test_a_stream_starts_in_a_gap_that_holds_it():
    pool = pool_of(12)
    blocks = [pool.take() for _ in range(12)]
    for block in (*blocks[1:3], *blocks[5:9]):
        pool.release(block)
    stream = []
    for _ in range(4):
        grow(pool, [stream], hint=4)
    assert stream == [5, 6, 7, 8]
    assert pool.take(None, 9) == 1, "no gap holds nine, and the next best is taken"


def test_a_full_cache_gives_contiguous_room_to_a_new_stream():
    pool = pool_of(12)
    for start in range(3):
        blocks = []
        for i in range(4):
            blocks.append(pool.take(blocks[-1] if blocks else None, 4 - i))
            pool.publish(blocks[-1], bytes([start, i]))
        for block in reversed(blocks):
            pool.release(block)
    assert pool.num_cached == 12
    stream = []
    for _ in range(4):
        grow(pool, [stream], hint=4)
    assert is_contiguous(stream)
    assert pool.counts.evictions == 4
    assert pool.find(bytes([1, 0])) is not None, "something younger than the oldest four was dropped"
    assert pool.find(bytes([0, 0])) is None


def test_a_stream_that_might_grow_long_does_not_empty_the_cache():
    pool = pool_of(100)
    for number in range(100):
        block = pool.take()
        pool.publish(block, bytes([number]))
        pool.release(block)
    pool.take(None, hint=1000)
    assert pool.counts.evictions < 20 and pool.num_cached > 80


def test_a_pool_has_the_bytes_it_says():
    pool = pool_of(3)
    tensors = [*pool.keys.values(), *pool.values.values(), pool.hidden]
    assert pool.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert SHAPE.token_bytes == (1 * 4 + 3 * 9 + 6) * 4 and SHAPE.block_bytes == BLOCK_TOKENS * SHAPE.token_bytes


@pytest.mark.parametrize("misuse", ["release twice", "hold a free one", "publish a shared one", "publish twice"])
def test_misuse_is_an_assertion(misuse):
    pool = pool_of(2)
    block = pool.take()
    if misuse == "release twice":
        pool.release(block)
    elif misuse == "publish a shared one":
        pool.hold(block)
    elif misuse == "publish twice":
        pool.publish(block, b"a")
    again = {"release twice": pool.release, "hold a free one": pool.hold}.get(misuse, lambda b: pool.publish(b, b"b"))
    with pytest.raises(AssertionError):
        again(1 - block if misuse == "hold a free one" else block)
