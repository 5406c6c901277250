"""Tables of sweeps outlive their units, runs of other files are no results, and each run says how it was run.

Run: pytest tests/test_sweep_store.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_workers import deadly, figures, killed_once

from workbench import UserError
from workbench.sweep import backends
from workbench.sweep.backends import Here, Processes
from workbench.sweep.grid import Grid
from workbench.sweep.merging import merge
from workbench.sweep.places import COLUMNS, MORE, notes_of, places_path, read_places, refresh_tables
from workbench.sweep.runner import sweep, wanted_units
from workbench.sweep.store import FAILED, Store, units_of

# blocks of different settings, and one setting that is a number here and a list there
GRID = {"name": "toy", "repeats": 2, "axes": {"seed": [0, 1]},
        "block": [{"fixed": {"mode": "lora", "adapters": 2}, "axes": {"rank": [4, [4, 8]]}}]}  # fmt: skip
LOST = {"name": "lost", "repeats": 1, "fixed": {"task": "fidelity", "mode": "xlora"},
        "axes": {"policy": ["exact", "lagged(1)", "lagged(2)"]}}  # fmt: skip


def run(store, units=None, measure=figures, **options):
    return sweep(store, units_of(store.grid) if units is None else units, Here(measure), **options)


def scored(kl):
    def measure(point, repeat, folder):
        tokens = pd.DataFrame({"place": [0, 1], "kl": [0.0, kl], "top1": 1.0, "scalings_l1": 0.5, "switch_at": None})
        tokens.to_parquet(folder / "tokens.parquet")
        return {"kl": kl}

    return measure


def fails(point, repeat, folder):
    raise UserError("no")


def without_units(out: Path, grid: Grid, measure=figures) -> Store:
    """Return what a checkout has of a finished sweep: its tables alone."""
    store = Store(out, grid)
    run(store, measure=measure)
    shutil.rmtree(store.folder)
    return Store(out, grid)


@settings(max_examples=12)
@given(st.sets(st.integers(0, 7)))
def test_a_table_without_units_survives_any_part_of_its_sweep(tmp_path_factory, chosen):
    grid = Grid.of(GRID)
    store = without_units(tmp_path_factory.mktemp("out"), grid)
    before, units = pd.read_parquet(store.table), units_of(grid)
    report = run(store, [units[number] for number in sorted(chosen)],
                 lambda point, repeat, folder: {"tok_s": -1.0, "new": 7})  # fmt: skip
    after = pd.read_parquet(store.table)
    assert len(report.done) == len(chosen) and len(after) == 8
    key = ["point", "repeat", "label", "rank", "seed", "mode", "status", "adapters"]
    pd.testing.assert_frame_equal(after[key], before[key])
    ran = pd.Series([number in chosen for number in range(8)])
    assert (after.tok_s[ran] == -1).all() and (after.tok_s[~ran] == before.tok_s[~ran]).all()
    assert set(after.session[~ran]) == set(before.session[~ran]) and (not chosen or (after.new[ran] == 7).all())


def test_only_limit_and_an_interrupt_leave_the_other_rows(tmp_path):
    def interrupted(point, repeat, folder):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    store = without_units(tmp_path, Grid.of(GRID))
    committed = store.table.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(store, measure=interrupted)
    assert store.table.read_bytes() == committed
    for options in ({"only": ["seed=1"]}, {"limit": 1}, {"shard": (2, 3)}):
        run(store, wanted_units(store.grid, **options))
        assert len(pd.read_parquet(store.table)) == 8


def test_places_without_units_survive_too(tmp_path):
    store = without_units(tmp_path, Grid.of(LOST), scored(1.0))
    run(store, wanted_units(store.grid, limit=1), scored(3.0))
    places = read_places(places_path(store))
    assert places.kl.tolist() == [0.0, 3.0, 0.0, 1.0, 0.0, 1.0] and set(places.mixture) == {"demo"}
    assert list(places.columns) == [*COLUMNS, *MORE] and set(places.dtype) == {"float32"}
    assert set(places.base) == {"demo"}


def test_places_of_before_they_named_their_mixture_are_read(tmp_path):
    store = without_units(tmp_path, Grid.of(LOST), scored(1.0))
    path = places_path(store)
    read_places(path)[list(COLUMNS)].to_parquet(path)
    assert read_places(path)[list(MORE)].isna().all(axis=None)
    run(store, wanted_units(store.grid, limit=1), scored(1.0))
    # what the grid says of the point is said of its old rows
    assert set(read_places(path).mixture) == {"demo"}


def test_rows_that_the_grid_no_longer_has_go(tmp_path):
    without_units(tmp_path, Grid.of(GRID))
    small = Grid.of({**GRID, "repeats": 1, "axes": {"seed": [1]}})
    store = Store(tmp_path, small)
    run(store, wanted_units(small, limit=1))
    frame = pd.read_parquet(store.table)
    assert sorted(frame.point) == sorted(point.id for point in small.points) and set(frame["repeat"]) == {0}


def test_a_failure_does_not_replace_what_succeeded(tmp_path):
    store = without_units(tmp_path, Grid.of(LOST), scored(1.0))
    report = run(store, measure=fails)
    frame = pd.read_parquet(store.table)
    assert len(report.failed) == 3 and set(frame.status) == {"done"} and len(read_places(places_path(store))) == 6


def test_merging_into_a_folder_keeps_the_rows_of_its_table(tmp_path):
    grid = Grid.of(GRID)
    without_units(tmp_path / "all", grid)
    run(Store(tmp_path / "part", grid), wanted_units(grid, limit=1), lambda *given: {"tok_s": -1.0})
    frame = pd.read_parquet(merge(grid, [tmp_path / "part"], tmp_path / "all").table)
    assert len(frame) == 8 and (frame.tok_s == -1).sum() == 2


@pytest.mark.parametrize(("name", "said"), [("lost.parquet", "table of results"), ("lost-places.parquet", "table of")])
def test_what_is_no_table_is_told_before_anything_runs(tmp_path, name, said):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name}' is no {said}"):
        run(Store(tmp_path, Grid.of(LOST)), measure=lambda *given: pytest.fail("it ran"))
    assert (tmp_path / name).read_text() == "mine"


ENDED = """
import os, sys
from workbench.sweep.backends import Here
from workbench.sweep.grid import Grid
from workbench.sweep.runner import sweep
from workbench.sweep.store import Store, units_of
def measure(point, repeat, folder):
    if point.seed == 1:
        %s
    return {"tok_s": 1.0}
