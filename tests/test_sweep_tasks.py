"""What units run on: engines that are kept while there is room, shared by points that load the same, and closed.

Run: pytest tests/test_sweep_tasks.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_problem import point_of, write_shelf

from workbench import UserError
from workbench.config import EngineConfig
from workbench.sweep import tasks
from workbench.sweep.tasks import Engines, Prepared, engine_key, engine_options, memory_bytes, num_slots

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


class Made:
    """Stands for an engine; remembers what was closed."""

    def __init__(self, point, num_bytes=10):
        self.point, self.num_bytes, self.is_closed = point, num_bytes, False

    def close(self):
        assert not self.is_closed
        self.is_closed = True


def base(seed):
    """Points whose engines differ."""
    return point_of(mode="base", max_requests=seed + 1)


def test_the_engine_used_longest_ago_is_closed_first():
    made = []
    engines = Engines(lambda point: made.append(Made(point)) or made[-1], budget_bytes=30)
    first = [engines.get(base(number)) for number in (0, 1, 2)]
    assert engines.get(base(0)) is first[0] and not any(each.is_closed for each in made)
    engines.get(base(3))
    assert [each.is_closed for each in made] == [False, True, False, False]
    assert engines.get(base(0)) is first[0] and engines.get(base(1)) is not first[1]
    engines.close()
    assert all(each.is_closed for each in made)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 60), st.integers(1, 12))
def test_the_budget_holds_and_one_engine_always_fits(asked, budget, size):
    made = []
    engines = Engines(lambda point: made.append(Made(point, size)) or made[-1], budget_bytes=budget)
    for number in asked:
        given = engines.get(base(number))
        assert not given.is_closed and given.point == base(number)
        held = [each for each in made if not each.is_closed]
        assert len(held) * size <= max(budget, size) and len({each.point for each in held}) == len(held)


@given(st.integers(1, 2000), st.none() | st.integers(1, 2000))
def test_an_engine_runs_as_many_requests_at_once_as_its_point_says(concurrency, most):
    given_ = {"concurrency": concurrency} | ({} if most is None else {"max_requests": most})
    if most is not None and most < concurrency:
        with pytest.raises(UserError, match=f"max_requests lets only {most} run at once"):
            point_of(mode="base", **given_)
        return
    config = EngineConfig().change(**engine_options(point_of(mode="base", **given_)))
    assert config.max_requests >= concurrency and config.max_rows_per_step >= 2 * concurrency
    # nobody who says less gets another engine
    assert most is not None or concurrency > 64 or config == EngineConfig().change(**point_of(mode="base").engine)
    assert point_of(mode="base", max_rows_per_step=32, concurrency=900).engine["max_rows_per_step"] == 32


def test_only_the_first_engine_of_a_process_has_its_memory_for_itself():
    engines = Engines(Made, budget_bytes=10)
    engines.get(base(0))
    engines.get(base(0))
    assert engines.is_first
    # the other is closed, but who knows what it left behind
    engines.get(base(1))
    assert not engines.is_first


def test_an_engine_that_cannot_be_made_leaves_the_others_alone():
    def make(point):
        if point.max_requests == 2:
            raise UserError("no such base")
        return Made(point)

    engines = Engines(make, budget_bytes=100)
    kept = engines.get(base(0))
    with pytest.raises(UserError, match="no such base"):
        engines.get(base(1))
    assert engines.get(base(0)) is kept and not kept.is_closed


def test_points_share_an_engine_if_they_load_the_same():
    def same(one, other):
        return engine_key(point_of(**one)) == engine_key(point_of(**other))

    lora = {"mode": "lora", "adapters": 4}
    assert same({**lora, "popularity": "skewed", "tokens": 9}, lora)
    assert same({"mode": "xlora", "policy": "lagged(1)"}, {"mode": "xlora"})
    assert same({"task": "fidelity", "mode": "xlora"}, {"mode": "xlora"})
    # as many slots, whoever asked for them
    assert same({**lora, "concurrency": 2}, {**lora, "concurrency": 8})
    many = {**lora, "adapters": 64}
    assert not same({**many, "concurrency": 2}, {**many, "concurrency": 32})
    assert same({**many, "concurrency": 2, "slots": 32}, {**many, "concurrency": 32})
    for change in ({"adapters": 5}, {"rank": 4}, {"seed": 1}, {"slots": 2}, {"drafting": False}, {"dtype": "float16"}):
        assert not same({**lora, **change}, lora), change
    assert not same({"mode": "base"}, {"mode": "xlora"}) and same({"mode": "base", "seed": 3}, {"mode": "base"})


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"mode": "base"}, 16), ({"mode": "lora", "adapters": 1000, "concurrency": 32}, 32),
        ({"mode": "lora", "adapters": 1000, "slots": 8}, 8), ({"mode": "lora", "adapters": 4}, 16),
        # nobody says how many requests there are at once: as many as the engine runs
        ({"mode": "lora", "adapters": 1000, "arrivals": "poisson", "rate": 5}, 64),
        ({"mode": "lora", "adapters": 1000, "arrivals": "poisson", "rate": 5, "max_requests": 20}, 20),
        ({"mode": "merged", "adapters": 40}, 40),
    ],
)  # fmt: skip
def test_there_are_slots_for_what_requests_can_ask_for(settings, slots):
    assert num_slots(point_of(**settings)) == slots


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "base"}, {"mode": "lora", "adapters": 3, "rank": [2, 4]}, {"mode": "merged", "adapters": 2, "rank": 2},
        {"mode": "xlora", "mixture": "synthetic", "adapters": 2, "rank": 2}, {"mode": "xlora", "mixture": "mix"},
    ],
)  # fmt: skip
def test_every_mode_is_prepared_measured_and_let_go(shelf, tmp_path, settings, monkeypatch):
    if settings.get("mixture") == "mix":
        settings = {**settings, "mixture": str(shelf / "mix")}
    monkeypatch.setattr(tasks, "_engines", None)
    small = {"requests": 3, "concurrency": 3, "prompt_tokens": 4, "tokens": 2}
    point = point_of(**{"base": str(shelf / "tiny"), **small, **settings})
    figures = tasks.measure(point, 0, tmp_path)
    assert figures["generated_tokens"] == 6 and figures["tok_s"] > 0
    assert figures["running_peak"] == 3 and figures["kv_peak_bytes"] > 0
    assert figures["peak_bytes"] > figures["model_bytes"] > 0
    # of a base alone there is nothing in slots
    assert (figures["slots_bytes"] > 0) == (point.mode != "base")
    (prepared,) = tasks._engines._kept.values()
    assert prepared.num_bytes > 0 and len(prepared.adapters) == (point.adapters or 0) * (point.mode != "xlora")
    folder = prepared._files.name
    tasks.close_engines()
    assert tasks._engines is None
    with pytest.raises(UserError, match="this engine is closed"):
        prepared.engine.generate([5], max_tokens=1)
    assert not Path(folder).exists()


def test_what_cannot_be_loaded_is_told_and_leaves_no_files(shelf, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for settings, said in (
        ({"base": str(shelf / "tinny")}, "tinny"), ({"mode": "xlora", "mixture": str(shelf / "mixx")}, "mixx"),
        ({"device": "cuda:9"}, "cuda"),
    ):
        with pytest.raises((UserError, RuntimeError, AssertionError), match=f"(?i){said}"):
            Prepared(point_of(**{"base": str(shelf / "tiny"), **settings}))
        assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_fails_its_point_only(shelf, tmp_path):
    from workbench.sweep.backends import Here
    from workbench.sweep.grid import Grid
    from workbench.sweep.runner import sweep
    from workbench.sweep.store import Store, units_of

    fixed = {"base": str(shelf / "tiny"), "requests": 1, "prompt_tokens": 4, "tokens": 2}
    grid = Grid.of({"name": "toy", "repeats": 1, "axes": {"device": ["cuda:7", "cpu"]}, "fixed": fixed})
    report = sweep(Store(tmp_path, grid), units_of(grid), Here())
    tasks.close_engines()
    assert len(report.done) == len(report.failed) == 1
    (result,) = (Store(tmp_path, grid).result(unit) for unit in units_of(grid) if unit.point.device == "cuda:7")
    assert "cuda" in result["error"].lower() and result["environment"]["cpu"]


def test_a_containers_memory_counts(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("max\n")
    (tmp_path / "b").write_text("1000000\n")
    monkeypatch.setattr(tasks, "_LIMITS", (tmp_path / "none", tmp_path / "a"))
    assert memory_bytes() > 1_000_000
    monkeypatch.setattr(tasks, "_LIMITS", (tmp_path / "a", tmp_path / "b"))
    assert memory_bytes() == 1_000_000


def test_workers_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(tasks, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(tasks, "_engines", None)
    tasks.share_memory(4)
    assert tasks._engines._budget == pytest.approx(100)
    kept = tasks._engines
    tasks.share_memory(2)
    assert tasks._engines is kept


def test_figures_are_plain_numbers():
    import numpy as np

    from workbench.sweep.runner import plain

    found = plain({"a": np.float32(0.5), "b": np.int64(3), "c": float("nan"), "d": float("inf"), "e": None, "f": 2})
    assert found == {"a": 0.5, "b": 3, "c": None, "d": None, "e": None, "f": 2} and type(found["b"]) is int


def test_the_store_s_environment_is_that_of_the_device(monkeypatch):
    from workbench.sweep import machine, runner

    asked = []
    monkeypatch.setattr(machine, "environment", lambda device: asked.append(device) or {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    runner._environment(SimpleNamespace(device=None))
    runner._environment(SimpleNamespace(device="cpu"))
    assert asked == ["cuda", "cpu"]
