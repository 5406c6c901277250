"""The manager, one promise at a time: `pytest tests/test_manager.py`."""

import re
import shutil
import threading
import time

import pytest
from manager_cases import (
    MODEL,
    OPTIONS,
    PROMPTS,
    RANKS,
    alone,
    check_tables,
    engine_with,
    finish,
    folder,
    model_of,
    sources,
)
from models import Adapter

from workbench import UserError
from workbench.adapters import LoRAConfig, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, linear
from workbench.adapters.slots import SiteTable
from workbench.adapters.turn import Turn
from workbench.adapters.types import split_spec

WAIT_S = 20.0  # far beyond what anything here takes


@pytest.fixture
def engine():
    """Return an engine with two slots and three adapters, a0, a1 and a2."""
    made = engine_with(max_num_loras=2)
    assert all(answer.ok for answer in made.adapters.load_all(sources(0, 1, 2)).values())
    return made


def tier(engine, name: str) -> str:
    return engine.adapters.to_frame().set_index("name").loc[name, "tier"]


def submit(engine, name: str | None, prompt: int = 0, **options):
    return engine.enqueue(PROMPTS[prompt], adapter=name, **{**OPTIONS, **options})


# slots


def test_three_adapters_on_two_slots_neither_thrash_nor_starve(engine):
    """The old way to fail: each admission evicts the adapter that the next one needs."""
    requests = [submit(engine, f"a{index % 3}", index % 2) for index in range(30)]
    tokens = finish(engine, *requests)
    assert tokens == [alone(index % 3, index % 2) for index in range(30)]
    assert engine.adapters.counts["slot_loads"] <= 6, engine.adapters.counts


def test_a_third_adapter_gets_its_turn_under_steady_traffic():
    engine = engine_with(max_requests=4, max_num_loras=2)
    engine.adapters.load_all(sources(0, 1, 2))
    traffic = [submit(engine, f"a{index % 2}") for index in range(8)]
    third = submit(engine, "a2")
    steps = 0
    while third.finish_reason is None:
        engine.step()
        steps += 1
        # whoever has had a turn comes back at once
        traffic = [r if r.finish_reason is None else submit(engine, r.adapter) for r in traffic]
        assert steps < 200, "starved"
    assert tuple(third.generated) == alone(2)
    finish(engine, *traffic)


def test_a_base_only_batch_makes_no_lora_work(engine, monkeypatch):
    calls = []
    for op, real in (("blend", linear.blend), ("sgmv", linear.sgmv), ("mix", linear.mix)):
        monkeypatch.setattr(linear, op, lambda *given, real=real, op=op: calls.append(op) or real(*given))
    engine.adapters.pin("a0")
    engine.adapters.pin("a1")
    assert finish(engine, submit(engine, None), submit(engine, None, 1)) == [alone(None), alone(None, 1)]
    assert calls == []
    before = engine.counters()["forwards"]
    finish(engine, submit(engine, "a0"), submit(engine, None))
    assert len(calls) == 2 * (engine.counters()["forwards"] - before), "two sites, once each per forward"


def test_a_put_that_fails_half_way_leaves_nothing_behind(engine, monkeypatch):
    real = SiteTable.put

    def full(table, slot, a, b):
        if a.shape[1] == 32:  # q_proj, the second site
            raise RuntimeError("not enough memory: you tried to allocate 8 bytes\nand more")
        real(table, slot, a, b)

    with monkeypatch.context() as patch:
        patch.setattr(SiteTable, "put", full)
        failed, other = submit(engine, "a0"), submit(engine, None)
        while not (failed.finish_reason and other.finish_reason):
            engine.step()
    assert failed.error == "adapter 'a0' cannot be put into a slot: not enough memory: you tried to allocate 8 bytes"
    assert tuple(other.generated) == alone(None)
    assert not any(table.spans for table in engine.slots.sites.values())
    # an adapter at one site only would now run with the rows that a0 had left at the other
    partial = Adapter(("q_proj",), rank=2, seed=9).write(folder(0).parent / "partial", MODEL)
    engine.load_adapter(partial)
    wanted = engine_with()
    wanted.load_adapter(partial)
    tokens = [each.generate(PROMPTS[0], adapter="partial", **OPTIONS).token_ids for each in (engine, wanted)]
    assert tokens[0] == tokens[1]
    assert finish(engine, submit(engine, "a0")) == [alone(0)]


# pins


