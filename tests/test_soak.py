"""Short requests with faults among them end with a result each, and leave nothing: `pytest tests/test_soak.py`.

More of them: `pytest -m full tests/test_soak.py`.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
from soak import FAULTS, LOST, FaultyForward, Job, Soak, engine_on, known_tokens, leaks, write_shelf

from workbench import UserError
from workbench.engine.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


@pytest.fixture
def shelf(tmp_path) -> Path:
    return write_shelf(tmp_path)


@pytest.fixture
def tight(shelf):
    """Return how to make an engine too small for what comes, and what jobs without faults say on a large one."""
    with engine_on(shelf) as roomy:
        known, block = known_tokens(roomy), roomy.memory.pool.shape.block_bytes
    return lambda: engine_on(shelf, kv_bytes=8 * block, max_requests=10, max_rows_per_step=24), known


def all_requests() -> weakref.WeakSet:
    return weakref.WeakSet(each for each in gc.get_objects() if type(each) is Request)


@pytest.fixture(autouse=True)
def others() -> weakref.WeakSet:
    """Return the requests that other tests keep alive."""
    return all_requests()


def assert_gone(engine: weakref.ref, threads: set[threading.Thread], others: weakref.WeakSet) -> None:
    """Fail if a closed engine, one of its requests or one of its threads lives on."""
    gc.collect()
    assert engine() is None
    assert not [each for each in all_requests() if each not in others], "requests are kept alive"
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert not left, f"threads left: {left}"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_requests_with_faults_among_them_end_and_leave_nothing(shelf, tight, others, seed, count=2000):
    before, (make, known) = set(threading.enumerate()), tight
    engine = make()
    FaultyForward(engine, seed, 0.01)
    shutil.rmtree(shelf / LOST)
    soak = Soak(engine, shelf, known, count, seed)
    soak.run()
    assert not soak.complaints, "\n".join(soak.complaints[:20])
    assert set(soak.outcomes) == set(range(count)), "every request has a result"
    assert leaks(engine) == []

    faults = Counter(Job.of(number, seed).fault for number in range(count))
    assert set(faults) == set(FAULTS), "every fault has been tried"
    counters = engine.counters()
    for happened in ("preemptions", "failed_steps", "slot_evictions", "kv_evictions", "cached_prompt_tokens"):
        assert counters[happened] > 0, f"{happened}: the test shows nothing"
    for name in [*engine.adapters.names(), *engine.mixtures]:
        engine.unload(name)
    assert not engine.slots.adapters
    engine.close()
    gone = weakref.ref(engine)
    del engine, soak
    assert_gone(gone, before, others)


def test_an_engine_closed_in_the_midst_of_it_all_ends_everything(tight, others):
    before, (make, _) = set(threading.enumerate()), tight
    engine = make()
    jobs = [job for job in (Job.of(number, 3) for number in range(150)) if job.fault is None and job.way != "score"]
    handles = [engine.submit(job.prompt, **{**job.asked(), "n": 1}) for job in jobs]
    while not any(handle.done for handle in handles):
        time.sleep(0.001)
    engine.close()
    ends = Counter(handle.result(10).finish_reason for handle in handles)
    assert ends["cancelled"] > 0 and set(ends) <= {"cancelled", "length", "stop"}
    with pytest.raises(UserError, match="this engine is closed; make a new one"):
        engine.submit("more", max_tokens=1)
    assert leaks(engine) == []
    gone = weakref.ref(engine)
    del engine, handles
    assert_gone(gone, before, others)
