"""What threads, callbacks and mistakes do to an engine: nothing to anyone else.

Run: pytest tests/test_engine_misuse.py
"""

from __future__ import annotations

import itertools
import threading

import pytest
from byte_engine import assert_idle, engine, engine_on, finish, shelf  # noqa: F401 - fixtures

from workbench import UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
SHORT = {"max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize(
    "misuse",
    [
        lambda e: e.generate("inner", max_tokens=3), lambda e: e.step(), lambda e: list(e.stream("inner")),
        lambda e: e.submit("inner", max_tokens=3).result(), lambda e: e.unload("a", in_use="wait"),
        lambda e: e.close(), lambda e: e.load_adapter("nowhere"),
    ],
    ids=["generate", "step", "stream", "result", "unload", "close", "load"],
)  # fmt: skip
def test_a_callback_that_would_wait_for_the_engine_fails_its_request_alone(engine, misuse):
    alone = engine.generate("neighbour", mixture="mix", **SHORT)
    outer = engine.enqueue("outer", on_text=lambda _: misuse(engine), **SHORT)
    other = engine.enqueue("neighbour", mixture="mix", **SHORT)
    finish(engine, outer, other)
    assert "it may cancel and submit, not wait" in outer.error
    assert tuple(other.generated) == alone.token_ids and other.error is None
    while engine.scheduler.has_work():
        engine.step()
    assert_idle(engine)


def test_a_callback_may_submit_and_cancel(engine):
    handles = []
    outer = engine.enqueue("outer", on_text=lambda _: handles.append(engine.submit("inner", **SHORT)), **SHORT)
    finish(engine, outer)
    assert outer.error is None and handles
    assert all(handle.result(60).finish_reason == "length" for handle in handles)


def test_bad_neighbours_one_after_another_do_not_end_a_healthy_request(engine):
    alone = engine.generate("healthy", max_tokens=60, ignore_eos=True)
    inner = engine.model.hidden

    def hidden(batch):
        if any(request.id.startswith("bad") for request in batch.requests):
            raise RuntimeError("boom")
        return inner(batch)

    engine.model.hidden = hidden
    healthy = engine.enqueue("healthy", max_tokens=60, ignore_eos=True)
    for number in range(6):
        bad = engine.enqueue("bad", request_id=f"bad{number}", **SHORT)
        finish(engine, bad)
        assert bad.error == "RuntimeError: boom"
    finish(engine, healthy)
    assert tuple(healthy.generated) == alone.token_ids
    assert_idle(engine)


def test_a_request_that_closing_overtakes_is_told_so(engine):
    add = engine.submissions.make

    def make(*args, **options):
        request = add(*args, **options)
        engine.close()
        return request

    engine.submissions.make = make
    with pytest.raises(UserError, match="this engine is closed"):
        engine.submit("hello", adapter="a", **SHORT)
    for call in (lambda: engine.load_adapter("x"), lambda: engine.load_mixture("x")):
        with pytest.raises(UserError, match="this engine is closed"):
            call()


@pytest.mark.parametrize("name", ["a", "mix"])
def test_what_a_request_was_made_for_stays_until_it_has_ended(engine, name):
    who = {"adapter": "a"} if name == "a" else {"mixture": "mix"}
    alone = engine.generate("hello", **SHORT, **who)
    request = engine.submissions.make("hello", **SHORT, **who)
    with pytest.raises(UserError, match="in use"):
        engine.unload(name)
    waiting = threading.Thread(target=engine.unload, args=(name,), kwargs={"in_use": "wait"})
    waiting.start()
    while not engine.library._leaving and not any(entry.leaving for entry in engine.adapters.entries()):
        pass
    with pytest.raises(UserError, match="is being unloaded"):
        engine.enqueue("another", **SHORT, **who)
    engine._queue([request])
    finish(engine, request)
    waiting.join(60)
    assert tuple(request.generated) == alone.token_ids and not waiting.is_alive()
    assert name not in engine.adapters and name not in engine.mixtures
    assert_idle(engine)


def test_requests_made_before_one_that_is_refused_leave_nothing(engine):
    busy = engine.enqueue("z", request_id="x-1", **SHORT)
    with pytest.raises(UserError, match="'x-1' is taken"):
        engine.generate("a", adapter="a", n=2, temperature=1.0, request_id="x", **SHORT)
    finish(engine, busy)
    with pytest.raises(UserError, match="unknown setting"):
        engine.generate(["a", "b"], adapter="a", sampling_=3)
    engine.unload("a")
    engine.enqueue("again", request_id="x-0", **SHORT)
    finish(engine, *engine.scheduler.requests())


