"""A recorder survives what goes wrong, and says what it lacks.

Run: pytest tests/test_recorder.py
"""

from __future__ import annotations

import gc
import threading
import weakref

import byte_engine
import numpy as np
import pytest
from byte_engine import engine_on, finish
from models import byte_ids
from recorded_problem import ALL, PROMPTS, WHO, generate, same_but_time
from recorded_problem import assert_same as assert_same_trace

from workbench import UserError
from workbench.edits import force
from workbench.engine.recording import Recording
from workbench.instrument.recorder import STEP_COLUMNS
from workbench.instrument.run import open_run

engine, shelf = byte_engine.engine, byte_engine.shelf


# what goes wrong


def test_a_mistake_in_measuring_stops_the_recording_and_not_the_engine(shelf, monkeypatch):
    expected = [done.token_ids for done in generate(engine_on(shelf))]

    def broken(*_):
        raise ZeroDivisionError("a mistake of ours")

    for place in ("_lengths", "as_index"):
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


@pytest.mark.parametrize("what", ["close", "open"])
def test_a_recorder_opens_and_closes_between_steps_only(engine, what):
    recorder, classify, waiting = engine.record(*ALL), engine.classifier, []

    def act():
        recorder.close() if what == "close" else engine.record(*ALL)

    def slow(hidden, batch):
        if not waiting:
            waiting.append(threading.Thread(target=act))
            waiting[0].start()
            waiting[0].join(0.2)
            assert waiting[0].is_alive() and len(engine.recording._watchers) == 1, "it did not wait for the step"
        return classify(hidden, batch)

    engine.classifier = slow
    done = engine.generate("hello", mixture="mix", max_tokens=9, ignore_eos=True)
    waiting[0].join()
    assert done.error is None and len(engine.recording._watchers) == (0 if what == "close" else 2)


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
    del engine, handle
    gc.collect()
    assert gone() is None and recorder.trace() is recorder.trace()
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
        (["scalings"], {"requests": 3}, "'requests' must be text or a list of texts, not .3."),
        (["scalings"], {"memory_bytes": -1}, "'memory_bytes' must be a whole number of at least 0, not -1"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_once(engine, what, options, said):
    with pytest.raises(UserError, match=said):
        engine.record(*what, **options)
    assert not engine.recording._watchers


def test_a_request_that_never_ran_is_an_error_at_the_end_that_names_the_nearest(engine):
    with pytest.raises(UserError, match="'req-9' was to be .* ran; did you mean 'req-2'.*recorded: 'req-1'$"), \
            engine.record(requests=["req-1", "req-9"]) as recorder:
        engine.generate(["a", "b"], mixture="mix", max_tokens=2)
    assert list(recorder.traces) == ["req-1"] and list(recorder.requests().request_id) == ["req-1"]
    with pytest.raises(UserError, match="'req-2' was not to be recorded, only 'req-1', 'req-9'"):
        recorder.trace("req-2")
    with pytest.raises(ZeroDivisionError), engine.record(requests="nobody"):
        raise ZeroDivisionError
    handle = engine.submit("hello", mixture="mix", max_tokens=2)
    with engine.record(requests=[handle, "late"]) as recorder:
        handle.result()
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
