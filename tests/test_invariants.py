"""The truths that must survive any change of the engine: `pytest tests/test_invariants.py`.

Matrix products round differently with the row count, so "bitwise" is tested with every forward padded to 32 rows and
attention row by row. `test_drafts_and_counts.py` compares those settings with the default ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import (
    ADAPTERS,
    BITWISE,
    SAMPLINGS,
    SPECS,
    TARGETS,
    TOLERANCE,
    WHO,
    Job,
    Outcome,
    assert_same,
    engine_on,
    everyone,
    run,
    write_shelf,
)
from models import (
    Adapter,
    MixtureSpec,
    by_definition,
    random_ids,
    save_base,
    tiny_model,
    xlora_names,
)
from safetensors.torch import save_file

from workbench import Engine, UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def bitwise(shelf) -> Engine:
    return engine_on(shelf, **BITWISE)


# 1, 2, 3: neighbours


def test_a_request_alone_equals_the_same_request_in_a_mixed_batch(bitwise):
    jobs = everyone()
    for together, job in zip(run(bitwise, jobs), jobs, strict=True):
        assert_same(run(bitwise, [job])[0], together)


def test_permuting_requests_permutes_outcomes(bitwise):
    jobs = everyone()
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(1)).tolist()
    straight, mixed = run(bitwise, jobs), run(bitwise, [jobs[i] for i in order])
    for place, i in enumerate(order):
        assert_same(straight[i], mixed[place])


def test_base_rows_of_the_wrapped_model_equal_the_unwrapped_model(bitwise, shelf):
    plain = run(engine_on(shelf, loaded=False, **BITWISE), [job for job in everyone() if not job.who])
    among_others = [outcome for job, outcome in zip(everyone(), run(bitwise, everyone()), strict=True) if not job.who]
    assert len(plain) == len(among_others) == 2
    for one, other in zip(plain, among_others, strict=True):
        assert_same(one, other)


_ALONE: dict[str, Outcome] = {}


@st.composite
def jobs_of_any_sort(draw) -> Job:
    length = draw(st.sampled_from([1, 2, 3, 8, 31, 32, 33, 50]))
    return Job(
        random_ids(length, seed=draw(st.integers(0, 2))), draw(st.sampled_from(WHO)), draw(st.sampled_from(SAMPLINGS)),
        draw(st.integers(1, 5)), draw(st.none() | st.integers(0, 6)),
    )  # fmt: skip


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(jobs_of_any_sort(), min_size=1, max_size=6))
def test_any_mix_of_requests_gives_each_what_it_gets_alone(bitwise, jobs):
    together = run(bitwise, jobs)
    assert not bitwise.scheduler.has_work() and bitwise.counters()["kv_bytes"] == 0, "a finished request left something"
    for job, outcome in zip(jobs, together, strict=True):
        whole = Job(job.prompt, job.who, job.sampling, job.max_tokens)
        alone = _ALONE.setdefault(repr(whole), None) or run(bitwise, [whole])[0]
        _ALONE[repr(whole)] = alone
        if job.cancel_after is None:
            assert outcome.request.finish_reason == "length" and len(outcome.tokens) == job.max_tokens
        count = len(outcome.tokens)
        assert outcome.tokens == alone.tokens[:count]
        assert torch.equal(outcome.logits, alone.logits[:count])
        if outcome.scalings is not None:
            assert torch.equal(outcome.scalings, alone.scalings[: len(outcome.scalings)])


def test_two_engines_do_not_see_each_other(shelf):
    first, second = engine_on(shelf, **BITWISE), engine_on(shelf, loaded=False, **BITWISE)
    second.load_adapter(shelf / "law", "python")  # the name the first engine gave to another adapter
    job = Job(random_ids(6, 1), {"adapter": "python"})
    alone = [run(engine, [job])[0] for engine in (first, second)]
    requests = [
        engine.enqueue(job.prompt, adapter="python", max_tokens=4, ignore_eos=True) for engine in (first, second)
    ]
    while any(request.finish_reason is None for request in requests):
        for engine in (first, second):
            if engine.scheduler.has_work():
                engine.step()
    assert [request.generated for request in requests] == [outcome.tokens for outcome in alone]
    assert not torch.equal(alone[0].logits, alone[1].logits)


# 4, 5: what scalings mean


def with_classifier(shelf: Path, folder: Path, bias: torch.Tensor) -> Path:
    """Copy the mixture "mix" with a classifier whose logits are `bias` `[site, adapter]` for every token."""
    spec = SPECS["mix"]
    model = tiny_model("mistral")
    spec.write(folder, model)
    layers = spec.layers(model)
    layers[-1] = (torch.zeros_like(layers[-1][0]), bias.reshape(-1))
    save_file(xlora_names(layers), folder / "xlora_classifier.safetensors")
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_one_hot_scalings_equal_that_adapter_alone(shelf, tmp_path, name):
    sites = SPECS["mix"].sites(tiny_model("mistral"))
    bias = torch.full((len(sites), len(ADAPTERS)), -200.0)
    bias[:, list(ADAPTERS).index(name)] = 200.0  # a softmax of exactly 1 and 0
    engine = engine_on(shelf)
    engine.load_mixture(with_classifier(shelf, tmp_path / "one-hot", bias), "one-hot")
    prompt = random_ids(9)
    alone, mixed = run(engine, [Job(prompt, {"adapter": name}), Job(prompt, {"mixture": "one-hot"})])
    assert set(mixed.scalings.unique().tolist()) == {0.0, 1.0}
    assert mixed.tokens == alone.tokens
    assert (mixed.logits - alone.logits).abs().max() < TOLERANCE
    base = run(engine, [Job(prompt)])[0]
    assert (base.logits[0] - alone.logits[0]).abs().max() > 0.01, "the adapter does nothing, so this proves nothing"


def test_uniform_scalings_equal_the_mean_of_the_deltas(shelf, tmp_path):
    """The mean of n deltas is one adapter with the factors side by side and B over n."""
    model = tiny_model("mistral")
    sites = SPECS["mix"].sites(model)
    stacked = {}
    for site in sites:
        downs, ups = [], []
        for adapter in ADAPTERS.values():
            tensors = adapter.factors(model)
            if f"base_model.model.{site}.lora_A.weight" in tensors:
                downs.append(tensors[f"base_model.model.{site}.lora_A.weight"])
                ups.append(tensors[f"base_model.model.{site}.lora_B.weight"] * adapter.scale_at(site) / len(ADAPTERS))
        stacked[f"base_model.model.{site}.lora_A.weight"] = torch.cat(downs)
        stacked[f"base_model.model.{site}.lora_B.weight"] = torch.cat(ups, dim=1)
    ranks = {
        key.split(".lora_")[0].removeprefix("base_model.model."): t.shape[0]
        for key, t in stacked.items()
        if "_A" in key
    }
    mean = Adapter(TARGETS, rank=1, alpha=1, config={"rank_pattern": ranks, "alpha_pattern": ranks})
    mean.write(tmp_path / "mean", model)
    save_file(stacked, tmp_path / "mean" / "adapter_model.safetensors")
    engine = engine_on(shelf)
    engine.load_adapter(tmp_path / "mean")
    engine.load_mixture(with_classifier(shelf, tmp_path / "uniform", torch.zeros(len(sites), len(ADAPTERS))), "uniform")
    prompt = random_ids(9)
    alone, mixed = run(engine, [Job(prompt, {"adapter": "mean"}), Job(prompt, {"mixture": "uniform"})])
    assert mixed.tokens == alone.tokens
    assert (mixed.logits - alone.logits).abs().max() < TOLERANCE


def test_scalings_sum_to_one_before_top_k_and_top_k_only_drops(shelf):
    engine = engine_on(shelf, loaded=False, prefix_cache=False)
    engine.load_mixture(shelf / "mix", "all")
    engine.load_mixture(shelf / "mix", "two", settings={"top_k_lora": 2})
    prompts = [random_ids(n, n) for n in (1, 6, 30)]
    whole = run(engine, [Job(prompt, {"mixture": "all"}, max_tokens=1) for prompt in prompts])
    kept = run(engine, [Job(prompt, {"mixture": "two"}, max_tokens=1) for prompt in prompts])
    for everything, two in zip(whole, kept, strict=True):
        sums = everything.scalings.sum(-1)
        assert (sums - 1).abs().max() < 1e-6
        assert ((two.scalings > 0).sum(-1) == 2).all()
        dropped = everything.scalings.min(-1, keepdim=True).values
        assert torch.equal(two.scalings, torch.where(everything.scalings == dropped, 0.0, everything.scalings))
        assert (two.scalings.sum(-1) < 1).all()


# 6: caches


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_cached_decoding_equals_full_recomputation_over_two_turns(shelf, name, drafting):
    engine = engine_on(shelf, drafting=drafting)
    turn = Job(random_ids(11, 1), {"mixture": name}, max_tokens=8)
    for _ in range(2):
        (done,) = run(engine, [turn])
        ids = [*turn.prompt, *done.tokens[:-1]]
        logits, scalings = by_definition(tiny_model("mistral"), SPECS[name], ids)
        assert (done.logits - logits[len(turn.prompt) - 1 :]).abs().max() < TOLERANCE
        assert done.scalings.shape == scalings.shape
        assert (done.scalings - scalings).abs().max() < TOLERANCE
        # long enough that the second turn's cache outgrows its first 64 positions while decoding
        turn = Job([*turn.prompt, *done.tokens, *random_ids(42, 2)], turn.who, max_tokens=8)


def test_reused_scalings_enter_the_cache_as_the_policy_says(shelf):
    """With k = 2 the rows past the second generated token run with that token's scalings; recomputed by definition."""
    engine = engine_on(shelf)
    prompt = random_ids(6, 1)
    (done,) = run(engine, [Job(prompt, {"mixture": "mix", "tgt_non_granular_index": 2}, max_tokens=7)])
    ids = [*prompt, *done.tokens[:-1]]
    own = by_definition(tiny_model("mistral"), SPECS["mix"], ids)[1]
    last = len(prompt) + 2 - 1
    used = torch.cat([own[: last + 1], own[last].expand(len(ids) - last - 1, -1, -1)])
    assert (done.scalings - used).abs().max() < TOLERANCE
    logits, _ = by_definition(tiny_model("mistral"), SPECS["mix"], ids, forced=used)
    assert (done.logits - logits[len(prompt) - 1 :]).abs().max() < TOLERANCE


