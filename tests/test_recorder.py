"""A recorder stays within its memory, survives what goes wrong, and says what it lacks.

Run: pytest tests/test_recorder.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import weakref
from dataclasses import replace
from pathlib import Path

import byte_engine
import numpy as np
import pytest
from byte_engine import engine_on, finish
from models import byte_ids
from recorded_problem import assert_same as assert_same_trace
from recorded_problem import with_extras
from trace_problem import small_trace

from workbench import UserError
from workbench.edits import force
from workbench.engine.recording import Recording
from workbench.instrument.recorder import REQUEST_COLUMNS, STEP_COLUMNS
from workbench.instrument.run import open_run
from workbench.instrument.store import Lines, Store, Table
from workbench.instrument.trace_checks import is_mapped

engine, shelf = byte_engine.engine, byte_engine.shelf
ALL = ("scalings", "logits:top:3", "delta_norm", "hidden_norm", "entropy", "cache", "throughput")
WHO = {"mixture": ["mix", None, None, "mix"], "adapter": [None, "a", None, None]}
PROMPTS = ["hello there", "hello", "good morning", "a"]


def generate(engine, **options):
    return engine.generate(PROMPTS, max_tokens=6, ignore_eos=True, **WHO, **options)


def same_but_time(trace):
    return replace(trace, time_s=trace.time_s * 0, metadata={**trace.metadata, "created": "", "request_id": ""})


# memory


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


# what goes wrong


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


def test_a_mistake_in_measuring_stops_the_recording_and_not_the_engine(shelf, monkeypatch):
    expected = [done.token_ids for done in generate(engine_on(shelf))]

    def broken(*_):
        raise ZeroDivisionError("a mistake of ours")

    for place in ("delta_ratios", "as_index"):
        engine = engine_on(shelf)
        monkeypatch.setattr(f"workbench.adapters.delta_norms.{place}", broken)
        with pytest.raises(UserError, match="stopped, .* ZeroDivisionError: a mistake of ours"), engine.record(*ALL):
            assert [done.token_ids for done in generate(engine)] == expected
        monkeypatch.undo()


@pytest.mark.parametrize("place", ["classifier", "sampler", "commit"])
def test_an_interrupt_in_a_step_leaves_the_recording_right(shelf, place, monkeypatch):
    undisturbed, disturbed = engine_on(shelf), engine_on(shelf)
    with undisturbed.record(*ALL) as expected:
        generate(undisturbed)
    calls = []

    def interrupting(inner):
        def call(*given):
            calls.append(place)
            found = inner(*given)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return found

        return call

    if place == "commit":
        # an interrupt that no handler holds back: the step's values are taken, and it is not committed
        monkeypatch.setattr(Recording, "commit", interrupting(Recording.commit))
    else:
        setattr(disturbed, place, interrupting(getattr(disturbed, place)))
    with disturbed.record(*ALL) as recorder:
        requests = [
            disturbed.enqueue(prompt, max_tokens=6, ignore_eos=True, mixture=mixture, adapter=adapter)
            for prompt, mixture, adapter in zip(PROMPTS, *WHO.values(), strict=True)
        ]
        with pytest.raises(KeyboardInterrupt):
            finish(disturbed, *requests)
        assert disturbed.model.routing.watchers == ()
        finish(disturbed, *requests)
    for request in requests:
        assert_same_trace(same_but_time(recorder.trace(request.id)), same_but_time(expected.trace(request.id)))
    counts = recorder.steps().drop(columns=["time_s", "duration_ms"])
    assert counts.equals(expected.steps().drop(columns=["time_s", "duration_ms"]))


def test_recorders_open_and_close_while_the_engines_own_thread_steps(shelf):
    engine = engine_on(shelf)
    expected = engine_on(shelf).generate("hello", mixture="mix", max_tokens=60, ignore_eos=True, seed=1)
    with engine.record(*ALL) as recorder:
        handles = [engine.submit("hello", mixture="mix", max_tokens=60, ignore_eos=True, seed=1) for _ in range(2)]
        count = 0
        while not all(handle.done for handle in handles):
            with engine.record("hidden_norm", "delta_norm", "throughput") as short:
                short.steps()
            recorder.steps()
            list(recorder.traces.items())
            count += 1
        assert [handle.result().token_ids for handle in handles] == [expected.token_ids] * 2
    assert count > 3 and set(recorder.traces) == {handle.id for handle in handles}
    for trace in recorder.traces.values():
        assert not trace.extra("hidden_norm").is_missing[:-1].any()
    assert recorder.steps().tokens.sum() == 120
    engine.close()


def test_a_callback_may_open_and_close_recorders_inside_a_step(engine):
    opened = []

    def on_text(piece):
        if len(opened) < 2:
            opened.append(engine.record(*ALL))
        else:
            opened[0].close()

    with engine.record(*ALL) as whole:
        done = engine.generate("hello", mixture="mix", max_tokens=8, ignore_eos=True, on_text=on_text)
    opened[1].close()
    assert whole.steps().tokens.sum() == 8 and opened[1].steps().tokens.sum() < 8
    assert opened[1].trace(done.request_id).num_tokens == whole.trace().num_tokens
    assert not opened[0].traces and not engine.recording._watchers


def test_a_closed_recorder_keeps_no_engine_alive(shelf):
    engine = engine_on(shelf)
    with engine.record(*ALL) as recorder:
        handle = engine.submit("hello", mixture="mix", max_tokens=3, ignore_eos=True)
        handle.result()
    gone = weakref.ref(engine)
    engine.close()
    trace = recorder.trace(handle.id)
    del engine, handle
    gc.collect()
    assert gone() is None and recorder.trace() is trace
    with pytest.raises(UserError, match="engine of this recorder is gone"):
        recorder.declared_bytes(3)


# what was asked for


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        (["scaling"], {}, "cannot record 'scaling'; did you mean 'scalings'"),
        (["logits"], {}, "did you mean 'logits:top'"),
        (["logits:top:0"], {}, "'logits:top:0' must end in a whole number of at least 1 and at most 259"),
        (["logits:top:many"], {}, "must end in a whole number"),
        (["logits:top:260"], {}, "at most 259"),
        (["entropy", "entropy"], {}, "'entropy' is given twice"),
        ([7], {}, "cannot record 7"),
        (["entropy"], {"every": 0}, "'every' must be a whole number of at least 1, not 0"),
        (["entropy"], {"every": True}, "not True"),
        (["scalings"], {"every": 2}, "'every' thins out what is measured, and 'scalings' is whole"),
        (["entropy"], {"sites": "*.q_proj"}, "'sites' is for 'scalings' and 'delta_norm'; 'entropy' is not of sites"),
        (["scalings"], {"sites": []}, r"sites=\[\] records nothing"),
        (["scalings"], {"requests": 3}, "'requests' must be text or a list of texts, not 3"),
        (["scalings"], {"memory_bytes": -1}, "'memory_bytes' must be a whole number of at least 0, not -1"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_once(engine, what, options, said):
    with pytest.raises(UserError, match=said):
        engine.record(*what, **options)
    assert not engine.recording._watchers


def test_a_request_that_never_ran_is_an_error_at_the_end_that_names_the_nearest(engine):
    with pytest.raises(UserError, match="'req-9' was to be recorded, but never ran; recorded: 'req-1'"), \
            engine.record(requests=["req-1", "req-9"]) as recorder:
        engine.generate(["a", "b"], mixture="mix", max_tokens=2)
    assert list(recorder.traces) == ["req-1"] and list(recorder.requests().request_id) == ["req-1"]
    with pytest.raises(UserError, match="'req-2' was not to be recorded, only 'req-1', 'req-9'"):
        recorder.trace("req-2")
    with pytest.raises(ZeroDivisionError), engine.record(requests="nobody"):
        raise ZeroDivisionError
    with engine.record(requests="late") as recorder:
        late = engine.enqueue("hello", request_id="late", mixture="mix", max_tokens=9, ignore_eos=True)
        engine.step()
        engine.step()
        with pytest.raises(UserError, match="'late' has not ended"):
            recorder.trace("late")
    finish(engine, late)


def test_each_request_has_a_trace_or_a_reason(engine):
    with engine.record("scalings", "throughput") as recorder:
        base = engine.generate("hello", max_tokens=2)
        waiting = engine.enqueue("hello", adapter="a", max_tokens=2)
        engine.cancel(waiting)
        merged = engine.generate(
            "hello", merged_adapters={"ids": ["a"], "weights": [0.25]}, max_tokens=3, ignore_eos=True
        )
    trace = recorder.trace(merged.request_id)
    assert trace.adapters == ("a",) and (trace.values[:-1] == 0.25).all() and trace.metadata["merged_adapters"] == {
        "a": 0.25
    }
    with pytest.raises(UserError, match="ran the base model alone: it has no scalings to trace"):
        recorder.trace(base.request_id)
    with pytest.raises(UserError, match="it ended before any of its rows was recorded"):
        recorder.trace(waiting.id)
    with engine.record("throughput") as recorder:
        base = engine.generate("hello", max_tokens=2)
    with pytest.raises(UserError, match="only 'throughput' was recorded, which is of steps; record 'scalings' too"):
        recorder.trace(base.request_id)
    with engine.record("scalings") as recorder, pytest.raises(UserError, match="steps were not recorded"):
        recorder.steps()


def test_a_cancelled_request_has_what_it_came_to(shelf):
    """In the middle of its prompt, and after some tokens: what never ran is missing, whoever it ran with."""
    prompt = byte_ids("a prompt of several chunks of eight rows")
    engine = engine_on(shelf, prefix_cache=False, max_rows_per_step=8)
    with engine.record(*ALL) as recorder:
        for who in ({}, {"adapter": "a"}, {"mixture": "mix"}):
            for steps in (2, 9):
                request = engine.enqueue(prompt, max_tokens=9, ignore_eos=True, **who)
                for _ in range(steps):
                    engine.step()
                length = request.streams["adapted"].length
                engine.cancel(request)
                trace = recorder.trace(request.id)
                ran = np.arange(trace.num_tokens) < length
                assert (~trace.extra("hidden_norm").is_missing.any(1) == ran).all()
                assert not who or ((trace.source >= 0) == ran).all()
                assert trace.metadata["finish_reason"] == "cancelled"


def test_an_id_that_comes_again_is_numbered(engine, tmp_path):
    with engine.record(run=tmp_path / "run") as recorder:
        for text in ("a", "bc"):
            engine.generate(text, mixture="mix", request_id="mine", max_tokens=2, ignore_eos=True)
    assert list(recorder.traces) == list(recorder.requests().request_id) == ["mine", "mine#2"]
    assert recorder.trace("mine#2").prompt_tokens == 2 and recorder.trace("mine#2").metadata["request_id"] == "mine#2"


def test_edits_are_in_the_trace_and_in_the_table(engine):
    with engine.record() as recorder, engine.edit(force({"b": 1.0})):
        done = engine.generate("hello", mixture="mix", max_tokens=2, ignore_eos=True)
    assert recorder.trace().metadata["edits"] == list(done.edits) != []
    assert recorder.requests().edits[0] == done.edits and (recorder.trace().values[:-1, :, 1] == 1).all()


# into a run


def test_a_run_gets_everything_the_recorder_has(engine, tmp_path):
    with engine.record(*ALL, run=tmp_path / "run") as recorder:
        done = generate(engine)
    run = open_run(tmp_path / "run")
    assert run.status == "complete" and set(run.trace_ids) == {each.request_id for each in done}
    for request_id, trace in recorder.traces.items():
        assert_same_trace(run.trace(request_id), trace)
    assert list(run.steps.columns[: len(STEP_COLUMNS)]) == list(STEP_COLUMNS)
    assert np.allclose(run.steps[list(STEP_COLUMNS)].to_numpy(float), recorder.steps().to_numpy(float))
    assert list(run.requests.request_id) == list(recorder.requests().request_id)
    assert run.meta["base"] == "tiny" and run.meta["recording"]["kinds"] == list(recorder.wanted.kinds)
    with pytest.raises(UserError, match="holds a run already"):
        engine.record(run=tmp_path / "run")
    assert not engine.recording._watchers


def test_a_run_that_cannot_be_written_stops_the_recording_and_not_the_engine(shelf, tmp_path, monkeypatch):
    expected = [done.token_ids for done in generate(engine_on(shelf))]
    engine, calls = engine_on(shelf), []

    def full(self, row):
        calls.append(row)
        if len(calls) > 4:
            raise UserError("No space left on device")

    monkeypatch.setattr("workbench.instrument.run_writer.RunWriter.step", full)
    with pytest.raises(UserError, match="recording stopped, as it could not keep a step: No space left on device"), \
            engine.record(run=tmp_path / "run") as recorder:
        assert [done.token_ids for done in generate(engine)] == expected
    assert len(recorder.steps()) == 5
