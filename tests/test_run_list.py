"""Many runs: listed, queried together, and names that are SQL stay names. Run: pytest tests/test_run_list.py"""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_run import REQUEST, STEP, named
from trace_problem import small_trace

from workbench import RunWriter, UserError, list_runs, open_run, open_runs
from workbench.instrument import run_columns
from workbench.instrument.run_meta import environment, meta_of
from workbench.instrument.trace import Trace

EVIL = ("a'); DROP TABLE steps; --", 'b"; COPY steps TO \'stolen.csv\'; "', "steps", "<script>", "{}%s\\")


@pytest.fixture
def runs(tmp_path):
    """A folder with three runs: two complete, the second with a column of its own, and one interrupted."""
    folder = tmp_path / "runs"
    for index, name in enumerate(("first", "second")):
        extra = {"watts": float} if index else {}
        with RunWriter(folder / name, meta={"base": "demo", "seed": index}, step_columns=extra) as writer:
            for step in range(2 + index):
                writer.step({**STEP, "step": step, **dict.fromkeys(extra, 5.0)})
            writer.request(REQUEST)
            writer.trace(named("req-1"))
    with pytest.raises(RuntimeError), RunWriter(folder / "third", meta={"base": "other", "device": 3}):
        raise RuntimeError
    return folder


def test_runs_are_listed_oldest_first_with_what_they_hold(runs):
    with RunWriter(runs / "a-later-one") as writer:
        writer.step(STEP)
        writer.flush()
        (runs / "notes").mkdir()
        (runs / "README.txt").write_text("not a run")
        frame = list_runs(runs)
    assert frame["run"].tolist() == ["first", "second", "third", "a-later-one"]
    assert frame["status"].tolist() == ["complete", "complete", "interrupted", "running"]
    assert frame["steps"].tolist() == [2, 3, 0, 1] and frame["traces"].tolist() == [1, 1, 0, 0]
    assert frame["tokens"].tolist() == [4, 4, 0, 0] and frame["base"].tolist()[:3] == ["demo", "demo", "other"]
    assert frame["problem"].isna().all() and frame["device"].tolist()[2] == "3"


def test_a_damaged_run_is_a_line_with_its_problem(runs):
    (runs / "first" / "run.json").write_text("{")
    (runs / "second" / "steps.parquet").write_bytes(b"nothing")
    frame = list_runs(runs).set_index("run")
    assert frame.loc["first", "status"] == "unreadable" and "is not valid JSON" in frame.loc["first", "problem"]
    assert frame.loc["second", "status"] == "complete" and "is damaged" in frame.loc["second", "problem"]
    assert frame.loc["second", "requests"] == 1 and pd.isna(frame.loc["third", "problem"])