def test_pinned_adapters_stay_and_the_last_slot_serves_the_others(engine):
    engine.adapters.pin("a1")
    engine.adapters.pin("a1")
    for name in ("a0", "a2", "a0", "a1", "a2"):
        assert finish(engine, submit(engine, name)) == [alone(int(name[1]))]
        assert tier(engine, "a1") == "slot"
    engine.adapters.unpin("a1")
    finish(engine, submit(engine, "a0"), submit(engine, "a2"))
    assert tier(engine, "a1") == "host"


def test_with_every_slot_pinned_other_adapters_are_told_so(engine):
    engine.adapters.pin("a0")
    engine.adapters.pin("a1")
    says = r"all 2 slots hold pinned adapters \('a0', 'a1'\); unpin one, or raise max_num_loras"
    with pytest.raises(UserError, match=f"no slot is left to pin 'a2': {says}"):
        engine.adapters.pin("a2")
    answer = engine.adapters.load(folder(3), "a3", pinned=True)
    assert answer.status is LoRAStatus.LOAD_ERROR and "no slot is left to pin 'a3'" in answer.message
    assert "a3" not in engine.adapters, "a load that fails leaves nothing behind"
    assert engine.adapters.load(folder(2), "a2", pinned=True).status is LoRAStatus.LOAD_ERROR
    assert "a2" in engine.adapters, "but what was there stays"
    refused, served = submit(engine, "a2"), submit(engine, "a0")
    assert finish(engine, served) == [alone(0)]
    assert re.fullmatch(f"adapter 'a2' cannot run: {says}", refused.error)
    engine.adapters.unpin("a1")
    assert finish(engine, submit(engine, "a2")) == [alone(2)]


def test_a_merge_that_finds_no_room_beside_the_pinned_is_told_so(engine):
    """It needs two slots at once: waiting for them would hold up all that come later, for ever."""
    engine.adapters.pin("a0")
    both = {"ids": ["a1", "a2"], "merge_strategy": "linear"}
    other = submit(engine, "a1")
    done = engine.generate(PROMPTS[0], merged_adapters=both, **OPTIONS)
    assert done.error == (
        "'a1', 'a2' cannot run together: 2 slots hold them only without the pinned 'a0'; unpin one, or raise "
        "max_num_loras"
    )
    assert finish(engine, other) == [alone(1)]
    assert engine.generate(PROMPTS[0], merged_adapters={**both, "ids": ["a0", "a2"]}, **OPTIONS).error is None
    engine.adapters.unpin("a0")
    assert engine.generate(PROMPTS[0], merged_adapters=both, **OPTIONS).error is None


def test_a_pin_while_requests_use_every_slot(engine):
    running = [submit(engine, "a0"), submit(engine, "a1")]
    engine.step()
    with pytest.raises(UserError, match="no slot is free for 'a2': requests use all 2"):
        engine.adapters.pin("a2")
    engine.adapters.pin("a0")
    assert finish(engine, *running) == [alone(0), alone(1)]
    engine.adapters.pin("a2")
    assert (tier(engine, "a0"), tier(engine, "a1"), tier(engine, "a2")) == ("slot", "host", "slot")


# unload, and load again


def test_unload_in_use_is_refused_or_waits(engine):
    manager = engine.adapters
    running, queued = submit(engine, "a0"), None
    engine.step()
    queued = submit(engine, "a0", 1)
    answer = manager.unload("a0")
    assert answer.status is LoRAStatus.UNLOAD_ERROR
    assert answer.message == (
        "adapter 'a0' is in use by 2 requests; wait for the end, cancel, or unload with in_use='wait'"
    )
    with pytest.raises(UserError, match="in_use must be 'refuse' or 'wait', not 'wai'; did you mean 'wait'"):
        manager.unload("a0", in_use="wai")
    answer = manager.unload("a0", in_use="wait")
    assert answer.ok and answer.message == "adapter 'a0' goes when the 2 requests that use it end"
    with pytest.raises(UserError, match="adapter 'a0' is being unloaded; it takes no new requests"):
        submit(engine, "a0")
    with pytest.raises(UserError, match="is being unloaded"):
        manager.pin("a0")
    assert manager.load(folder(1), "a0").status is LoRAStatus.LOAD_NAME_EXISTS, "its requests would see it"
    assert finish(engine, running, queued) == [alone(0), alone(0, 1)]
    assert "a0" not in manager
    answer = manager.unload("a0")
    assert answer.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
    assert answer.message.startswith("no adapter 'a0' is loaded; did you mean 'a")


