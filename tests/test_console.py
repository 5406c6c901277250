"""The console: messages in, state and messages out. Run: pytest tests/test_console.py"""

from __future__ import annotations

import gc
import json
import re
import threading
import time
import weakref

import numpy as np
import pytest
from byte_engine import SPEC, VOCAB, engine, engine_on, shelf  # noqa: F401
from live_page import Page
from models import byte_tokenizer, save_base, tiny_model

from workbench import console
from workbench.display.labels import visible
from workbench.errors import UserError

LONG = {"max_tokens": 200, "ignore_eos": True}
SHORT = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_shelf(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("long"), tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=2048)
    byte_tokenizer(save_base(model, folder / "tiny"))
    SPEC.write(folder / "mix", model)
    return folder


@pytest.fixture
def long_engine(long_shelf):
    return engine_on(long_shelf)


def slowed(engine, seconds: float = 0.004):  # noqa: F811
    """Make every step take a little: the tiny model is faster than any front end."""
    step = engine._step

    def slow():
        time.sleep(seconds)
        return step()

    engine._step = slow
    return engine


def test_a_run_streams_what_the_trace_then_holds(engine) -> None:  # noqa: F811
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


def test_forwards_are_those_the_engine_ran_for_it(engine) -> None:  # noqa: F811
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


def test_faders_act_on_the_running_request_from_its_next_token_on_and_on_nobody_else(long_engine) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True, "seed": 7}
    plain = long_engine.generate("hello", mixture="mix", **asked)
    shown, other = (console(long_engine, "hello", **asked) for _ in range(2))
    slowed(long_engine)
    page = Page(shown)
    other.run()
    page.send("run")
    page.wait_until(lambda: page.all("more") and page.all("more")[-1]["stats"]["generated"] > 5)
    page.send("mode", mode="force")
    page.send("fader", adapter=0, value=0.0, mode="force", seq=1)
    page.send("fader", adapter=1, value=1.0, mode="force", seq=2)
    assert shown.faders["values"] == [0.0, 1.0] and (shown.faders["page"], shown.faders["seq"]) == ("page", 2)
    done, untouched = shown.wait(60), other.wait(60)
    assert untouched.token_ids == plain.token_ids and untouched.edits == ()
    assert done.edits == ("faders",) and "edited: the faders changed" in page.wait_for("end")["edited"]
    moved = shown.history
    assert moved.adapter.tolist() == ["a", "b"] and moved["mode"].tolist() == ["force"] * 2
    first = int(moved.token.iloc[0])
    assert 5 < first < 60 and done.token_ids[:first] == plain.token_ids[:first]
    means = shown.trace.token_means()[:-1]
    forced = np.flatnonzero(np.abs(means - [0, 1]).max(1) < 1e-6)
    assert forced[0] >= 5 + first - 1 and forced.tolist() == list(range(forced[0], len(means)))
    assert shown.trace.metadata["faders"][0]["adapter"] == "a" and shown.trace.metadata["edits"] == ["faders"]
    _, streamed, _ = page.story()
    np.testing.assert_allclose(streamed, means, atol=1e-6)


def test_faders_stay_for_the_next_run_and_put_to_rest_they_change_nothing(engine) -> None:  # noqa: F811
    shown = console(engine, "hello", **SHORT)
    shown.set_fader("b", 4.0)
    shown.run()
    assert shown.wait(20).edits == ("faders",)
    assert shown.history.loc[0, ["run", "token", "adapter", "value"]].tolist() == [1, 0, "b", 4.0]
    shown.clear_faders("b")
    shown.run()
    assert shown.wait(20).edits == () and "edits" not in shown.trace.metadata
    shown.set_fader("b", 1.0)
    shown.set_fader("a", 0.5, "force")
    assert shown.faders["mode"] == "force" and shown.faders["values"] == [0.5, None]
    shown.clear_faders()
    assert shown.faders["values"] == [None, None] and len(shown.history) == 1


