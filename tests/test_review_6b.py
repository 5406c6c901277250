"""What a second review of recording found: half-made runs, stopped recordings, and arguments of another sort.

Run: pytest tests/test_review_6b.py
"""

from __future__ import annotations

import numpy as np
import pytest

from workbench import Comparison, Trace, UserError, list_runs, open_run
from workbench.edits import freeze
from workbench.edits.edit import Tap
from workbench.errors import TransientError
from workbench.instrument import trace_file
from workbench.instrument.recorded import Recorded
from workbench.instrument.recorder import REQUEST_COLUMNS, STEP_COLUMNS
from workbench.instrument.run import remove_run
from workbench.instrument.run_columns import REQUESTS, STEPS
from workbench.instrument.run_list import open_runs
from workbench.instrument.run_writer import RunWriter


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
