"""The console: messages in, state and messages out. Run: pytest tests/test_console.py"""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import pytest
from byte_engine import engine, shelf  # noqa: F401
from live_page import LONG, SHORT, Page, long_engine, long_shelf, slowed  # noqa: F401

from workbench import console
from workbench.display.labels import visible
from workbench.errors import UserError


def test_a_run_streams_what_the_trace_then_holds(engine) -> None:
    shown = console(engine, "hello", tgt_non_granular_index=4, **SHORT)
    page = Page(shown)
    page.send("hello")
    page.send("run")
    done = shown.wait(20)
    end = page.wait_for("end")
    texts, means, sources = page.story()
    trace = shown.trace
    assert texts == [visible(token) for token in trace.tokens]
    np.testing.assert_allclose(means, trace.token_means()[:-1], atol=1e-6)
    assert sources == trace.source[:-1].tolist()
    assert end["reason"] == done.finish_reason == "length" and end["edited"] == "" and done.edits == ()
    assert end["stats"]["computed"] == done.scalings_computed and end["stats"]["reused"] == done.scalings_reused
    assert (end["stats"]["accepted"], end["stats"]["rejected"]) == (done.drafts_accepted, done.drafts_rejected)
    assert page.all("start")[0]["voice"]["adapters"] == ["a", "b"]
    assert {message["id"] for message in page.all("ack")} == {"page.1", "page.2"}


def test_forwards_are_those_the_engine_ran_for_it(engine) -> None:
    before = engine.counters()["forwards"]
    shown = console(engine, "hello", **SHORT)
    shown.run()
    shown.wait(20)
    assert shown._playing.ended["stats"]["forwards"] == engine.counters()["forwards"] - before


def test_updates_are_few_and_small_however_fast_the_tokens_come(long_engine) -> None:
    shown = console(long_engine, "hello", **LONG)
    page = Page(shown)
    began = time.monotonic()
    page.send("run")
    page.wait_for("end")
    took = time.monotonic() - began
    more = page.all("more")
    assert len(more) <= took / 0.05 + 3
    gaps = np.diff([message["at_s"] for message in more[:-1]])
    assert not len(gaps) or gaps.min() >= 0.045
    assert sum(len(message["texts"]) for message in more) == 205
    assert sum(len(message["buffers"][0]) for message in more) == 204 * 2 * 4
    # increments, never the whole text again
    assert all(len(json.dumps({**message, "buffers": []})) < 500 + 20 * len(message["texts"]) for message in more)


def test_the_engine_never_waits_for_a_front_end_that_hangs(long_engine) -> None:
    shown, hang = console(long_engine, "hello", **SHORT), threading.Event()
    shown.comm.publish_msg = lambda *args, **more: hang.wait(30)
    threading.Thread(target=shown.run, daemon=True).start()
    try:
        assert long_engine.generate("somebody else", mixture="mix", **SHORT).finish_reason == "length"
    finally:
        hang.set()
    while not shown._number:
        time.sleep(0.01)
    assert shown.wait(20).finish_reason == "length"


def test_stop_ends_the_answer_and_keeps_what_it_said(long_engine) -> None:
    shown = console(slowed(long_engine), "hello", **LONG)
    page = Page(shown)
    page.send("run")
    page.wait_until(lambda: page.all("more") and page.all("more")[-1]["stats"]["generated"] > 2)
    page.send("stop")
    done = shown.wait(20)
    assert done.finish_reason == "cancelled" and 0 < len(done.token_ids) < 200
    assert page.wait_for("end")["reason"] == "cancelled"
    assert shown.trace.num_tokens == 5 + len(done.token_ids)
    page.send("stop")  # nothing runs: no error
    assert not page.all("say") and not long_engine.scheduler.has_work()


@pytest.mark.parametrize("voice", ["base", "adapter:a", "mixture:mix"])
def test_every_voice_answers_as_the_engine_does(engine, voice) -> None:
    kind, _, name = voice.partition(":")
    shown = console(engine, "hello", seed=3, temperature=0.8, **SHORT)
    page = Page(shown)
    page.type(voice=voice)
    page.send("run")
    asked = {} if kind == "base" else {kind: name}
    expected = engine.generate("hello", seed=3, temperature=0.8, **asked, **SHORT)
    assert shown.wait(20).token_ids == expected.token_ids
    page.wait_for("end")
    texts, means, _ = page.story()
    assert len(texts) == 17 and means.shape == (16, {"base": 0, "adapter": 1, "mixture": 2}[kind])
    if kind == "adapter":
        assert (means == 1).all()
    assert shown.trace.num_tokens == 17 and shown.trace.has_scalings == (kind != "base")


