"""Reports of sweeps: medians, intervals and ratios of a table with known numbers, and text that stays text.

Run: pytest tests/test_sweep_report.py
"""

from __future__ import annotations

import os
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest

from workbench import UserError
from workbench.cli import main
from workbench.sweep.document import Block, Document
from workbench.sweep.grid import Grid
from workbench.sweep.places import COLUMNS
from workbench.sweep.report import axes_of, caveats, curves_of, read_table, report_of
from workbench.sweep.report_tables import THROUGHPUT, against, baseline_of, domain_tables, main_table, memory_table
from workbench.sweep.store import Store, flat, units_of

GRID = Grid.of(
    {
        "name": "toy", "question": "What <b>costs</b> | what?", "repeats": 3, "baseline": {"mode": "base"},
        "fixed": {"requests": 8}, "axes": {"concurrency": [2, 8]},
        "block": [{"fixed": {"mode": "lora"}, "axes": {"concurrency": [2, 8], "popularity": ["identical", "skewed"]}}],
    }
)  # fmt: skip
SPEEDS = {"base": [10.0, 20.0, 12.0], "identical": [5.0, 10.0, 6.0], "skewed": [2.0, 3.0, 2.0]}
MACHINE = {"cpu": "A fast one", "gpu": None, "threads": 2, "cores": 2, "platform": "Linux",
           "versions": {"torch": "2.13"}}  # fmt: skip


def table(grid=GRID, figures=None, **changes) -> pd.DataFrame:
    figures = figures or (lambda point, repeat: {
        "tok_s": SPEEDS[point.popularity or "base"][repeat] * point.concurrency, "ttft_ms_p50": 100.0,
        "forwards_per_token": 1.0, "fairness": 1.0})  # fmt: skip
    rows = []
    for unit in units_of(grid):
        result = {"status": "done", "error": None, "figures": figures(unit.point, unit.repeat), "seconds": 1.0,
                  "load_before": 0.5, "load_after": 0.5, "created": f"2026-01-0{unit.repeat + 1}",
                  "environment": MACHINE, **changes}  # fmt: skip
        rows.append(flat(grid, unit, result))
    return pd.DataFrame(rows)


def cells(block: Block, row: int) -> dict[str, str]:
    return dict(zip(block.content[0], block.content[row], strict=True))


def test_a_row_has_medians_intervals_and_the_ratio_to_its_own_baseline():
    block = main_table(GRID, GRID.points, table(), THROUGHPUT)
    slow, fast = cells(block, 1), cells(block, 2)
    assert slow["point"] == "mode=base concurrency=2" and slow["tok/s"] == "24.0 (20.0–40.0)"
    assert fast["tok/s"] == "96.0 (80.0–160.0)" and fast["tok/s against baseline"] == "1.000"
    lora = [cells(block, row) for row in range(3, 7)]
    # identical runs at half the base's speed in every round; skewed at a sixth, more or less
    assert [row["tok/s against baseline"] for row in lora] == ["0.500", "0.167 (0.150–0.200)"] * 2
    assert [row["point"] for row in lora][1] == "mode=lora popularity=skewed concurrency=2"
    assert lora[0]["n"] == "3" and lora[0]["first token ms, median"] == "100"
    assert "goodput req/s" not in slow


def test_ratios_compare_the_rounds_that_both_have():
    frame = table()
    base, _, identical, *_ = GRID.points
    assert against(frame, identical, base, "tok_s").value == 0.5
    # the slow middle round is missing from one of them: it must not make the other look fast
    gone = frame.drop(frame[(frame.point == base.id) & (frame["repeat"] == 1)].index)
    found = against(gone, identical, base, "tok_s")
    assert (found.value, found.n) == (0.5, 2)
    assert against(frame[frame.point != base.id], identical, base, "tok_s") is None


def test_one_repeat_has_no_ratio():
    once = table()[lambda frame: frame["repeat"] == 0]
    block = main_table(GRID, GRID.points, once, THROUGHPUT)
    assert {row[-2] for row in block.content[1:]} == {"–"} and block.note.startswith("one repeat of each: no intervals")
    assert cells(block, 1)["tok/s"] == "20.0"