def test_a_load_of_the_same_content_takes_an_unload_back(engine):
    running = submit(engine, "a0")
    assert engine.adapters.unload("a0", in_use="wait").ok and engine.adapters.load(folder(0), "a0").ok
    assert finish(engine, running, submit(engine, "a0", 1)) == [alone(0), alone(0, 1)]
    assert "a0" in engine.adapters


def test_a_queued_request_keeps_the_content_it_asked_for(engine):
    """Its name may not be given to another adapter while it waits."""
    running = [submit(engine, "a1"), submit(engine, "a2")]
    engine.step()
    queued = submit(engine, "a0")
    engine.step()
    assert not queued.has_lease and engine.adapters.unload("a0").status is LoRAStatus.UNLOAD_ERROR
    engine.cancel(queued)
    assert engine.adapters.unload("a0").ok and engine.adapters.load(folder(3), "a0").ok
    assert finish(engine, *running, submit(engine, "a0")) == [alone(1), alone(2), alone(3)]


def test_no_stale_weights_under_an_old_name(engine):
    for content in (0, 3, 4, 1, 0):
        assert engine.adapters.unload("a0").ok and engine.adapters.load(folder(content), "a0").ok
        assert finish(engine, submit(engine, "a0"), submit(engine, "a1")) == [alone(content), alone(1)]
        check_tables(engine, {"a0": content, "a1": 1, "a2": 2})


def test_reloading_the_same_is_no_change_and_other_content_is_refused(engine, tmp_path):
    manager = engine.adapters
    same = shutil.copytree(folder(0), tmp_path / "b")
    before = manager.entries()
    for source in (folder(0), f"{folder(0)}/", same):
        answer = manager.load(source, "a0")
        assert answer.ok and answer.message.startswith("adapter 'a0' is loaded: rank 1, 2 sites, 0.00 MB")
    assert manager.entries() == before and manager.names() == ["a0", "a1", "a2"]
    answer = manager.load(folder(1), "a0")
    assert answer.status is LoRAStatus.LOAD_NAME_EXISTS
    assert answer.message == (
        f"'a0' is loaded already, with other content, from '{same}'; unload it first, or load this one under another "
        "name"
    )
    assert finish(engine, submit(engine, "a0")) == [alone(0)]


# names, requests, settings


@pytest.mark.parametrize(
    ("spec", "name", "source"),
    [
        ("law=/data/x", "law", "/data/x"),
        ("law=org/x", "law", "org/x"),
        ("/data/run=5/best", "best", "/data/run=5/best"),
        ("best=/data/run=5/x", "best", "/data/run=5/x"),
        ("./run=5", "run=5", "./run=5"),
        ("run=5/x", "run", "5/x"),
        ("org/name", "name", "org/name"),
        ("/data/x/", "x", "/data/x/"),
        (r"C:\run=5\x", r"C:\run=5\x", r"C:\run=5\x"),
        ("a = b", "a", "b"),
    ],
)
def test_what_a_spec_names(spec, name, source):
    assert split_spec(spec) == (name, source)


def test_a_spec_of_dots_is_called_by_its_folder(monkeypatch):
    monkeypatch.chdir(folder(0))
    assert split_spec(".") == ("content-0", ".")
    assert split_spec("..") == (folder(0).parent.name, "..")


def test_paths_with_equals_signs_load(engine, tmp_path):
    path = Adapter(("q_proj",), rank=2).write(tmp_path / "lr=3e-4" / "run=5", MODEL)
    assert engine.adapters.load(path).ok and engine.adapters.load(f"best={path}").ok
    assert engine.adapters.names()[-2:] == ["run=5", "best"]


