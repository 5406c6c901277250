"""What a second review of recording found: half-made runs, stopped recordings, and arguments of another sort.

Run: pytest tests/test_review_6b.py
"""

from __future__ import annotations

import gc
import os
import signal
import weakref

import numpy as np
import pytest
from jobs import engine_on, write_shelf
from models import random_ids

from workbench import Comparison, Trace, UserError, list_runs, open_run
from workbench.edits import freeze
from workbench.edits.edit import Tap
from workbench.engine import recording
from workbench.errors import TransientError
from workbench.instrument import run_files, run_meta, run_writer, trace_file
from workbench.instrument.recorded import Recorded
from workbench.instrument.recorder import REQUEST_COLUMNS, STEP_COLUMNS
from workbench.instrument.run import remove_run
from workbench.instrument.run_columns import REQUESTS, STEPS
from workbench.instrument.run_list import open_runs
from workbench.instrument.run_writer import RunWriter
from workbench.live.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
PROMPT = random_ids(20, 5)
MIX = {"mixture": "mix", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_on(write_shelf(tmp_path_factory.mktemp("shelf"), "llama"), row_padding=32, max_rows_per_step=32)


@pytest.fixture
def trace():
    count = np.arange(4)
    return Trace(
        np.full((4, 2, 3), 0.5, np.float32), ("law", "med", "code"), ("a.q_proj", "a.v_proj"), count, tuple("abcd"),
        count, count > 1, count, np.full(4, -1), np.zeros(4),
        extras={"entropy": Recorded(np.zeros(4, np.float32), ("token",), {}, "nats", "of the next token")},
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("entropi", "did you mean 'entropy'"), ("delta_nrm", "did you mean 'delta_norm'"),
        ("hidden_norm", r"Record it with engine.record\('scalings', 'hidden_norm'\)"),
        (["entropy"], "this trace has no"),
    ],
)  # fmt: skip
def test_what_was_not_recorded_names_what_can_be(trace, name, said):
    with pytest.raises(UserError, match=said) as caught:
        trace.extra(name)
    assert "record('scalings', 'entropi')" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sites": 3}, "sites must be a pattern"), ({"sites": [3]}, "sites must be a pattern"),
        ({"adapters": 3}, "adapters must be the name"), ({"adapters": [["law"]]}, "adapters must be the name"),
        ({"tokens": [[1, 2]]}, "in one list"), ({"tokens": [[1], [2, 3]]}, "tokens must be"),
        ({"tokens": "ab"}, "tokens must be"), ({"tokens": slice(0, 4, 0)}, "no slice"),
        ({"tokens": slice("a", None)}, "no slice"), ({"sites": "*.k_proj"}, "no site of this trace matches"),
    ],
)  # fmt: skip
def test_a_selection_of_another_sort_is_a_sentence(trace, given, said):
    with pytest.raises(UserError, match=said):
        trace.select(**given)


@pytest.mark.parametrize("path", [None, 3, b"bytes", "a\0b", ["a"]])
@pytest.mark.parametrize(
    "use", [Trace.load, open_run, remove_run, list_runs, Comparison.load, RunWriter, lambda path: open_runs(path)]
)
def test_what_is_no_path_is_a_sentence(use, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="path|takes a folder of runs|no such folder|no run at"):
        use(path)


