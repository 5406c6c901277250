"""KV streams in blocks, checked by content: `pytest tests/test_kv.py`.

What a forward would write is stood in for by a number that says who made it from which tokens; so a stream that reads
another's rows, or rows somebody wrote over, is seen.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.engine.blocks import BLOCK_TOKENS, BlockPool, KVShape
from workbench.engine.paged import PagedStream

SHAPE = KVShape({0: (1, 1, 1)}, hidden_size=1, dtype=torch.float64)


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(SHAPE, num_blocks, "cpu")


def mark(*made_of) -> float:
    """Return a number a float64 holds exactly."""
    return float(hash(made_of) % 2**52)


class Sequence:
    """A stream and what it should contain."""

    number = 0

    def __init__(self, pool: BlockPool, producer: bytes | None, tokens: tuple[int, ...]):
        Sequence.number += 1
        self.id, self.stream, self.tokens = Sequence.number, PagedStream(pool, producer), tokens
        self.pure = len(tokens)  # from here on its KV is not what its producer says

    def content(self, position: int) -> float:
        producer = self.stream.producer
        own = self.id if producer is None or position >= self.pure else None
        return mark(producer, self.tokens[: position + 1], own)

    def write(self, first: int, stop: int, right: bool = True) -> None:
        """Do what a forward does."""
        self.stream.require_writable(first, stop)
        marks = [self.content(p) if right else float("nan") for p in range(first, stop)]
        self.stream.pool.hidden[self.stream.rows(first, stop), 0] = torch.tensor(marks, dtype=torch.float64)


class StreamMachine(RuleBasedStateMachine):
    """Several streams on a pool too small for them."""

    @initialize(num_blocks=st.sampled_from([6, 12, 60]))
    def start(self, num_blocks):
        self.pool = pool_of(num_blocks)
        self.live: list[Sequence] = []
        self.published: set = set()
        self.is_cleared = False

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        producer=st.sampled_from([None, b"base", b"law"]),
        parts=st.lists(st.sampled_from([0, 1]), min_size=0, max_size=4),
        tail=st.integers(0, 15), limit=st.integers(0, 80),
    )  # fmt: skip
    def open(self, producer, parts, tail, limit):
        tokens = tuple(part for part in parts for _ in range(BLOCK_TOKENS)) + tuple(range(5, 5 + tail)) + (3,) * 40
        new = Sequence(self.pool, producer, tokens)
        expected = 0
        while expected + BLOCK_TOKENS <= limit and (producer, tokens[: expected + BLOCK_TOKENS]) in self.published:
            expected += BLOCK_TOKENS
        length = new.stream.lookup(tokens, limit)
        assert length == new.stream.length <= expected and length % BLOCK_TOKENS == 0
        if not self.pool.counts.evictions and not self.is_cleared:
            assert length == expected
        self.live.append(new)

    def pick(self, data) -> Sequence:
        return data.draw(st.sampled_from(self.live))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 40), hint=st.sampled_from([0, 100]), fate=st.sampled_from("ccccfsd"))
    def step(self, data, count, hint, fate):
        """Reserve and write; then commit all, or fail, or lose the draft, or never get to write."""
        one = self.pick(data)
        first = one.stream.length
        stop = min(first + count, len(one.tokens))
        before = (one.stream.blocks, self.pool.num_free)
        missing = one.stream.missing(stop)
        assert missing == max(0, -(-stop // BLOCK_TOKENS) - len(one.stream.blocks))
        if not one.stream.reserve(stop, hint):
            assert missing > self.pool.num_free and before == (one.stream.blocks, self.pool.num_free)
            return
        if stop > first and fate != "s":
            one.write(first, stop, right=fate != "f")
            if fate == "c":
                one.stream.commit(stop)
            elif fate == "d":
                one.write(stop - 1, stop, right=False)
                one.stream.commit(stop - 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data):
        one = self.pick(data)
        one.stream.publish(one.tokens, one.pure)
        if one.stream.producer is not None:
            for block in range(min(one.stream.length, one.pure) // BLOCK_TOKENS):
                self.published.add((one.stream.producer, one.tokens[: (block + 1) * BLOCK_TOKENS]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def taint(self, data):
        """From here on the KV depends on more than tokens and producer."""
        one = self.pick(data)
        one.pure = min(one.pure, one.stream.length)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.integers(0, 30))
    def go_back(self, data, back):
        one = self.pick(data)
        dropped = one.stream.blocks.count(-1) * BLOCK_TOKENS
        length = max(one.stream.length - back, dropped)
        if length < one.stream.num_published * BLOCK_TOKENS:
            length = length // BLOCK_TOKENS * BLOCK_TOKENS
        if length >= dropped:
            one.stream.commit(length)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), position=st.integers(0, 90))
    def drop(self, data, position):
        one = self.pick(data)
        # as the engine does: what was to be published is published before it is dropped
        self.publish(data)
        one.stream.drop_before(position)
        assert one.stream.blocks.count(-1) >= min(position, one.stream.length) // BLOCK_TOKENS

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data):
        one = self.pick(data)
        one.stream.free()
        assert one.stream.length == one.stream.num_blocks == 0 and one.stream.blocks == ()
        self.live.remove(one)

    @rule()
    def clear(self):
        self.pool.clear()
        self.is_cleared = True

    @invariant()
    def every_stream_reads_what_it_wrote(self):
        for one in getattr(self, "live", ()):
            first = one.stream.blocks.count(-1) * BLOCK_TOKENS
            rows = one.stream.rows(first, one.stream.length)
            assert self.pool.hidden[rows, 0].tolist() == [one.content(p) for p in range(first, one.stream.length)]

    @invariant()
    def no_block_leaks(self):
        if not hasattr(self, "live"):
            return
        holders = [block for one in self.live for block in one.stream.blocks if block >= 0]
        assert self.pool.num_referenced == len(set(holders))
        assert all(self.pool.references(block) == holders.count(block) for block in range(self.pool.num_blocks))
        for one in self.live:
            assert one.stream.num_blocks == sum(block >= 0 for block in one.stream.blocks)

    def teardown(self):
        for one in getattr(self, "live", ()):
            one.stream.free()
        if hasattr(self, "pool"):
            self.pool.clear()
            assert self.pool.num_free == self.pool.num_blocks


TestStreams = StreamMachine.TestCase
TestStreams.settings = settings(max_examples=60, stateful_step_count=40)


def written(pool: BlockPool, producer: bytes | None, tokens: tuple[int, ...], until: int | None = None) -> PagedStream:
    """Return a stream that holds all of `tokens` and published what it may."""
    stream = PagedStream(pool, producer)
    assert stream.reserve(len(tokens))
    stream.commit(len(tokens))
    stream.publish(tokens, len(tokens) if until is None else until)
    return stream


TOKENS = tuple(range(100, 150))


@pytest.mark.parametrize(
    ("producer", "tokens", "found"),
    [
        (b"base", TOKENS, 48),
        (b"base", TOKENS[:40], 32),
        (b"base", (*TOKENS[:20], 7, *TOKENS[21:]), 16),
        (b"base", (7, *TOKENS[1:]), 0),
        (b"base", TOKENS[16:], 0),
        (b"law", TOKENS, 0),
        (None, TOKENS, 0),
    ],
)
def test_streams_share_equal_beginnings_of_equal_producers(producer, tokens, found):
    pool = pool_of(20)
    first = written(pool, b"base", TOKENS)
    second = PagedStream(pool, producer)
    assert second.lookup(tokens, len(tokens)) == found
    assert second.blocks == first.blocks[: found // BLOCK_TOKENS]
    whole = len(tokens) // BLOCK_TOKENS if producer is not None else 0
    assert (pool.counts.hits, pool.counts.misses) == (found // BLOCK_TOKENS, whole - found // BLOCK_TOKENS)


def test_a_stream_without_a_producer_is_never_published():
    pool = pool_of(20)
    written(pool, None, TOKENS).free()
    assert pool.num_cached == 0


@pytest.mark.parametrize(("until", "found"), [(0, 0), (15, 0), (16, 16), (31, 16), (47, 32), (48, 48), (50, 48)])
def test_no_block_that_is_half_full_or_reaches_past_until_is_published(until, found):
    pool = pool_of(20)
    written(pool, b"base", TOKENS, until)
    assert PagedStream(pool, b"base").lookup(TOKENS, len(TOKENS)) == found


@pytest.mark.parametrize(("limit", "found"), [(49, 48), (48, 48), (47, 32), (15, 0)])
def test_a_lookup_stays_below_its_limit(limit, found):
    pool = pool_of(20)
    written(pool, b"base", TOKENS)
    assert PagedStream(pool, b"base").lookup(TOKENS, limit) == found


def test_the_beginning_of_a_chain_outlives_its_end():
    pool = pool_of(3)
    written(pool, b"base", TOKENS[:48]).free()
    assert PagedStream(pool, None).reserve(16)
    assert PagedStream(pool, b"base").lookup(TOKENS, 48) == 32


def test_a_stream_that_hit_continues_the_chain():
    pool = pool_of(20)
    written(pool, b"base", TOKENS[:20]).free()
    second = PagedStream(pool, b"base")
    assert second.lookup(TOKENS, 50) == 16
    assert second.reserve(50)
    second.commit(50)
    second.publish(TOKENS, 50)
    assert PagedStream(pool, b"base").lookup(TOKENS, 50) == 48


def test_extents_are_one_where_blocks_are_neighbours():
    pool = pool_of(20)
    first = written(pool, b"base", TOKENS)
    second = PagedStream(pool, b"base")
    second.lookup(TOKENS, 32)
    assert second.reserve(40)
    assert first.extents(3, 50) == [(3, 50)]
    assert second.extents(5, 37) == [(5, 32), (64, 69)]
    assert second.rows(30, 34) == [30, 31, 64, 65]
    assert second.extents(33, 33) == []


@pytest.mark.parametrize(("hint", "pieces"), [(96, 1), (0, 6)])
def test_streams_that_say_how_long_they_will_be_lie_in_one_piece(hint, pieces):
    streams = [PagedStream(pool_of(40), None)]
    streams += [PagedStream(streams[0].pool, None) for _ in range(2)]
    for stop in range(16, 97, 16):
        assert all(stream.reserve(stop, hint) for stream in streams)
    assert [len(stream.extents(0, 96)) for stream in streams] == [pieces] * 3


def test_a_stream_keeps_its_length_when_blocks_are_dropped():
    pool = pool_of(4)
    stream = written(pool, None, TOKENS)
    stream.drop_before(35)
    assert stream.length == 50 and stream.num_blocks == 2 and pool.num_free == 2
    assert stream.rows(32, 50) == list(range(32, 50))
    with pytest.raises(AssertionError, match="position 31 was dropped"):
        stream.extents(31, 50)
    assert stream.reserve(82)
    stream.free()
    assert pool.num_free == 4


def test_going_back_into_published_blocks_lets_them_go():
    pool = pool_of(20)
    first = written(pool, b"base", TOKENS)
    first.commit(32)
    assert first.num_published == 2 and first.num_blocks == 2
    assert PagedStream(pool, b"base").lookup(TOKENS, 50) == 48, "what is published stays so"
    with pytest.raises(AssertionError, match="inside a published block"):
        first.commit(20)


@pytest.mark.parametrize("how", ["found", "published", "beyond"])
def test_a_stream_writes_nothing_that_is_not_its_own(how):
    pool = pool_of(20)
    stream = written(pool, b"base", TOKENS, None if how == "published" else 0)
    if how == "found":
        written(pool, b"base", TOKENS)
        stream = PagedStream(pool, b"base")
        stream.lookup(TOKENS, 48)
    with pytest.raises(AssertionError):
        if how == "beyond":
            stream.rows(50, 70)
        else:
            stream.require_writable(40, 48)
