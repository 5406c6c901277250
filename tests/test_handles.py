"""Submitting from threads, cells and asyncio; deadlines, shutdown, steps that raise: `pytest tests/test_handles.py`."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest
from byte_engine import MODEL, TOLERANCE, assert_idle, engine_on, shelf  # noqa: F401 - fixtures
from models import byte_ids

from workbench import UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
LONG = {"max_tokens": 90, "ignore_eos": True}


@pytest.fixture
def engine(shelf):
    with engine_on(shelf) as made:
        yield made


def test_a_handle_gives_tokens_text_and_result(engine):
    wanted = engine.generate("hello", mixture="mix", max_tokens=8, ignore_eos=True, top_logprobs=2)
    handle = engine.submit("hello", mixture="mix", max_tokens=8, ignore_eos=True, top_logprobs=2)
    tokens = list(handle.tokens())
    done = handle.result()
    assert [token.id for token in tokens if token.id is not None] == list(wanted.token_ids) == list(done.token_ids)
    assert "".join(token.text for token in tokens) == done.text == wanted.text
    assert [token.logprob for token in tokens if token.id is not None] == pytest.approx(wanted.logprobs, abs=TOLERANCE)
    assert all(len(token.top) == 2 and token.top[0][1] >= token.top[1][1] for token in tokens if token.id is not None)
    assert handle.done and list(handle.tokens()) == tokens, "a stream can be read again"
    assert "".join(handle.text()) == done.text


def test_threads_submit_at_once_and_each_gets_its_own(engine):
    prompts = [f"prompt {i}" for i in range(12)]
    who = [{}, {"adapter": "a"}, {"mixture": "mix"}]
    wanted = [engine.generate(p, max_tokens=6, ignore_eos=True, **who[i % 3]) for i, p in enumerate(prompts)]
    found: dict[int, tuple] = {}

    def ask(i: int) -> None:
        if i % 2:
            found[i] = engine.submit(prompts[i], max_tokens=6, ignore_eos=True, **who[i % 3]).result().token_ids
        else:
            found[i] = engine.generate(prompts[i], max_tokens=6, ignore_eos=True, **who[i % 3]).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(12)] == [done.token_ids for done in wanted]
    assert_idle(engine)


def test_awaited_and_iterated_in_an_event_loop(engine):
    wanted = engine.generate("hello", max_tokens=6, ignore_eos=True)

    async def ask() -> tuple:
        handles = [engine.submit("hello", max_tokens=6, ignore_eos=True) for _ in range(3)]
        pieces = [token.text async for token in handles[0]]
        results = await asyncio.gather(*(handle._result() for handle in handles[1:]))
        return "".join(pieces), await handles[0], results

    text, first, others = asyncio.run(ask())
    assert text == first.text == wanted.text
    assert [done.token_ids for done in others] == [wanted.token_ids] * 2


def test_a_cancelled_task_cancels_its_request(engine):
    async def ask() -> object:
        with engine.adapters.turn:  # no step can run, so it cannot end by itself
            handle = engine.submit("hello", **LONG)
            task = asyncio.ensure_future(handle._result())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return handle

    assert asyncio.run(ask()).result().finish_reason == "cancelled"
    assert_idle(engine)


def test_cancel_and_leaving_a_stream_end_a_request(engine):
    handle = engine.submit("hello", **LONG)
    next(iter(handle.tokens()))
    handle.cancel()
    assert handle.result().finish_reason == "cancelled" and handle.result().token_ids
    other = engine.submit("hello", **LONG)
    for _ in other.text():
        break
    assert other.result().finish_reason in ("cancelled", "length")
    assert_idle(engine)


def test_an_interrupt_of_a_waiting_cell_cancels_what_it_waits_for(engine, monkeypatch):
    handle = engine.submit("hello", **LONG)
    monkeypatch.setattr(handle._changed, "wait_for", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    monkeypatch.undo()
    assert handle.result().finish_reason in ("cancelled", "length")
    assert engine.generate("x", max_tokens=1).token_ids


def test_a_result_that_is_late_raises_and_goes_on(engine):
    engine.adapters.turn.__enter__()  # no step can run
    try:
        handle = engine.submit("hello", max_tokens=2)
        with pytest.raises(TimeoutError, match="has not ended after 0.05 s; it goes on"):
            handle.result(timeout_s=0.05)
    finally:
        engine.adapters.turn.__exit__()
    assert handle.result().error is None


def test_nobody_has_to_read(engine):
    handle = engine.submit("hello", **LONG)
    while not handle.done:
        time.sleep(0.01)
    assert len([token for token in handle.tokens() if token.id is not None]) == 90
    assert_idle(engine)


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(engine):
    running = engine.enqueue("hello", deadline_s=60, **LONG)
    engine.step()
    running.deadline_s = time.perf_counter()
    engine.scheduler.max_requests = 1
    waiting = engine.enqueue("hello", deadline_s=1e-9, **LONG)
    time.sleep(0.001)
    engine.step()
    assert running.finish_reason == waiting.finish_reason == "deadline"
    assert len(running.generated) == 1 and not waiting.generated
    assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deadline_s": 0}, "deadline_s must be"), ({"deadline_s": float("nan")}, "deadline_s must be"),
        ({"deadline_s": True}, "deadline_s must be"), ({"priority": 1.5}, "priority must be a whole number"),
        ({"n": 3}, "ask generate for them"), ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"priorty": 3}, "did you mean 'priority'"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused(engine, options, says):
    with pytest.raises(UserError, match=says):
        engine.submit("hello", **options)
    assert_idle(engine)


def test_a_closed_engine_says_so_and_leaves_no_thread(shelf):
    before = set(threading.enumerate())
    engine = engine_on(shelf)
    running = engine.submit("hello", **LONG)
    engine.close()
    engine.close()
    assert running.result().finish_reason == "cancelled"
    for call in (engine.submit, engine.generate):
        with pytest.raises(UserError, match="this engine is closed; make a new one"):
            call("hello", max_tokens=3)
    assert engine.memory.pool.num_referenced == 0
    deadline = time.time() + 5
    while set(threading.enumerate()) - before and time.time() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_an_engine_nobody_holds_is_collected_with_its_thread(shelf):
    engine = engine_on(shelf)
    engine.submit("hello", max_tokens=2).result()
    (thread,) = [t for t in threading.enumerate() if t.name == "lora-engine" and t is engine._driver._thread]
    gone = weakref.ref(engine)
    del engine
    deadline = time.time() + 5
    while (gone() is not None or thread.is_alive()) and time.time() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert gone() is None and not thread.is_alive()


# a step that raises


def break_on(engine, token: int, error: Exception) -> None:
    """Make every forward raise that has `token` among its rows."""
    inner = engine.model.hidden

    def hidden(batch):
        if token in batch.token_ids.tolist():
            raise error
        return inner(batch)

    engine.model.hidden = hidden


@pytest.mark.parametrize("who", [{}, {"adapter": "a"}, {"mixture": "mix"}])
def test_a_step_that_raises_fails_the_request_it_belongs_to(engine, who):
    wanted = [engine.generate(p, max_tokens=4, ignore_eos=True) for p in ("one", "two")]
    break_on(engine, byte_ids("X")[0], RuntimeError("the card is on fire"))
    good, bad, other = engine.generate(
        ["one", "aXb", "two"], max_tokens=4, ignore_eos=True, adapter=[None, who.get("adapter"), None],
        mixture=[None, who.get("mixture"), None],
    )
    assert bad.finish_reason == "error" and bad.error == "RuntimeError: the card is on fire"
    assert (good.token_ids, other.token_ids) == tuple(done.token_ids for done in wanted)
    assert engine.counters()["failed_steps"] >= 1
    assert_idle(engine)


def test_a_step_that_fails_together_but_never_alone_ends_in_errors_not_in_a_loop(engine):
    inner = engine.model.hidden

    def hidden(batch):
        if len(batch.requests) > 1:
            raise MemoryError("no room for two")
        return inner(batch)

    engine.model.hidden = hidden
    for done in engine.generate(["one", "two"], max_tokens=50, ignore_eos=True):
        assert done.finish_reason in ("error", "length")
    assert_idle(engine)


def test_a_callback_that_raises_fails_its_request_alone(engine):
    def on_text(_: str) -> None:
        raise ValueError("my own mistake")

    bad = engine.enqueue("one", on_text=on_text, max_tokens=6, ignore_eos=True)
    good = engine.enqueue("two", max_tokens=6, ignore_eos=True, mixture="mix")
    while engine.scheduler.has_work():
        engine.step()
    assert bad.finish_reason == "error" and bad.error == "on_text raised ValueError: my own mistake"
    assert good.finish_reason == "length"
    assert_idle(engine)


def test_several_of_one_prompt_are_ranked_and_reproducible(engine):
    options = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    done = engine.generate("hello", n=2, best_of=4, **options)
    assert len(done.choices) == 2 and done.choices[0].token_ids == done.token_ids
    assert sum(done.choices[0].logprobs) >= sum(done.choices[1].logprobs)
    again = engine.generate("hello", n=4, **options)
    assert len({choice.token_ids for choice in again.choices}) > 1
    assert [choice.token_ids for choice in again.choices[:2]] == [choice.token_ids for choice in done.choices]
    assert engine.generate("hello", **options).token_ids in [choice.token_ids for choice in again.choices]


def test_a_use_waits_for_unloading_if_asked(engine):
    handle = engine.submit("hello", adapter="a", **LONG)
    with pytest.raises(UserError, match="in use by requests .*in_use='wait'"):
        engine.unload("a")
    engine.unload("a", in_use="wait")
    assert handle.result().finish_reason == "length" and "a" not in engine.adapters


@pytest.mark.parametrize("where", ["next_batch", "commit"])
def test_a_mistake_of_the_engines_own_fails_everyone_and_hangs_nobody(engine, monkeypatch, where):
    def broken(*_):
        monkeypatch.undo()
        raise AssertionError("a bug")

    handles = [engine.submit("hello", **LONG) for _ in range(2)]
    with engine.adapters.turn:
        monkeypatch.setattr(engine.scheduler, where, broken)
    for handle in handles:
        done = handle.result(timeout_s=60)
        assert done.error == "AssertionError: a bug" or done.finish_reason == "length"
    assert engine.generate("hello", max_tokens=2).error is None
    assert_idle(engine)
