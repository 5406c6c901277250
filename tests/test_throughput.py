"""Throughput of a point: figures of requests whose times are known, and no figure of a wrong result.

Run: pytest tests/test_throughput.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_problem import ended, point_of, prepared_on, write_shelf

from workbench.adapters.types import LoRAConfig
from workbench.instrument.run import open_run
from workbench.sweep import synthetic, throughput
from workbench.sweep.checking import CheckFailed
from workbench.sweep.memory import held_bytes, watched_peaks
from workbench.sweep.throughput import (
    by_adapter,
    counts,
    fairness,
    goodput,
    latencies,
    measure_throughput,
    of_many_adapters,
)
from workbench.sweep.throughput import require_right as checked
from workbench.sweep.traffic import Arrival, serve
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
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        repeats.append(measure_throughput(point, 1, prepared, folder))
        requests = open_run(folder / "run").requests
        assert requests.completion_tokens.sum() == repeats[-1]["generated_tokens"] and set(requests.mixture) == {"mix"}
        assert pd.read_parquet(folder / "adapters.parquet").requests.tolist() == [3]
    first, second = repeats
    # each time begins cold, and what has the same repeat does the same work
    work = ("forwards", "rows", "scaling_rows", "scalings_computed", "scalings_reused", "generated_tokens",
            "forwards_per_token", "cached_tokens", "adapters_used", "kv_peak_bytes", "running_peak")  # fmt: skip
    assert {key: first[key] for key in work} == {key: second[key] for key in work} and first["cached_tokens"] == 0
    assert first["slo_share"] == 1 and 0 < first["ttft_ms_p50"] <= first["ttft_ms_p99"] and first["fairness"] == 1
    assert first["adapters_used"] == 2 and first["running_peak"] == 2
    # who does not know that the process holds this engine only says nothing of the process
    assert np.isnan(first.pop("peak_bytes")) and all(np.isfinite(value) for value in first.values())


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


@given(st.lists(st.sampled_from([None, *"abcdefghijkl"]), min_size=1, max_size=40), st.integers(1, 12))
def test_what_is_checked_covers_as_many_adapters_as_it_can(names, most):
    arrivals = [Arrival(None, [number], 2, {} if name is None else {"adapter": name})
                for number, name in enumerate(names)]
    found = of_many_adapters(arrivals, most)
    assert len(found) == min(most, len(names)) and [each for each in arrivals if each in found] == found
    assert len({each.options.get("adapter") for each in found}) == min(most, len(set(names)))


LORA = {"mode": "lora", "adapters": 12, "rank": 2, "prompt_tokens": 4, "tokens": 2}


def with_adapters(shelf, folder, slots):
    """Return an engine with twelve adapters."""
    prepared = prepared_on(shelf, lora=LoRAConfig(max_num_loras=slots))
    sources = synthetic.write_adapters(folder, prepared.engine.model.targets, 12, 2)
    prepared.adapters = synthetic.load_adapters(prepared.engine, sources)
    return prepared


@pytest.fixture(scope="module")
def adapted(shelf, tmp_path_factory):
    return with_adapters(shelf, tmp_path_factory.mktemp("own"), 16)


@pytest.mark.filterwarnings("ignore:the mixture was made for base")
def test_no_adapter_comes_into_its_slot_while_it_is_timed(adapted, tmp_path):
    few = point_of(**LORA, popularity="uniform", concurrency=4, requests=14)
    for repeat in range(2):
        figures = measure_throughput(few, repeat, adapted, tmp_path / str(repeat))
        used = pd.read_parquet(tmp_path / str(repeat) / "adapters.parquet").name
        assert figures["slot_loads"] == 0 and figures["adapters_used"] == len(used) > 4
    every = point_of(**LORA, popularity="distinct", concurrency=4, requests=14)
    assert measure_throughput(every, 0, adapted, tmp_path / "2")["adapters_used"] == 12
    one = point_of(**LORA, popularity="identical", requests=3)
    assert measure_throughput(one, 0, adapted, tmp_path / "3")["adapters_used"] == 1


@pytest.mark.filterwarnings("ignore:the mixture was made for base")
def test_what_a_unit_finds_in_its_slots_does_not_depend_on_what_ran_before(shelf, tmp_path):
    prepared = with_adapters(shelf, tmp_path / "own", 3)
    points = {popularity: point_of(**LORA, popularity=popularity, concurrency=1, requests=9, slots=3)
              for popularity in ("uniform", "zipf:1.5", "identical", "half_base")}  # fmt: skip
    loads = {}
    for place, key in enumerate([*points, *reversed(points), "uniform", "half_base", "identical", "zipf:1.5"]):
        found = measure_throughput(points[key], 1, prepared, tmp_path / str(place))
        assert loads.setdefault(key, found["slot_loads"]) == found["slot_loads"], key
    # of three adapters in twelve, few are found again; the one that all ask for is there
    assert loads["uniform"] >= 4 and loads["identical"] == 0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=6), st.sampled_from([None, 1]))
def test_the_most_kv_is_that_of_what_runs_at_once(adapted, sizes, concurrency):
    engine = adapted.engine
    arrivals = [Arrival(None, [5] * prompt, tokens) for prompt, tokens in sizes]
    with watched_peaks(engine) as peaks:
        serve(engine, arrivals, concurrency)
    block = engine.memory.pool.shape.block_bytes
    # the last token is never an input, and takes no place; a block has 16
    needed = [-(-(prompt + tokens - 1) // 16) * block for prompt, tokens in sizes]
    assert max(needed) <= peaks.kv_bytes <= (sum(needed) if concurrency is None else max(needed))
    assert peaks.running == (concurrency or len(sizes))
    assert not engine.model.model.base_model._forward_pre_hooks
    if len(sizes) == 1 or concurrency == 1:
        assert peaks.kv_bytes == max(needed)


def test_an_engine_s_bytes_are_its_own(shelf):
    one = prepared_on(shelf).engine
    before, other = held_bytes(one), prepared_on(shelf).engine
    weights = sum(each.numel() * each.element_size() for each in one.model.model.parameters())
    assert held_bytes(one) == before == held_bytes(other) and weights <= before["model_bytes"] < 1.1 * weights
    assert before["slots_bytes"] == one.counters()["slot_bytes"] > 0


@pytest.mark.parametrize(("is_reset", "is_alone"), [(True, True), (True, False), (False, True)])
def test_the_process_s_memory_counts_only_where_it_is_this_engine_s(adapted, tmp_path, monkeypatch, is_reset, is_alone):
    monkeypatch.setattr(throughput, "reset_peak", lambda device: is_reset)
    monkeypatch.setattr(throughput, "peak_bytes", lambda device: 1234)
    point = point_of(mode="base", requests=1, prompt_tokens=4, tokens=2)
    found = measure_throughput(point, 0, adapted, tmp_path, is_alone=is_alone)["peak_bytes"]
    assert found == 1234 if is_reset and is_alone else np.isnan(found)
