"""A recorder stays within its memory, and what goes to files is what would have stayed.

Run: pytest tests/test_record_store.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path

import byte_engine
import numpy as np
import pytest
from byte_engine import engine_on, finish
from recorded_problem import ALL, generate, same_but_time, with_extras
from recorded_problem import assert_same as assert_same_trace
from trace_problem import small_trace

from workbench import UserError
from workbench.instrument.recorder import REQUEST_COLUMNS, STEP_COLUMNS
from workbench.instrument.store import Lines, Store, Table
from workbench.instrument.trace_checks import is_mapped

engine, shelf = byte_engine.engine, byte_engine.shelf


def test_what_is_spilled_is_what_is_kept_in_memory(shelf):
    recorders = []
    for memory_bytes in (1 << 28, 0, None):
        half = memory_bytes is None and (recorders[0].store.used_bytes - 1024 * len(STEP_COLUMNS) * 8) // 2
        engine = engine_on(shelf)
        with engine.record(*ALL, memory_bytes=half or memory_bytes) as recorder:
            done = generate(engine)
        recorders.append(recorder)
    whole, spilled, part = recorders
    assert [r.store.num_spilled for r in (whole, spilled)] == [0, 4] and 0 < part.store.num_spilled < 4
    for completion in done:
        expected = same_but_time(whole.trace(completion.request_id))
        for recorder in (spilled, part):
            assert_same_trace(same_but_time(recorder.trace(completion.request_id)), expected)
    assert is_mapped(spilled.trace(done[0].request_id).extra("delta_norm").values)
    assert not is_mapped(whole.trace(done[0].request_id).values)
    for recorder in (spilled, part):
        assert recorder.steps().drop(columns=["time_s", "duration_ms"]).equals(
            whole.steps().drop(columns=["time_s", "duration_ms"])
        )
        assert (recorder.requests().text == whole.requests().text).all()
    folder = spilled.store.folder
    left = sorted(path.suffix for path in folder.iterdir())
    assert left == [".bin", ".jsonl", *[".safetensors"] * 4], "buffers are gone, one block of steps is there"
    del spilled, recorders, recorder
    gc.collect()
    assert not folder.exists(), "the folder goes with its recorder"


@pytest.mark.parametrize("every", [1, 4])
def test_buffers_are_as_large_as_declared_and_no_larger(engine, every):
    size = {"every": every, "memory_bytes": 1 << 28}
    with engine.record(*ALL, **size) as recorder:
        request = engine.enqueue("hello there", mixture="mix", max_tokens=20, ignore_eos=True)
        other = engine.enqueue("hello there", adapter="a", max_tokens=20, ignore_eos=True)
        for _ in range(3):
            engine.step()
        steps = 1024 * len(STEP_COLUMNS) * 8
        scalings = 31 * 4 * (4 * 2 + 4 * 1)  # of request and other: they hold these themselves until they end
        assert recorder.store.used_bytes - steps + scalings == sum(
            recorder.declared_bytes(31, **who) for who in ({"mixture": "mix"}, {"adapter": "a"})
        )
        finish(engine, request, other)
    assert recorder.store.used_bytes - steps < sum(
        recorder.declared_bytes(request.max_length, **who) for who in ({"mixture": "mix"}, {"adapter": "a"})
    ) + 64 * 2 * len(REQUEST_COLUMNS) + 200
    assert recorder.declared_bytes(31, num_requests=3) == 3 * recorder.declared_bytes(31)
    with pytest.raises(UserError, match="no mixture 'mixx' is loaded; did you mean 'mix'"):
        recorder.declared_bytes(31, mixture="mixx")


def test_a_store_moves_the_oldest_traces_to_files_first(tmp_path):
    trace = with_extras(small_trace())
    store = Store(250)
    for key in "abcd":
        store.keep(key, 100, lambda: trace)
    buffer = store.array((20,), np.float32)
    assert store.keys() == list("abcd") and store.used_bytes == 180
    assert [is_mapped(store.trace(key).values) for key in "abcd"] == [True, True, True, False]
    for key in "abcd":
        assert_same_trace(store.trace(key), trace)
    store.release(buffer)
    store.drop("d")
    assert store.used_bytes == 0 and store.num_spilled == 3
    big = store.array((10, 100), np.int64)
    assert isinstance(big, np.memmap) and os.stat(big.filename).st_blocks * 512 >= 8000, "its space is reserved"
    big[:] = 3
    store.release(big)
    assert not Path(big.filename).exists()


def test_tables_and_lines_keep_their_rows_over_blocks_and_files():
    for limit in (0, 1 << 20):
        store = Store(limit)
        table, lines = Table(store, ("a", "b")), Lines(store)
        for i in range(2500):
            table.add({"b": i / 2, "a": i})
            lines.add({"text": "é" * (i % 3), "i": i, "none": None})
        assert (table.values() == np.stack([np.arange(2500), np.arange(2500) / 2], 1)).all() and len(table) == 2500
        assert [line["i"] for line in lines] == list(range(2500)) and next(iter(lines))["none"] is None


@contextlib.contextmanager
def file_limit(num_bytes: int):
    """No file of this process may grow beyond a size, which a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_recording_and_not_the_engine(shelf):
    expected = [done.token_ids for done in generate(engine_on(shelf))]
    engine = engine_on(shelf)
    recorder = engine.record(*ALL, memory_bytes=200_000)
    first = engine.generate("hello", mixture="mix", max_tokens=3, ignore_eos=True, request_id="first")
    with file_limit(1000):
        recorder.store.memory_bytes = 0
        assert [done.token_ids for done in generate(engine)] == expected
    assert recorder.trace("first").num_tokens == 5 + len(first.token_ids)
    assert "stopped" in repr(recorder)
    with pytest.raises(UserError, match=r"recording stopped, as it could not .*too large; what was recorded before is"):
        recorder.close()
    recorder.close()
    with pytest.raises(UserError, match="no trace of request .* recording stopped"):
        recorder.trace("other")
    assert not engine.recording._watchers and not engine.model.model.model.layers[0]._forward_hooks
