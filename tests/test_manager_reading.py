"""Adapters read while others run, and several threads at one manager: `pytest tests/test_manager_reading.py`."""

import json
import shutil
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from manager_cases import OPTIONS, PROMPTS, RANKS, alone, check_tables, engine_with, finish, folder, model_of, sources
from models import Adapter, tiny_model

from workbench import UserError
from workbench.adapters import LoRAStatus
from workbench.adapters.reading import Reader
from workbench.engine.hf import linear_targets

WAIT_S = 20.0  # far beyond what anything here takes
NO_HOST = {"max_host_bytes": 0}  # what is in no slot is on disk


@contextmanager
def slow(monkeypatch, *names: str):
    """Hold reads of these adapters up until the block ends, or until the yielded event is set."""
    real, go_on = Reader.read, threading.Event()

    def read(reader, name, source, where):
        if name in names:
            assert go_on.wait(WAIT_S)
        return real(reader, name, source, where)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", read)
        try:
            yield go_on
        finally:
            go_on.set()


def submit(engine, name: str | None, prompt: int = 0, **options):
    return engine.enqueue(PROMPTS[prompt], adapter=name, **{**OPTIONS, **options})


def until(condition) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < WAIT_S, "never came true"
        time.sleep(0.001)


def test_a_request_whose_adapter_is_being_read_waits_and_the_others_do_not(monkeypatch):
    """More such requests than may run at once, in front of the queue, for more steps than want of a slot is borne."""
    engine = engine_with(max_requests=4, max_num_loras=2, **NO_HOST)
    engine.adapters.load_all(sources(0, 1))
    engine.adapters.pin("a1")
    with slow(monkeypatch, "a0") as go_on:
        waiting = [submit(engine, "a0") for _ in range(6)]
        for _ in range(20):
            assert finish(engine, submit(engine, "a1"), submit(engine, None, 1)) == [alone(1), alone(None, 1)]
        assert engine.counters()["steps"] > 100 and not any(request.generated for request in waiting)
        assert engine.adapters.to_frame().set_index("name").loc["a0", "tier"] == "loading"
        go_on.set()
        assert finish(engine, *waiting) == [alone(0)] * 6
    assert engine.adapters.counts["disk_loads"] == 2, "one read for all of them, and one for the pin"


def test_nothing_to_run_but_a_read_costs_no_forwards(monkeypatch):
    engine = engine_with(max_num_loras=2, **NO_HOST)
    engine.adapters.load_all(sources(0))
    with slow(monkeypatch, "a0") as go_on:
        request = submit(engine, "a0")
        started, used = time.monotonic(), time.process_time()
        while time.monotonic() - started < 0.5:
            engine.step()
        assert time.process_time() - used < 0.25, "it spins"
        go_on.set()
        assert finish(engine, request) == [alone(0)] and engine.counters()["steps"] == len(request.generated)


def test_a_read_that_fails_fails_its_request_alone_and_can_be_tried_again(tmp_path):
    copy = shutil.copytree(folder(0), tmp_path / "a0")
    engine = engine_with(max_num_loras=2, **NO_HOST)
    engine.adapters.load(copy)
    engine.adapters.load_all(sources(1))
    other = submit(engine, "a1")
    copy.rename(tmp_path / "away")
    failed = submit(engine, "a0")
    while not (failed.finish_reason and other.finish_reason):
        engine.step()
    assert failed.error.startswith(f"adapter '{copy}': folder not found in '{tmp_path}'")
    assert tuple(other.generated) == alone(1)
    (tmp_path / "away").rename(copy)
    assert finish(engine, submit(engine, "a0")) == [alone(0)]
    check_tables(engine, {"a0": 0, "a1": 1})


def test_of_two_that_wait_for_a_read_that_fails_the_second_tries_again(tmp_path):
    copy = shutil.copytree(folder(0), tmp_path / "a0")
    engine = engine_with(max_num_loras=2, **NO_HOST)
    engine.adapters.load(copy)
    copy.rename(tmp_path / "away")
    first, second = submit(engine, "a0"), submit(engine, "a0", 1)
    until(lambda: not engine.adapters.is_reading("a0"))
    (tmp_path / "away").rename(copy)
    assert finish(engine, second) == [alone(0, 1)]
    assert "folder not found" in first.error and not first.generated


