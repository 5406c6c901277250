"""Grids and points: what a file says, ids that are content, and every mistake by name.

Run: pytest tests/test_grid.py
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import UserError
from workbench.sweep.grid import Grid
from workbench.sweep.point import PointSettings
from workbench.sweep.runner import wanted_units
from workbench.sweep.shipped import results_folder, shipped_grids
from workbench.sweep.store import units_of

TOML = """
question = "Which?"
repeats = 2
baseline = { mode = "base" }

[fixed]
tokens = 8

[[block]]
fixed = { mode = "base" }

[[block]]
fixed = { mode = "xlora" }
axes = { tgt_non_granular_index = ["none", 0, 4], prompt_tokens = [8, [8, 64]] }
"""


def of(**given) -> PointSettings:
    return PointSettings.of(given, "grid 'g'")


@pytest.fixture
def grid(tmp_path) -> Grid:
    path = tmp_path / "which.toml"
    path.write_text(TOML)
    return Grid.load(path)


def test_a_file_says_its_points(grid):
    assert grid.name == "which" and grid.repeats == 2 and len(grid.points) == 1 + 3 * 2
    assert [point.policy for point in grid.points] == [None] + ["exact"] * 2 + ["non_granular(0)"] * 2 + [
        "non_granular(4)"
    ] * 2
    assert grid.points[2].prompt_tokens == (8, 64) and grid.points[1].tokens == 8
    # only xlora has a mixture, and always the same: the mode says it
    assert grid.varied == ("mode", "policy", "prompt_tokens")
    assert grid.baseline_points() == grid.points[:1]
    assert grid.label(grid.points[2]) == "mode=xlora policy=exact prompt_tokens=[8, 64]"


def test_labels_tell_points_apart_and_say_no_more():
    grid = Grid.of({"block": [{"fixed": {"mode": "base"}}, {"fixed": {"slo_ttft_ms": 9}}, {"fixed": {"mode": "lora"}}]})
    labels = [grid.label(point) for point in grid.points]
    assert labels == ["mode=base", "mode=base slo_ttft_ms=9", "mode=lora"]


def test_axes_alone_and_nothing_at_all():
    assert len(Grid.of({"axes": {"mode": ["base"], "seed": [0, 1]}}).points) == 2
    assert Grid.of({}).points == (PointSettings.of({}, ""),)


def test_a_mixture_of_ones_own_brings_its_base():
    assert of(mode="xlora").base == of().base == "demo" and of(mode="xlora", mixture="synthetic").base == "demo"
    assert of(mode="xlora", mixture="./mine").base is None and "base" not in of(mode="xlora", mixture="./mine").engine
    assert of(mode="xlora", mixture="./mine", base="./b").engine["base"] == "./b"


def test_an_id_is_the_content_however_it_was_written():
    one = of(mode="xlora", tgt_non_granular_index=4)
    assert one.id == of(policy="non_granular(4)", mode="xlora", mixture="demo", concurrency=8, requests=8).id
    assert of(mode="xlora", tgt_non_granular_index="none").id == of(mode="xlora").id
    assert json.loads(json.dumps(one.settings)) == one.settings
    assert PointSettings.of(one.settings, "again") == one
    # results of other machines and days are found by it: it must not change
    assert of().id == "377f2f05aa56"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mode": "xlora", "policy": "lagged( 1 )"}, {"mode": "xlora", "policy": "lagged(1)"}),
        ({"arrivals": "poisson", "rate": 2}, {"arrivals": "poisson", "rate": 2.0}),
        ({"arrivals": "gamma", "rate": 2, "cv": 1}, {"arrivals": "gamma", "rate": 2.0, "cv": 1.0}),
        ({"slo_ttft_ms": 200, "slo_time_per_token_ms": 9}, {"slo_ttft_ms": 200.0, "slo_time_per_token_ms": 9.0}),
        ({"mode": "lora", "popularity": "zipf:1.50"}, {"mode": "lora", "popularity": "zipf:1.5"}),
        ({"mode": "lora", "rank": [8, 8]}, {"mode": "lora", "rank": 8}), ({"tokens": [9, 9]}, {"tokens": 9}),
    ],
)  # fmt: skip
def test_what_is_written_in_two_ways_has_one_id(one, other):
    assert of(**one).id == of(**other).id and of(**one) == of(**other)
    assert len(Grid.of({"block": [{"fixed": one}, {"fixed": other}]}).points) == 1
    assert PointSettings.of(of(**one).settings, "again").id == of(**one).id


def test_a_rate_is_found_and_shown_however_it_was_written():
    grid = Grid.of({"fixed": {"arrivals": "poisson"}, "axes": {"rate": [0.5, 1, 2.0]}})
    assert [grid.label(point) for point in grid.points] == ["rate=0.5", "rate=1", "rate=2"]
    for wanted in ("1", "1.0"):
        assert grid.only(f"rate={wanted}") == (grid.points[1],)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True))
def test_different_settings_have_different_ids(values):
    assert len({of(tokens=value + 1).id for value in values}) == len(values)


@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 4))
def test_shards_are_disjoint_and_together_everything(count, num_points, repeats):
    grid = Grid.of({"repeats": repeats, "axes": {"seed": list(range(num_points))}})
    parts = [wanted_units(grid, shard=(index + 1, count)) for index in range(count)]
    names = [unit.name for part in parts for unit in part]
    assert sorted(names) == sorted(unit.name for unit in units_of(grid)) and len(set(names)) == len(names)


def test_every_other_round_runs_backwards():
    grid = Grid.of({"repeats": 3, "axes": {"seed": [0, 1, 2]}})
    assert [(unit.point.seed, unit.repeat) for unit in units_of(grid)] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1), (0, 2), (1, 2), (2, 2),
    ]  # fmt: skip


def test_only_and_limit_choose_points(grid):
    assert [point.policy for point in grid.only("policy=exact,prompt_tokens=8")] == ["exact"]
    assert grid.only(grid.points[3].id[:8]) == (grid.points[3],)
    # commas inside a value, spaces, and TOML's way to write it
    assert len(grid.only("prompt_tokens=[8, 64], policy=non_granular(4)")) == 1
    assert len(grid.only("prompt_tokens=[8,64]")) == 3 and len(grid.only("drafting=true")) == 7
    assert grid.only("policy=none") == grid.points[:1]
    units = wanted_units(grid, only=["mode=base", "policy=exact"], limit=2)
    assert {unit.point for unit in units} == set(grid.points[:2]) and len(units) == 2 * grid.repeats
    with pytest.raises(UserError, match="did you mean 'policy'"):
        grid.only("polcy=exact")
    with pytest.raises(UserError, match="fits none of the 7 points"):
        grid.only("policy=periodic(3)")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"repeat": 3}, "did you mean 'repeats'"),
        ({"mode": "base"}, "belong to \\[fixed\\]"),
        ({"fixed": {"populartiy": "uniform"}}, "did you mean 'popularity'"),
        ({"fixed": {"mode": "xlra"}}, "did you mean 'xlora'"),
        ({"axes": {"mode": "base"}}, "expected a list"),
        ({"axes": {"mode": []}}, "expected a list"),
        ({"axes": {"seed": [0, 0]}}, "names a value twice"),
        ({"fixed": {"seed": 0}, "axes": {"seed": [0, 1]}}, "give each once"),
        ({"axes": {"seed": list(range(200)), "tokens": list(range(2, 102))}}, "20000 points"),
        ({"block": {"fixed": {}}}, r"\[\[block\]\]"),
        ({"block": [{"fixd": {}}]}, "did you mean 'fixed'"),
        ({"repeats": 0}, "at least 1"),
        ({"name": "../x"}, "names a folder"), ({"name": ".."}, "names a folder"), ({"name": ""}, "names a folder"),
        ({"axes": {"trace": [3]}}, "'trace' is 3, expected a text"), ({"fixed": {"mode": ["base"]}}, "expected a text"),
        ({"axes": {"seed": [date(2026, 1, 1)]}}, "expected a whole number"),
        ({"baseline": {"mode": "lora"}}, "no point fits the baseline"),
        ({"question": 3}, "expected a sentence"),
    ],
)
def test_a_mistake_in_a_grid_is_named(data, said):
    with pytest.raises(UserError, match=said):
        Grid.of(data)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "base", "policy": "exact"}, "'policy' would be ignored"),
        ({"mode": "base", "tgt_non_granular_index": 4}, "would be ignored: mode 'base' has no mixture"),
        ({"mode": "lora", "mixture": "demo"}, "'mixture' would be ignored"),
        ({"mode": "xlora", "adapters": 4}, "'adapters' would be ignored"),
        ({"mode": "xlora", "popularity": "skewed"}, "'popularity' would be ignored"),
        ({"mode": "lora", "popularity": "unifrom"}, "popularity must be one of .* did you mean 'uniform'"),
        ({"mode": "lora", "popularity": "zipf:-1"}, "popularity must be one of"),
        ({"concurrency": 100, "max_requests": 64}, "concurrency is 100, but max_requests lets only 64 run at once"),
        ({"mode": "merged", "popularity": "skewed"}, "'popularity' would be ignored"),
        ({"mode": "xlora", "policy": "exact", "tgt_non_granular_index": 1}, "not both"),
        ({"mode": "xlora", "policy": "exat"}, "did you mean 'exact'"),
        ({"mode": "xlora", "tgt_non_granular_index": -1}, "at least 0"),
        ({"arrivals": "poisson"}, "need 'rate'"),
        ({"arrivals": "gamma", "rate": 1.0}, "need 'cv'"),
        ({"arrivals": "closed", "rate": 1.0}, "'rate' would be ignored"),
        ({"arrivals": "poisson", "rate": 2, "concurrency": 4}, "'concurrency' would be ignored"),
        ({"arrivals": "trace"}, "need 'trace'"),
        ({"arrivals": "trace", "trace": "x", "tokens": 4}, "'tokens' would be ignored"),
        ({"texts": "single"}, "'texts' would be ignored"),
        ({"task": "fidelity"}, "mode must be 'xlora'"),
        ({"task": "fidelity", "mode": "xlora", "concurrency": 4}, "'concurrency' would be ignored"),
        ({"task": "fidelity", "mode": "xlora", "prefix_tokens": 128}, "a passage has 128"),
        ({"tokens": 1}, "at least 2"), ({"tokens": [9, 3]}, "or \\[low, high\\]"), ({"rank": []}, "a list of them"),
        ({"mode": "merged", "adapters": 4, "slots": 2}, "runs all adapters at once, more than 2 slots"),
        ({"mode": "xlora", "mixture": "synthetic", "rank": [4, 8]}, "have one rank"),
        ({"folder": "/"}, "unknown setting 'folder'"),
        ({"mode": "lora", "adapters": 2, "slots": 4}, "slots beyond them stay empty"),
        ({"dtype": "fp32"}, "dtype"), ({"drafting": 1}, "true or false"), ({"seed": True}, "whole number"),
        ({"rate": float("nan"), "arrivals": "poisson"}, "above 0"), ({"base": " "}, "expected a text"),
    ],
)  # fmt: skip
def test_a_point_that_contradicts_itself_is_named(settings, said):
    with pytest.raises(UserError, match=said) as caught:
        of(**settings)
    assert str(caught.value).startswith("grid 'g'")


def test_files_that_are_no_grids(tmp_path):
    (tmp_path / "smoke.toml").write_text("")
    (tmp_path / "bad.toml").write_text("a = [")
    (tmp_path / "latin.toml").write_bytes(b"question = '\xe9'")
    mistakes = {"smok.toml": "did you mean 'smoke.toml'", "bad.toml": "not valid TOML", "latin.toml": "UTF-8"}
    for name, said in mistakes.items():
        with pytest.raises(UserError, match=said):
            Grid.load(tmp_path / name)


def test_a_shipped_grid_goes_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Grid.load("smoke").path == shipped_grids()["smoke"]
    with pytest.raises(UserError, match="did you mean 'smoke'"):
        Grid.load("smok")
    Path("smoke").write_text(TOML)
    assert Grid.load("smoke").question == "Which?"
    assert (results_folder() / "frontier.parquet").is_file()


def test_an_installed_package_brings_grids_and_results(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "workbench"
    (package / "experiments" / "grids").mkdir(parents=True)
    (package / "experiments" / "grids" / "own.toml").write_text(TOML)
    monkeypatch.setattr("workbench.__file__", str(package / "__init__.py"))
    assert Grid.load("own").name == "own" and results_folder() == package / "experiments" / "results"


GRIDS = sorted((Path(__file__).parents[1] / "experiments" / "grids").glob("*.toml"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_that_comes_with_the_workbench_is_right(path):
    grid = Grid.load(path)
    assert grid.question.endswith("?") and grid.name == path.stem and len(set(map(grid.label, grid.points))) == len(
        grid.points
    )
