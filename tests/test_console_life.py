"""Consoles beside others, closed, replaced, interrupted, with a faulty part. Run: pytest tests/test_console_life.py"""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from byte_engine import engine, engine_on, shelf  # noqa: F401
from live_page import LONG, SHORT, Page, long_engine, long_shelf, slowed  # noqa: F401

from workbench import console
from workbench.display.labels import visible
from workbench.errors import UserError


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


def test_a_second_view_gets_everything_so_far_and_the_first_is_left_alone(engine) -> None:
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


def test_loading_and_unloading_change_who_can_answer(engine, shelf) -> None:
    shown = console(engine, "hello", adapter="a", **SHORT)
    page = Page(shown)
    engine.load_adapter(shelf / "mix" / "b", "second")
    page.send("voices")
    assert [voice["id"] for voice in shown.voices] == ["mixture:mix", "adapter:a", "adapter:second", "base"]
    engine.unload("a")
    page.send("voices")
    assert shown.voice == "mixture:mix" and page.said() == "'a' is not loaded; now chosen: mixture mix"
    assert shown.faders["values"] == [None, None]
    engine.unload("mix")
    page.send("run")
    assert page.said() == "'mix' is not loaded; now chosen: adapter second" and not shown.is_running
    page.send("run")
    assert shown.wait(20).error is None and page.all("start")[0]["voice"]["kind"] == "adapter"


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


def test_a_fault_in_the_feed_ends_neither_the_step_nor_the_run(engine, monkeypatch) -> None:
    def broken(self, request):
        raise RuntimeError("bug")

    monkeypatch.setattr("workbench.live.feed.Feed._take_rows", broken)
    shown = console(engine, "hello", **SHORT)
    page = Page(shown)
    page.send("run")
    page.wait_for("end")
    assert shown.wait(20).finish_reason == "length" and engine.counters()["failed_steps"] == 0
    told = [message for message in page.all("say") if message["error"]]
    assert [message["text"] for message in told] == [
        "what is written can no longer be followed here, but it goes on to its end: RuntimeError: bug"
    ]


def test_the_end_of_a_run_leaves_the_desk_to_a_run_that_begins_meanwhile(engine) -> None:
    shown = console(engine, "hello", **SHORT)
    choose, held = shown._desk.choose, []
    # whoever chooses holds what a run that begins waits for
    shown._desk.choose = lambda adapters: (held.append(shown._lock._is_owned()), choose(adapters))[1]
    page = Page(shown)
    page.send("run")
    page.wait_for("end")
    page.wait_until(lambda: len(held) > 1)
    assert held == [True] * len(held)


def test_a_console_out_of_use_keeps_no_engine(shelf) -> None:
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


class Shell:
    """As much of a notebook's IPython as a widget looks at."""

    def __init__(self):
        self.execution, self.cell, self.events = 0, "cell-1", self
        self.hooks: list = []

    def get_parent(self) -> dict:
        return {"metadata": {"cellId": self.cell}, "header": {"msg_id": f"run-{self.execution}"}}

    def register(self, event: str, hook) -> None:
        self.hooks.append(hook)

    def unregister(self, event: str, hook) -> None:
        self.hooks.remove(hook)


@pytest.fixture
def shell(monkeypatch) -> Shell:
    made = Shell()
    monkeypatch.setattr("workbench.live.widget._shell", lambda: made)
    monkeypatch.setattr("workbench.live.widget._cells", {})
    return made


def test_a_cell_run_again_replaces_its_consoles_and_those_of_other_cells_stay(long_engine, shell) -> None:
    first, second = console(slowed(long_engine), "hello", **LONG), console(long_engine, "hello", **LONG)
    first.run()
    assert not first._is_over and not second._is_over and len(shell.hooks) == 2
    shell.execution, shell.cell = 1, "cell-2"
    elsewhere = console(long_engine)
    shell.execution, shell.cell = 2, "cell-1"
    again = console(long_engine)
    assert first._is_over and second._is_over and not elsewhere._is_over and not again._is_over
    assert first._playing.request.finish_reason == "cancelled" and len(shell.hooks) == 2


def test_after_every_cell_a_console_looks_who_is_loaded(engine, shelf, shell) -> None:
    shown = console(engine)
    engine.load_adapter(shelf / "mix" / "b", "third")
    for hook in shell.hooks:
        hook("the cell's result")
    assert "adapter:third" in [voice["id"] for voice in shown.voices]
    shown.close()
    assert not shell.hooks