def test_a_folder_that_changed_on_disk_is_refused_until_it_is_loaded_again(tmp_path):
    copy = shutil.copytree(folder(0), tmp_path / "a0")
    engine = engine_with(max_num_loras=1, **NO_HOST)
    engine.adapters.load(copy)
    shutil.rmtree(copy)
    shutil.copytree(folder(3), copy)
    done = engine.generate(PROMPTS[0], adapter="a0", **OPTIONS)
    says = f"adapter 'a0' in '{copy}' has changed since it was loaded; unload it, then load it again"
    assert (done.finish_reason, done.error) == ("error", says)
    with pytest.raises(UserError, match="has changed since it was loaded"):
        engine.adapters.pin("a0")
    assert engine.adapters.load(copy).status is LoRAStatus.LOAD_NAME_EXISTS
    assert engine.adapters.unload("a0").ok and engine.adapters.load(copy).ok
    assert finish(engine, submit(engine, "a0")) == [alone(3)]


def test_the_same_content_from_a_new_place_is_read_from_there(tmp_path):
    old, new = (shutil.copytree(folder(0), tmp_path / name / "a0") for name in ("old", "new"))
    engine = engine_with(max_num_loras=1, **NO_HOST)
    assert engine.adapters.load(old).ok and engine.adapters.load(new).ok
    shutil.rmtree(old)
    assert finish(engine, submit(engine, "a0")) == [alone(0)]


def test_a_crowd_of_requests_does_not_fill_the_memory():
    """Each wants another adapter; the host has room for three of them."""
    engine = engine_with(max_requests=4, max_num_loras=2, max_host_bytes=3 * model_of(2).num_bytes)
    contents = {f"x{number}": number % 3 for number in range(24)}
    answers = engine.adapters.load_all({name: folder(content) for name, content in contents.items()})
    assert all(answer.ok for answer in answers.values()) and engine.adapters.names() == list(contents)
    requests = [submit(engine, name) for name in contents]
    most = engine.adapters.host_bytes
    while any(request.finish_reason is None for request in requests):
        engine.step()
        most = max(most, engine.adapters.host_bytes)
        check_tables(engine, contents)
    assert [tuple(request.generated) for request in requests] == [alone(content) for content in contents.values()]
    assert 0 < most <= 3 * model_of(2).num_bytes
    assert engine.adapters.counts["slot_loads"] >= 24


def test_twenty_loads_one_of_them_slow_while_tokens_come(monkeypatch):
    engine = engine_with(max_num_loras=2, num_workers=2)
    engine.adapters.load_all(sources(0))
    given = {f"x{number}": folder(number % 5) for number in range(20)}
    answers = {}
    with slow(monkeypatch, "x3") as go_on:
        loader = threading.Thread(target=lambda: answers.update(engine.adapters.load_all(given)))
        loader.start()
        while len(engine.adapters.names()) < 20:  # all but the slow one
            assert finish(engine, submit(engine, "a0")) == [alone(0)]
        assert "x3" not in engine.adapters and not answers
        assert finish(engine, submit(engine, "x19")) == [alone(4)], "what is there can be used"
        go_on.set()
        loader.join(WAIT_S)
    assert list(answers) == list(given) and all(answer.ok for answer in answers.values())
    assert engine.adapters.names() == ["a0", *given]


def test_one_of_several_that_fails_is_named_and_the_others_are_there(tmp_path):
    engine = engine_with()
    bad = shutil.copytree(folder(1), tmp_path / "bad")
    (bad / "adapter_config.json").write_text(json.dumps({"r": 0}))
    other = Adapter(("q_proj",)).write(tmp_path / "other", tiny_model("llama", hidden_size=16))
    answers = engine.adapters.load_all({"good": folder(0), "bad": bad, "other": other, "lost": tmp_path / "lost"})
    assert [answer.status for answer in answers.values()] == [
        LoRAStatus.SUCCESS, LoRAStatus.LOAD_INVALID_ADAPTER, LoRAStatus.LOAD_INVALID_ADAPTER,
        LoRAStatus.LOAD_INVALID_PATH,
    ]  # fmt: skip
    assert engine.adapters.names() == ["good"]


# several threads