def test_an_output_head_takes_part_in_a_mixture(tmp_path):
    """PEFT cannot load such adapters into X-LoRA, so the reference is the definition."""
    model = tiny_model("llama")
    adapters = {"0": Adapter(("lm_head", "q_proj"), seed=6), "1": Adapter(("lm_head",), rank=2)}
    spec = MixtureSpec(adapters, {"layerwise_scalings": True, "scaling_pass_value": 0.3})
    engine = Engine(save_base(model, tmp_path / "tiny"))
    engine.load_mixture(spec.write(tmp_path / "m", model), "m")
    assert engine.mixtures["m"].sites[-1] == "lm_head"
    prompt = random_ids(8)
    (done,) = run(engine, [Job(prompt, {"mixture": "m"})])
    logits, scalings = by_definition(model, spec, [*prompt, *done.tokens[:-1]])
    assert (done.logits - logits[len(prompt) - 1 :]).abs().max() < TOLERANCE
    assert (done.scalings - scalings).abs().max() < TOLERANCE


# 7, 8: what comes and goes


def test_loading_and_unloading_leaves_other_rows_untouched(shelf):
    jobs = [Job(random_ids(5, 1)), Job(random_ids(9, 2), {"adapter": "law"}), Job(random_ids(7, 3), {"mixture": "mix"}),
            Job(random_ids(4, 4), {"adapter": "python"})]  # fmt: skip
    engine = engine_on(shelf, **BITWISE)
    before = run(engine, jobs)
    mine = [engine.enqueue(j.prompt, max_tokens=4, ignore_eos=True, **j.who) for j in jobs[:3]]
    engine.step()
    engine.unload("german")
    engine.step()
    engine.load_adapter(shelf / "german", "again")
    engine.unload("python")
    engine.unload("lifted")
    while engine.scheduler.has_work():
        engine.step()
    assert [request.generated for request in mine] == [outcome.tokens for outcome in before[:3]]
    engine.load_adapter(shelf / "python")
    engine.load_mixture(shelf / "lifted", "lifted")
    for one, other in zip(before, run(engine, jobs), strict=True):
        assert_same(one, other)
    used = ["law", "python"]  # the other adapters were never asked for, so they are in no slot
    assert sorted(engine.slots.adapters) == list(range(len(used) + 5)), "slots are used again from the lowest"