def test_rounds_of_two_sessions_are_not_paired():
    frame = table().assign(session="a", backend="in process")
    base, _, identical, skewed, *_ = GRID.points
    assert against(frame, identical, base, "tok_s").is_paired
    # the base ran on another day, when the machine was half as fast in one round
    moved = frame.copy()
    moved.loc[moved.point == base.id, "session"] = "b"
    found = against(moved, identical, base, "tok_s")
    assert not found.is_paired and (found.value, found.low, found.high) == (0.5, 5 / 20, 10 / 10)
    block = main_table(GRID, GRID.points, moved, THROUGHPUT)
    rows = {row[0]: row[-2] for row in block.content[1:]}
    assert rows["mode=lora popularity=identical concurrency=2"] == "0.500 (0.250–1.000) †"
    assert rows["mode=lora popularity=identical concurrency=8"] == "0.500" and "† of different" not in block.note
    assert "†: of different sessions, resampled apart" in block.note
    assert "units ran in 2 sessions: only rounds of one session" in caveats(GRID, moved)[1]
    # two rounds of three in one session are compared with each other alone
    resumed = frame.copy()
    resumed.loc[(resumed.point == base.id) & (resumed["repeat"] == 1), "session"] = "b"
    found = against(resumed, skewed, base, "tok_s")
    assert found.is_paired and found.n == 2 and (found.low, found.high) == (2 / 12, 2 / 10)
    # one round that they share is no pair
    resumed.loc[(resumed.point == base.id) & (resumed["repeat"] == 2), "session"] = "b"
    assert not against(resumed, skewed, base, "tok_s").is_paired


def test_the_command_says_how_units_ran():
    frame = table().assign(session="a", backend="in process")
    frame.loc[frame["repeat"] == 2, "backend"] = "joblib 4"
    frame.loc[frame["repeat"] == 1, "backend"] = "ray"
    text = report_of(GRID, frame).markdown()
    assert "workbench sweep toy\nworkbench sweep toy --ray\nworkbench sweep toy --jobs 4\nworkbench report toy" in text
    assert "* 1 session; units ran in process, ray, joblib 4" in text
    assert "units ran side by side (ray, joblib 4): they slowed each other" in text


def test_memory_is_in_units_one_can_read():
    bytes_of = {"model_bytes": 1.23e9, "slots_bytes": 7e6, "kv_peak_bytes": 4e6}
    frame = table().assign(**bytes_of)
    frame.loc[frame["repeat"] == 1, "kv_peak_bytes"] = 5e6
    (block,) = memory_table(GRID, GRID.points, frame)
    assert block.content[:2] == [["point", "weights of the base", "slots of adapters", "largest KV cache"],
                                 ["mode=base concurrency=2", "1.23 GB", "7.00 MB", "4.00 (4.00–5.00) MB"]]  # fmt: skip
    assert "largest KV cache" in report_of(GRID, frame).markdown()
    assert memory_table(GRID, GRID.points, table()) == []
    assert memory_table(GRID, GRID.points, frame.drop(columns="slots_bytes"))[0].content[0][1:] == [
        "weights of the base", "largest KV cache"]  # fmt: skip


def test_points_that_differ_in_another_setting_are_no_one_point_of_a_figure():
    some = {"concurrency": [1, 4, 16]}
    mixture = {"fixed": {"mode": "xlora"}, "axes": {"policy": ["exact", "lagged(1)"], **some}}
    grid = Grid.of({"name": "many", "repeats": 3, "fixed": {"requests": 8}, "axes": some, "block": [mixture]})
    speeds = {None: 30.0, "exact": 10.0, "lagged(1)": 20.0}
    frame = table(grid, lambda point, repeat: {"tok_s": speeds[point.policy] + repeat ** 2})
    shown, series, facet = curves_of(frame, *axes_of(grid, frame))
    assert series == "mode, policy" and facet is None
    assert set(shown[series]) == {"base", "xlora, exact", "xlora, lagged(1)"}
    picture = report_of(grid, frame).pictures["many-throughput.png"]
    # the median of 0, 1 and 4 more; the mean would be 1.7 more
    for curve, middle in (("base", 31), ("xlora, exact", 11), ("xlora, lagged(1)", 21)):
        assert f"{curve}, concurrency 4: {middle}," in picture.description
    assert "as well" not in picture.description and "range of 3 repeats 10 to 14" in picture.description


def test_more_curves_than_one_panel_holds_make_panels():
    axes = {"adapters": list(range(1, 9)), "rank": [2, 4, 8, 16, 32], "popularity": ["identical", "skewed", "uniform"]}
    grid = Grid.of({"repeats": 1, "fixed": {"mode": "lora"}, "axes": axes})
    frame = table(grid, lambda point, repeat: {"tok_s": 1.0})
    shown, series, facet = curves_of(frame, *axes_of(grid, frame))
    assert (series, facet) == ("rank", "popularity") and shown["rank"].nunique() == 5
    assert shown.groupby(["adapters", series, facet]).size().max() == 1