def test_where_there_are_no_runs_it_is_said(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    assert list_runs(tmp_path / "empty").empty
    with pytest.raises(UserError, match="no run in"):
        open_runs(tmp_path / "empty")
    for where, said in ((runs / "first", "is a run itself"), (runs / "nowhere", "no such folder"),
                        (runs / "first" / "run.json", "it is a file")):
        with pytest.raises(UserError, match=said):
            list_runs(where)


def test_one_query_reads_many_runs(runs):
    many = open_runs(runs)
    assert list(many) == ["first", "second", "third"] and many["first"].name == "first"
    frame = many.sql("SELECT run, count(*) AS n, max(watts) AS watts FROM steps GROUP BY run ORDER BY run")
    assert frame["n"].tolist() == [2, 3] and pd.isna(frame["watts"][0]) and frame["watts"][1] == 5
    frame = many.sql("""
        SELECT runs.run, runs.seed, count(*) AS tokens FROM tokens JOIN runs USING (run)
        GROUP BY ALL ORDER BY runs.run
    """)
    assert frame["tokens"].tolist() == [4, 4] and frame["seed"].tolist() == [0, 1]
    assert many.sql("SELECT json_extract_string(meta, '$.base') AS base FROM runs WHERE status = 'interrupted'")[
        "base"
    ].tolist() == ["other"]
    assert many.sql("SELECT * FROM steps").columns[0] == "run" and len(many.frame) == 3


def test_runs_may_be_given_one_by_one(runs):
    many = open_runs([runs / "second", open_run(runs / "first")])
    assert list(many) == ["second", "first"] and "second" in repr(many) and "<table" in many._repr_html_()
    with pytest.raises(UserError, match="a run is given twice"):
        open_runs([runs / "first", runs / "first"])


def test_names_that_are_sql_stay_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = replace(small_trace(adapters=len(EVIL), tokens=EVIL), adapters=EVIL)
    with RunWriter("runs/it's", meta={"base": EVIL[0]}) as writer:
        writer.step(STEP)
        writer.request({**REQUEST, "adapter": EVIL[1], "text": EVIL[0]})
        writer.trace(named(EVIL[0], trace))
    for source in (open_run("runs/it's"), open_runs("runs")):
        assert source.sql("SELECT adapter FROM requests")["adapter"].tolist() == [EVIL[1]]
        assert source.sql("SELECT text FROM tokens ORDER BY token")["text"].tolist() == list(EVIL)
        assert set(source.sql("SELECT DISTINCT adapter FROM tokens")["adapter"]) <= set(EVIL)
        assert source.sql("SELECT count(*) AS n FROM steps")["n"][0] == 1
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.parametrize(("query", "said"), [
    ("SELECT * FROM step", "names a table 'step'; did you mean 'steps'?; the tables are 'steps', 'requests', 'tokens'"),
    ("SELEC 1", "syntax error"), ("SELECT row FROM steps", '"rows"'), ("  ", "a query is SQL as text"),
    (None, "a query is SQL as text"), ("SELECT * FROM writer", "names a table 'writer'"),
    ("SELECT * FROM connection", "names a table 'connection'"),
])
def test_a_wrong_query_is_a_sentence(runs, query, said):
    writer = pd.DataFrame({"secret": [1]})  # a variable of the caller is no table
    with pytest.raises(UserError) as error:
        open_run(runs / "first").sql(query)
    assert said in str(error.value) and "\n" not in str(error.value) and len(writer) == 1


def test_tokens_are_made_only_for_a_query_that_names_them(runs, monkeypatch):
    run, asked = open_run(runs / "first"), []
    monkeypatch.setattr(type(run), "table", lambda self, table: asked.append(table) or _table(table))
    run.sql("SELECT * FROM Steps")
    assert asked == ["steps"]
    run.sql('SELECT count(*) FROM "tokens" JOIN requests USING (request_id)')
    assert asked == ["steps", "requests", "tokens"]


def _table(name):
    return run_columns.schema(run_columns.TABLES[name]).empty_table()


def test_a_hundred_thousand_tokens_are_listed_and_queried_without_their_values(tmp_path):
    tokens, sites, adapters = 5000, 64, 4
    rng = np.random.default_rng(0)
    values = rng.random((tokens, sites, adapters), np.float32)
    positions = np.arange(tokens)
    trace = Trace(
        values=values, adapters=tuple("abcd"), sites=tuple(f"model.layers.{site}.q_proj" for site in range(sites)),
        token_ids=positions, tokens=("x",) * tokens, positions=positions, generated=positions > 9, source=positions,
        draft=np.full(tokens, -1), time_s=np.zeros(tokens),
    )  # fmt: skip
    with RunWriter(tmp_path / "run") as writer:
        writer.trace(named("req-0", trace))
    # the other 19 are links to the first file
    folder, table = tmp_path / "run" / "traces", open_run(tmp_path / "run").table("tokens")
    with RunWriter(tmp_path / "large") as writer:
        for index in range(20):
            os.link(folder / "00001-req-0.safetensors", tmp_path / "large" / "traces" / f"{index:05d}.safetensors")
            line = {"request_id": f"req-{index}", "file": f"{index:05d}.safetensors"}
            with (tmp_path / "large" / "traces" / "index.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            ids = run_columns.arrow().array([f"req-{index}"] * tokens)
            writer._streams["tokens"].append(table.set_column(0, "request_id", ids).to_batches()[0])
    tracemalloc.start()
    assert list_runs(tmp_path).set_index("run").loc["large", "tokens"] == 20 * tokens
    run = open_run(tmp_path / "large")
    found = run.sql("SELECT adapter, count(*) AS n FROM tokens GROUP BY adapter")
    lazy = run.trace("req-7")
    np.testing.assert_array_equal(lazy.values[4321], values[4321])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["n"].sum() == 20 * tokens and len(run.trace_ids) == 20
    # numpy tells tracemalloc of its arrays: one trace's values are 5.1 MB, all of them 102
    assert peak < values.nbytes / 2


class FakeEngine:
    """What `meta_of` asks an engine for."""

    base_id, device = "demo", "cpu"

    def __init__(self):
        from types import SimpleNamespace as Some

        from workbench.config import EngineConfig

        self.config = EngineConfig(token="hf_secretsecretsecret", dtype="bfloat16", seed=5)
        entry = Some(name="german", content_hash="abc", where={"token": "hf_secretsecretsecret"})
        self.adapters = Some(entries=lambda: [entry], config=Some(max_num_loras=3))
        self.mixtures = {"demo": Some(content_key="def", config=Some(softmax_temperature=0.5))}


def test_what_a_run_keeps_of_an_engine(tmp_path):
    meta = meta_of(FakeEngine())
    assert (meta["base"], meta["dtype"], meta["device"], meta["seed"]) == ("demo", "bfloat16", "cpu", 5)
    assert meta["mixtures"] == {"demo": "def"} and meta["adapters"] == {"german": "abc"}
    assert meta["config"]["max_requests"] == 64 and meta["lora"] == {"max_num_loras": 3}
    assert meta["mixture_settings"] == {"demo": {"softmax_temperature": 0.5}}
    RunWriter(tmp_path / "run", meta=meta).close()
    assert "hf_secret" not in (tmp_path / "run" / "run.json").read_text()
    assert open_run(tmp_path / "run").meta["config"] == meta["config"]


def test_the_environment_is_read_without_importing_what_it_names():
    found = environment(gpu="H200", threads=3)
    assert (found["gpu"], found["threads"]) == ("H200", 3) and found["versions"]["numpy"] == np.__version__