def test_an_adapter_in_use_is_not_unloaded(shelf):
    engine = engine_on(shelf)
    request = engine.enqueue(random_ids(4), mixture="mix", request_id="mine", max_tokens=3, ignore_eos=True)
    with pytest.raises(UserError, match="'mix' is in use by requests 'mine'"):
        engine.unload("mix")
    while request.finish_reason is None:
        engine.step()
    engine.unload("mix")
    with pytest.raises(UserError, match="no mixture 'mix' is loaded.*loaded: 'lifted'"):
        engine.generate(random_ids(4), mixture="mix")


def test_recording_changes_no_bit(bitwise):
    for one, other in zip(run(bitwise, everyone()), run(bitwise, everyone(), record=False), strict=True):
        assert_same(one, other)


def test_the_fixture_is_not_vacuous(bitwise):
    """Different adapters, mixtures and k give different logits, so equality above is not equality of everything."""
    prompt = random_ids(9, 1)
    outcomes = run(bitwise, [Job(prompt, who, max_tokens=5) for who in WHO])
    for i, one in enumerate(outcomes):
        for j in range(i):
            same_k = "tgt_non_granular_index" in WHO[i] and "tgt_non_granular_index" in WHO[j]
            assert same_k or not torch.equal(one.logits[0], outcomes[j].logits[0])