def test_few_texts_are_said():
    few = table(FIDELITY, lambda point, repeat: {**lost(point, repeat), "num_texts": 4})
    assert [each for each in caveats(FIDELITY, few) if "distinct" in each] == [
        f"texts {texts}: 6 passages of 4 distinct texts; intervals over fewer than 8 texts say little of others"
        for texts in ("single", "switching")]  # fmt: skip
    text = report_of(FIDELITY, few).markdown()
    assert "2 × 6 passages of 4 texts" in text and "95 % bootstrap interval, texts resampled" in text
    assert not [each for each in caveats(FIDELITY, few.assign(num_texts=8)) if "texts" in each]
    # a table from before says what its intervals are not
    assert any("they are too narrow" in each for each in caveats(FIDELITY, table(FIDELITY, lost)))


def test_places_of_points_that_differ_elsewhere_have_panels_of_their_own():
    grid = Grid.of({"name": "lost", "repeats": 1, "fixed": {"task": "fidelity", "mode": "xlora"},
                    "axes": {"dtype": ["float32", "bfloat16"], "policy": ["exact", "lagged(1)"]}})  # fmt: skip
    frame = table(grid, lambda point, repeat: {**lost(point, repeat), "kl": 0.1 if point.dtype == "float32" else 0.2})
    places = places_of(grid).drop(columns=["dtype", "mixture", "base"], errors="ignore")
    made = report_of(grid, frame, places)
    for name in ("frontier", "places"):
        words = made.pictures[f"lost-{name}.png"].description
        assert "dtype: float32 texts: single" in words and "dtype: bfloat16 texts: single" in words


def test_the_baseline_is_the_one_that_differs_least():
    for point in GRID.points:
        assert baseline_of(GRID, point, GRID.baseline_points()).concurrency == point.concurrency


FIDELITY = Grid.of(
    {"name": "lost", "fixed": {"task": "fidelity", "mode": "xlora"}, "repeats": 2, "baseline": {"policy": "exact"},
     "axes": {"texts": ["single", "switching"], "policy": ["exact", "non_granular(4)", "lagged(1)"]}}
)  # fmt: skip


def lost(point, repeat):
    kl = {"exact": 0.0, "non_granular(4)": 0.02, "lagged(1)": 3e-7}[point.policy]
    domains = ["german", "python"] if point.texts == "single" else ["german>python"]
    return {
        "kl": kl, "kl_low": kl / 2, "kl_high": kl * 2, "top1": 1.0, "top1_low": 1.0, "top1_high": 1.0,
        "perplexity": 9.0, "num_passages": 6, "forwards_per_token": 1.5 if point.policy == "exact" else 1.0,
        "tok_s": 10.0 + repeat,
        **{f"{key}:{domain}": kl + place for place, domain in enumerate(domains)
           for key in ("kl", "perplexity", "perplexity_exact")},
    }  # fmt: skip


def places_of(grid) -> pd.DataFrame:
    rows = []
    for point in grid.points:
        for place in range(12):
            rows.append({"point": point.id, "texts": point.texts, "policy": point.policy, "place": place, "top1": 1.0,
                         "switch_at": 6.0 if point.texts == "switching" else np.nan, "passages": 6,
                         "scalings_l1": 0.0, "kl": 0.0 if point.policy == "exact" else 1e-3 * (place + 1)})
    return pd.DataFrame(rows)[list(COLUMNS)]


def test_fidelity_keeps_the_intervals_over_passages_and_shows_domains():
    frame = table(FIDELITY, lost)
    text = report_of(FIDELITY, frame, places_of(FIDELITY)).markdown()
    assert "| policy=non_granular(4) texts=single | 0.02000 (0.01000–0.04000) | 1.0000 | 9.00 |" in text
    # what the digits would call nothing is not nothing
    assert "| 3.0e-07 (1.5e-07–6.0e-07) |" in text and "| 2 × 6 passages, 128 tokens each |" in text
    assert "lost-frontier.png" in text and "lost-places.png" in text
    single, perplexities, switching, _ = domain_tables(FIDELITY, FIDELITY.points, frame)
    assert single.content == [["point", "german", "python"], ["policy=exact", "0.00000", "1.00000"],
                              ["policy=non_granular(4)", "0.02000", "1.02000"],
                              ["policy=lagged(1)", "3.0e-07", "1.00000"]]  # fmt: skip
    assert perplexities.content[-1] == ["by exact scalings", "0.0", "1.00"] or perplexities.content[-1][0] == (
        "by exact scalings"
    )
    assert switching.content[0] == ["point", "german>python"] and "switching" in switching.note


