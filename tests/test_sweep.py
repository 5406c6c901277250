"""Sweeps: resumable, one point's failure its own, nothing lost by kills, interrupts and full disks.

Run: pytest tests/test_sweep.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_workers import deadly, figures, killed_once

from workbench import UserError
from workbench.sweep import backends
from workbench.sweep.backends import Here, Processes
from workbench.sweep.grid import Grid
from workbench.sweep.merging import merge
from workbench.sweep.passages import switch_place
from workbench.sweep.places import places_path, read_places
from workbench.sweep.runner import sweep, wanted_units
from workbench.sweep.store import Store, units_of

GRID = {"name": "toy", "repeats": 2, "axes": {"seed": [0, 1, 2, 3]}}


@pytest.fixture
def grid() -> Grid:
    return Grid.of(GRID)


def run(store, units=None, measure=figures, **options):
    return sweep(store, units_of(store.grid) if units is None else units, Here(measure), **options)


def rows_of(store) -> list[tuple]:
    frame = pd.read_parquet(store.table)
    return sorted(zip(frame.seed, frame["repeat"], frame.status, frame.tok_s, strict=True))


EXPECTED = sorted((seed, repeat, "done", 10.0 * seed + repeat) for seed in range(4) for repeat in range(2))


def test_a_sweep_gives_a_folder_per_unit_and_one_table(tmp_path, grid):
    store, seen = Store(tmp_path, grid), []
    report = run(store, progress=lambda unit, result: seen.append(unit.name))
    assert report.done == seen == [unit.name for unit in units_of(grid)] and not report.failed and not report.left
    assert rows_of(store) == EXPECTED
    for unit in units_of(grid):
        assert (store.path(unit) / "kept.txt").read_text() == str(unit.point.seed)
        result = store.result(unit)
        assert result["settings"] == unit.point.settings and result["environment"]["cpu"] and result["seconds"] > 0
    assert not list(store.folder.glob("**/*.part"))


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_what_is_finished_is_not_run_again(tmp_path_factory, first, second):
    grid = Grid.of(GRID)
    store, units, ran = Store(tmp_path_factory.mktemp("out"), grid), units_of(grid), []

    def measure(point, repeat, folder):
        ran.append((point.seed, repeat))
        return figures(point, repeat, folder)

    for chosen in (first, second, set(range(8))):
        run(store, [units[number] for number in sorted(chosen)], measure)
    assert len(ran) == len(set(ran)) == 8 and rows_of(store) == EXPECTED


def test_a_failing_point_is_recorded_and_the_others_run(tmp_path, grid):
    def measure(point, repeat, folder):
        if point.seed == 2:
            raise UserError("no such adapter") if repeat else ZeroDivisionError("by zero")
        return figures(point, repeat, folder)

    store = Store(tmp_path, grid)
    report = run(store, measure=measure)
    assert len(report.done) == 6 and set(report.errors.values()) == {"ZeroDivisionError: by zero", "no such adapter"}
    frame = pd.read_parquet(store.table)
    assert set(frame[frame.seed == 2].status) == {"failed"} and frame[frame.seed == 2].tok_s.isna().all()
    assert len(run(store).skipped) == 8
    again = run(store, retry_failed=True)
    assert len(again.done) == 2 and not again.failed and rows_of(store) == EXPECTED


def test_ctrl_c_stops_after_the_unit_and_keeps_everything(tmp_path, grid, capsys):
    def measure(point, repeat, folder):
        if (point.seed, repeat) == (1, 0):
            os.kill(os.getpid(), signal.SIGINT)
        return figures(point, repeat, folder)

    store = Store(tmp_path, grid)
    report = run(store, measure=measure)
    assert len(report.done) == 2 and report.left == 6 and "stopping after" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(run(store).done) == 6 and rows_of(store) == EXPECTED


def test_a_second_ctrl_c_stops_at_once_and_leaves_no_half_unit(tmp_path, grid):
    def measure(point, repeat, folder):
        if point.seed == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return figures(point, repeat, folder)

    store = Store(tmp_path, grid)
    with pytest.raises(KeyboardInterrupt):
        run(store, measure=measure)
    assert len(store.finished()) == 1 and not list(store.folder.glob("**/*.part"))
    run(store)
    assert rows_of(store) == EXPECTED


KILLED = """
import sys, time
from workbench.sweep.backends import Here
from workbench.sweep.grid import Grid
from workbench.sweep.runner import sweep
from workbench.sweep.store import Store, units_of
def measure(point, repeat, folder):
    (folder / "kept.txt").write_text(str(point.seed))
    print("begun", flush=True)
    time.sleep(0.05)
    return {"tok_s": 10.0 * point.seed + repeat}
