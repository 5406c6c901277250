"""Any mix of requests, recorded in any way, gives each what it gives alone: `pytest tests/test_record_random.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import BITWISE, SAMPLINGS, WHO, Job, engine_on, run, write_shelf
from models import random_ids

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
ALL = ("scalings", "logits:top:3", "delta_norm", "hidden_norm", "entropy", "throughput")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines: recorded, and not."""
    shelf = write_shelf(tmp_path_factory.mktemp("shelf"), "llama")
    return [engine_on(shelf, prefix_cache=False, **BITWISE) for _ in range(2)]


@st.composite
def jobs_of_any_sort(draw) -> Job:
    length = draw(st.sampled_from([1, 2, 3, 8, 31, 32, 33, 50]))
    return Job(
        random_ids(length, seed=draw(st.integers(0, 2))), draw(st.sampled_from(WHO)), draw(st.sampled_from(SAMPLINGS)),
        draw(st.integers(1, 5)), draw(st.none() | st.integers(0, 6)), draw(st.integers(0, 3)),
    )  # fmt: skip


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(jobs_of_any_sort(), min_size=1, max_size=5), every=st.sampled_from([1, 1, 2, 5]),
    sites=st.sampled_from([None, "*.q_proj", ["*.0.*", "*.v_proj"]]), memory_bytes=st.sampled_from([0, 5000, 1 << 28]),
)  # fmt: skip
def test_any_mix_of_requests_is_recorded_as_each_alone_and_runs_as_unrecorded(
    engines, jobs, every, sites, memory_bytes
):
    recorded, plain = engines
    expected = run(plain, jobs, record=False)
    with recorded.record(*ALL, every=every, sites=sites, memory_bytes=memory_bytes) as recorder:
        together = run(recorded, jobs, record=False)
    steps = recorder.steps()
    assert steps.tokens.sum() == sum(len(outcome.tokens) for outcome in together)
    for index, (job, outcome) in enumerate(zip(jobs, together, strict=True)):
        assert outcome.tokens == expected[index].tokens and torch.equal(outcome.logits, expected[index].logits)
        if f"job-{index}" not in recorder.traces:
            assert job.cancel_after is not None and outcome.request.finish_reason == "cancelled"
            continue
        with recorded.record(*ALL, sites=sites) as alone:
            run(recorded, [Job(job.prompt, job.who, job.sampling, job.max_tokens)], record=False)
        assert_part(recorder.trace(f"job-{index}"), alone.trace(), every)


def assert_part(trace, whole, every: int) -> None:
    """Check that a trace holds what the whole one does, as far as it came."""
    count = trace.num_tokens
    assert trace.sites == whole.sites and trace.token_ids.tolist() == whole.token_ids[:count].tolist()
    ran = trace.source >= 0
    np.testing.assert_array_equal(trace.values[ran], whole.values[:count][ran])
    for name, ours in trace.extras.items():
        theirs, there = whole.extra(name).values[:count], ~ours.is_missing
        assert not there[np.arange(count) % every > 0].any()
        if name in ("hidden_norm", "delta_norm"):
            np.testing.assert_allclose(ours.values[there], theirs[there], rtol=1e-4, atol=1e-6, err_msg=name)
        elif name == "logits:top.ids":
            np.testing.assert_array_equal(ours.values[there], theirs[there])
        else:
            np.testing.assert_allclose(ours.values[there], theirs[there], atol=1e-5, err_msg=name)
        if trace.metadata["finish_reason"] == "length":
            should = ~whole.extra(name).is_missing[:count]
            should[np.arange(count) % every > 0] = False
            assert (there == should).all(), name
