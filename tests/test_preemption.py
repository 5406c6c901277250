"""KV pools too small for everyone: requests give way, are recomputed, and end the same; pools too small for one refuse.

Run: pytest tests/test_preemption.py
"""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from jobs import SAMPLINGS, WHO, Job, assert_same, engine_on, run, write_shelf
from models import random_ids

from workbench import UserError
from workbench.engine.batch import SCALING
from workbench.engine.outcome import classify

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"), "llama")


@pytest.fixture(scope="module")
def roomy(shelf):
    return engine_on(shelf, prefix_cache=False, **BITWISE)


def tight(shelf, blocks: int, **options):
    size = engine_on(shelf, False).memory.pool.shape.block_bytes
    return engine_on(shelf, kv_bytes=blocks * size, **{**BITWISE, **options})


def mixed_jobs(count: int = 6) -> list[Job]:
    return [
        Job(random_ids(5 + 5 * i, i), WHO[i % len(WHO)], SAMPLINGS[i % len(SAMPLINGS)], max_tokens=20)
        for i in range(count)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("blocks", [8, 10, 13])
def test_under_pressure_everything_ends_as_with_room(shelf, roomy, blocks, prefix_cache):
    jobs = mixed_jobs(8)
    engine = tight(shelf, blocks, prefix_cache=prefix_cache)
    outcomes = run(engine, jobs)
    assert engine.scheduler.num_preemptions > 0, "there was room enough: the test shows nothing"
    for one, other in zip(outcomes, run(roomy, jobs), strict=True):
        assert_same(one, other)
    assert engine.memory.pool.num_referenced == 0


def test_a_recomputed_request_replays_the_scalings_it_used(shelf):
    """Preempted at every place: the trace, and whose scalings each token used, stay those of an undisturbed run."""
    engine = engine_on(shelf, prefix_cache=False, **BITWISE)
    job = Job(random_ids(9, 3), {"mixture": "mix", "tgt_non_granular_index": 3}, {}, max_tokens=8)
    (undisturbed,) = run(engine, [job])
    for steps in range(1, 14):
        request = engine.enqueue(job.prompt, max_tokens=8, ignore_eos=True, seed=7, **job.who)
        for _ in range(steps):
            engine.step()
        if request.finish_reason is None:
            engine.scheduler.preempt(request)
            assert engine.memory.pool.num_referenced == 0
            used = request.num_scaled
            engine.classifier = lambda hidden, batch, used=used: spoiled(classify(hidden, batch), batch, used)
        while request.finish_reason is None:
            engine.step()
        engine.classifier = classify
        assert request.generated == undisturbed.tokens and request.sources == undisturbed.request.sources
        assert (request.scalings_computed, request.scalings_reused) == (12, 4)


def spoiled(scalings: dict, batch, used: int) -> dict:
    """Make the scalings of positions that had some before useless: a replay must not take them."""
    for span in batch.spans_of(SCALING):
        scalings[span.plan.request][: max(0, used - span.plan.first)] = 1000.0
    return scalings


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_random_arrivals_in_a_small_pool_leave_nothing_and_change_nothing(shelf, roomy, data):
    count = data.draw(st.integers(2, 7))
    jobs = [
        Job(
            random_ids(data.draw(st.integers(1, 40)), data.draw(st.integers(0, 3))), data.draw(st.sampled_from(WHO)),
            data.draw(st.sampled_from(SAMPLINGS)), max_tokens=data.draw(st.integers(1, 12)),
            cancel_after=data.draw(st.one_of(st.none(), st.integers(0, 20))),
            arrive_after=data.draw(st.integers(0, 12)),
        )
        for _ in range(count)
    ]  # fmt: skip
    engine = tight(shelf, data.draw(st.integers(8, 24)), prefix_cache=data.draw(st.booleans()))
    outcomes = run(engine, jobs)
    for outcome, job in zip(outcomes, jobs, strict=True):
        (whole,) = run(roomy, [Job(job.prompt, job.who, job.sampling, job.max_tokens)])
        done = len(outcome.tokens)
        assert outcome.tokens == whole.tokens[:done] and (done == job.max_tokens or job.cancel_after is not None)
    assert engine.memory.pool.num_referenced == 0 and not engine.scheduler.has_work()


def test_a_request_that_no_pool_could_hold_is_refused_with_the_sizes(shelf):
    engine = tight(shelf, 4)
    with pytest.raises(UserError, match="90 tokens, but the KV pool of .* holds 64; lower max_tokens or raise"):
        engine.enqueue(random_ids(60), max_tokens=30)
    with pytest.raises(UserError, match="holds 32 twice"):
        engine.enqueue(random_ids(30), max_tokens=10, mixture="mix")
    assert engine.generate(random_ids(30), max_tokens=34, ignore_eos=True).finish_reason == "length"
    good, bad = engine.generate([random_ids(5), random_ids(60)], max_tokens=30)
    assert good.error is None and "holds 64" in bad.error


def test_a_pool_smaller_than_a_block_is_refused(shelf):
    with pytest.raises(UserError, match="'kv_bytes' is 10, but one block of 16 tokens takes"):
        engine_on(shelf, False, kv_bytes=10)


def test_the_pool_is_never_exceeded_and_says_its_size(shelf):
    engine = tight(shelf, 10)
    requests = [engine.enqueue(job.prompt, max_tokens=20, ignore_eos=True, **job.who) for job in mixed_jobs()]
    while engine.scheduler.has_work():
        engine.step()
        counts = engine.counters()
        assert counts["kv_bytes"] + counts["kv_cached_bytes"] <= counts["kv_pool_bytes"] == engine.memory.pool.num_bytes
    assert all(request.finish_reason == "length" for request in requests)
    assert engine.stats().loc["preemptions", "value"] == engine.scheduler.num_preemptions > 0


def test_the_more_important_request_keeps_its_place(shelf):
    engine = tight(shelf, 6, prefix_cache=False)
    first = engine.enqueue(random_ids(20, 1), max_tokens=40, ignore_eos=True)
    engine.step()
    urgent = engine.enqueue(random_ids(20, 2), max_tokens=40, ignore_eos=True, priority=-1)
    while engine.scheduler.has_work():
        engine.step()
    assert first.num_preemptions and not urgent.num_preemptions
    assert urgent.token_times_s[-1] + urgent.submitted_s < first.token_times_s[-1] + first.submitted_s


def test_what_a_sliding_window_has_left_behind_is_freed(tmp_path):
    """The tiny mistral sees 8 positions: a request of 100 tokens holds two blocks at most, and says the same."""
    shelf = write_shelf(tmp_path)
    engine, whole = tight(shelf, 8, prefix_cache=False), engine_on(shelf, prefix_cache=False, **BITWISE)
    assert engine.memory.window is not None
    jobs = [Job(random_ids(20, i), who, {}, max_tokens=60) for i, who in enumerate(({}, {"adapter": "python"}))]
    held = []
    inner = engine.scheduler.commit

    def commit(*args):
        done = inner(*args)
        held.append(max((s.num_blocks for r in engine.scheduler.running for s in r.streams.values()), default=0))
        return done

    engine.scheduler.commit = commit
    for one, other in zip(run(engine, jobs), run(whole, jobs), strict=True):
        assert_same(one, other)
    assert max(held[5:]) <= -(-engine.memory.window // 16) + 1 and engine.scheduler.num_preemptions == 0
