"""Figures of runs and of memory show the tables' numbers. Run: pytest tests/test_figures_runs.py"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from figure_parts import panel, texts

from workbench.display import figures, palette
from workbench.display.latency_figure import grouped
from workbench.display.run_figures import BANDS, MOST_BARS, Bars
from workbench.errors import UserError
from workbench.instrument import memory_state as kinds
from workbench.instrument.memory_state import MemoryState, SlotState, StreamState
from workbench.instrument.run_columns import REQUESTS, STEPS

pytestmark = pytest.mark.filterwarnings("error")


def steps(count: int = 12, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    made = {name: rng.integers(0, 9, count) for name, kind in STEPS.items() if kind is int}
    duration = rng.uniform(20, 60, count)
    return pd.DataFrame({**made, "duration_ms": duration, "time_s": np.cumsum(duration) / 1000 + 1})


def requests(count: int = 12) -> pd.DataFrame:
    made = {name: [None] * count for name in REQUESTS}
    kinds = [("german", None), ("python", None), (None, "demo"), (None, None)]
    adapter, mixture = zip(*(kinds[i % 4] for i in range(count)), strict=True)
    ttft = np.linspace(0.1, 0.3, count)
    times = {"ttft_s": ttft, "total_s": ttft + 0.9, "completion_tokens": 10, "prompt_tokens": 20, "cached_tokens": 5}
    return pd.DataFrame({**made, "adapter": adapter, "mixture": mixture, **times})


def bars(axes) -> list[tuple[float, float, float]]:
    return [(patch.get_x(), patch.get_width(), patch.get_height()) for patch in axes.containers[0]]


def test_each_step_is_a_bar_as_long_as_it_took() -> None:
    table = steps()
    picture = figures.timeline(table)
    busy = table[table["tokens"] > 0]
    drawn = np.array(bars(panel(picture, "tokens per second")))
    np.testing.assert_allclose(drawn[:, 0], busy["time_s"] - busy["duration_ms"] / 1000)
    np.testing.assert_allclose(drawn[:, 2], busy["tokens"] / busy["duration_ms"] * 1000)
    milliseconds = panel(picture, "milliseconds per step")
    np.testing.assert_allclose([height for *_, height in bars(milliseconds)], table["duration_ms"])
    rows = panel(picture, "rows of a forward")
    stacked = [patch.get_y() + patch.get_height() for patch in rows.containers[1]]
    both = table[table["scaling_rows"] > 0]
    np.testing.assert_allclose(stacked, both["adapted_rows"] + both["scaling_rows"])
    assert {patch.get_hatch() for patch in rows.containers[1]} == {BANDS}
    queue = panel(picture, "requests")
    by_name = {line.get_label(): line.get_ydata()[:-1].tolist() for line in queue.lines}
    assert by_name == {name: table[name].tolist() for name in ("running", "waiting")}
    assert len({line.get_linestyle() for line in queue.lines}) == 2
    units = [axes.get_ylabel() for axes in picture.figure.axes]
    assert units == ["tokens/s", "rows", "ms", "requests"]
    assert picture.figure.axes[-1].get_xlabel() == "time since the recording began (s)"
    assert f"{table['tokens'].sum()} tokens generated" in picture.description


def test_many_steps_are_pooled_and_nothing_is_lost() -> None:
    table = steps(3000)
    found = Bars.of(table["time_s"].to_numpy(), table["duration_ms"].to_numpy() / 1000)
    assert found.is_pooled and len(found.left) == MOST_BARS
    assert found.sum(table["tokens"].to_numpy()).sum() == table["tokens"].sum()
    owner = found.owner
    assert found.mean(table["rows"].to_numpy(float))[7] == pytest.approx(table["rows"][owner == 7].mean())
    assert found.largest(table["duration_ms"].to_numpy())[7] == table["duration_ms"][owner == 7].max()
    drawn = bars(panel(figures.timeline(table), "tokens per second"))
    assert sum(width * height for _, width, height in drawn) == pytest.approx(table["tokens"].sum())


def test_cache_hits_are_running_totals() -> None:
    table = steps()
    picture = figures.cache_hits(SimpleNamespace(steps=table, requests=requests(), meta={}, name="r"))
    wanted = {
        "prefix cache": ["cached_prompt_tokens", "cached_scaling_tokens"],
        "slots": ["slot_hits", "slot_loads", "slot_evictions"],
        "scalings": ["scalings_computed", "scalings_reused"],
    }
    for words, columns in wanted.items():
        drawn = [line.get_ydata().tolist() for line in panel(picture, words).lines]
        assert drawn == [table[column].cumsum().tolist() for column in columns]
    reused, computed = (table[f"scalings_{name}"].sum() for name in ("reused", "computed"))
    assert f"{reused / (reused + computed):.0%} of {reused + computed} rows reused" in picture.description
    assert "Of the 240 prompt tokens of 12 requests, 25% were found." in picture.description


def test_caches_that_counted_nothing_are_said_in_one_line_and_not_drawn() -> None:
    zero = {name: 0 for name in STEPS if name.startswith(("cached_", "slot_"))}
    picture = figures.cache_hits(steps().assign(**zero))
    assert [axes.get_title(loc="left").partition(":")[0] for axes in picture.figure.axes] == ["scalings"]
    assert picture.figure.axes[0].get_xlabel()
    said = "0 throughout, so not drawn: prefix cache (adapted pass, scaling pass); slots (hits, loads, evictions)."
    assert said in " ".join(texts(picture)) and said in picture.description
    nothing = figures.cache_hits(steps().assign(**zero, scalings_computed=0, scalings_reused=0))
    assert not nothing.figure.axes and "scalings (computed, reused)" in " ".join(texts(nothing)) and nothing.png


def test_latency_shows_every_request_by_what_it_ran_on() -> None:
    table = requests(24)
    table.loc[0, ["ttft_s", "total_s"]] = np.nan
    picture = figures.latency(table, adapters=["python", "german"])
    groups = grouped(table, ["python", "german"])
    assert [group.name for group in groups] == ["python", "german", "mixture demo", "base model"]
    first, per_token, total = picture.figure.axes
    for row, group in enumerate(groups):
        seconds = table["ttft_s"].to_numpy()[group.rows]
        drawn = first.collections[2 * row].get_offsets()[:, 0] if row else first.collections[0].get_offsets()[:, 0]
        np.testing.assert_allclose(np.sort(drawn), np.sort(seconds[~np.isnan(seconds)]) * 1000)
    medians = [line.get_xdata()[0] for line in per_token.lines]
    assert medians == pytest.approx([100.0] * 4) and per_token.get_xlabel() == "ms" and total.get_xlabel() == "s"
    labels = [tick.get_text() for tick in first.get_yticklabels()]
    assert labels == ["A python (6)", "B german (6)", "mixture demo (6)", "base model (6)"]
    face = first.collections[0].get_facecolor()[0][:3]
    assert face == pytest.approx(np.array(palette.rgb(palette.adapter_colour(0))) / 255)
    assert "1 of 24 requests have no times" in " ".join(texts(picture))


@pytest.mark.parametrize("name", ["timeline", "cache_hits", "latency"])
def test_what_is_no_table_or_lacks_a_column_is_named(name: str) -> None:
    draw = getattr(figures, name)
    table = requests() if name == "latency" else steps()
    column = "total_s" if name == "latency" else "time_s"
    with pytest.raises(UserError, match=f"lack the columns '{column}'.*did you mean '{column}x'"):
        draw(table.rename(columns={column: f"{column}x"}))
    with pytest.raises(UserError, match="nothing|none was recorded"):
        draw(table.head(0))
    with pytest.raises(UserError, match="drawn from a table of .*not int"):
        draw(3)
    with pytest.raises(UserError, match="must hold numbers"):
        draw(table.assign(**{column: "x"}))
    assert draw(SimpleNamespace(steps=lambda: table, requests=lambda: table)).png  # a recorder


def test_steps_without_a_time_are_left_out_and_counted() -> None:
    table = steps()
    table.loc[[1, 4], "time_s"] = np.nan
    picture = figures.timeline(table)
    assert "2 steps have no time" in " ".join(texts(picture))
    with pytest.raises(UserError, match="none of these steps has a time"):
        figures.timeline(table.assign(time_s=np.nan))
    assert figures.timeline(table.head(1)).png and figures.cache_hits(table.head(1)).png


def state() -> MemoryState:
    references, published = np.zeros(200, int), np.zeros(200, bool)
    references[:4], published[:4] = 2, True
    references[4:7], published[4:6] = 1, True
    published[10:12] = True
    slots = (
        SlotState(0, "python", 3_000_000, 8, leases=2),
        SlotState(1),
        SlotState(2, "german", 1_000_000, 4, is_pinned=True, mixture="demo"),
    )
    streams = (
        StreamState("a", "adapted", "python", False, (0, 1, 2, 3, 4, 6)),
        StreamState("b", "scaling", "demo", True, (0, 1, 2, 3, 5)),
    )
    return MemoryState(slots, 5_000_000, 16, 700_000, references, published, streams)


def test_a_block_is_of_one_kind() -> None:
    expected = [kinds.SHARED] * 4 + [kinds.PUBLISHED] * 2 + [kinds.PRIVATE] + [kinds.FREE] * 3 + [kinds.CACHED] * 2
    assert state().kinds().tolist()[:12] == expected
    assert state().counts() == {"free": 191, "cached": 2, "private": 1, "published": 2, "shared": 4}
    with pytest.raises(UserError, match="one entry per block"):
        MemoryState((), 0, 16, 1, np.zeros(3), np.zeros(4, bool))
    with pytest.raises(UserError, match="'a' holds block 7; there are 3 blocks"):
        MemoryState((), 0, 16, 1, np.zeros(3), np.zeros(3, bool), (StreamState("a", "adapted", "x", False, (7,)),))


def spans(axes) -> dict[tuple[float, float], str | None]:
    """Return `(first, width)` -> hatch of every bar of blocks."""
    found = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, _), (right, _) = path.vertices.min(0), path.vertices.max(0)
            found[left, right - left] = collection.get_hatch()
    return found


def test_the_map_shows_slots_by_size_and_blocks_by_who_holds_them() -> None:
    picture = figures.memory_map(state(), adapters=("german", "python"))
    slots, pool, streams = picture.figure.axes[:3]
    sizes = [width for _, width in spans(slots)]
    assert sizes[0] == pytest.approx(3.0) and slots.get_xlabel() == "MB"
    shown = [text.get_text() for text in slots.texts]
    assert "B python\nrank 8 ×2" in shown and "A german\nrank 4 p" in shown
    drawn = spans(pool)
    assert drawn[0, 4] == "////" and drawn[10, 2] == "...." and drawn[4, 2] is None and drawn[6, 1] is None
    assert {(0, 4), (4, 1), (6, 1), (5, 1)} == set(spans(streams))
    assert [tick.get_text() for tick in streams.get_yticklabels()] == ["a: B python", "b: demo: scaling"]
    assert "the 184 behind them are free" in pool.get_title(loc="left")
    assert "191 free, 2 cached, 1 private, 2 published, 4 shared" in picture.description


def test_an_empty_memory_and_a_crowded_one_are_drawn() -> None:
    nothing = MemoryState((), 0, 16, 700, np.zeros(5, int), np.zeros(5, bool))
    assert "no adapter is loaded" in texts(figures.memory_map(nothing))
    many = tuple(StreamState(f"r{i}", "adapted", "x", False, tuple(range(i, i + 2))) for i in range(60))
    crowd = MemoryState(
        tuple(SlotState(i, f"adapter_{i}", 1000 + i, 8) for i in range(90)), 10**6, 16, 700,
        np.full(5000, 2), np.ones(5000, bool), many,
    )  # fmt: skip
    picture = figures.memory_map(crowd)
    assert picture.figure.get_figheight() < 12 and any("the 24 of 60 streams" in text for text in texts(picture))
    with pytest.raises(UserError, match=r"memory_state\(\) takes an Engine, not int"):
        figures.memory_map(3)
