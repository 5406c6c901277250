"""An engine's memory as plain numbers is what its pool and slots say. Run: pytest tests/test_memory_state.py"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from byte_engine import engine_on, finish, shelf  # noqa: F401 - fixtures

from workbench.display import figures
from workbench.instrument.memory_state import CACHED, FREE, PRIVATE, PUBLISHED, SHARED, memory_state

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
PROMPT = "the same forty-eight letters, then something else"[:48]


@pytest.fixture
def engine(shelf):  # noqa: F811 - the fixture is named again by the argument
    made = engine_on(shelf, kv_bytes=2_000_000)
    yield made
    made.close()


def test_the_state_is_the_pools_and_the_slots(engine):
    engine.generate(PROMPT, max_tokens=1, ignore_eos=True)
    engine.adapters.pin("a")
    who = {"base": {}, "mix": {"mixture": "mix"}, "a": {"adapter": "a"}}
    settings = {"max_tokens": 4, "ignore_eos": True}
    requests = [engine.enqueue(PROMPT, request_id=name, **settings, **options) for name, options in who.items()]
    while not all(request.is_decoding for request in requests):
        engine.step()
    state, pool = memory_state(engine), engine.memory.pool
    assert state.num_blocks == pool.num_blocks and state.block_tokens == 16
    assert state.block_bytes == pool.shape.block_bytes and state.slot_bytes == engine.slots.num_bytes
    assert state.references.tolist() == [pool.references(block) for block in range(pool.num_blocks)]
    counts = state.counts()
    assert counts["free"] + counts["cached"] == pool.num_free and counts["cached"] == pool.num_cached
    streams = {(stream.request_id, stream.kind): stream for stream in state.streams}
    assert {key: (stream.runs_on, stream.is_mixture) for key, stream in streams.items()} == {
        ("base", "adapted"): ("base", False), ("a", "adapted"): ("a", False),
        ("mix", "adapted"): ("mix", True), ("mix", "scaling"): ("mix", True),
    }  # fmt: skip
    kinds = state.kinds()
    # the scaling pass is the base model: both hold what the first request has left
    shared = set(streams["base", "adapted"].blocks) & set(streams["mix", "scaling"].blocks)
    assert shared == set(np.flatnonzero(kinds == SHARED).tolist()) and len(shared) == 2
    held = [block for stream in state.streams for block in stream.blocks]
    assert np.bincount(held, minlength=state.num_blocks).tolist() == state.references.tolist()
    assert all((kinds[block] == PRIVATE) == pool.is_writable(block) for block in set(held))
    slots = {(slot.adapter, slot.mixture): slot for slot in state.slots}
    assert {key: (slot.rank, slot.leases, slot.is_pinned) for key, slot in slots.items()} == {
        ("a", "mix"): (4, 1, False), ("b", "mix"): (2, 1, False), ("a", None): (4, 1, True),
    }  # fmt: skip
    assert figures.memory_map(engine).description == figures.memory_map(state).description
    finish(engine, *requests)
    after = memory_state(engine).kinds()
    assert set(after.tolist()) == {FREE, CACHED} and not memory_state(engine).streams
    assert (kinds == PUBLISHED).any()


def test_an_unloaded_adapter_leaves_an_empty_slot(engine, shelf):  # noqa: F811
    engine.load_adapter(shelf / "mix" / "b", "b")
    engine.adapters.pin("a"), engine.adapters.pin("b")
    before = [slot.adapter for slot in memory_state(engine).slots]
    engine.adapters.unpin("a")
    engine.adapters.unload("a").raise_for_status()
    after = memory_state(engine).slots
    assert before == ["a", "b", "a", "b"] and [slot.adapter for slot in after] == ["a", "b", None, "b"]
    assert after[2].num_bytes == 0 and figures.memory_map(engine).png


def test_it_needs_no_torch():
    code = "import workbench.instrument.memory_state, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