def test_a_trace_is_not_saved_to_what_is_no_path(trace):
    for path in (None, "a\0.safetensors"):
        with pytest.raises(UserError, match="the file of a trace is a path"):
            trace.save(path)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(trace, tmp_path, monkeypatch):
    import safetensors.numpy
    from safetensors import SafetensorError

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    comparison = Comparison.of({"a": trace, "b": trace})
    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    for save, name in ((trace.save, "t.safetensors"), (comparison.save, "folder")):
        with pytest.raises(TransientError, match="cannot save .*No space left"):
            save(tmp_path / name)
    # the index alone, after the traces
    monkeypatch.setattr(trace_file, "write", lambda trace, path: path)
    with pytest.raises(TransientError, match="cannot save .*No space left"):
        comparison.save(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_a_recorder_has_the_columns_of_a_run():
    assert list(STEP_COLUMNS) == list(STEPS) and list(REQUEST_COLUMNS) == list(REQUESTS)


def test_freezing_after_other_edits_keeps_what_is_unedited():
    import torch

    unedited = torch.arange(6.0).reshape(3, 1, 2)
    tap = Tap("k", "r", ("law", "med"), ("a.q_proj",), torch.arange(3), 3, lambda position: unedited[position])
    assert torch.equal(freeze(0)(unedited + 100, tap)[1:], unedited[:1].expand(2, 1, 2))
    assert "unedited" in freeze.__doc__


@pytest.mark.parametrize("where", ["Watcher", "Recorder", "_run_writer"])
def test_an_interrupt_during_record_leaves_no_recorder_and_no_run(engine, tmp_path, monkeypatch, where):
    real = getattr(recording, where)

    def interrupted(*given):
        made = real(*given)
        os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setattr(recording, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.record("hidden_norm", run=tmp_path / "run")
    assert not engine.recording._watchers and not engine.recording._hooks
    monkeypatch.undo()
    with engine.record("throughput", run=tmp_path / "run"):
        pass
    assert open_run(tmp_path / "run").status == "complete"


def test_what_goes_wrong_while_a_recorder_opens_leaves_none(engine, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(recording, "Watcher", broken)
    with pytest.raises(RuntimeError):
        engine.record("hidden_norm", run=tmp_path / "run")
    assert not engine.recording._watchers and not engine.recording._hooks and not list((tmp_path / "run").iterdir())


def test_record_takes_no_run_that_is_no_path(engine):
    for path in (3, "a\0b"):
        with pytest.raises(UserError, match="the folder of a run is a path"):
            engine.record(run=path)
    assert not engine.recording._watchers


@pytest.mark.parametrize(
    ("owner", "name", "is_after", "error"),
    [
        (run_writer, "_begin", True, KeyboardInterrupt), (run_files, "write_json", True, KeyboardInterrupt),
        (run_files, "Stream", True, KeyboardInterrupt), (run_files.Stream, "_append", False, OSError),
        (run_writer.Path, "mkdir", True, KeyboardInterrupt), (run_writer.threading.Thread, "start", True, OSError),
    ],
)  # fmt: skip
def test_a_run_that_could_not_begin_may_be_begun_again(tmp_path, monkeypatch, owner, name, is_after, error):
    real, calls = getattr(owner, name), []

    def failing(*given, **named):
        calls.append(name)
        is_now = len(calls) == (2 if name in ("mkdir", "Stream") else 1)  # not the first of them
        if is_now and not is_after:
            raise error()
        made = real(*given, **named)
        if is_now:
            raise error()
        return made

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises((KeyboardInterrupt, OSError, UserError)):
        RunWriter(tmp_path / "run")
    monkeypatch.undo()
    gc.collect()
    left = [path for path in (tmp_path / "run").rglob("*") if path.name != "traces"]
    assert len(calls) and not left
    RunWriter(tmp_path / "run").close()
    assert open_run(tmp_path / "run").status == "complete"


def test_a_folder_with_somebody_s_traces_is_no_half_made_run(tmp_path):
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "traces" / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="an empty folder"):
        RunWriter(tmp_path / "run")
    assert (tmp_path / "run" / "traces" / "mine.txt").read_text() == "kept"


def test_a_run_whose_recording_stopped_is_interrupted_and_says_why(engine, tmp_path):
    recorder = engine.record("scalings", run=tmp_path / "run")
    engine.generate(PROMPT, **MIX)
    recorder.stop("keep a step", OSError("the disk is gone"))
    with pytest.raises(UserError, match="recording stopped"):
        recorder.close()
    run = open_run(tmp_path / "run")
    assert run.status == "interrupted" and "the disk is gone" in run.meta["ended_by"] and len(run.requests) == 1


@pytest.mark.parametrize("goes_to_a_run", [False, True])
def test_a_recorder_does_not_keep_the_distributions_of_requests(engine, tmp_path, goes_to_a_run):
    with engine.record("scalings", run=tmp_path / "run" if goes_to_a_run else None) as recorder:
        kept = []
        for seed in range(3):
            request = engine.submissions.make(
                PROMPT, mixture="mix", continuation=random_ids(5, seed), distributions=True
            )
            engine._queue([request])
            while request.finish_reason is None:
                engine.step()
            assert request.scored_distributions
            kept.append(weakref.ref(request))
            del request
        engine.step()
        gc.collect()
        assert not [each for each in kept if each() is not None]
        assert len(recorder.traces) == 3
    assert all(each.computed.sum() == 24 for each in recorder.traces.values())


def test_answers_of_several_are_named_where_one_id_was_meant(engine):
    answers = {**MIX, "n": 2, "temperature": 1.0}
    for opened in (engine.record("scalings", requests="nn"), engine.edit({"classifier:scalings": freeze()}, "nn")):
        with pytest.raises(UserError, match="'nn-0', 'nn-1' did: each answer of n > 1 has an id of its own"), opened:
            engine.generate(PROMPT, request_id="nn", **answers)
    with pytest.raises(UserError, match="'req-one' was to be .*did you mean 'req-once'"), \
            engine.record("scalings", requests="req-one"):
        engine.generate(PROMPT, request_id="req-once", **MIX)


def test_a_setting_cut_off_by_its_deadline_has_not_run(engine):
    found = compare(engine, PROMPT, {"a": {}, "late": {"deadline_s": 1e-6}, "b": {"tgt_non_granular_index": 0}}, **MIX)
    assert found.labels == ("a", "b") and "deadline" in found.failed["late"] and found.was_first is None
    with pytest.raises(UserError, match="1 of 2 settings ran.*deadline"):
        compare(engine, PROMPT, {"a": {}, "late": {"deadline_s": 1e-6}}, **MIX)


def test_a_comparison_says_what_stands_in_for_a_first_setting_that_failed(engine, tmp_path):
    from workbench.display.compare_figure import badges, description, facts

    settings = {"exact": {"adapter": "germann"}, "k=0": {"tgt_non_granular_index": 0}, "k=1": {}}
    found = compare(engine, PROMPT, settings, null=False, **MIX)
    note = "'exact', the first setting, failed: the others are compared with 'k=0'"
    back = Comparison.load(found.save(tmp_path / "kept"))
    for each in (found, back):
        assert each.was_first == "exact" and repr(each).splitlines()[1] == f"  NOTE: {note}"
        assert "as 'exact' failed" in each.says("k=0") and "as 'exact' failed" in facts(each)
        assert note in description(each, "x") and "not compared with 'exact'" in badges(each)
        assert note in each.summary().set_index("setting").loc["exact", "error"]
    right = compare(engine, PROMPT, {"k=0": {}, "exact": {"adapter": "germann"}, "k=1": {}}, null=False, **MIX)
    assert right.was_first is None and "NOTE" not in repr(right) and "as '" not in facts(right)
    with pytest.raises(UserError, match="was_first is a setting that failed"):
        Comparison.of(dict(right.traces), was_first="k=0")


def test_a_bench_and_a_run_say_the_same_of_the_machine():
    from workbench.sweep import machine

    said = machine.environment("cpu")
    assert {key: said[key] for key in said if key != "created"} == run_meta.environment(None, said["threads"])
