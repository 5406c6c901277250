"""Any order of loads, requests, steps, pins and unloads: `pytest tests/test_manager_machine.py`.

Few slots and little host memory, so that adapters move between slot, host and disk all the time. After every action
the tables agree; every request ends with the tokens its adapter gives alone. A read ends when the machine says so: runs
repeat, and every order of reads and steps comes up.
"""

from collections import Counter, deque
from concurrent.futures import Future

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from manager_cases import OPTIONS, PROMPTS, RANKS, alone, check_tables, engine_with, folder, model_of

from workbench.adapters import LoRAStatus
from workbench.errors import UserError

TOTALS: Counter[str] = Counter()
NAMES = ("law", "med", "code", "verse")
names = st.sampled_from(NAMES)
contents = st.sampled_from(range(len(RANKS)))
prompts = st.sampled_from(range(len(PROMPTS)))


class Disk:
    """Stands in for the worker threads: reads one adapter at a time, when it is told to."""

    def __init__(self):
        self.asked: deque[tuple] = deque()

    def submit(self, function, *given) -> Future:
        future = Future()
        self.asked.append((future, function, given))
        return future

    def read_one(self, *_) -> None:
        if self.asked:
            future, function, given = self.asked.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(function(*given))

    def shutdown(self, **_) -> None:
        self.asked.clear()


