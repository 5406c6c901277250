"""`workbench sweep` and `workbench report`: what they print, what they skip, and every mistake one sentence.

Run: pytest tests/test_cli_sweep.py
"""

from __future__ import annotations

import re

import pandas as pd
import pytest

from workbench.cli import main
from workbench.errors import UserError
from workbench.sweep import tasks

TOML = """
question = "Which?"
repeats = 2

[axes]
seed = [0, 1, 2]
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """A grid whose units are measured by hand, and fail for seed 2 while `failing` is there."""
    (tmp_path / "toy.toml").write_text(TOML)

    def measure(point, repeat, folder):
        if point.seed == 2 and (tmp_path / "failing").exists():
            raise UserError("seed 2 is out")
        return {"tok_s": 10.0 * point.seed + repeat}

    monkeypatch.setattr(tasks, "measure", measure)
    return tmp_path / "toy.toml"


@pytest.fixture
def run(capsys, grid):
    def call(command, *arguments, out="out") -> tuple[int, str, str]:
        where = "--results" if command == "report" else "--out"
        try:
            code = main([command, *map(str, arguments), where, str(grid.parent / out)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_a_sweep_says_what_it_did_and_goes_on_where_it_stopped(run, grid):
    code, out, err = run("sweep", grid, "--limit", 1)
    assert code == 0 and "toy: 2 run, 0 finished before, 0 failed" in out and "2/2" in err
    code, out, _ = run("sweep", grid)
    assert code == 0 and "toy: 4 run, 2 finished before, 0 failed" in out
    frame = pd.read_parquet(grid.parent / "out" / "toy.parquet")
    assert sorted(frame.tok_s) == [0, 1, 10, 11, 20, 21] and f"workbench report {grid}" in out
    assert "0 run, 6 finished before" in run("sweep", grid)[1]


def test_a_failing_point_is_named_and_tried_again_when_asked(run, grid):
    (grid.parent / "failing").touch()
    code, out, err = run("sweep", grid)
    assert code == 1 and "4 run, 0 finished before, 2 failed" in out and "2 × seed 2 is out" in out
    assert "failed: seed=2 (repeat 0): seed 2 is out" in err
    code, out, _ = run("sweep", grid)
    # what failed before is no success now
    assert code == 1 and "6 finished before, 0 failed, 2 failed before: --retry-failed runs them again" in out
    assert "(2 failed)" in run("sweep", grid, "--dry-run")[1]
    (grid.parent / "failing").unlink()
    code, out, err = run("sweep", grid, "--retry-failed")
    assert code == 0 and "2 run, 4 finished before, 0 failed" in out and "6/6" in err and "7/6" not in err


def test_a_dry_run_lists_the_points_and_runs_nothing(run, grid):
    code, out, _ = run("sweep", grid, "--dry-run", "--only", "seed=1")
    assert code == 0 and out.startswith("Which?\n") and "0/2  seed=1" in out and "seed=0" not in out
    assert "1 points × 2 repeats; 0 of 2 finished" in out and not (grid.parent / "out").exists()


def test_shards_are_run_apart_and_merged(run, grid):
    for index in (1, 2):
        assert run("sweep", grid, "--shard", f"{index}/2", out=f"part-{index}")[0] == 0
    parts = [grid.parent / f"part-{index}" for index in (1, 2)]
    assert [len(pd.read_parquet(part / "toy.parquet")) for part in parts] == [4, 2]
    code, out, _ = run("sweep", "merge", grid, *parts, out="all")
    assert code == 0 and "6 of 6 runs in" in out and len(pd.read_parquet(grid.parent / "all" / "toy.parquet")) == 6
    code, out, _ = run("report", grid, out="all")
    written = [grid.parent / "all" / name for name in ("toy.md", "toy.html", "toy-throughput.png")]
    assert code == 0 and out.split() == [str(path) for path in written] and all(path.is_file() for path in written)
    assert "seed=2" in written[0].read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.toml"], "nothing.toml' cannot be read"), (["{grid}", "--only", "sed=1"], "did you mean 'seed'"),
        (["{grid}", "--only", "seed=7"], "fits none of the 3 points"), (["{grid}", "--limit", "0"], "--limit must be"),
        (["{grid}", "--shard", "3/2"], "--shard is written I/N"), (["{grid}", "--shard", "²/3"], "--shard is written"),
        (["{grid}", "--shard", "1"], "--shard is written I/N"), (["{grid}", "more"], "one grid at a time"),
        (["{grid}", "--jobs", "0"], "--jobs must be at least 1"), (["{grid}", "--gpus", "1"], "read with --ray only"),
        (["{grid}", "--jobs", "2", "--ray"], "--jobs .* or --ray .*, not both"),
        (["{grid}", "--dry-run", "--jobs", "2"], "--dry-run runs nothing"),
        (["merge", "{grid}"], "merge takes a grid and at least one results folder"),
        (["merge", "{grid}", "{tmp}/none"], "there is no folder"),
        (["merge", "{grid}", "{tmp}"], "holds no results of grid 'toy'"),
        (["merge", "{grid}", "{tmp}", "--limit", "1"], "it does not read '--limit'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(run, grid, arguments, said):
    given = [each.format(grid=grid, tmp=grid.parent) for each in arguments]
    code, out, err = run("sweep", *given)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in err, (out, err)
    assert re.search(said, errors[0]), errors[0]


def test_results_that_are_something_else_are_not_touched(run, grid):
    (grid.parent / "out").write_text("mine")
    code, _, err = run("sweep", grid)
    assert code == 2 and "cannot write results" in err and (grid.parent / "out").read_text() == "mine"
    (grid.parent / "other").mkdir()
    (grid.parent / "other" / "toy").write_text("mine")
    code, _, err = run("sweep", grid, out="other")
    assert code == 2 and "is a file, and results go to a folder of that name" in err


def test_reports_of_nothing_say_so(run, grid):
    code, _, err = run("report", grid)
    assert code == 2 and "run `workbench sweep` on the grid first" in err
    run("sweep", grid)
    (grid.parent / "out" / "toy-places.parquet").write_text("no table")
    code, _, err = run("report", grid)
    assert code == 2 and "is no table of places" in err


def test_a_disk_that_is_full_ends_the_command_with_a_sentence(run, grid, monkeypatch):
    def full(point, repeat, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks, "measure", full)
    code, _, err = run("sweep", grid)
    assert code == 2 and "No space left on device; what is finished is kept" in err and "Traceback" not in err


def test_other_errors_of_the_system_are_the_point_s_own(run, grid, monkeypatch):
    def lost(point, repeat, folder):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(tasks, "measure", lost)
    code, out, _ = run("sweep", grid)
    assert code == 1 and "6 × ConnectionResetError: [Errno 104] Connection reset by peer" in out


def test_runs_of_an_edited_trace_are_missing_and_one_line_says_so(run, grid):
    grid.write_text('repeats = 2\n[fixed]\narrivals = "trace"\ntrace = "t.jsonl"\n[axes]\nseed = [0, 1]\n')
    trace = grid.parent / "t.jsonl"
    trace.write_text("one")
    assert run("sweep", grid)[0] == 0 and "read another" not in run("sweep", grid)[1]
    trace.write_text("two")
    said = "toy: 4 finished runs read another trace ('t.jsonl') than there is now: counted as missing\n"
    code, out, _ = run("sweep", grid, "--dry-run")
    assert code == 0 and out.count(said) == 1 and "0 of 4 finished" in out
    code, out, err = run("sweep", grid, "--limit", 1)
    assert code == 0 and out.startswith(said) and "2 run, 0 finished before" in out and "2/2" in err
    code, out, _ = run("sweep", "merge", grid, grid.parent / "out", out="all")
    assert code == 0 and "2 finished runs read another trace" in out and "2 of 4 runs in" in out


def test_a_table_without_units_keeps_its_rows(run, grid):
    run("sweep", grid)
    for path in sorted((grid.parent / "out" / "toy").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, out, _ = run("sweep", grid, "--only", "seed=1", "--limit", 1)
    assert code == 0 and "2 run, 0 finished before" in out
    assert sorted(pd.read_parquet(grid.parent / "out" / "toy.parquet").tok_s) == [0, 1, 10, 11, 20, 21]
