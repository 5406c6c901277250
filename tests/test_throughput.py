"""Throughput of a point: figures of requests whose times are known, and no figure of a wrong result.

Run: pytest tests/test_throughput.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from sweep_problem import ended, point_of, prepared_on, write_shelf

from workbench.instrument.run import open_run
from workbench.sweep import throughput
from workbench.sweep.checking import CheckFailed
from workbench.sweep.throughput import by_adapter, counts, fairness, goodput, latencies, measure_throughput
from workbench.sweep.throughput import require_right as checked
from workbench.xlora.policy import non_granular


def split(*pairs):
    return [each for each, _ in pairs], [done for _, done in pairs]


def test_latencies_are_percentiles_that_count_the_wait_for_a_place():
    served, done = split(*(ended(ttft_s=n / 100, total_s=n / 100 + 0.3, late_s=0.01, tokens=4) for n in range(1, 102)))
    found = latencies(served, done)
    # 1 to 101 hundredths, a hundredth late: the median is the 51st, the 95th percentile the 96th
    assert found["ttft_ms_p50"] == pytest.approx(520) and found["ttft_ms_p95"] == pytest.approx(970)
    assert found["total_ms_p50"] == pytest.approx(820) and found["time_per_token_ms_p99"] == pytest.approx(100)


def test_a_single_token_has_no_time_per_further_token():
    served, done = split(ended(tokens=1, ttft_s=0.2, total_s=0.2), ended(tokens=3, ttft_s=0.1, total_s=0.5))
    assert latencies(served, done)["time_per_token_ms_p50"] == pytest.approx(200)
    assert "time_per_token_ms_p50" not in latencies(served[:1], done[:1])


def test_goodput_counts_the_requests_that_kept_every_limit():
    served, done = split(
        ended(ttft_s=0.10, total_s=0.40), ended(ttft_s=0.30, total_s=0.60), ended(ttft_s=0.10, total_s=1.00),
        ended(ttft_s=0.10, total_s=0.40, late_s=0.15),
    )  # fmt: skip
    point = point_of(slo_ttft_ms=200, slo_time_per_token_ms=150)
    assert goodput(point, served, done, 2.0) == {"goodput_requests_s": 0.5, "slo_share": 0.25}
    assert goodput(point_of(slo_ttft_ms=200), served, done, 2.0)["slo_share"] == 0.5
    assert goodput(point_of(), served, done, 2.0) == {}


def test_fairness_is_jains_index_over_adapters():
    alike = split(*(ended(key, total_s=0.4) for key in ("a", "b", None)))
    assert fairness(*alike) == pytest.approx(1)
    # one adapter gets 3 tokens a second, the other 1: (3 + 1)² / (2 (9 + 1))
    served, done = split(ended("a", tokens=3, total_s=1.0), ended("b", tokens=1, total_s=1.0))
    assert fairness(served, done) == pytest.approx(0.8)
    # of two requests of an adapter it is the mean that counts
    served, done = split(ended("a", tokens=4, total_s=1.0), ended("a", tokens=2, total_s=1.0),
                         ended("b", tokens=1, total_s=0.5, late_s=0.5))
    assert fairness(served, done) == pytest.approx(0.8)


def test_counts_are_rates_and_what_one_request_waits_for():
    served, done = split(*(ended(tokens=4, forwards=number) for number in (4, 6, 8)))
    changed = {"forwards": 18, "step_s": 0.9, "rows": 40, "scaling_rows": 7, "preemptions": 0, "slot_hits": 1,
               "slot_loads": 2, "slot_evictions": 0}  # fmt: skip
    found = counts(served, done, changed, 2.0)
    assert (found["tok_s"], found["requests_s"], found["generated_tokens"]) == (6.0, 1.5, 12)
    assert found["forwards_per_token"] == 1.5 and found["forward_ms"] == pytest.approx(50)
    assert (found["scalings_computed"], found["scalings_reused"], found["slot_loads"]) == (18, 6, 2)


def test_every_adapter_has_a_row():
    served, done = split(ended("a", ttft_s=0.1), ended("a", ttft_s=0.3), ended(None, tokens=2, total_s=0.2))
    frame = by_adapter(served, done).set_index("name")
    assert frame.loc["a", ["requests", "tokens"]].tolist() == [2, 8]
    assert frame.loc["a", "ttft_ms_p50"] == pytest.approx(200)
    assert frame[frame.index.isna()].tok_s_per_request.tolist() == [10.0]


def right(**changes):
    """Return a served request of 3 prompt tokens and 4 generated ones under non_granular(1)."""
    wanted = {"prompt_ids": [1, 2, 3], "tokens": [1, 2, 3, 4, 5, 6, 7], "generated": [4, 5, 6, 7],
              "scalings_computed": 4, "scalings_reused": 2}  # fmt: skip
    tokens = changes.pop("asked", 4)
    served, _ = ended(tokens=tokens, request={**wanted, **changes})
    return served


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None), ({"error": "out of memory", "finish_reason": "error"}, "ended with error: out of memory"),
        ({"finish_reason": "stop"}, "ended with stop"), ({"asked": 5}, "has 4 tokens, not 5"),
        ({"scalings_computed": 3, "scalings_reused": 3}, r"non_granular\(1\) asks for 4 and 2"),
        ({"scalings_reused": 1}, "asks for 4 and 2"),
    ],
)  # fmt: skip
def test_a_wrong_result_has_no_figures(changes, said):
    served, point = [right(**changes)], point_of(mode="xlora", policy=non_granular(1).name)
    if said is None:
        return checked(served, [served[0].arrival], point)
    with pytest.raises(CheckFailed, match=said):
        checked(served, [served[0].arrival], point)
    with pytest.raises(CheckFailed, match="1 of 2 requests ended"):
        checked(served, [served[0].arrival] * 2, point)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.mark.filterwarnings("ignore:the mixture was made for base")
@pytest.mark.parametrize("policy", ["exact", "lagged(2)"])
def test_a_point_is_measured_on_an_engine(shelf, tmp_path, policy):
    prepared = prepared_on(shelf, prefix_cache=True)
    point = point_of(mode="xlora", policy=policy, concurrency=2, requests=3, prompt_tokens=20, tokens=[3, 5],
                     slo_ttft_ms=1e6, prefix_cache=True)  # fmt: skip
    repeats = []
    for repeat in range(2):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        repeats.append(measure_throughput(point, repeat, prepared, folder))
        requests = open_run(folder / "run").requests
        assert requests.completion_tokens.sum() == repeats[-1]["generated_tokens"] and set(requests.mixture) == {"mix"}
        assert pd.read_parquet(folder / "adapters.parquet").requests.tolist() == [3]
    first, second = repeats
    # each repeat begins cold, and does the same work
    work = ("forwards", "rows", "scaling_rows", "scalings_computed", "scalings_reused", "generated_tokens",
            "forwards_per_token", "cached_tokens")  # fmt: skip
    assert {key: first[key] for key in work} == {key: second[key] for key in work} and first["cached_tokens"] == 0
    assert first["slo_share"] == 1 and 0 < first["ttft_ms_p50"] <= first["ttft_ms_p99"] and first["fairness"] == 1
    assert all(np.isfinite(value) for value in first.values())


@pytest.mark.filterwarnings("ignore:the mixture was made for base")
def test_wrong_tokens_are_found_before_anything_is_timed(shelf, tmp_path, monkeypatch):
    prepared, served = prepared_on(shelf), throughput.serve

    def one_short(engine, arrivals, concurrency=None):
        return served(engine, [dataclasses.replace(each, tokens=each.tokens + 1) for each in arrivals], concurrency)

    monkeypatch.setattr(throughput, "serve", one_short)
    point = point_of(mode="base", requests=2, prompt_tokens=4, tokens=3)
    right_or_not = throughput.require_right
    monkeypatch.setattr(throughput, "require_right", lambda done, asked, of: right_or_not(
        [dataclasses.replace(each, arrival=one) for each, one in zip(done, asked, strict=True)], asked, of))
    with pytest.raises(CheckFailed, match="has 4 tokens, not 3"):
        measure_throughput(point, 0, prepared, tmp_path)
    assert not list(tmp_path.iterdir())
