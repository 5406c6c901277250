"""Recording changes nothing, and what it measures is what one sequence alone gives: `pytest tests/test_record.py`.

Every kind, in every mode of the engine, for requests of every sort in one batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from jobs import ADAPTERS, BITWISE, SPECS, Job, engine_on, everyone, run, write_shelf
from measured_alone import assert_measured, measured_alone
from models import Probe, lora_sites, random_ids, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
ALL = ("scalings", "logits:top:3", "delta_norm", "hidden_norm", "entropy", "cache", "throughput")
MERGED = {"ids": ["law", "german"], "weights": [0.7, -0.4]}
MODES = {
    "default": {},
    "bitwise": BITWISE,
    "no drafts": {"drafting": False},
    "chunked prefill": {"max_rows_per_step": 7},
    "reference attention, no cache": {"attention": "reference", "prefix_cache": False},
    "preemption": {"blocks": 9},
    "preemption, no cache": {"blocks": 9, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"), "llama")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def jobs() -> list[Job]:
    """One request of every sort, merged and with each reuse policy too, long enough to be preempted."""
    more = [
        Job(random_ids(6, 9), {"merged_adapters": MERGED}, max_tokens=12),
        Job(random_ids(17, 10), {"mixture": "mix", "tgt_non_granular_index": 0}, max_tokens=12),
        Job(random_ids(17, 11), {"mixture": "lifted", "policy": "periodic(3)"}, max_tokens=12),
        Job(random_ids(4, 12), {"mixture": "mix", "policy": "lagged(1)"}, max_tokens=5),
    ]
    return [*everyone(), *more]


def engine_in(shelf, mode: str, **changes):
    options = {**MODES[mode], **changes}
    if blocks := options.pop("blocks", None):
        options["kv_bytes"] = blocks * engine_on(shelf, False).memory.pool.shape.block_bytes
    return engine_on(shelf, **options)


def adapters_of(who: dict) -> dict:
    """Return the adapters a request runs with, and the global weight of its mixture."""
    if "mixture" in who:
        return SPECS[who["mixture"]].adapters
    named = MERGED["ids"] if "merged_adapters" in who else [who["adapter"]] if "adapter" in who else []
    return {name: ADAPTERS[name] for name in named}


def sites_of(model, adapters: dict) -> list[str]:
    touched = {site for adapter in adapters.values() for site in lora_sites(model, adapter.targets)}
    return [name for name, _ in model.named_modules() if name in touched]


def alone(model, job: Job, trace):
    adapters = adapters_of(job.who)
    weights = torch.from_numpy(trace.values[: trace.num_tokens - 1])
    sites = sites_of(model, adapters)
    if adapters:
        assert trace.sites == tuple(sites) and trace.adapters == tuple(adapters)
    return measured_alone(model, adapters, sites, weights, trace.token_ids[:-1].tolist())


@pytest.mark.parametrize("mode", MODES)
def test_on_equals_off_bitwise_and_values_are_those_of_a_sequence_alone(shelf, model, mode):
    off = engine_in(shelf, mode)
    plain = run(off, jobs(), record=False)
    on = engine_in(shelf, mode)
    before = on.counters()
    with on.record(*ALL) as recorder:
        watched = run(on, jobs(), record=False)
    for one, other, job in zip(plain, watched, jobs(), strict=True):
        assert one.tokens == other.tokens and torch.equal(one.logits, other.logits)
        trace = recorder.trace(other.request.id)
        assert trace.token_ids.tolist() == [*job.prompt, *other.tokens]
        assert_measured(trace, alone(model, job, trace))
    after, steps = on.counters(), recorder.steps()
    for ours, theirs in {
        "tokens": "generated_tokens", "rows": "rows", "scaling_rows": "scaling_rows",
        "scalings_computed": "scalings_computed", "scalings_reused": "scalings_reused",
        "drafts_accepted": "drafts_accepted", "drafts_rejected": "drafts_rejected", "preemptions": "preemptions",
        "cached_prompt_tokens": "cached_prompt_tokens", "cached_scaling_tokens": "cached_scaling_tokens",
        "slot_hits": "slot_hits", "slot_loads": "slot_loads", "slot_evictions": "slot_evictions",
    }.items():  # fmt: skip
        assert steps[ours].sum() == after[theirs] - before[theirs] == off.counters()[theirs] - before[theirs], ours
    assert len(steps) == after["steps"] and (steps.adapted_rows + steps.scaling_rows == steps.rows).all()
    assert steps.duration_ms.sum() / 1000 == pytest.approx(after["step_s"] - before["step_s"])
    if "preemption" in mode:
        assert after["preemptions"] > 0, "there was room enough: the test shows nothing"
    if "drafting" not in MODES[mode]:
        assert after["drafts_accepted"] + after["drafts_rejected"] > 0


def test_tokens_found_in_the_prefix_cache_have_no_values_and_the_trace_says_so(shelf, model):
    engine = engine_in(shelf, "bitwise")
    prompt = random_ids(40, 2)
    for who in ({}, {"adapter": "python"}, {"mixture": "mix"}):
        job = Job(prompt, who, max_tokens=3)
        (first,) = run(engine, [job], record=False)
        with engine.record(*ALL) as recorder:
            (second,) = run(engine, [job], record=False)
        trace = recorder.trace()
        assert first.tokens == second.tokens and torch.equal(first.logits, second.logits)
        cached = trace.metadata["cached_tokens"]
        assert cached == 32 and (trace.extra("hidden_norm").is_missing[:cached]).all()
        assert_measured(trace, alone(model, job, trace))
        assert trace.metadata["unmeasured"] == ["positions 0 to 31 were found in the prefix cache: they did not run"]
        if who:
            assert not torch.from_numpy(trace.values[:-1]).isnan().any(), "scalings are whole"
        assert recorder.steps().cached_prompt_tokens.sum() == cached


def test_a_recording_begun_in_the_middle_has_the_rest(shelf, model):
    engine, prompt = engine_in(shelf, "default"), random_ids(7, 3)
    request = engine.enqueue(prompt, mixture="mix", max_tokens=8, ignore_eos=True)
    while len(request.generated) < 3:
        engine.step()
    with engine.record("scalings", "hidden_norm", "entropy", "throughput") as recorder:
        already = request.streams["adapted"].length
        while request.finish_reason is None:
            engine.step()
    trace = recorder.trace()
    assert trace.extra("hidden_norm").is_missing.all(1).tolist() == [
        not already <= position < trace.num_tokens - 1 for position in range(trace.num_tokens)
    ]
    assert trace.metadata["unmeasured"] == [f"positions 0 to {already - 1} ran before the recording began"]
    assert not torch.from_numpy(trace.values[:-1]).isnan().any()
    assert recorder.steps().tokens.sum() == 5, "what came before it does not count"


def test_every_thins_out_what_is_measured_and_scalings_stay_whole(shelf, model):
    chosen = jobs()
    for mode in ("default", "chunked prefill"):
        with (engine := engine_in(shelf, mode)).record(*ALL, every=3) as recorder:
            outcomes = run(engine, chosen, record=False)
        for job, outcome in zip(chosen, outcomes, strict=True):
            trace = recorder.trace(outcome.request.id)
            if job.who:
                assert not torch.from_numpy(trace.values[:-1]).isnan().any()
            assert "only positions that 3 divides were measured" in trace.metadata["unmeasured"]
            if trace.num_tokens > 6:
                assert_measured(trace, alone(model, job, trace), every=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_recording_changes_nothing_and_values_are_near_float32s(shelf, dtype):
    chosen = [replace(job, max_tokens=3) for job in jobs()]
    off = run(engine_in(shelf, "default", dtype=dtype), chosen, record=False)
    engine, exact = engine_in(shelf, "default", dtype=dtype), engine_in(shelf, "default")
    with engine.record(*ALL) as recorder, exact.record(*ALL) as reference:
        on = run(engine, chosen, record=False)
        run(exact, chosen, record=False)
    for one, other in zip(off, on, strict=True):
        assert one.tokens == other.tokens and torch.equal(one.logits, other.logits)
        ours, theirs = (each.trace(one.request.id) for each in (recorder, reference))
        prompt = slice(0, ours.prompt_tokens)  # what follows may differ by the tokens chosen
        for name in [name for name in ("hidden_norm", "delta_norm") if name in ours.extras]:
            values, expected = ours.extra(name).values[prompt], theirs.extra(name).values[prompt]
            is_there = expected > 0
            assert np.median(np.abs(values[is_there] / expected[is_there] - 1)) < 0.02, name


def test_two_recorders_at_once_see_what_each_asked_for(shelf, model):
    engine, chosen = engine_in(shelf, "default"), jobs()
    whole, part = engine.record(*ALL), engine.record("scalings", "delta_norm", sites="*.q_proj", requests=["job-2"])
    outcomes = run(engine, chosen, record=False)
    part.close()
    whole.close()
    assert list(part.traces) == ["job-2"] and len(whole.traces) == len(chosen)
    ours, theirs = part.trace(), whole.trace("job-2")
    assert ours.sites == tuple(site for site in theirs.sites if site.endswith("q_proj"))
    assert ours.extra("delta_norm").labels["site"] == ours.sites
    same = theirs.select(sites="*.q_proj")
    np.testing.assert_array_equal(ours.values, same.values)
    np.testing.assert_allclose(ours.extra("delta_norm").values, same.extra("delta_norm").values, rtol=1e-5)
    assert_measured(whole.trace("job-1"), alone(model, chosen[1], whole.trace("job-1")))
    assert list(part.requests().request_id) == ["job-2"] and len(outcomes) == len(chosen)


def test_no_row_gets_logits_for_the_recording(shelf):
    """And prompt log-probabilities give entropies for the prompt."""
    engine, ids = engine_in(shelf, "default"), random_ids(9, 1)
    probes = []
    for kinds in ((), ("entropy", "logits:top")):
        probe = Probe(engine)
        recorder = engine.record(*kinds) if kinds else None
        engine.generate([ids, ids], adapter=[None, "python"], max_tokens=3, ignore_eos=True, seed=1)
        scored = engine.generate(ids, max_tokens=2, prompt_logprobs=True, request_id="scored")
        probe.close()
        probes.append(probe)
    recorder.close()
    assert len(probes[0].logits) == len(probes[1].logits) > 0
    entropy = recorder.trace("scored").extra("entropy")
    assert entropy.is_missing.tolist() == [False] * (8 + len(scored.token_ids)) + [True]
    assert len(engine.model.routing.watchers) == 0


def test_hooks_are_on_the_model_only_while_a_recorder_wants_them(shelf):
    engine = engine_in(shelf, "default")
    layers = engine.model.model.model.layers

    def hooks() -> int:
        return sum(len(layer._forward_hooks) for layer in layers)

    with engine.record("entropy"):
        assert hooks() == 0
        with engine.record("hidden_norm"), engine.record("hidden_norm"):
            assert hooks() == len(layers)
        assert hooks() == 0
    assert not engine.recording._watchers


def test_a_step_that_failed_leaves_no_value_and_the_recording_goes_on(shelf, model):
    engine, classify = engine_in(shelf, "bitwise"), None
    classify, calls = engine.classifier, []

    def failing(hidden, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("a step that fails")
        return classify(hidden, batch)

    engine.classifier = failing
    job = Job(random_ids(6, 1), {"mixture": "mix"}, max_tokens=6)
    with engine.record(*ALL) as recorder:
        (one, other) = run(engine, [job, replace(job, who={"adapter": "law"})], record=False)
    assert one.request.finish_reason == other.request.finish_reason == "length"
    for each, outcome in ((job, one), (replace(job, who={"adapter": "law"}), other)):
        trace = recorder.trace(outcome.request.id)
        assert_measured(trace, alone(model, each, trace))
    assert len(recorder.steps()) == engine.counters()["steps"] == len(calls) - 1