def test_merged_adapters_are_a_voice_with_constant_weights(engine, shelf) -> None:
    engine.load_adapter(shelf / "mix" / "b")
    shown = console(engine, "hi", merged_adapters={"ids": ["a", "b"], "weights": [0.5, 0.25]}, **SHORT)
    assert shown.voice == "merged:" and not shown.faders["values"]
    page = Page(shown)
    shown.run()
    assert shown.wait(20).error is None
    page.wait_for("end")
    np.testing.assert_allclose(page.story()[1], np.tile([0.5, 0.25], (13, 1)))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"max_tokens": "many"}, "max tokens: 'many' is not a whole number"),
        ({"max_tokens": "2.5"}, "max tokens: '2.5' is not a whole number"),
        ({"temperature": "warm"}, "temperature: 'warm' is not a number, such as 0.7"),
        ({"temperature": "nan"}, "temperature must be a number of at least 0, not nan"),
        ({"top_p": "1.5"}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"seed": "-1"}, "seed must be a whole number from 0"),
        ({"tgt_non_granular_index": "-2"}, "tgt_non_granular_index must be a whole number of at least 0, not -2"),
        ({"mood": "1"}, "unknown setting 'mood'"),
        ({"max_tokens": "100000"}, "shorten the prompt or lower max_tokens"),
    ],
)
def test_a_bad_number_is_a_sentence_and_nothing_runs(long_engine, typed, said) -> None:
    shown = console(long_engine, "hello")
    page = Page(shown)
    page.type(values={**shown.values, **typed})
    page.send("run")
    assert said in page.said() and not page.all("start") and not shown.is_running
    assert not long_engine.scheduler.has_work()
    page.type(values={"max_tokens": "3"})
    page.send("run")
    assert shown.wait(20).error is None


def test_what_cannot_run_is_a_sentence(engine, shelf) -> None:
    shown = console(engine, "")
    page = Page(shown)
    page.send("run")
    assert page.said() == "the prompt is empty; give at least one token"
    page.type(prompt="half a \ud800 character")
    page.send("run")
    assert "half a character" in page.said()
    page.type(prompt="hi", voice="adapter:c")
    page.send("run")
    assert page.said() == "no adapter 'c' is loaded; loaded: 'a'"
    page.send("run", prompt=7)
    assert page.said() == "the page sent a prompt that is none: 7"
    page.send("sing")
    assert "does not know: 'sing'" in page.said()
    page.send("_run")
    assert "does not know: '_run'" in page.said()
    page.type(voice="mixture:mix")
    engine.close()
    page.send("run")
    assert page.said() == "this engine is closed; make a new one"
    with pytest.raises(UserError, match="this engine is closed"):
        console(engine)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"temprature": 1}, "unknown setting 'temprature'; did you mean 'temperature'"),
        ({"top_p": 2}, "top_p must be above 0"),
        ({"n": 2}, "n is not for here: a console shows one answer"),
        ({"continuation": "x"}, "engine.score scores a continuation"),
        ({"adapter": "z"}, "no adapter 'z' is loaded"),
        ({"adapter": "a", "mixture": "mix"}, "name one of"),
        ({"theme": "drak"}, "theme is one of 'auto', 'light', 'dark', not 'drak'; did you mean 'dark'"),
        ({"prompt": 3}, "prompt must be text, not 3"),
        ({"record": "scaling"}, "scaling"),
    ],
)
def test_a_console_is_made_with_what_the_engine_knows(engine, arguments, said) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        console(engine, **arguments).run("x")


def test_a_console_takes_an_engine() -> None:
    with pytest.raises(UserError, match="takes an Engine .*, not str"):
        console("demo")


def test_what_was_typed_comes_with_the_wish_to_run(engine) -> None:  # a trait's change may be behind a busy kernel
    shown = console(engine, "old")
    page = Page(shown)
    page.send("run", prompt="new", voice="base", values={**shown.values, "max_tokens": "3"}, chat=False)
    assert len(shown.wait(20).token_ids) == 3
    page.wait_for("end")
    assert "".join(page.story()[0]).startswith("new") and shown.voice == "base" and shown.prompt == "new"


@pytest.mark.parametrize("first", [{}, {"policy": "periodic(2)"}, {"tgt_non_granular_index": 2}])
def test_the_newest_word_on_reuse_holds(engine, first) -> None:
    shown = console(engine, "hello", **first, **SHORT)
    page = Page(shown)
    page.send("run", values={**shown.values, "tgt_non_granular_index": "0"})
    assert shown.wait(20).scalings_computed == 5
    shown.run(policy="exact")
    assert shown.wait(20).scalings_reused == 0
    shown.run(tgt_non_granular_index=3)
    assert shown.wait(20).scalings_computed == 8
    shown.run(adapter="a")
    assert shown.wait(20).error is None


def test_before_a_run_there_is_nothing_to_show(engine, tmp_path) -> None:
    shown = console(engine, "hello", **SHORT)
    for ask in (lambda: shown.trace, shown.wait, shown.show, lambda: shown.save(tmp_path / "x.png"), shown.explore):
        with pytest.raises(UserError, match="nothing has run in this console yet"):
            ask()
    assert shown.completion is None and shown.history.empty
    shown.run()
    with pytest.raises(UserError, match="answering already; stop it first"):
        shown.run()
    shown.wait(20)
    assert shown.save(tmp_path / "answer.html").stat().st_size > 10_000
    with pytest.raises(UserError, match=r"\.gif"):
        shown.save(tmp_path / "answer.gif")


def test_a_long_prompt_shows_its_end_only(long_engine) -> None:
    shown = console(long_engine, "x" * 1000, **SHORT)
    page = Page(shown)
    shown.run()
    shown.wait(30)
    page.wait_for("end")
    start, (texts, means, sources) = page.all("start")[0], page.story()
    assert (start["hidden"], start["prompt_tokens"]) == (200, 800) and len(texts) == 812
    assert sources == list(range(811)) and len(means) == 811
