"""Settings side by side: messages in, messages and a comparison out. Run: pytest tests/test_compare_live.py"""

from __future__ import annotations

import re

import numpy as np
import pytest
from byte_engine import engine, engine_on, shelf  # noqa: F401
from live_page import Page, slowed

from workbench import Comparison, compare_live
from workbench.display.labels import visible
from workbench.edits import ablate
from workbench.errors import UserError

SHORT = {"max_tokens": 16, "ignore_eos": True}
SETTINGS = {"exact": {}, "k = 0": {"tgt_non_granular_index": 0}, "without b": {"edits": ablate("b")}}


def columns_of(page: Page) -> list[tuple[list[str], np.ndarray]]:
    """Put each column's texts and means together from the increments."""
    start = page.all("start")[-1]
    found = [([], []) for _ in start["columns"]]
    for message in page.all("more"):
        for each in message["columns"]:
            texts, means = found[each["column"]]
            assert (each["first"], each["first_row"]) == (len(texts), sum(map(len, means)))
            texts += each["texts"]
            width = len(start["columns"][each["column"]]["voice"]["adapters"])
            rows = np.frombuffer(message["buffers"][2 * each["column"]], "<f4")
            means.append(rows.reshape(each["num_rows"], width))
    return [(texts, np.concatenate(means)) for texts, means in found]


def test_every_column_streams_what_its_trace_then_holds(engine) -> None:
    shown = compare_live(engine, SETTINGS, "hello", mixture="mix", **SHORT)
    page = Page(shown)
    page.send("hello")
    page.send("run")
    comparison = shown.wait(30)
    end = page.wait_for("end")
    assert isinstance(comparison, Comparison) and comparison.labels == tuple(SETTINGS) and not comparison.failed
    for (texts, means), trace in zip(columns_of(page), comparison.traces.values(), strict=True):
        assert texts == [visible(token) for token in trace.tokens]
        np.testing.assert_allclose(means, trace.token_means()[:-1], atol=1e-6)
    assert end["says"] == [comparison.says(label) for label in SETTINGS] and end["compared"]
    diverged = page.all("more")[-1]["diverged"]
    assert diverged == [None, *(comparison.divergence(label) for label in list(SETTINGS)[1:])]
    assert any(at is not None for at in diverged)
    assert shown.completions["without b"].edits and not shown.completions["exact"].edits


def test_all_settings_share_their_batches_from_the_first_step_on(engine) -> None:
    shown = compare_live(engine, {"1": {}, "2": {}, "3": {}}, "hello", null=False, adapter="a", **SHORT)
    with engine.record("throughput") as recorder:
        shown.run()
        shown.wait(30)
    steps = recorder.steps()
    # the prompt, then one row of each at every step
    assert len(steps) == 16 and steps.rows.tolist() == [15] + [3] * 15


def test_the_null_pair_computes_again_alone_and_is_the_floor(engine) -> None:
    shown = compare_live(engine, SETTINGS, "hello " * 8, mixture="mix", **SHORT)
    page = Page(shown)
    shown.run()
    floor = shown.wait(30).floor
    assert floor is not None and floor.divergence is None and floor.level < 1e-4
    assert any("alone" in message["text"] for message in page.all("say"))
    assert shown._round.null.feed.stats()["cached"] == shown._round.null.feed.stats()["cached_scaling"] == 0
    bare = compare_live(engine, SETTINGS, "hello", null=False, mixture="mix", **SHORT)
    bare.run()
    assert bare.wait(30).floor is None


def test_stop_ends_every_column(engine) -> None:
    shown = compare_live(slowed(engine, 0.02), SETTINGS, "hello", mixture="mix", max_tokens=100, ignore_eos=True)
    page = Page(shown)
    page.send("run")
    page.wait_until(lambda: page.all("more") and page.all("more")[-1]["columns"][0]["stats"]["generated"] > 2)
    page.send("stop")
    end = page.wait_for("end")
    assert not end["compared"] and "two are needed" in end["floor"] and shown._round.null is None
    assert {done.finish_reason for done in shown.completions.values()} == {"cancelled"}
    with pytest.raises(UserError, match="0 of 3 settings ran to their end"):
        shown.wait(10)
    page.send("run")
    assert shown.is_running
    page.send("run")
    assert "run already" in page.said()
    shown.close()
    assert shown._done.wait(10)
    assert not engine.scheduler.has_work() and not engine.recording._watchers and not engine.editing._open