class Manager(RuleBasedStateMachine):
    """An engine and what a user who keeps books thinks of it."""

    def __init__(self):
        super().__init__()
        # the largest adapters alone are beyond the limit: they must still run, one at a time
        limit = 3 * model_of(0).num_bytes
        self.engine = engine_with(max_requests=3, max_num_loras=2, max_host_bytes=limit, num_workers=2)
        self.manager = self.engine.adapters
        self.disk = self.manager._tiers._workers = Disk()
        self.manager.wait = self.disk.read_one
        self.loaded: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.pinned: set[str] = set()
        self.live: list = []  # (request, content, prompt)

    @initialize(given=st.lists(contents, min_size=len(NAMES), max_size=len(NAMES)))
    def start_with_all(self, given):
        for name, content in zip(NAMES, given, strict=True):
            self.load(name, content)

    @rule(name=names, content=contents)
    def load(self, name, content):
        answer = self.manager.load(folder(content), name)
        if name in self.loaded and self.loaded[name] != content:
            assert answer.status is LoRAStatus.LOAD_NAME_EXISTS
            return
        assert answer.ok, answer
        self.loaded[name] = content
        self.leaving.discard(name)

    @rule(name=st.none() | names, prompt=prompts)
    def submit(self, name, prompt):
        try:
            request = self.engine.enqueue(PROMPTS[prompt], adapter=name, **OPTIONS)
        except UserError as error:
            assert name is not None and (name not in self.loaded or name in self.leaving), error
            return
        assert name is None or (name in self.loaded and name not in self.leaving)
        self.live.append((request, self.loaded.get(name), prompt))

    @rule(each=st.lists(st.tuples(names, prompts), min_size=2, max_size=6))
    def submit_several(self, each):
        for name, prompt in each:
            self.submit(name, prompt)

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
            self.settle()

    @rule(count=st.integers(1, 3))
    def read(self, count):
        for _ in range(count):
            self.disk.read_one()

    @rule(index=st.integers(0, 5))
    def cancel(self, index):
        for request, _, _ in self.live[index : index + 1]:
            self.engine.cancel(request)
        self.settle()

    @rule(name=names)
    def pin(self, name):
        try:
            self.manager.pin(name)
        except UserError as error:
            full = len(self.pinned - {name}) >= 2
            busy = sum(entry.leases > 0 or entry.pinned for entry in self.manager.entries()) >= 2
            assert name not in self.loaded or name in self.leaving or full or busy, error
            return
        assert name in self.loaded and name not in self.leaving
        self.pinned.add(name)

    @rule(name=names)
    def unpin(self, name):
        try:
            self.manager.unpin(name)
        except UserError:
            assert name not in self.loaded
        self.pinned.discard(name)

    @rule(name=names, in_use=st.sampled_from(["refuse", "wait"]))
    def unload(self, name, in_use):
        used = any(request.adapter == name for request, _, _ in self.live)
        status = self.manager.unload(name, in_use=in_use).status
        if name not in self.loaded:
            assert status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
        elif used and in_use == "refuse":
            assert status is LoRAStatus.UNLOAD_ERROR
        elif used:
            assert status is LoRAStatus.SUCCESS
            self.leaving.add(name)
        else:
            assert status is LoRAStatus.SUCCESS
            self.gone(name)

    @rule(name=names)
    def prefetch(self, name):
        try:
            self.manager.prefetch(name)
        except UserError:
            assert name not in self.loaded

    @rule()
    def drain(self):
        steps = 0
        while self.live:
            self.step(1)
            steps += 1
            assert steps < 2000, f"stuck: {self.manager.to_frame().to_string()}"

    def settle(self):
        """Check and forget the requests that have ended."""
        ended = [each for each in self.live if each[0].finish_reason is not None]
        self.live = [each for each in self.live if each[0].finish_reason is None]
        for request, content, prompt in ended:
            tokens = tuple(request.generated)
            wanted = alone(content, prompt)
            if request.finish_reason == "error":
                # with every slot pinned nothing else can ever run
                assert "slots hold pinned adapters" in request.error and not tokens
            elif request.finish_reason == "cancelled":
                assert tokens == wanted[: len(tokens)]
            else:
                TOTALS["finished"] += 1
                assert tokens == wanted, f"{request.adapter} ran with other weights than those it was asked for with"
        for name in self.leaving - {request.adapter for request, _, _ in self.live}:
            self.gone(name)

    def gone(self, name):
        del self.loaded[name]
        self.leaving = self.leaving - {name}
        self.pinned.discard(name)

    @invariant()
    def tables_agree(self):
        check_tables(self.engine, self.loaded)
        assert {entry.name for entry in self.manager.entries() if entry.pinned} == self.pinned
        assert {entry.name for entry in self.manager.entries() if entry.leaving} == self.leaving

    def teardown(self):
        self.drain()
        TOTALS.update(self.manager.counts)
        assert all(entry.leases == entry.users == 0 for entry in self.manager.entries())
        for name in list(self.loaded):
            assert self.manager.unload(name).ok
        assert not self.engine.slots.adapters and self.manager.host_bytes == 0
        assert not any(table.spans for table in self.engine.slots.sites.values())
        self.manager.close()


@pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.full)])
def test_any_order(examples):
    TOTALS.clear()
    run_state_machine_as_test(Manager, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None))
    # else the machine would have checked little
    assert min(TOTALS[count] for count in ("slot_hits", "slot_loads", "slot_evictions", "disk_loads")) > examples / 4
    assert TOTALS["finished"] > 4 * examples


def test_an_adapter_put_out_of_its_slot_beside_a_read_is_within_the_limit():
    """Found by the machine: the largest adapter comes back to the host while another's read is under way."""
    state = Manager()
    state.start_with_all(given=[0, 0, 2, 0])
    state.unload(in_use="refuse", name="verse")
    state.submit_several(each=[("med", 0), ("code", 0)])
    state.drain()
    state.pin(name="med")
    state.load(content=0, name="verse")
    state.submit_several(each=[("code", 0), ("law", 0)])
    state.pin(name="verse")
    state.tables_agree()
    state.unpin(name="med")
    state.teardown()


def test_every_content_has_tokens_of_its_own():
    """Else the machine could not tell one adapter's weights from another's."""
    for prompt in range(len(PROMPTS)):
        assert len({alone(content, prompt) for content in [None, *range(len(RANKS))]}) == 1 + len(RANKS)