def test_nothing_in_a_report_becomes_markup(tmp_path):
    hostile = "<script>alert(1)</script> | `x` *y* [z](http://e.vil)\n# not a heading"
    frame = table()
    failed = frame.iloc[:1].assign(status="failed", error=hostile, point=GRID.points[-1].id, repeat=9)
    frame = pd.concat([frame, failed], ignore_index=True).assign(cpu=hostile)
    made = report_of(GRID, frame)
    html, text = made.html(), made.markdown()
    assert "<script>" not in html and "<b>" not in html and html.count("&lt;script&gt;") == 2
    assert "http://" not in re.sub(r"\\\[z\\\]\(http", "", text) and "<script>" not in text and "<b>" not in text
    assert "\n# not" not in text and unescape(re.sub(r"\\(.)", r"\1", text)).count("# not a heading") == 2
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    assert 'src="data:image/png;base64,' in html and "src=" not in html.replace('src="data:image/png', "")
    paths = made.save(tmp_path / "new" / "folder", "toy")
    assert [path.name for path in paths] == ["toy.md", "toy.html", "toy-throughput.png"] and all(
        path.stat().st_size for path in paths
    )


def test_what_a_reader_must_know_is_said():
    frame = table()
    assert caveats(GRID, frame) == [
        "3 repeats: with fewer than 6 an interval of times is the range of the repeats, which holds the true median "
        "less often than in 95 of 100 cases",
        "load average before a unit: 0.5 to 0.5 on 2 cores, of which the sweep's own threads are a part",
    ]
    once = frame[frame["repeat"] == 0]
    assert caveats(GRID, once)[0] == "1 repeat: one run says nothing of how far times vary"
    halved = frame[frame.point != GRID.points[0].id].copy()
    halved.loc[halved.index[0], ["status", "error"]] = ["failed", "no room"]
    halved.loc[halved.index[1], "cpu"] = "Another"
    said = caveats(GRID, halved.assign(dtype="bfloat16"), foreign=2)
    assert said[:3] == ["2 points of the table are not in this grid any more, and not in this report",
                        "1 unit failed: no room", "1 point has no result: mode=base concurrency=2"]  # fmt: skip
    assert "2 to 3 repeats" in said[3] and "bfloat16" in said[5] and "different machines ('cpu' differ)" in said[6]
    # as many cores of the same name may be another machine still
    other = frame.assign(threads=[2] * (len(frame) - 1) + [16], cores=[2] * (len(frame) - 1) + [64])
    assert "different machines ('cores', 'threads' differ)" in caveats(GRID, other)[-1]


def test_what_other_programs_used_is_said_where_it_was_measured():
    frame = table().assign(others_cores=0.04, load_before=7.0)
    assert not [each for each in caveats(GRID, frame) if "cores" in each]
    assert "other programs used at most 0.04 cores while units ran" in report_of(GRID, frame).markdown()
    frame.loc[3, "others_cores"] = 1.62
    assert caveats(GRID, frame)[-1] == ("other programs used 0.0 to 1.6 cores while units ran: times say less than "
                                        "counts")  # fmt: skip
    assert "load average" not in report_of(GRID, frame).markdown()
    # nobody could tell them apart from units that ran beside: nothing is known
    assert "load average before a unit: 7.0" in caveats(GRID, frame.assign(others_cores=np.nan))[-1]


def test_the_command_and_the_machine_are_in_the_report(tmp_path):
    path = tmp_path / "my grid.toml"
    path.write_text("name = 'mine'\nrepeats = 1\n[axes]\nseed = [0, 1]")
    grid = Grid.load(path)
    text = report_of(grid, table(grid, lambda point, repeat: {"tok_s": 1.0})).markdown()
    assert f"workbench sweep '{path}'\nworkbench report '{path}'" in text
    assert "A fast one, 2 threads, torch 2.13, Linux" in text and "2 of 2 points, 2 units" in text