grid = Grid.of(%r)
sweep(Store(sys.argv[1], grid), units_of(grid), Here(measure))
"""


@pytest.mark.parametrize("after", [1, 4, 7])
def test_killed_at_any_point_and_resumed_it_gives_the_same_points(tmp_path, grid, after):
    command = [sys.executable, "-c", KILLED % GRID, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(after):
            assert process.stdout.readline() == "begun\n"
        process.kill()
    store = Store(tmp_path, grid)
    before = store.finished()
    assert len(before) in (after - 1, after) and list(store.folder.glob("**/*.part"))
    report = run(store)
    assert set(report.skipped) == before and rows_of(store) == EXPECTED
    assert not list(store.folder.glob("**/*.part")), "what the killed process left is cleared away"


def test_shards_are_merged(tmp_path, grid):
    for number in (1, 2, 3):
        run(Store(tmp_path / f"part-{number}", grid), wanted_units(grid, shard=(number, 3)))
    store = merge(grid, [tmp_path / f"part-{number}" for number in (1, 2, 3)], tmp_path / "all")
    assert rows_of(store) == EXPECTED
    with pytest.raises(UserError, match="holds no results of grid 'toy'"):
        merge(grid, [tmp_path], tmp_path / "all")


def test_merging_prefers_what_succeeded(tmp_path, grid):
    def fails(point, repeat, folder):
        raise UserError("no")

    run(Store(tmp_path / "a", grid), measure=fails)
    run(Store(tmp_path / "b", grid))
    for order in (["a", "b"], ["b", "a"]):
        store = merge(grid, [tmp_path / name for name in order], tmp_path / "".join(order))
        assert rows_of(store) == EXPECTED


def test_a_folder_of_something_else_is_refused(tmp_path, grid):
    run(Store(tmp_path, grid))
    said = json.loads((tmp_path / "toy" / "grid.json").read_text())
    for change, expected in (({"schema": 99}, "schema 99"), ({"name": "other"}, "results of grid 'other'")):
        (tmp_path / "toy" / "grid.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(UserError, match=expected):
            Store(tmp_path, grid)
    (tmp_path / "x" / "toy").mkdir(parents=True)
    (tmp_path / "x" / "toy" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="it is no results folder"):
        Store(tmp_path / "x", grid)


def test_a_grown_grid_goes_on_with_what_is_there(tmp_path, grid):
    run(Store(tmp_path, grid))
    grown = Grid.of({**GRID, "axes": {"seed": [0, 1, 2, 3, 4]}})
    report = run(Store(tmp_path, grown))
    assert len(report.skipped) == 8 and len(report.done) == 2


def test_a_full_disk_stops_the_sweep_and_loses_nothing(tmp_path, grid):
    def measure(point, repeat, folder):
        if point.seed == 2:
            raise OSError(28, "No space left on device")
        return figures(point, repeat, folder)

    store = Store(tmp_path, grid)
    with pytest.raises(UserError, match="No space left on device; what is finished is kept"):
        run(store, measure=measure)
    assert len(store.finished()) == 2
    assert len(run(store).done) == 6 and rows_of(store) == EXPECTED


def test_a_disk_that_fills_while_a_result_is_written_loses_that_unit_only(tmp_path, grid, monkeypatch):
    store, written, write = Store(tmp_path, grid), [], Path.write_text

    def fills(path, text, **options):
        if path.name.startswith(".result.json"):
            written.append(path)
            if len(written) == 3:
                raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(UserError, match="cannot write results at .*No space left on device; what is finished is kept"):
        run(store)
    monkeypatch.undo()
    assert len(store.finished()) == 2 and not list(store.folder.glob("**/*.part"))
    assert len(run(store).done) == 6 and rows_of(store) == EXPECTED


def test_figures_that_json_has_no_word_for_fail_no_sweep(tmp_path, grid):
    store = Store(tmp_path, grid)
    run(store, measure=lambda point, repeat, folder: {"tok_s": float("nan"), "kl": float("inf")})
    assert pd.read_parquet(store.table)[["tok_s", "kl"]].isna().all(axis=None)
    other = Store(tmp_path / "other", grid)
    report = run(other, measure=lambda point, repeat, folder: {"tok_s": object()})
    assert len(report.failed) == 8 and "tok_s" in report.errors[report.failed[0]]


def test_where_it_is_lost_is_one_small_table(tmp_path):
    grid = Grid.of({"name": "lost", "repeats": 2, "fixed": {"task": "fidelity", "mode": "xlora"}, "axes": {
        "texts": ["single", "switching"], "policy": ["exact", "lagged(1)"]}})  # fmt: skip

    def measure(point, repeat, folder):
        tokens = pd.DataFrame({"place": [0, 1, 0, 1], "kl": [0.0, 1.0, 0.0, 3.0], "top1": 1.0, "scalings_l1": 0.5,
                               "passage": ["a", "a", "b", "b"], "switch_at": switch_place(point)})
        tokens.to_parquet(folder / "tokens.parquet")
        return {"kl": 1.0}

    store = Store(tmp_path, grid)
    run(store, measure=measure)
    places = read_places(places_path(store))
    # repeats score the same texts: one of them is enough
    assert len(places) == 4 * 2 and places.kl.tolist() == [0.0, 2.0] * 4 and set(places.passages) == {2}
    assert places[places.texts == "switching"].switch_at.tolist() == [32.0] * 4
    assert places[places.texts == "single"].switch_at.isna().all() and read_places(tmp_path / "none") is None
    toy = Store(tmp_path, Grid.of(GRID))
    run(toy)
    assert not places_path(toy).exists()


def test_a_clock_that_jumps_changes_nothing(tmp_path, grid, monkeypatch):
    jumps = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    store = Store(tmp_path, grid)
    run(store)
    frame = pd.read_parquet(store.table)
    assert ((frame.seconds >= 0) & (frame.seconds < 60)).all()


def test_processes_give_the_same_and_survive_a_killed_worker(tmp_path, grid, monkeypatch):
    monkeypatch.setattr(backends, "work", killed_once)
    store = Store(tmp_path, grid)
    report = sweep(store, units_of(grid), Processes(2, threads=1))
    assert (tmp_path / "killed").exists() and not report.failed and rows_of(store) == EXPECTED


def test_a_unit_that_kills_its_workers_is_recorded_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "work", deadly)
    monkeypatch.setattr(backends, "TRIES", 1)
    store = Store(tmp_path, Grid.of({"name": "toy", "repeats": 1, "axes": {"seed": [0, 1, 2]}}))
    report = sweep(store, units_of(store.grid), Processes(2, threads=1))
    assert len(report.done) == 2 and list(report.errors.values()) == [
        f"its worker process died {backends.TRIES} times (killed, or out of memory)"
    ]


def test_outside_the_main_thread_a_sweep_runs_too(tmp_path, grid):
    store = Store(tmp_path, grid)
    thread = threading.Thread(target=run, args=(store,))
    thread.start()
    thread.join()
    assert rows_of(store) == EXPECTED