def test_a_fader_moved_too_late_is_said_to_have_changed_nothing(engine) -> None:  # noqa: F811
    shown = console(engine, "hello", **SHORT)
    page = Page(shown)
    shown._finish, finish = lambda playing: (shown.set_fader("a", 1.0), finish(playing)), shown._finish
    shown.run()
    assert shown.wait(20).edits == ()
    assert page.wait_for("end")["edited"].startswith("not edited")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"adapter": 0, "value": 5, "mode": "bias"}, "a bias fader goes from -4 to 4, not 5"),
        ({"adapter": 0, "value": float("nan"), "mode": "bias"}, "a bias fader goes from -4 to 4, not nan"),
        ({"adapter": 0, "value": "x", "mode": "force"}, "a force fader goes from 0 to 1, not 'x'"),
        ({"adapter": 9, "value": 0, "mode": "bias"}, "not on the desk any more"),
        ({"adapter": 0, "value": 0, "mode": "twist"}, "one of 'bias', 'force', not 'twist'"),
    ],
)
def test_a_bad_fader_message_is_a_sentence(engine, message, said) -> None:  # noqa: F811
    page = Page(console(engine, "hello", **SHORT))
    page.send("fader", **message)
    assert said in page.said() and page.all("say")[-1]["error"]


def test_faders_need_a_mixture(long_engine) -> None:
    shown = console(slowed(long_engine), "hello", adapter="a", **LONG)
    with pytest.raises(UserError, match="faders move the adapters of a mixture; choose one"):
        shown.set_fader("a", 1.0)
    page = Page(shown)
    page.send("run")
    page.wait_for("more")
    page.send("fader", adapter=0, value=1, mode="bias")
    assert "faders move the adapters of a mixture; adapter a is answering" in page.said()
    shown.stop()
    with pytest.raises(UserError, match=r"no adapter 'c' on the faders.*there are 'a', 'b'"):
        console(long_engine, "hello").set_fader("c", 1.0)


@pytest.mark.parametrize("voice", ["base", "adapter:a", "mixture:mix"])
def test_every_voice_answers_as_the_engine_does(engine, voice) -> None:  # noqa: F811
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


def test_merged_adapters_are_a_voice_with_constant_weights(engine, shelf) -> None:  # noqa: F811
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


def test_what_cannot_run_is_a_sentence(engine, shelf) -> None:  # noqa: F811
    shown = console(engine, "")
    page = Page(shown)
    page.send("run")
    assert page.said() == "the prompt is empty; give at least one token"
    page.type(prompt="half a \ud800 character")
    page.send("run")
    assert "half a character" in page.said()
    page.type(prompt="hi", voice="adapter:c")
    page.send("run")
    assert "'c' is not loaded any more" in page.said() or "no adapter 'c' is loaded" in page.said()
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
def test_a_console_is_made_with_what_the_engine_knows(engine, arguments, said) -> None:  # noqa: F811
    with pytest.raises(UserError, match=re.escape(said)):
        console(engine, **arguments).run("x")


def test_a_console_takes_an_engine() -> None:
    with pytest.raises(UserError, match="takes an Engine .*, not str"):
        console("demo")


def test_before_a_run_there_is_nothing_to_show(engine, tmp_path) -> None:  # noqa: F811
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


def test_two_consoles_on_one_engine_know_nothing_of_each_other(long_engine) -> None:
    one, two = console(slowed(long_engine), "hello", **LONG), console(long_engine, "good bye", **SHORT)
    pages = [Page(one, "one"), Page(two, "two")]
    pages[0].send("run")
    pages[0].wait_for("more")
    pages[1].send("run")
    assert two.wait(20).finish_reason == "length" and one.is_running
    one.stop()
    assert one.wait(20).finish_reason == "cancelled"
    assert "".join(pages[1].story()[0]).startswith("good bye") and "".join(pages[0].story()[0]).startswith("hello")
    assert one.completion.request_id != two.completion.request_id


def test_a_second_view_gets_everything_so_far_and_the_first_is_left_alone(engine) -> None:  # noqa: F811
    shown = console(engine, "hello", **SHORT)
    page = Page(shown)
    shown.run()
    shown.wait(20)
    page.wait_for("end")
    before = len(page.messages)
    page.name = "second"
    page.send("hello")
    again = [message for message in page.messages[before:] if message["type"] != "ack"]
    assert [message["type"] for message in again] == ["start", "more", "end"]
    assert all(message["page"] == "second" for message in again)
    assert again[1]["texts"] == [visible(token) for token in shown.trace.tokens] and again[1]["num_rows"] == 16