def test_a_setting_that_fails_while_it_runs_leaves_the_others(engine) -> None:
    def broken(scalings, tap):
        raise RuntimeError("no such sound")

    shown = compare_live(engine, {**SETTINGS, "broken": {"edits": broken}}, "hello", mixture="mix", **SHORT)
    page = Page(shown)
    page.send("run")
    comparison = shown.wait(30)
    assert comparison.labels == tuple(SETTINGS) and "no such sound" in comparison.failed["broken"]
    ended = [each["ended"] for message in page.all("more") for each in message["columns"] if "ended" in each]
    assert any("no such sound" in each["error"] for each in ended)


def test_a_fault_in_a_columns_feed_is_told_once_with_its_label(engine, monkeypatch) -> None:
    def broken(self, request):
        raise RuntimeError("bug")

    monkeypatch.setattr("workbench.live.feed.Feed._take_rows", broken)
    shown = compare_live(engine, {"one": {}, "two": {}}, "hello", mixture="mix", null=False, **SHORT)
    page = Page(shown)
    page.send("run")
    page.wait_for("end")
    told = [message["text"] for message in page.all("say") if message["error"]]
    assert [text.partition(":")[0] for text in told] == ["setting 'one'", "setting 'two'"]
    assert all(text.endswith("RuntimeError: bug") for text in told)


def test_a_setting_that_cannot_start_starts_none(engine) -> None:
    shown = compare_live(engine, {"short": {}, "long": {"max_tokens": 5000}}, "hello", mixture="mix")
    page = Page(shown)
    page.type(prompt="hi " * 30)
    page.send("run")
    assert page.said().startswith("setting 'short': ") or page.said().startswith("setting 'long': ")
    assert not shown.is_running and not engine.scheduler.has_work() and not engine.recording._watchers


@pytest.mark.parametrize(
    ("settings", "common", "said"),
    [
        ({"one": {}}, {}, "2 to 8 settings can be compared, not 1"),
        ([{}, {"temprature": 1}], {}, "unknown option 'temprature'; did you mean 'temperature'"),
        ([{}, {"adapter": "z"}], {}, "no adapter 'z' is loaded"),
        ([{}, {"top_p": 2}], {}, "top_p must be above 0"),
        (None, {}, "nothing to compare"),
        ("k", {}, "settings must be a dict"),
    ],
)
def test_settings_that_cannot_be_compared_are_sentences(engine, settings, common, said) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        compare_live(engine, settings, **common)


def test_one_list_makes_the_settings_and_seeds_are_alike(engine) -> None:
    again = {"tgt_non_granular_index": [None, None], "temperature": 1.0, "mixture": "mix"}
    shown = compare_live(engine, None, "hello", **again, **SHORT)
    shown.run()
    one, two = (shown.wait(30), list(shown.completions.values()))[1]
    assert one.token_ids == two.token_ids and one.seed == two.seed
    assert list(shown.comparison.labels) == [column["label"] for column in shown.columns]


def test_before_a_run_there_is_nothing_to_show_and_after_it_a_picture(engine, tmp_path) -> None:
    shown = compare_live(engine, SETTINGS, "hello", mixture="mix", **SHORT)
    for ask in (lambda: shown.comparison, shown.wait, shown.show):
        with pytest.raises(UserError, match="nothing has run here yet"):
            ask()
    shown.run()
    shown.wait(30)
    assert shown.save(tmp_path / "both.html").stat().st_size > 10_000


def test_colours_go_by_the_adapters_name_across_columns(engine, shelf) -> None:
    engine.load_adapter(shelf / "mix" / "b")
    shown = compare_live(engine, {"mix": {"mixture": "mix"}, "b": {"adapter": "b"}, "base": {}}, "hello", **SHORT)
    page = Page(shown)
    shown.run()
    shown.wait(30)
    mix, alone, base = (column["voice"] for column in page.all("start")[0]["columns"])
    assert mix["keys"] == ["A", "B"] and alone["keys"] == ["B"] and alone["colours"] == [mix["colours"][1]]
    assert base["adapters"] == []


def test_a_second_view_gets_everything_so_far(engine) -> None:
    shown = compare_live(engine, SETTINGS, "hello", mixture="mix", **SHORT)
    page = Page(shown)
    shown.run()
    shown.wait(30)
    page.wait_for("end")
    before = len(page.messages)
    page.name = "second"
    page.send("hello")
    again = [message for message in page.messages[before:] if message["type"] != "ack"]
    assert [message["type"] for message in again] == ["start", "more", "end"]
    assert all(each["first"] == 0 and "ended" in each for each in again[1]["columns"])
