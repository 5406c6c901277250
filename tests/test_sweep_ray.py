"""Sweeps on a local Ray cluster of two workers: the same points, the same counts, and a killed worker's points again.

Run: pytest -m full tests/test_sweep_ray.py
"""

from __future__ import annotations

import os
import signal
import sys

import pandas as pd
import pytest
from sweep_problem import write_shelf

from workbench import UserError
from workbench.sweep import backends
from workbench.sweep.backends import Here, RayCluster
from workbench.sweep.grid import Grid
from workbench.sweep.runner import execute, sweep
from workbench.sweep.store import Store, units_of
from workbench.sweep.tasks import close_engines

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
COUNTED = ["generated_tokens", "forwards", "forwards_per_token", "rows", "scaling_rows", "scalings_computed",
           "scalings_reused", "kl", "top1", "same_tokens"]  # fmt: skip


def test_where_no_cluster_is_there_is_none_to_join():
    with pytest.raises(UserError, match="--ray auto: no Ray cluster there .* use --ray local"):
        next(RayCluster("auto").run(None, [], None))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = RayCluster("local", workers=2)
    made._connect(ray)
    # workers do not have this file
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield made
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


def table(store) -> pd.DataFrame:
    return pd.read_parquet(store.table).sort_values(["point", "repeat"]).reset_index(drop=True)


def test_ray_gives_what_this_process_gives_point_by_point(cluster, tmp_path, monkeypatch):
    shelf = write_shelf(tmp_path / "shelf")
    small = {"requests": 3, "concurrency": 2, "prompt_tokens": 6, "tokens": [3, 6]}
    scored = {"task": "fidelity", "passages": 2, "passage_tokens": 24, "prefix_tokens": 6}
    xlora = {"mode": "xlora", "mixture": str(shelf / "mix")}
    grid = Grid.of({
        "name": "both", "repeats": 2, "fixed": {"base": str(shelf / "tiny")},
        "block": [{"fixed": {"mode": "lora", "adapters": 2, "rank": 2, **small}},
                  {"fixed": {**xlora, **small}, "axes": {"policy": ["exact", "lagged(1)"]}},
                  {"fixed": {**xlora, **scored, "policy": "non_granular(0)"}}],
    })  # fmt: skip
    here, there = Store(tmp_path / "here", grid), Store("there", grid)
    # a folder named from here means the same to workers that run elsewhere
    monkeypatch.chdir(tmp_path)
    assert not sweep(here, units_of(grid), Here()).failed
    close_engines()
    report = sweep(there, units_of(grid), cluster)
    assert not report.failed and sorted(report.done) == sorted(unit.name for unit in units_of(grid))
    one, other = table(here), table(there)
    pd.testing.assert_frame_equal(one[["point", "repeat", "label", *COUNTED]], other[["point", "repeat", "label",
                                                                                      *COUNTED]])  # fmt: skip
    assert (tmp_path / "there" / "both-places.parquet").is_file()


def figures(point, repeat, folder):
    return {"tok_s": 10.0 * point.seed + repeat}


def killed_once(store, unit, threads, workers):
    if unit.point.seed == 1 and not (store.out / "killed").exists():
        (store.out / "killed").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return unit, execute(store, unit, figures)


def deadly(store, unit, threads, workers):
    if unit.point.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return unit, execute(store, unit, figures)


def test_a_killed_worker_s_points_are_run_again(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "work", killed_once)
    store = Store(tmp_path, Grid.of({"name": "toy", "repeats": 2, "axes": {"seed": [0, 1, 2, 3]}}))
    report = sweep(store, units_of(store.grid), cluster)
    assert (tmp_path / "killed").exists() and not report.failed and len(report.done) == 8
    frame = table(store)
    assert (frame.tok_s == 10.0 * frame.seed + frame["repeat"]).all()


def test_a_point_that_kills_its_workers_fails_and_the_others_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "work", deadly)
    monkeypatch.setattr(backends, "TRIES", 2)
    store = Store(tmp_path, Grid.of({"name": "toy", "repeats": 1, "axes": {"seed": [0, 1, 2]}}))
    report = sweep(store, units_of(store.grid), cluster)
    assert len(report.done) == 2
    assert list(report.errors.values()) == ["its worker process died 2 times (killed, or out of memory)"]


def elsewhere(store, unit, threads, workers):
    return unit, {"status": "done"}


def full(store, unit, threads, workers):
    raise UserError("cannot write results: No space left on device")


def broken(store, unit, threads, workers):
    raise ModuleNotFoundError("No module named 'workbench'")


@pytest.mark.parametrize(
    ("work", "said"),
    [(elsewhere, "an --out that all machines"), (full, "^cannot write results: No space left"),
     (broken, "could not run its point: .*No module named 'workbench'; every machine")],
)  # fmt: skip
def test_what_workers_cannot_write_stops_the_sweep(cluster, tmp_path, monkeypatch, work, said):
    monkeypatch.setattr(backends, "work", work)
    store = Store(tmp_path, Grid.of({"name": "toy"}))
    with pytest.raises(UserError, match=said):
        sweep(store, units_of(store.grid), cluster)


def test_a_cluster_that_is_too_small_is_told_before_anything_waits(cluster, tmp_path):
    store = Store(tmp_path, Grid.of({"name": "toy"}))
    for asked, said in (({"gpus": 1}, "--gpus 1, but the cluster has 0"), ({"cpus": 64}, "--cpus 64, but the cluster")):
        with pytest.raises(UserError, match=said):
            sweep(store, units_of(store.grid), RayCluster(**asked))
    for asked in ({"cpus": 0}, {"gpus": -1}):
        with pytest.raises(UserError, match="needs more than 0 --cpus and at least 0 --gpus"):
            RayCluster(**asked)
