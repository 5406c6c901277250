"""What a review of recording and editing found: edits that end requests, fail, never end, or are moved out of place.

Run: pytest tests/test_review_6.py
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from jobs import engine_on, write_shelf
from models import random_ids

from workbench import UserError
from workbench.edits import Faders, ablate, force, replay, scale
from workbench.engine.interrupts import held_interrupts, let_interrupts

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
KEY = "classifier:scalings"
PROMPT = random_ids(20, 5)
SHORT = PROMPT[:5]
MIX = {"mixture": "mix", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"), "llama")


@pytest.fixture(scope="module")
def engine(shelf):
    return engine_on(shelf, row_padding=32, max_rows_per_step=32, attention="reference")


def run(engine, *ids):
    requests = [engine.enqueue(PROMPT, request_id=name, **MIX) for name in ids]
    while any(request.finish_reason is None for request in requests):
        engine.step()
    return requests


@pytest.mark.parametrize("ended", ["edited", "other"])
def test_an_edit_may_cancel_its_own_request_and_others(engine, ended):
    plain, running = engine.generate(PROMPT, **MIX), {}

    def cancel(scalings, tap):
        engine.cancel(running[ended])

    edits = engine.edit({KEY: cancel}, requests="edited")
    for name in ("edited", "other"):
        running[name] = engine.enqueue(PROMPT, request_id=name, **MIX)
    while any(request.finish_reason is None for request in running.values()):
        engine.step()
    edits.close()
    for name, request in running.items():
        assert request.finish_reason == ("cancelled" if name == ended else "length"), request.error
    (left,) = [request for name, request in running.items() if name != ended]
    assert tuple(left.generated) == plain.token_ids
    assert engine.memory.pool.num_referenced == 0


def test_a_request_that_ended_before_its_edited_rows_counted_has_a_trace(engine):
    """Its first forward gave no number: no row of it was committed, but all of them were edited."""
    with engine.record() as recorder:
        with engine.edit(force({"law": 1e38})):
            failed = engine.generate(SHORT, **MIX)
        after = engine.generate(SHORT, **MIX)
    assert "NaN or infinite" in failed.error
    trace = recorder.trace(failed.request_id)
    assert trace.metadata["edits"] == ["force law=1e+38"] and not trace.computed.any()
    assert recorder.trace(after.request_id).computed.sum() == len(SHORT) + 4


def test_an_edit_that_failed_every_time_says_why_at_the_end(engine):
    with engine.record() as recorder:
        engine.generate(PROMPT, **MIX)
    part = recorder.trace().select(tokens=slice(3, None))
    with pytest.raises(UserError, match="no scalings of position 0"), engine.edit(replay(part)):
        assert engine.generate(PROMPT, **MIX).finish_reason == "error"
    with pytest.raises(UserError, match="ZeroDivisionError"), engine.edit(lambda scalings, tap: 1 / 0):
        engine.generate(PROMPT, **MIX)


def test_a_fader_of_no_adapter_fails_the_request_instead_of_moving_nothing(engine):
    faders = Faders()
    with engine.edit(faders):
        faders.set("law", 1.0, "force")
        assert engine.generate(PROMPT, **MIX).edits == ("faders",)
        faders.set("lawn", 1.0, "force")
        assert "did you mean 'law'" in engine.generate(PROMPT, **MIX).error
        # a mixture that they never fitted is none of their business
        assert engine.generate(PROMPT, mixture="lifted", max_tokens=2).edits == ()
        faders.clear("lawn")
        assert engine.generate(PROMPT, **MIX).error is None


def test_edits_that_no_mixture_fits_together_are_refused(engine):
    with pytest.raises(UserError, match="no mixture fits all"):
        engine.edit({"*.q_proj:scalings": ablate("law"), KEY: ablate("b")})
    assert not engine.editing._open


def test_an_edit_in_place_that_returns_nothing_is_told_so(engine):
    def in_place(scalings, tap):
        scalings[..., 0] = 0

    def looking(scalings, tap):
        seen.append(scalings.clone())

    seen: list[torch.Tensor] = []
    with engine.edit({KEY: in_place}, requests="bad") as edits:
        bad, good = run(engine, "bad", "good")
        edits["classifier:scalings"].fired = 1
    assert "in_place changed what it was given and returned None" in bad.error and good.error is None

    def in_place_and_back(scalings, tap):
        scalings[..., 0] = 0
        return scalings

    with engine.edit({KEY: [in_place_and_back, looking]}):
        assert engine.generate(PROMPT, **MIX).edits == ("in_place_and_back",)
    assert all((each[..., 0] == 0).all() and each.any() for each in seen)


@pytest.mark.parametrize("position", [-1, 20, 500, "a", True, 1.0])
def test_an_edit_is_told_of_positions_it_cannot_know(engine, position):
    with engine.edit({KEY: lambda scalings, tap: tap.scalings_at(position)[None] * scalings}, "bad") as edits:
        bad, good = run(engine, "bad", "good")
        edits[KEY].fired = 1
    assert "scalings_at takes a position from 0 to" in bad.error and good.error is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sites": 3}, "sites must be"), ({"sites": [3]}, "sites must be"), ({"sites": []}, "changes nothing"),
        ({"positions": slice("a", None)}, "whole numbers"), ({"positions": slice(1.5, None)}, "whole numbers"),
        ({"positions": slice(0, 5, 0)}, "at least 1"), ({"positions": [[1]]}, "positions must be"),
    ],
)  # fmt: skip
def test_sites_and_positions_that_are_none_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        scale("law", 2.0, **given)
    with pytest.raises(UserError, match="named by text"):
        Faders().set(["law"], 1.0)


def test_an_id_that_no_file_can_hold_is_refused(engine):
    with pytest.raises(UserError, match="valid Unicode"):
        engine.generate(PROMPT, request_id="\ud800", **MIX)


def test_a_closed_engine_takes_no_edit(shelf):
    engine = engine_on(shelf)
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.edit(ablate("law"))


def test_an_edit_that_never_ends_can_be_interrupted(engine):
    plain = engine.generate(PROMPT, **MIX)

    def endless(scalings, tap):
        begun.set()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            time.sleep(0.001)

    begun = threading.Event()
    killer = threading.Thread(target=lambda: (begun.wait(20), os.kill(os.getpid(), signal.SIGINT)))
    killer.start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt), engine.edit(endless):
        engine.generate(PROMPT, **MIX)
    killer.join()
    assert time.monotonic() - before < 15
    assert not engine.scheduler.has_work() and engine.memory.pool.num_referenced == 0 and not engine.editing._open
    assert engine.generate(PROMPT, **MIX).token_ids == plain.token_ids


def test_an_interrupt_that_was_held_arrives_where_it_is_let_in():
    seen = []
    with pytest.raises(KeyboardInterrupt), held_interrupts(), held_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held")
        with let_interrupts():
            seen.append("not reached")
    assert seen == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_while_edits_open_leaves_none_open(engine, monkeypatch):
    inner = engine.editing.open

    def interrupted(*given):
        opened = inner(*given)
        os.kill(os.getpid(), signal.SIGINT)
        return opened

    monkeypatch.setattr(engine.editing, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.edit(ablate("law"))
    assert not engine.editing._open


@pytest.mark.parametrize("who", [{}, {"adapter": "law"}, {"mixture": "mix"}], ids=str)
def test_blocks_a_request_made_and_found_again_are_no_savings(shelf, who):
    """Preempted, it finds its own blocks in the cache: it computed them, so nothing calls them found."""
    engine = engine_on(shelf, max_rows_per_step=16)
    with engine.record("scalings", "hidden_norm") as recorder:
        request = engine.enqueue(random_ids(40, 8), max_tokens=12, ignore_eos=True, request_id="r", **who)
        while request.finish_reason is None:
            engine.step()
            if len(request.generated) in (1, 9) and request.num_preemptions < 2 and request.finish_reason is None:
                engine.scheduler.preempt(request)
    assert request.num_preemptions == 2
    trace = recorder.trace("r")
    assert trace.metadata["cached_tokens"] == recorder.requests().cached_tokens[0] == 0
    assert "unmeasured" not in trace.metadata and not trace.extra("hidden_norm").is_missing[:-1].any()
    again = engine.generate(random_ids(40, 8), max_tokens=2, ignore_eos=True, **who)
    assert again.cached_tokens == 32 and engine.counters()["cached_prompt_tokens"] == 32