def test_loading_and_unloading_change_who_can_answer(engine, shelf) -> None:  # noqa: F811
    shown = console(engine, "hello", adapter="a", **SHORT)
    page = Page(shown)
    engine.load_adapter(shelf / "mix" / "b", "second")
    page.send("voices")
    assert [voice["id"] for voice in shown.voices] == ["mixture:mix", "adapter:a", "adapter:second", "base"]
    engine.unload("a")
    page.send("voices")
    assert shown.voice == "mixture:mix" and page.said() == "'a' is not loaded any more; chosen: mixture mix"
    assert shown.faders["values"] == [None, None]
    engine.unload("mix")
    page.send("run")
    assert shown.voice == "adapter:second" and shown.wait(20).error is None


def test_a_closed_console_ends_its_request_and_listens_no_more(long_engine) -> None:
    shown = console(slowed(long_engine), "hello", **LONG)
    page = Page(shown)
    page.send("run")
    page.wait_for("more")
    request = shown._playing.request
    shown.close()
    assert request.finish_reason == "cancelled"
    shown._playing.done.wait(10)
    assert request.on_progress != shown._playing.feed._hear
    assert not long_engine.recording._watchers and not long_engine.editing._open
    with pytest.raises(UserError, match="this console is closed"):
        shown.run()
    shown.close()


def test_when_the_last_view_is_gone_the_request_ends_but_not_when_it_only_moved(long_engine, monkeypatch) -> None:
    monkeypatch.setattr("workbench.live.widget.GONE_S", 0.05)
    shown = console(slowed(long_engine), "hello", **LONG)
    page = Page(shown)
    page.send("hello")
    page.send("run")
    page.send("gone")
    page.send("hello")
    time.sleep(0.15)
    assert shown.is_running
    page.send("gone")
    assert shown.wait(20).finish_reason == "cancelled"


def test_an_engine_closed_in_the_middle_ends_the_answer(long_engine) -> None:
    shown = console(slowed(long_engine), "hello", **LONG)
    page = Page(shown)
    page.send("run")
    page.wait_for("more")
    long_engine.close()
    assert shown.wait(20).finish_reason == "cancelled" and page.wait_for("end")["reason"] == "cancelled"


def test_a_cell_interrupted_in_the_middle_of_a_stream_leaves_engine_and_console_usable(long_engine) -> None:
    shown = console(slowed(long_engine), "hello", **LONG)
    shown.run()
    with pytest.raises(KeyboardInterrupt):
        for _ in long_engine.stream("in a cell", mixture="mix", **LONG):
            raise KeyboardInterrupt
    assert shown.is_running
    shown.stop()
    assert shown.wait(20).finish_reason == "cancelled"
    shown.run("again", **SHORT)
    assert shown.wait(20).finish_reason == "length" and not long_engine.scheduler.has_work()


def test_a_fault_in_the_feed_ends_neither_the_step_nor_the_run(engine, monkeypatch) -> None:  # noqa: F811
    def broken(self, request):
        raise RuntimeError("bug")

    monkeypatch.setattr("workbench.live.feed.Feed._take_rows", broken)
    shown = console(engine, "hello", **SHORT)
    shown.run()
    assert shown.wait(20).finish_reason == "length" and engine.counters()["failed_steps"] == 0


def test_a_long_prompt_shows_its_end_only(long_engine) -> None:
    shown = console(long_engine, "x" * 1000, **SHORT)
    page = Page(shown)
    shown.run()
    shown.wait(30)
    page.wait_for("end")
    start, (texts, means, sources) = page.all("start")[0], page.story()
    assert (start["hidden"], start["prompt_tokens"]) == (200, 800) and len(texts) == 812
    assert sources == list(range(811)) and len(means) == 811


def test_a_console_out_of_use_keeps_no_engine(shelf) -> None:  # noqa: F811
    made = engine_on(shelf)
    shown = console(made, "hello", **SHORT)
    shown.run()
    shown.wait(20)
    shown.close()
    made.close()
    alive = weakref.ref(made)
    del made, shown
    for _ in range(20):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.05)
    assert alive() is None