def test_a_replay_and_a_long_score_take_whole_chunks(engine):
    request = engine.enqueue([5] * 60, max_tokens=60, ignore_eos=True)
    while len(request.generated) < 40:
        engine.step()
    engine.scheduler.preempt(request)
    engine.memory.pool.clear()
    before = engine.counters()["steps"]
    while len(request.generated) < 41:
        engine.step()
    assert engine.counters()["steps"] - before == 1
    engine.cancel(request)
    engine.scheduler.max_rows = 32
    before = engine.counters()["steps"]
    engine.score([5] * 10, [6] * 110)
    assert engine.counters()["steps"] - before == 4


def test_numbers_that_a_user_took_are_left_out(engine):
    first = engine.enqueue("x", request_id="req-2", **SHORT)
    second, third = engine.enqueue("x", **SHORT), engine.enqueue("x", **SHORT)
    assert len({first.id, second.id, third.id}) == 3
    finish(engine, first, second, third)


def test_a_stream_tells_its_listener_too_and_says_why_it_failed(engine):
    heard: list[str] = []
    said = "".join(engine.stream("hello", on_text=heard.append, **SHORT))
    assert said == "".join(heard) == engine.generate("hello", **SHORT).text
    bad = {"type": "regex", "regex": "("}
    with pytest.raises(UserError, match="cannot be compiled"):
        list(engine.stream("hello", response_format=bad, max_tokens=5))
    handle = engine.submit("hello", response_format=bad, max_tokens=5)
    with pytest.raises(UserError, match="cannot be compiled"):
        list(handle.tokens())
    assert "cannot be compiled" in handle.result().error
    assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": {}}, "adapter must be a name"), ({"mixture": {}}, "mixture must be a name"),
        ({"request_id": ""}, "request_id must be a name"), ({"request_id": 5}, "request_id must be a name"),
        ({"on_text": 5}, "on_text must be a function"), ({"sampling": {}}, "sampling must be a Sampling"),
        ({"mixture": "mix", "policy": 3}, "policy must be a reuse policy"),
        ({"distributions": True}, "ask score for them"), ({"distributions": "x"}, "must be True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_no_use_are_refused(engine, options, says):
    for call in (engine.submit, engine.generate, lambda *a, **o: list(engine.stream(*a, **o))):
        with pytest.raises(UserError, match=says):
            call("hello", max_tokens=3, **options)
    assert_idle(engine)


def test_one_answer_means_one_answer(engine):
    for call in (engine.submit, engine.enqueue, lambda *a, **o: list(engine.stream(*a, **o))):
        with pytest.raises(UserError, match="ask generate for them"):
            call("hello", n=2, max_tokens=3)
    with pytest.raises(UserError, match="score needs a continuation"):
        engine.score("hello", None)


def test_two_threads_cannot_load_one_name_twice(shelf):
    made = engine_on(shelf)
    made.unload("mix")
    outcomes = []

    def load() -> None:
        try:
            outcomes.append(made.load_mixture(shelf / "mix", "mix"))
        except UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("mix") == 1 and sum("loaded already" in outcome for outcome in outcomes) == 3
    made.unload("mix")
    assert not made.slots.adapters


def test_a_request_often_in_bad_company_is_not_to_blame(engine, monkeypatch):
    names = ("one", "two")
    alone = engine.generate(list(names), max_tokens=40, ignore_eos=True)
    hidden, steps = engine.model.hidden, itertools.count(1)

    def now_and_then(batch):
        if len(batch.requests) > 1 and next(steps) % 3 == 0:
            raise RuntimeError("a fault that passes")
        return hidden(batch)

    monkeypatch.setattr(engine.model, "hidden", now_and_then)
    assert [done.token_ids for done in engine.generate(list(names), max_tokens=40, ignore_eos=True)] == [
        done.token_ids for done in alone
    ]
    assert next(steps) > 12
    # one that never runs beside others fails in the end
    monkeypatch.setattr(engine.model, "hidden", lambda batch: hidden(batch) if len(batch.requests) == 1 else 1 / 0)
    ended = engine.generate(list(names), max_tokens=40, ignore_eos=True)
    assert any("division" in (done.error or "") for done in ended)