grid = Grid.of({"name": "toy", "repeats": 1, "axes": {"seed": [0, 1]}})
sweep(Store(sys.argv[1], grid), units_of(grid), Here(measure))
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 2); os.kill(os.getpid(), 2)",
                                 "raise OSError(28, 'No space left on device')"])  # fmt: skip
def test_however_a_sweep_ends_its_tables_have_what_is_finished(tmp_path, end):
    command = [sys.executable, "-c", ENDED % end, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    grid = Grid.of({"name": "toy", "repeats": 1, "axes": {"seed": [0, 1]}})
    if "9" in end:
        # nothing runs after a kill: a report rebuilds the table
        assert not Store(tmp_path, grid).table.exists() and refresh_tables(tmp_path, grid) == []
    assert pd.read_parquet(Store(tmp_path, grid).table).seed.tolist() == [0]


def test_refreshing_writes_only_what_is_new(tmp_path):
    store = without_units(tmp_path, Grid.of(GRID))
    committed = store.table.stat().st_mtime_ns, sorted(tmp_path.rglob("*"))
    assert refresh_tables(tmp_path, store.grid) == []
    assert (store.table.stat().st_mtime_ns, sorted(tmp_path.rglob("*"))) == committed
    run(store, wanted_units(store.grid, limit=1))
    at = store.table.stat().st_mtime_ns
    refresh_tables(tmp_path, store.grid)
    assert store.table.stat().st_mtime_ns == at
    store.table.unlink()
    refresh_tables(tmp_path, store.grid)
    assert len(pd.read_parquet(store.table)) == 2


TRACE = {"name": "load", "repeats": 1, "block": [
    {"fixed": {"arrivals": "trace", "trace": "t.jsonl"}, "axes": {"seed": [0, 1]}}, {"axes": {"seed": [2]}},
]}  # fmt: skip


def traced(folder: Path, text: str) -> Grid:
    folder.mkdir(exist_ok=True)
    (folder / "t.jsonl").write_text(text)
    return Grid.of(TRACE, path=folder / "load.toml")


def test_an_edited_trace_is_measured_again(tmp_path):
    grid = traced(tmp_path / "a", "one")
    store = Store(tmp_path / "out", grid)
    assert len(run(store).done) == 3 and not run(store).done and notes_of(store) == []
    traced(tmp_path / "a", "two")
    (note,) = notes_of(store)
    assert note == "2 finished runs read another trace ('t.jsonl') than there is now: counted as missing"
    assert {unit.point.seed for unit in store.missing(units_of(grid))} == {0, 1}
    # a run of the new file stands beside none of the old one
    run(store, wanted_units(grid, only=["seed=0"]))
    assert pd.read_parquet(store.table).seed.tolist() == [0, 2] and "1 finished run read" in notes_of(store)[0]
    assert len(run(store).done) == 1 and pd.read_parquet(store.table).seed.tolist() == [0, 1, 2]


def test_a_file_that_is_back_makes_its_results_count_again(tmp_path):
    grid = traced(tmp_path / "a", "one")
    store = Store(tmp_path / "out", grid)
    run(store)
    traced(tmp_path / "a", "two")
    refresh_tables(tmp_path / "out", grid)
    assert pd.read_parquet(store.table).seed.tolist() == [2]
    traced(tmp_path / "a", "one")
    assert refresh_tables(tmp_path / "out", grid) == [] and len(pd.read_parquet(store.table)) == 3


def test_the_same_name_in_another_folder_is_another_trace(tmp_path):
    one, other = traced(tmp_path / "a", "one"), traced(tmp_path / "b", "other")
    assert [point.id for point in one.points] == [point.id for point in other.points]
    run(Store(tmp_path / "out", one))
    assert len(run(Store(tmp_path / "out", other)).done) == 2
    same = traced(tmp_path / "c", "other")
    assert not run(Store(tmp_path / "out", same)).done


def test_where_a_file_is_not_its_results_are_trusted(tmp_path):
    grid = traced(tmp_path / "a", "one")
    run(Store(tmp_path / "out", grid))
    (tmp_path / "a" / "t.jsonl").unlink()
    assert Store(tmp_path / "out", grid).missing(units_of(grid)) == [] and not refresh_tables(tmp_path / "out", grid)


def test_results_of_before_they_said_what_they_read_are_kept(tmp_path):
    grid = traced(tmp_path / "a", "one")
    store = Store(tmp_path / "out", grid)
    run(store)
    for unit in units_of(grid):
        path = store.path(unit) / "result.json"
        old = {key: value for key, value in json.loads(path.read_text()).items()
               if key not in ("inputs", "session", "backend", "others_cores")}  # fmt: skip
        path.write_text(json.dumps(old))
    assert not run(store).done
    frame = pd.read_parquet(store.table)
    assert frame[["inputs", "session", "backend", "others_cores"]].isna().all(axis=None) and len(frame) == 3
    shutil.rmtree(store.folder)
    frame.drop(columns=["inputs", "session", "backend", "others_cores"]).to_parquet(store.table)
    run(Store(tmp_path / "out", grid), wanted_units(grid, limit=1))
    assert len(pd.read_parquet(store.table)) == 3


def test_rows_of_another_file_leave_the_table_and_say_so(tmp_path):
    store = without_units(tmp_path / "out", traced(tmp_path / "a", "one"))
    traced(tmp_path / "a", "two")
    (note,) = notes_of(store)
    assert note == "2 rows of the table read another trace ('t.jsonl') than there is now: left out of it from now on"
    run(store, wanted_units(store.grid, only=["seed=1"]))
    assert pd.read_parquet(store.table).seed.tolist() == [1, 2] and notes_of(store) == []


def test_merging_prefers_the_files_that_are_here(tmp_path):
    grid = traced(tmp_path / "a", "one")
    run(Store(tmp_path / "x", grid), measure=lambda *given: {"tok_s": 1.0})
    traced(tmp_path / "a", "two")
    run(Store(tmp_path / "y", grid), measure=lambda *given: {"tok_s": 2.0})
    for order in (["x", "y"], ["y", "x"]):
        store = merge(grid, [tmp_path / name for name in order], tmp_path / "".join(order))
        assert pd.read_parquet(store.table).tok_s.tolist()[:2] == [2.0, 2.0]
        assert notes_of(store) == []


def test_each_call_is_a_session_and_says_where_its_units_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "work", killed_once)
    (tmp_path / "killed").touch()
    grid = Grid.of(GRID)
    store, units = Store(tmp_path, grid), units_of(grid)
    run(store, units[:3])
    run(store, units[3:6])
    sweep(store, units[6:], Processes(2, threads=1))
    frame = pd.read_parquet(store.table)
    sessions = [list(frame.session[span]) for span in (slice(0, 3), slice(3, 6), slice(6, 8))]
    assert [len(set(each)) for each in sessions] == [1, 1, 1] and len(set(frame.session)) == 3
    assert frame.backend.tolist() == ["in process"] * 6 + ["joblib 2"] * 2
    # side by side nobody knows who are others
    assert (frame.others_cores[:6] >= 0).all() and frame.others_cores[6:].isna().all()