def test_requests_and_responses(engine):
    manager = engine.adapters
    answer = manager.handle(LoRARequest("load", "law", str(folder(3))))
    assert (answer.status, answer.ok) == (LoRAStatus.SUCCESS, True) and answer.raise_for_status() is answer
    assert manager.handle(LoRARequest(LoRAOperation.LOAD, "law", str(folder(2)))).status is LoRAStatus.LOAD_NAME_EXISTS
    assert manager.handle(LoRARequest("load", "x", "/nowhere/x")).status is LoRAStatus.LOAD_INVALID_PATH
    assert manager.handle(LoRARequest("load", "x", str(folder(0).parent))).status is LoRAStatus.LOAD_INVALID_ADAPTER
    answer = manager.handle(LoRARequest("unload", "lawn"))
    assert answer == LoRAResponse(
        LoRAStatus.UNLOAD_NAME_NONEXISTENT, "no adapter 'lawn' is loaded; did you mean 'law'?"
    )
    with pytest.raises(UserError, match="no adapter 'lawn' is loaded"):
        answer.raise_for_status()
    assert manager.handle(LoRARequest("unload", "law")).ok
    assert manager.load(folder(0), " ").status is LoRAStatus.LOAD_INVALID_PATH
    for given, says in (
        (("lod", "x", "y"), "operation must be 'load' or 'unload', not 'lod'"),
        (("load", " ", "y"), "lora_name must be a name"),
        (("load", "x"), "a request to load 'x' needs a lora_path"),
    ):
        with pytest.raises(UserError, match=says):
            LoRARequest(*given)


def test_the_paths_of_the_settings_are_loaded_at_the_start(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(f'[lora_config]\nlora_paths = ["law={folder(1)}", "{folder(2)}"]\nmax_num_loras = 2\n')
    config = LoRAConfig.from_toml(file)
    assert (config.max_num_loras, config.max_lora_rank, config.max_host_bytes) == (2, 256, None)
    engine = engine_with(lora_paths=config.lora_paths)
    assert engine.adapters.names() == ["law", "content-2"]
    assert finish(engine, submit(engine, "law"), submit(engine, "content-2")) == [alone(1), alone(2)]
    with pytest.raises(UserError, match="folder not found"):
        engine_with(lora_paths=[str(folder(0)), "/nowhere/x"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_paths": "law=/x"}, "'lora_paths' is 'law=/x', expected"),
        ({"lora_paths": 5}, "'lora_paths' is 5"),
        ({"lora_paths": ["a=/x", "a=/y"]}, "'lora_paths' gives 'a' two sources, '/x' and '/y'"),
        ({"lora_paths": ["/x/a", "/y/a"]}, "gives 'a' two sources"),
        ({"lora_paths": ["=x"]}, "is not of the form name=source"),
        ({"lora_paths": [3]}, "'lora_paths' holds 3, expected texts"),
        ({"max_num_loras": 0}, "'max_num_loras' is 0, expected at least 1"),
        ({"max_lora_rank": 0}, "'max_lora_rank' is 0"),
        ({"max_num_loras": True}, "'max_num_loras' is True, expected a whole number"),
        ({"max_host_bytes": -1}, "'max_host_bytes' is -1"),
        ({"num_workers": 0}, "'num_workers' is 0, expected from 1 to 64"),
        ({"max_num_lora": 3}, "unknown key 'max_num_lora'; did you mean 'max_num_loras'"),
    ],
)
def test_settings_that_mean_nothing(settings, says):
    with pytest.raises(UserError, match=says):
        LoRAConfig.from_mapping(settings)


def test_adapters_above_the_rank_limit_are_refused():
    engine = engine_with(max_lora_rank=3)
    assert engine.adapters.load(folder(2)).ok
    answer = engine.adapters.load(folder(3))
    assert answer.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert answer.message == "adapter 'content-3' has rank 4, but max_lora_rank is 3; raise max_lora_rank"


def test_the_table(engine):
    submit(engine, "a0")
    engine.step()
    engine.adapters.pin("a1")
    table = engine.adapters.to_frame()
    assert list(table.columns) == [
        "name", "tier", "slot", "rank", "num_bytes", "users", "leases", "pinned", "leaving", "source",
    ]  # fmt: skip
    assert list(table["name"]) == ["a0", "a1", "a2"] and list(table["tier"]) == ["slot", "slot", "host"]
    assert list(table["slot"].dropna()) == [0, 1] and table["slot"].isna().sum() == 1
    assert list(table["leases"]) == [1, 0, 0] and list(table["pinned"]) == [False, True, False]
    assert list(table["num_bytes"]) == [model_of(content).num_bytes for content in range(3)]
    assert table["num_bytes"][2] == engine.adapters.host_bytes and list(table["rank"]) == list(RANKS[:3])


def test_the_turn_goes_to_whoever_asked_first():
    turn, order = Turn(), []

    def take(number: int) -> None:
        with turn, turn:
            order.append(number)

    with turn:
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(turn._waiting) <= number:
                time.sleep(0.001)
    with turn:  # asked for last, though this thread never slept
        order.append("again")
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [0, 1, 2, 3, 4, "again"]


