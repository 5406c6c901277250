"""A run folder: what is put in comes out, and what is no run is refused in a sentence. Run: pytest tests/test_run.py"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trace_problem import make_trace, small_trace

from workbench import Run, RunWriter, UserError, open_run
from workbench.instrument import run_columns
from workbench.instrument.run import remove_run

STEP = {"step": 0, "time_s": 0.5, "duration_ms": 1.25, "rows": 3, "tokens": 2, "kv_bytes": 1 << 40}
REQUEST = {"request_id": "req-1", "adapter": None, "mixture": "demo", "tgt_non_granular_index": 4, "tok_s": 3.5,
           "edits": ("ablate('german')",), "prompt": "hello", "text": " world"}  # fmt: skip


def named(request_id: str, trace=None):
    trace = trace or small_trace()
    return replace(trace, metadata={**trace.metadata, "request_id": request_id})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def complete(folder):
    """A run with three steps, a request and a trace."""
    with RunWriter(folder, meta={"base": "demo", "seed": 7}) as writer:
        for step in range(3):
            writer.step({**STEP, "step": step})
        writer.request(REQUEST)
        writer.trace(named("req-1"))
    return folder


def test_what_is_written_is_read(complete):
    run = open_run(complete)
    assert (run.status, run.name, run.meta["base"], run.meta["seed"]) == ("complete", "run", "demo", 7)
    assert list(run.steps.columns) == list(run_columns.STEPS)
    assert run.steps["step"].tolist() == [0, 1, 2] and run.steps["kv_bytes"].tolist() == [1 << 40] * 3
    row = run.requests.iloc[0]
    assert {key: row[key] for key in ("request_id", "mixture", "prompt", "text")} == {
        key: REQUEST[key] for key in ("request_id", "mixture", "prompt", "text")
    }
    assert row["tgt_non_granular_index"] == 4 and list(row["edits"]) == ["ablate('german')"]
    assert pd.isna(row["adapter"]) and pd.isna(row["error"])  # None, and never said
    trace = run.trace()
    np.testing.assert_array_equal(trace.values, small_trace().values)
    assert run.trace_ids == ("req-1",) and trace.metadata["request_id"] == "req-1"


def test_tokens_say_which_adapter_leads_and_by_how_much(folder):
    trace = named("req-9", make_trace(layers=3))
    with RunWriter(folder) as writer:
        writer.trace(trace)
    tokens, means = open_run(folder).tokens, trace.token_means()
    assert tokens["text"].tolist() == list(trace.tokens) and set(tokens["request_id"]) == {"req-9"}
    for name, wanted in (("token_id", trace.token_ids), ("position", trace.positions), ("source", trace.source),
                         ("generated", trace.generated), ("draft", trace.draft), ("time_s", trace.time_s)):
        np.testing.assert_array_equal(tokens[name], wanted)
    np.testing.assert_allclose(tokens["share"].to_numpy()[:-1], means.max(1)[:-1], rtol=1e-6)
    assert tokens["adapter"].tolist()[:-1] == [trace.adapters[index] for index in means.argmax(1)[:-1]]
    assert pd.isna(tokens["adapter"].iloc[-1]) and np.isnan(tokens["share"].iloc[-1])  # never an input


def test_a_trace_without_scalings_has_tokens_without_a_leader(folder):
    trace = small_trace()
    bare = replace(trace, values=np.zeros((4, 0, 0), np.float32), adapters=(), sites=(), source=np.full(4, -1))
    with RunWriter(folder) as writer:
        writer.trace(named("base", bare))
    tokens = open_run(folder).tokens
    assert len(tokens) == 4 and tokens["adapter"].isna().all() and tokens["share"].isna().all()


@pytest.mark.parametrize("request_id", ["../../x", "/etc/passwd", "a/b", "CON", "", "." * 300, "é✓", "x\0y", "a b"])
def test_a_request_id_never_decides_where_a_file_lies(folder, request_id):
    with RunWriter(folder) as writer:
        for name in (request_id, "other"):
            path = writer.trace(named(name))
            assert path.parent == folder / "traces" and re.fullmatch(r"[a-z0-9_-]+\.safetensors", path.name)
    run = open_run(folder)
    assert run.trace_ids == (request_id or "trace-1", "other")
    assert run.trace(request_id or "trace-1").num_tokens == 4
    assert not [path for path in folder.parent.iterdir() if path != folder]


def test_ids_that_differ_only_in_case_are_two_traces(folder):
    with RunWriter(folder) as writer:
        for index, name in enumerate(("Req", "req")):
            writer.trace(named(name, small_trace(adapters=index + 1)))
    run = open_run(folder)
    assert [len(run.trace(name).adapters) for name in ("Req", "req")] == [1, 2]


def test_a_second_trace_of_one_id_is_kept_beside_the_first(folder):
    with RunWriter(folder) as writer:
        for adapters in (1, 2, 3):
            writer.trace(named("a", small_trace(adapters=adapters)))
    for _ in range(2):
        run = open_run(folder)
        assert [len(run.trace(name).adapters) for name in ("a", "a#2", "a#3")] == [1, 2, 3]
        assert set(run.tokens["request_id"]) == {"a", "a#2", "a#3"}
        (folder / "traces" / "index.jsonl").unlink(missing_ok=True)


def test_a_lost_index_is_made_up_from_the_traces(complete):
    (complete / "traces" / "index.jsonl").write_text('{"request_id": "req-1", "fi')
    assert open_run(complete).trace_ids == ("req-1",)


def test_an_index_that_points_elsewhere_is_not_followed(complete, tmp_path):
    small_trace().save(tmp_path / "secret.safetensors")
    line = json.dumps({"request_id": "evil", "file": "../../secret.safetensors"})
    (complete / "traces" / "index.jsonl").write_text(line + "\n")
    assert open_run(complete).trace_ids == ("req-1",)


def test_values_are_read_only_when_they_are_looked_at(folder):
    with RunWriter(folder) as writer:
        for index in range(3):
            writer.trace(named(f"req-{index}", make_trace(layers=2)))
    lazy, whole = (open_run(folder).trace("req-1", lazy=lazy).values for lazy in (True, False))
    assert isinstance(lazy.base, np.memmap) and not isinstance(whole.base, np.memmap)
    np.testing.assert_array_equal(lazy, whole)
    for path in (folder / "traces").glob("*.safetensors"):
        path.write_bytes(b"")
    again = open_run(folder)
    assert again.trace_ids == ("req-0", "req-1", "req-2")
    assert again.sql("SELECT count(*) AS n FROM tokens WHERE adapter = 'german'")["n"][0] > 10
    assert "traces: 3" in repr(again)


@pytest.mark.parametrize(("row", "said"), [
    ({"step": 1, "row": 2}, "no column 'row'; did you mean 'rows'?"),
    ({"watts": 2.0}, "step_columns={'watts': float}"),
])
def test_an_unknown_column_is_refused_at_once(folder, row, said):
    with RunWriter(folder) as writer, pytest.raises(UserError, match=re.escape(said)):
        writer.step(row)
    assert open_run(folder).steps.empty


def test_a_declared_column_is_kept(folder):
    with RunWriter(folder, step_columns={"watts": float}, request_columns={"grade": str}) as writer:
        writer.step({**STEP, "watts": 3})
        writer.request({**REQUEST, "grade": "good"})
    run = open_run(folder)
    assert run.steps["watts"].tolist() == [3.0] and run.requests["grade"].tolist() == ["good"]
    for wrong in ({"rows": int}, {" ": int}, {"x": list}):
        with pytest.raises(UserError, match="column"):
            RunWriter(folder.parent / "other", step_columns=wrong)


@pytest.mark.filterwarnings("ignore:run .*takes whole numbers")
def test_a_value_that_does_not_fit_is_said_and_costs_no_other_row(folder):
    writer = RunWriter(folder)
    for rows in ("many", 1, np.int64(3), 2.0, 2.5, True, float("inf"), 1 << 70):
        writer.step({**STEP, "rows": rows})
    with pytest.raises(UserError, match="column 'rows' of the steps takes whole numbers, not 'many'"):
        writer.close()
    assert open_run(folder).steps["rows"].tolist() == [1, 3, 2, 1]


def test_any_text_can_be_kept(folder):
    text = "\udcff \x00 \u202e <script> שלום 👩\u200d👧"
    with RunWriter(folder) as writer:
        writer.request({"request_id": "a", "text": text})
    assert open_run(folder).requests["text"][0] == text.replace("\udcff", "\\udcff")


def test_no_secret_is_stored(folder):
    token = "hf_" + "a1B2" * 8
    meta = {"config": {"token": token, "max_tokens": 5, "password": "p",
                       "base": f"https://me:{token}@host/x", "hub": {"api_key": "k", "deep": [{"HF_TOKEN": "t9"}]}},
            "note": f"used {token} here"}  # fmt: skip
    RunWriter(folder, meta=meta).close()
    text = (folder / "run.json").read_text()
    assert token not in text and '"p"' not in text and '"k"' not in text and "t9" not in text
    stored = open_run(folder).meta
    assert stored["config"]["max_tokens"] == 5 and stored["config"]["base"].endswith("@host/x")


def test_the_file_says_where_it_was_made(complete):
    meta = json.loads((complete / "run.json").read_text())
    assert meta["environment"]["python"] == sys.version.split()[0] and meta["environment"]["versions"]["torch"]
    assert meta["environment"]["cores"] >= 1 and meta["created"] <= meta["closed"]
    assert (meta["format"], meta["version"]) == ("lora-workbench-run", 1) and meta["workbench"]


@pytest.mark.parametrize(("meta", "said"), [
    ({"version": 3}, "cannot have the key 'version'"), ({"x": object()}, "cannot be stored as JSON"),
    ({"x": float("nan")}, "cannot be stored as JSON"), ({1: 2}, "a dict with text as keys"),
    ({"environment": 3}, "is a dict, not 3"),
])
def test_metadata_that_cannot_be_kept_makes_no_folder(folder, meta, said):
    with pytest.raises(UserError, match=said):
        RunWriter(folder, meta=meta)
    assert not folder.exists()


def test_nothing_is_ever_overwritten(complete, tmp_path):
    before = {path: path.read_bytes() for path in complete.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds a run already; give another folder"):
        RunWriter(complete)
    assert {path: path.read_bytes() for path in complete.rglob("*") if path.is_file()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds 'notes.txt'"):
        RunWriter(other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="it is a file"):
        RunWriter(other / "notes.txt")
    with pytest.raises(UserError, match="cannot make the run folder .*: Not a directory"):
        RunWriter(other / "notes.txt" / "run")


def test_two_writers_cannot_share_a_folder_nor_write_what_is_closed(folder):
    with RunWriter(folder) as writer, pytest.raises(UserError, match="holds a run already"):
        RunWriter(folder)
    with pytest.raises(UserError, match="is closed"):
        writer.step(STEP)
    with pytest.raises(UserError, match="is closed"):
        writer.trace(named("b"))
    writer.close()
    assert writer.error is None


def test_a_run_left_by_an_exception_is_interrupted(folder):
    with pytest.raises(RuntimeError), RunWriter(folder) as writer:
        writer.step(STEP)
        raise RuntimeError("no")
    run = open_run(folder)
    assert run.status == "interrupted" and "RuntimeError" in repr(run) and len(run.steps) == 1


def damage(folder, what: str) -> None:
    if what == "removed":
        (folder / "run.json").unlink()
    elif what == "json":
        (folder / "run.json").write_text('{"format":')
    elif what.startswith("{"):
        (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | json.loads(what)))
    else:
        (folder / what).write_bytes(b"PAR1 this is not it")


@pytest.mark.parametrize(("what", "said"), [
    ("removed", "is no run, it has no run.json; it holds 'requests.parquet', 'steps.parquet'"),
    ("json", "is not valid JSON"),
    ('{"format": "tensorboard"}', "is no run of this workbench"),
    ('{"version": 9}', "has run version 9; this workbench reads up to 1: update it"),
    ('{"version": "1"}', "is damaged: its version is '1'"),
])
def test_what_is_no_run_is_refused(complete, what, said):
    damage(complete, what)
    with pytest.raises(UserError, match=re.escape(said)):
        open_run(complete)


def test_a_damaged_part_is_named_and_the_rest_is_read(complete):
    damage(complete, "steps.parquet")
    run = open_run(complete)
    with pytest.raises(UserError, match="steps.parquet' is damaged"):
        _ = run.steps
    assert len(run.requests) == 1 and "is damaged" in repr(run)
    (complete / "steps.parquet").unlink()
    with pytest.raises(UserError, match="is damaged: steps.parquet is missing"):
        _ = open_run(complete).steps
    path = next((complete / "traces").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="truncated"):
        open_run(complete).trace()
    (complete / "traces" / path.name).unlink()
    with pytest.raises(UserError, match="the trace of 'req-1', .* is missing"):
        open_run(complete).trace()


def test_where_there_is_no_run_the_nearest_thing_is_said(complete, tmp_path):
    with pytest.raises(UserError, match="runs in it: 'run'"):
        open_run(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        open_run(tmp_path / "rum")
    with pytest.raises(UserError, match="a file; a run is a folder"):
        open_run(complete / "steps.parquet")
    assert open_run(complete / "run.json").name == "run"
    run = open_run(complete)
    with pytest.raises(UserError, match="no trace of request 'req-2' in run 'run'; did you mean 'req-1'?"):
        run.trace("req-2")


def test_which_trace_must_be_said_where_there_are_several(folder):
    with RunWriter(folder) as writer:
        run = open_run(folder)
        with pytest.raises(UserError, match="has no traces"):
            run.trace()
        writer.trace(named("a"))
        writer.trace(named("b"))
        with pytest.raises(UserError, match="has 2 traces \\('a', 'b'\\); name one"):
            run.trace()


def test_a_summary_in_a_notebook_is_escaped(folder):
    RunWriter(folder, name="<script>alert(1)</script>", meta={"base": "<b>"}).close()
    shown = open_run(folder)._repr_html_()
    assert "<script" not in shown and "&lt;b&gt;" in shown
    run = open_run(folder)
    assert isinstance(run, Run)
    remove_run(folder)
    assert not folder.exists() and "<script>" in repr(run)


def test_only_a_run_is_deleted(complete, tmp_path):
    (complete / "traces" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="it holds 'notes.txt', which is not of the run"):
        remove_run(complete)
    (complete / "traces" / "notes.txt").unlink()
    with RunWriter(tmp_path / "busy"), pytest.raises(UserError, match="is being written"):
        remove_run(tmp_path / "busy")
    with pytest.raises(UserError, match="is no run"):
        remove_run(tmp_path)
    remove_run(complete)
    assert not complete.exists()


def test_a_run_is_written_and_read_without_torch(tmp_path):
    code = (
        "import sys\n"
        "from workbench import RunWriter, open_run, list_runs\n"
        "assert not {'pyarrow', 'duckdb', 'pandas'} & set(sys.modules)\n"
        "with RunWriter('run') as writer: writer.step({'step': 1})\n"
        "assert open_run('run').sql('SELECT sum(step) AS s FROM steps')['s'][0] == 1 and len(list_runs('.')) == 1\n"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr
