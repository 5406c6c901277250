"""Faders act on the running request, and only on it. Run: pytest tests/test_console_faders.py"""

from __future__ import annotations

import numpy as np
import pytest
from byte_engine import engine, shelf  # noqa: F401
from live_page import LONG, SHORT, Page, long_engine, long_shelf, slowed  # noqa: F401

from workbench import console
from workbench.errors import UserError


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


def test_faders_stay_for_the_next_run_and_put_to_rest_they_change_nothing(engine) -> None:
    shown = console(engine, "hello", **SHORT)
    shown.set_fader("b", 4.0)
    shown.run()
    assert shown.wait(20).edits == ("faders",)
    assert shown.history.loc[0, ["run", "token", "adapter", "value"]].tolist() == [1, 0, "b", 4.0]
    shown.clear_faders("b")
    shown.run()
    assert shown.wait(20).edits == () and "edits" not in shown.trace.metadata
    shown.set_fader("b", 1.0)
    shown.set_fader("b", 0.0)
    assert shown.faders["values"] == [None, None]
    shown.set_fader("b", 1.0)
    shown.set_fader("a", 0.5, "force")
    assert shown.faders["mode"] == "force" and shown.faders["values"] == [0.5, None]
    shown.clear_faders()
    assert shown.faders["values"] == [None, None] and len(shown.history) == 1


def test_a_fader_moved_too_late_is_said_to_have_changed_nothing(engine) -> None:
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
def test_a_bad_fader_message_is_a_sentence(engine, message, said) -> None:
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