def test_a_unit_of_another_machine_is_of_another_session(tmp_path, monkeypatch):
    store = Store(tmp_path, Grid.of(GRID))
    store.begin()
    unit = units_of(store.grid)[0]
    here = store.session.facts()["session"]
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    there = store.session.facts()["session"]
    assert here != there and there.startswith(here) and "elsewhere" not in there
    backends.died(store, unit)
    assert store.has_ended(unit) and not Store(tmp_path, store.grid).has_ended(unit)
    assert store.absolute().session == store.session


def test_a_failure_of_before_is_no_answer_when_workers_die(tmp_path, monkeypatch):
    grid = Grid.of({"name": "toy", "repeats": 1, "axes": {"seed": [0, 1, 2, 3]}})
    store = Store(tmp_path, grid)
    assert len(run(store, measure=fails).failed) == 4
    monkeypatch.setattr(backends, "work", deadly)
    monkeypatch.setattr(backends, "TRIES", 1)
    report = sweep(store, units_of(grid), Processes(2, threads=1), retry_failed=True)
    # seed 1 kills its worker; the others run again instead of ending with the failure they had before
    assert len(report.done) == 3 and list(report.errors.values()) == [
        "its worker process died 1 times (killed, or out of memory)"
    ]
    assert {store.result(unit)["error"] for unit in units_of(grid) if store.result(unit)["status"] == FAILED} == set(
        report.errors.values()
    )