def test_slots_change_between_forwards_only(monkeypatch):
    """Pins, unloads and a mixture's load from another thread come while a forward runs: they wait for its end."""
    engine = engine_with(max_num_loras=3)
    engine.adapters.load_all(sources(0, 1, 4))
    engine.adapters.pin("a1")
    request = submit(engine, "a0")
    engine.step()
    inside, go_on, real = threading.Event(), threading.Event(), engine.model.hidden

    def hidden(batch):
        stacks = [each for table in engine.slots.sites.values() for each in (table.a, table.b)]
        slots = dict(engine.slots.adapters)
        inside.set()
        assert go_on.wait(WAIT_S)
        assert engine.slots.adapters == slots
        now = [each for table in engine.slots.sites.values() for each in (table.a, table.b)]
        assert all(old is new for old, new in zip(stacks, now, strict=True))
        return real(batch)

    monkeypatch.setattr(engine.model, "hidden", hidden)
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert inside.wait(WAIT_S)
    changes = [
        threading.Thread(target=engine.adapters.pin, args=("a4",)),  # rank 8: the stacks must grow for it
        threading.Thread(target=engine.adapters.unload, args=("a1",)),
        threading.Thread(target=engine.adapters.load, args=(folder(3), "a3"), kwargs={"pinned": True}),
    ]
    for change in changes:
        change.start()
    until(lambda: len(engine.adapters.turn._waiting) == 3)
    assert engine.adapters.names() == ["a0", "a1", "a4", "a3"], "reading and registering need no turn"
    go_on.set()
    for thread in [stepping, *changes]:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    monkeypatch.undo()
    assert finish(engine, request) == [alone(0)]
    check_tables(engine, {"a0": 0, "a4": 4, "a3": 3})


def test_a_loop_of_steps_lets_other_threads_in():
    engine = engine_with(max_num_loras=2)
    engine.adapters.load_all(sources(0, 1))
    steps_waited = []

    def pin_often():
        for _ in range(20):
            before = engine.counters()["steps"]
            engine.adapters.pin("a1")
            steps_waited.append(engine.counters()["steps"] - before)
            engine.adapters.unpin("a1")

    thread = threading.Thread(target=pin_often)
    thread.start()
    while thread.is_alive():
        assert finish(engine, submit(engine, "a0")) == [alone(0)]
    # a pin takes its turn twice, each time after the step under way
    assert len(steps_waited) == 20 and max(steps_waited) <= 4, steps_waited


def test_many_threads_load_pin_list_and_unload_while_one_generates():
    engine = engine_with(max_num_loras=3, max_host_bytes=4 * model_of(4).num_bytes, num_workers=3)
    engine.adapters.load_all(sources(*range(len(RANKS))))
    stop, problems = threading.Event(), []

    def work(number: int) -> None:
        manager, name = engine.adapters, f"mine-{number}"
        try:
            for turn in range(1000):
                assert manager.load(folder((number + turn) % 5), name).ok
                manager.prefetch(name)
                if number == 0:
                    with suppress(UserError):  # requests may use every slot
                        manager.pin(name)
                assert len(manager.to_frame()) >= 5 and name in manager.names() and manager.host_bytes >= 0
                assert manager.load(folder((number + turn + 1) % 5), name).status is LoRAStatus.LOAD_NAME_EXISTS
                assert manager.unload(name).ok
                assert manager.unload(name).status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
                if stop.is_set():
                    return
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        mine = [(turn + shift) % 5 for shift in range(4)]
        requests = [submit(engine, f"a{content}", turn % 3) for content in mine]
        assert finish(engine, *requests, submit(engine, None)) == [*(alone(c, turn % 3) for c in mine), alone(None)]
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    check_tables(engine, {f"a{content}": content for content in range(5)})
    engine.adapters.close()


def test_factors_for_a_gpu_are_read_into_page_locked_memory(monkeypatch, tmp_path):
    """There is no GPU here: that every factor is pinned, and only for a GPU, is what can be seen."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    model = tiny_model("llama")
    folder = Adapter(("q_proj", "v_proj"), rank=2).write(tmp_path / "a", model)
    targets = linear_targets(model)
    for pin in (False, True):
        read = Reader(targets, "tiny", 8, pin=pin).read("a", str(folder), {})
        assert len(pinned) == pin * 2 * len(read.sites)