def test_axes_are_settings_that_split_points_of_one_value():
    frame = table()
    assert axes_of(GRID, frame) == ("popularity", ["concurrency"])
    one = Grid.of({"axes": {"adapters": [1, 8, 64]}, "fixed": {"mode": "lora", "popularity": "uniform"}})
    assert axes_of(one, table(one, lambda point, repeat: {"tok_s": 1.0})) == ("adapters", [])
    alone = Grid.of({})
    assert axes_of(alone, table(alone, lambda point, repeat: {"tok_s": 1.0})) is None
    # slots that go with the number of adapters split nothing
    pairs = Grid.of({"block": [{"fixed": {"mode": "lora", "adapters": n, "slots": min(n, 8)}} for n in (1, 8, 64)]})
    assert axes_of(pairs, table(pairs, lambda point, repeat: {"tok_s": 1.0})) == ("adapters", [])


def test_tables_that_are_none_are_named(tmp_path):
    with pytest.raises(UserError, match="run `workbench sweep` on the grid first"):
        read_table(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(UserError, match="is no table of results"):
        read_table(tmp_path / "bad.parquet")
    pd.DataFrame({"point": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no column 'repeat', 'status', 'task'"):
        read_table(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="none of its 6 points has finished"):
        report_of(GRID, table(status="failed", error="x"))


def test_a_table_survives_lists_numbers_and_nothing_in_one_column(tmp_path):
    grid = Grid.of({"name": "mixed", "repeats": 1, "block": [
        {"fixed": {"mode": "base"}}, {"fixed": {"mode": "lora"}, "axes": {"rank": [4, [4, 8]]}}]})  # fmt: skip
    from workbench.sweep.backends import Here
    from workbench.sweep.runner import sweep

    store = Store(tmp_path, grid)
    sweep(store, units_of(grid), Here(lambda point, repeat, folder: {"tok_s": 1.0, "none": float("nan")}))
    frame = read_table(store.table)
    assert frame["rank"].fillna("").tolist() == ["", "4", "[4, 8]"] and frame["none"].isna().all()
    assert "rank=\\[4, 8\\]" in report_of(grid, frame).markdown()


def test_units_that_the_table_lacks_are_said(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("name = 'mine'\nrepeats = 1\n[axes]\nseed = [0, 1]")
    grid = Grid.load(path)
    from workbench.sweep.backends import Here
    from workbench.sweep.runner import sweep

    store = Store(tmp_path, grid)
    sweep(store, units_of(grid), Here(lambda point, repeat, folder: {"tok_s": 1.0}))
    command = ["report", str(path), "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    if not store.table.is_file():
        pd.DataFrame(store.rows(units_of(grid))).to_parquet(store.table)
    assert main(command) == 0 and capsys.readouterr().err == ""
    # as after a sweep that was killed before it wrote its table
    os.utime(store.table, (1e9, 1e9))
    assert main(command) == 0 and "2 units are newer than" in capsys.readouterr().err


def test_a_document_shows_every_kind_of_block():
    made = Document("T & t", (Block("text", "a"), Block("list", ["b", "c"]), Block("code", "d <e>")), {})
    assert made.markdown() == "# T &amp; t\n\na\n\n* b\n* c\n\n```sh\nd <e>\n```\n"
    assert "<ul><li>b</li><li>c</li></ul>" in made.html() and "<pre>d &lt;e&gt;</pre>" in made.html()


def test_what_was_asked_is_the_axis_and_not_how_much_of_it_was_measured():
    both = [{"fixed": {"rate": rate, "requests": int(24 * rate)}, "axes": {"policy": ["exact", "lagged(1)"]}}
            for rate in (1.0, 2.0, 4.0)]
    grid = Grid.of({"name": "g", "repeats": 1, "fixed": {"mode": "xlora", "arrivals": "poisson"}, "block": both})
    done = pd.DataFrame([{"point": point.id, "repeat": 0, "tok_s": 1.0, "rate": point.rate, "requests": point.requests,
                          "policy": point.policy} for point in grid.points])
    assert axes_of(grid, done) == ("rate", ["policy"])
    _, first, *_ = main_table(grid, grid.points, done, THROUGHPUT).content
    assert first[0] == "policy=exact rate=1"


def test_a_shipped_grid_is_named_in_the_commands_and_not_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = Grid.load("load")
    frame = table(grid, lambda point, repeat: {"tok_s": 1.0})
    said = report_of(grid, frame).markdown()
    assert "workbench sweep load\n" in said and str(grid.path.parent) not in said
