"""Recorders, edits, runs and reuse policies when their users err, interrupt, move about or meet in threads.

Run: pytest tests/test_review_record.py
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from byte_engine import engine_on, finish, shelf
from test_run import STEP, named
from trace_problem import small_trace

from workbench import Comparison, RunWriter, UserError, lagged, list_runs, open_run, open_runs
from workbench.edits import ablate, force, scale
from workbench.engine.editing import Editing
from workbench.instrument import comparison_file
from workbench.instrument.recorder import Recorder
from workbench.instrument.run import remove_run
from workbench.instrument.wanted import Wanted

KEY = "classifier:scalings"
PROMPT = list(range(20))
MIX = {"mixture": "mix", "max_tokens": 6, "ignore_eos": True}
__all__ = ["shelf"]


@pytest.fixture(scope="module")
def engine(shelf):
    return engine_on(shelf, prefix_cache=False)


# reuse policies


@dataclass
class Own:
    """A policy as a user writes it: exact, but for what a test says."""

    sources: object = staticmethod(lambda position: position)
    last: object = staticmethod(lambda: None)

    def source(self, position: int, prompt_tokens: int) -> int:
        return self.sources(position)

    def last_own(self, prompt_tokens: int) -> int | None:
        return self.last()


TABLE = list(range(22))
BAD = {
    "the input itself": Own(lambda position: position + 1), "a position from 0": Own(lambda position: position - 30),
    "IndexError": Own(lambda position: TABLE[position]), "a whole number": Own(lambda position: position / 2),
    "never goes back": Own(lambda position: position if position % 2 else 0),
    "ZeroDivisionError": Own(last=lambda: 1 / 0), "after the last": Own(last=lambda: 21),
    "or None": Own(last=lambda: "end"),
}  # fmt: skip


@pytest.mark.parametrize("said", BAD)
def test_a_policy_of_ones_own_that_errs_ends_its_request_and_no_other(engine, said):
    plain = engine.generate(PROMPT, **MIX)
    good = engine.enqueue(PROMPT, **MIX)
    bad = engine.enqueue(PROMPT, policy=BAD[said], **MIX)
    other = engine.enqueue(PROMPT, **MIX)
    for _ in range(60):
        engine.step()
    for request in (bad, good, other):
        engine.cancel(request)
    assert bad.finish_reason == "error" and said in bad.error and "Own" in bad.error
    assert good.generated == other.generated == list(plain.token_ids)


def test_a_policy_of_ones_own_that_keeps_the_contract_is_used(engine):
    halves = Own(lambda position: position if position < len(PROMPT) else np.int64(position // 2 * 2))
    done = engine.generate(PROMPT, policy=halves, **MIX)
    expected = engine.generate(PROMPT, policy="periodic(1)", **MIX)
    assert done.error is None and done.scalings_reused > expected.scalings_reused == 0


def test_a_class_is_no_policy(engine):
    with pytest.raises(UserError, match=r"the class 'lagged'.*lagged\(1\)"):
        engine.generate(PROMPT, policy=lagged, **MIX)


# closing a recorder


def test_a_recorder_that_is_closed_in_a_step_has_that_step(engine):
    recorder, sampler = engine.record("throughput"), engine.sampler
    closing = threading.Thread(target=recorder.close)

    def slow(*given):
        closing.start()
        time.sleep(0.1)
        return sampler(*given)

    request = engine.enqueue(PROMPT, max_tokens=1)
    engine.sampler = slow
    try:
        finish(engine, request)
    finally:
        engine.sampler = sampler
    closing.join()
    assert not recorder.is_recording and len(recorder.requests()) == 1
    assert recorder.steps().tokens.sum() == recorder.requests().completion_tokens.sum() == 1


def interrupt_once(function):
    """Return `function`, but for Ctrl-C at its first call."""
    calls = []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return function(*given)

    return interrupted


def test_a_recorder_that_was_interrupted_while_it_waited_can_be_closed(engine, tmp_path):
    recorder = engine.record("hidden_norm", run=tmp_path / "run")
    recorder._on_close = interrupt_once(recorder._on_close)
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    done = engine.generate(PROMPT, max_tokens=2)
    recorder.close()
    recorder.close()
    assert not engine.recording._watchers and not engine.recording._hooks
    assert done.request_id in recorder.traces and open_run(tmp_path / "run").status == "complete"


def test_a_run_that_was_interrupted_while_it_closed_can_be_closed(tmp_path):
    writer = RunWriter(tmp_path / "run")
    writer.step(STEP)
    writer._thread.join = interrupt_once(writer._thread.join)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    writer.close()
    writer.close()
    assert open_run(tmp_path / "run").status == "complete" and len(open_run(tmp_path / "run").steps) == 1


# run folders


def dead_run(root: Path) -> Path:
    """Return a folder as a killed writer leaves it, in the middle of a trace and of `run.json`."""
    writer = RunWriter(root / "run")
    writer.step(STEP)
    writer.trace(named("req-0"))
    writer.flush()
    dead = Path(shutil.copytree(root / "run", root / "dead"))
    writer.close()
    for left in (".run.json.ab12_x9z", ".steps.parquet.ab12_x9z", "traces/.00002-req-1.safetensors.ab12_x9z"):
        (dead / left).write_text("half")
    return dead


def test_what_a_killed_writer_left_is_tidied_and_a_file_of_the_users_is_not(tmp_path):
    dead = dead_run(tmp_path)
    (dead / ".notes.md").write_text("mine")
    (dead / "traces" / ".req-1.safetensors.md").write_text("mine")
    assert open_run(dead).trace_ids == ("req-0",)
    hidden = {str(path.relative_to(dead)) for path in dead.rglob(".*")} - {".lock", ".compact.lock"}
    assert {".notes.md", "traces/.req-1.safetensors.md"} == {each for each in hidden if "lock" not in each}


def test_a_run_whose_writer_was_killed_in_a_trace_is_removed(tmp_path):
    dead = dead_run(tmp_path)
    shutil.copytree(dead, tmp_path / "noted")
    remove_run(dead)
    assert not dead.exists()
    (tmp_path / "noted" / "traces" / ".notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"holds '\.notes\.md'"):
        remove_run(tmp_path / "noted")


def test_a_run_goes_on_when_the_working_folder_changes(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunWriter("run") as writer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.step(STEP)
        writer.trace(named("req-0"))
    monkeypatch.chdir(tmp_path)
    run = open_run("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.status == "complete" and len(run.steps) == 1 and run.trace("req-0").num_tokens == 4
    assert not os.listdir()


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option is deprecated")
@pytest.mark.parametrize("is_new", [True, False])
def test_what_a_run_does_not_say_is_missing_in_the_table(tmp_path, is_new):
    RunWriter(tmp_path / "one", meta={"device": 3}).close()
    RunWriter(tmp_path / "two").close()
    # text is of dtype str in pandas 3, of objects before
    with pd.option_context("future.infer_string", is_new):
        frame = list_runs(tmp_path).set_index("run")
        assert frame["device"].tolist()[0] == "3" and pd.isna(frame["device"].tolist()[1])
        assert frame[["base", "problem", "seed"]].isna().all(axis=None) and (frame["status"] == "complete").all()
        found = open_runs(tmp_path).sql("select run from runs where base = 'tiny' or device = '3'")
        assert found["run"].tolist() == ["one"]


# memory


@pytest.mark.parametrize("sites", [None, "*.layers.0.*q_proj"])
def test_what_a_recorder_holds_of_ended_requests_is_counted(engine, sites):
    with engine.record(sites=sites) as recorder, engine.edit({KEY: scale("a", 2)}):
        request = engine.enqueue(PROMPT, **MIX)
        finish(engine, request)
        held = request.scalings.nbytes + sum(each.nbytes for each in request.edited.values())
        counted = recorder.store._kept[request.id].num_bytes
        request = weakref.ref(request)
        engine.generate(PROMPT, max_tokens=1)
        assert request() is None if sites else counted >= held
    assert len(recorder.trace(next(iter(recorder.traces))).sites) == (1 if sites else 4)


def test_a_trace_that_is_read_while_it_is_spilled_is_made_once(engine):
    recorder = Recorder(Wanted.of((), None, None, 1, 10), memory_bytes=100)
    made, reading, found = [], threading.Event(), []

    def make():
        made.append(1)
        reading.set()
        time.sleep(0.1)
        return small_trace()

    recorder.store.keep("a", 60, make)
    reader = threading.Thread(target=lambda: found.append(recorder.traces["a"]))
    reader.start()
    reading.wait()
    recorder.store.array((100,), np.uint8)
    reader.join()
    kept = recorder.store._kept["a"]
    assert len(made) == 1 and found[0].num_tokens == 4 and kept.trace is None and kept.path.exists()
    assert recorder.store.used_bytes == 100


def test_different_requests_have_different_ids(engine):
    with engine.record("entropy") as recorder:
        for request_id in ("a", "a", "a#2", "a", "a#2"):
            engine.generate(PROMPT, max_tokens=1, request_id=request_id)
    ids = recorder.requests().request_id.tolist()
    assert ids[:2] == ["a", "a#2"] and len(set(ids)) == 5 and set(recorder.traces) == set(ids)


def test_what_a_preempted_request_computes_again_is_not_called_unmeasured(engine):
    request = engine.enqueue(PROMPT, **MIX)
    while len(request.choices) < 3:
        engine.step()
    with engine.record("hidden_norm") as recorder:
        while len(request.choices) < 4:
            engine.step()
        engine.scheduler.preempt(request)
        finish(engine, request)
    trace = recorder.trace(request.id)
    assert not trace.extra("hidden_norm").is_missing[: len(request.tokens) - 1].any()
    assert "unmeasured" not in trace.metadata


# edits


def test_an_edit_that_never_fires_beside_one_that_does_is_named(engine):
    edits = [scale("a", 2), ablate("b", positions=[5000])]
    with pytest.raises(UserError, match="ablate b of tokens 5000.*changed no row") as error, engine.edit({KEY: edits}):
        engine.generate(PROMPT, **MIX)
    assert "scale" not in str(error.value)
    with engine.edit({KEY: [scale("a", 2), lambda scalings, tap: None]}):
        engine.generate(PROMPT, **MIX)  # a function of one's own may just look


def test_a_named_request_that_never_ran_is_named(engine):
    with pytest.raises(UserError, match=r"request 'req-tipo'.*never ran; did you mean 'req-typo'"), engine.edit(
        {KEY: scale("a", 2)}, ["one", "req-tipo"]
    ):
        engine.generate(PROMPT, request_id="one", **MIX)
        engine.generate(PROMPT, request_id="req-typo", max_tokens=1)
    with engine.edit(scale("a", 2), ["one", "two"]), engine.edit(scale("b", 2), ["one", "two"]):
        for name in ("one", "two"):
            engine.generate(PROMPT, request_id=name, **MIX)


@pytest.mark.parametrize(
    ("edits", "fired"),
    [
        (force({"a": 1}, positions=[5]), 1), (force({"a": 1}, positions=[5, 21, 99]), 2), (scale("a", 2), 25),
        (force({"a": 1}, positions="prompt"), 20), (force({"a": 1}, positions="generated"), 5),
        (force({"a": 1}, positions=slice(2, 23, 4)), 6), (force({"a": 1}, positions=slice(18, None)), 7),
        ([force({"a": 1}, positions=[5, 6]), scale("b", 2, positions=slice(6, 8))], 3),
        (lambda scalings, tap: scalings, 25),
    ],
)  # fmt: skip
def test_rows_that_an_edit_changed_are_counted(engine, edits, fired):
    with engine.edit({KEY: edits}) as opened:
        engine.generate(PROMPT, **MIX)
    assert opened[KEY].fired == fired


class Meeting(list):
    """A list in whose reading another thread does something."""

    def meet(self, function):
        self.function = function
        return self

    def __iter__(self):
        function, self.function = self.function, None
        if function is not None:
            self.other = threading.Thread(target=function)
            self.other.start()
            self.other.join(0.2)
        return super().__iter__()


def test_edits_that_open_and_close_at_once_are_open_or_closed(engine):
    editing = Editing()
    first, second = (editing.open({KEY: scale("a", 2)}, None, engine.mixtures) for _ in range(2))
    meeting = editing._open = Meeting(editing._open).meet(first.close)
    third = editing.open({KEY: scale("a", 2)}, None, engine.mixtures)
    meeting.other.join()
    assert editing._open == [second, third]


# a comparison that is saved over another


def comparison():
    return Comparison({"one": small_trace(), "other": small_trace()})


def test_a_comparison_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    path = comparison().save(tmp_path / "cmp")
    rename, calls = Path.rename, []

    def failing(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="No space left"):
        comparison().save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["cmp"] and comparison_file.read(path)["traces"]


def test_a_comparison_whose_replacing_was_killed_is_pointed_to(tmp_path):
    path = comparison().save(tmp_path / "cmp")
    path.rename(tmp_path / ".cmp.ab12_x9z")
    with pytest.raises(UserError, match=r"no such folder; .*'\.cmp\.ab12_x9z'"):
        comparison_file.read(path)
