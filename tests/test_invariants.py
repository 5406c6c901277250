"""The truths that must survive any change of the engine: `pytest tests/test_invariants.py`.

Matrix products round differently with the row count, so "bitwise" is tested with every forward padded to 32 rows and
attention row by row; with the default settings teacher-forced logits agree to 1e-5, and so do tokens wherever the two
best logits are not nearly equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import (
    GREEDY_GAP,
    VOCAB,
    Adapter,
    MixtureSpec,
    Probe,
    by_definition,
    random_ids,
    save_base,
    tiny_model,
    xlora_names,
)
from safetensors.torch import save_file

from workbench import Engine, UserError
from workbench.engine.batch import ADAPTED, SCALING

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
TOLERANCE = 1e-5
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
ADAPTERS = {
    "python": Adapter(TARGETS, rank=4, seed=1),
    "german": Adapter(TARGETS[:2], rank=2, alpha=3, seed=2),
    "law": Adapter(TARGETS, rank=7, seed=3, config={"use_rslora": True}),
}
SPECS = {
    "mix": MixtureSpec(ADAPTERS, {"layerwise_scalings": True, "xlora_depth": 2, "xlora_size": 16}),
    "lifted": MixtureSpec(
        {"b": ADAPTERS["german"], "a": ADAPTERS["python"]}, {"scaling_pass_value": 0.4, "top_k_lora": 1}
    ),
}
ALL_SAMPLING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2,
}  # fmt: skip


@dataclass
class Job:
    """A request to run: its prompt, who runs it, and after how many steps it is cancelled, if ever."""

    prompt: list[int]
    who: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 4
    cancel_after: int | None = None


@dataclass
class Outcome:
    """What a job gave: tokens, logits `[row, vocab]` from the last prompt token on, scalings of its inputs."""

    tokens: list[int]
    logits: torch.Tensor
    scalings: torch.Tensor | None
    request: Any


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    """Return a folder with a base, its adapters and its mixtures."""
    folder = tmp_path_factory.mktemp("shelf")
    model = tiny_model("mistral")
    save_base(model, folder / "tiny")
    for name, adapter in ADAPTERS.items():
        adapter.write(folder / name, model)
    for name, spec in SPECS.items():
        spec.write(folder / name, model)
    return folder


def engine_on(shelf: Path, loaded: bool = True, **options) -> Engine:
    engine = Engine(shelf / "tiny", **options)
    if loaded:
        for name in ADAPTERS:
            engine.load_adapter(shelf / name)
        for name in SPECS:
            engine.load_mixture(shelf / name, name)
    return engine


@pytest.fixture(scope="module")
def bitwise(shelf) -> Engine:
    return engine_on(shelf, **BITWISE)


def run(engine: Engine, jobs: list[Job], record: bool = True, forced: dict | None = None) -> list[Outcome]:
    """Run jobs together to their ends and return their outcomes in the same order."""
    probe = Probe(engine, forced)
    recorder = engine.record("scalings") if record else None
    requests = []
    try:
        for i, job in enumerate(jobs):
            options = {"seed": 7, "max_tokens": job.max_tokens, "ignore_eos": True, **job.who, **job.sampling}
            requests.append(engine.submit(job.prompt, request_id=f"job-{i}", **options))
        for steps in range(1000):
            for request, job in zip(requests, jobs, strict=True):
                if job.cancel_after == steps:
                    engine.cancel(request)
            if not engine.scheduler.has_work():
                break
            engine.step()
    finally:
        for request in requests:
            engine.cancel(request)
        probe.close()
        if recorder:
            recorder.__exit__()
    outcomes = []
    for request, job in zip(requests, jobs, strict=True):
        rows = [probe.logits[request.id, ADAPTED, len(job.prompt) - 1 + i] for i in range(len(request.generated))]
        scalings = None
        if recorder and request.mixture is not None:
            trace = recorder.trace(request.id)
            scalings = torch.from_numpy(trace.values[trace.source >= 0])
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
        outcomes.append(Outcome(request.generated, logits, scalings, request))
    return outcomes


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bitwise."""
    assert one.tokens == other.tokens
    assert torch.equal(one.logits, other.logits)
    if one.scalings is not None and other.scalings is not None:
        assert torch.equal(one.scalings, other.scalings)


def everyone() -> list[Job]:
    """One job of every sort; prompts from 1 token to more than one forward holds."""
    return [
        Job(random_ids(5, 1)),
        Job(random_ids(40, 2), {"adapter": "python"}),
        Job(random_ids(7, 3), {"mixture": "mix"}),
        Job(random_ids(1, 4), {"adapter": "german"}),
        Job(random_ids(23, 5), {"mixture": "lifted"}),
        Job(random_ids(3, 6), {"mixture": "mix", "tgt_non_granular_index": 1}, max_tokens=6),
        Job(random_ids(9, 7), {"mixture": "mix"}, {**ALL_SAMPLING, "seed": 3}),
        Job(random_ids(2, 8), {}, {"temperature": 1.0}),
    ]


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


SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.5, "top_k": 5, "seed": 2},
    {**ALL_SAMPLING, "seed": 3},
]
WHO = [{}, {"adapter": "python"}, {"adapter": "german"}, {"adapter": "law"}, {"mixture": "lifted"}] + [
    {"mixture": "mix", "tgt_non_granular_index": k} for k in (None, 0, 1, 3)
]
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
    assert not bitwise.scheduler.has_work() and bitwise.stats()["kv_bytes"] == 0, "a finished request left something"
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
        engine.submit(job.prompt, adapter="python", max_tokens=4, ignore_eos=True) for engine in (first, second)
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
    engine = engine_on(shelf, loaded=False)
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
        turn = Job([*turn.prompt, *done.tokens, *random_ids(5, 2)], turn.who, max_tokens=8)


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


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "top-k", "everything"])
def test_drafting_changes_no_result(shelf, bitwise, sampling):
    plain = engine_on(shelf, drafting=False, **BITWISE)
    jobs = [
        Job(random_ids(6, seed), {"mixture": name, "tgt_non_granular_index": k}, sampling, max_tokens=12)
        for seed, (name, k) in enumerate([("mix", None), ("lifted", None), ("mix", 5), ("mix", 0)])
    ]
    drafted = run(bitwise, jobs)
    for one, other in zip(drafted, run(plain, jobs), strict=True):
        assert_same(one, other)
        assert set(other.request.drafts) == {-1}
    settled = [draft for outcome in drafted for draft in outcome.request.drafts]
    assert 1 in settled and 0 in settled, "drafts must have been both right and wrong for this to mean anything"
    assert set(drafted[3].request.drafts) == {-1}, "k = 0 needs no scalings after the prompt"


# 7, 8: what comes and goes


def test_loading_and_unloading_leaves_other_rows_untouched(shelf):
    jobs = [Job(random_ids(5, 1)), Job(random_ids(9, 2), {"adapter": "law"}), Job(random_ids(7, 3), {"mixture": "mix"}),
            Job(random_ids(4, 4), {"adapter": "python"})]  # fmt: skip
    engine = engine_on(shelf, **BITWISE)
    before = run(engine, jobs)
    mine = [engine.submit(j.prompt, max_tokens=4, ignore_eos=True, **j.who) for j in jobs[:3]]
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
    request = engine.submit(random_ids(4), mixture="mix", request_id="mine", max_tokens=3, ignore_eos=True)
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


# seeds and counts


def test_a_seed_reproduces_and_another_does_not(shelf):
    engine = engine_on(shelf)
    prompt = random_ids(6)
    options = {"mixture": "mix", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    first = engine.generate(prompt, **options)
    second = engine.generate(prompt, **options)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert engine.generate(prompt, seed=first.seed, **options).token_ids == first.token_ids
    listed = engine.generate([prompt, prompt], **options, seed=[second.seed, first.seed])
    assert [done.token_ids for done in listed] == [second.token_ids, first.token_ids]
    fresh = [engine_on(shelf, seed=seed).generate(prompt, **options).token_ids for seed in (0, 0, 1)]
    assert fresh[0] == fresh[1] != fresh[2]


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("k", [None, 0, 1, 3, 50])
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 6), (7, 1), (7, 2), (40, 6)])
def test_rows_and_scalings_are_accounted_for(shelf, bitwise, prompt, new, k, drafting):
    engine = bitwise if drafting else engine_on_plain(shelf)
    probe = Probe(engine)
    before = engine.stats()
    done = engine.generate(random_ids(prompt), mixture="mix", tgt_non_granular_index=k, max_tokens=new, ignore_eos=True)
    after = engine.stats()
    probe.close()
    computed = prompt + (new - 1 if k is None else min(k, new - 1))
    assert done.scalings_computed == computed
    assert done.scalings_computed + done.scalings_reused == prompt + new - 1
    rows = {kind: sum(count for batch in probe.batches for _, which, _, count in batch if which == kind)
            for kind in (ADAPTED, SCALING)}  # fmt: skip
    assert rows[ADAPTED] == prompt + new - 1
    assert rows[SCALING] == computed + done.drafts_rejected
    assert after["scaling_rows"] - before["scaling_rows"] == rows[SCALING]
    assert after["rows"] - before["rows"] == sum(rows.values())
    assert done.usage.prompt_tokens == prompt and done.usage.completion_tokens == len(done.logprobs) == new
    if not drafting:
        assert done.drafts_accepted == done.drafts_rejected == 0
    assert done.drafts_accepted + done.drafts_rejected <= max(0, computed - prompt), "nothing is drafted past the k-th"


_PLAIN: list[Engine] = []


def engine_on_plain(shelf: Path) -> Engine:
    if not _PLAIN:
        _PLAIN.append(engine_on(shelf, drafting=False, **BITWISE))
    return _PLAIN[0]


# the default settings


@pytest.mark.parametrize("kind", ["mistral", "mixtral"])
def test_default_settings_agree_with_the_bitwise_ones(tmp_path, record_property, kind):
    """Teacher-forced logits to 1e-5; tokens too, up to the first row whose two best logits are nearly equal."""
    model = tiny_model(kind)
    spec = MixtureSpec({name: Adapter(TARGETS[:3], seed=i) for i, name in enumerate("abc")}, SPECS["mix"].settings)
    save_base(model, tmp_path / "tiny")
    spec.write(tmp_path / "m", model)
    engines = [Engine(tmp_path / "tiny", **options) for options in (BITWISE, {}, {"max_rows_per_step": 5})]
    for engine in engines:
        engine.load_mixture(tmp_path / "m", "m")
        engine.load_adapter(tmp_path / "m" / "a")
    who = [{}, {"adapter": "a"}, {"mixture": "m"}, {"mixture": "m", "tgt_non_granular_index": 2}]
    jobs = [Job(random_ids(3 + 5 * i, i), who[i % 4], max_tokens=10) for i in range(8)]
    exact = run(engines[0], jobs)
    stops = compared = 0
    for engine in engines[1:]:
        forced = {f"job-{i}": outcome.tokens for i, outcome in enumerate(exact)}
        for one, other in zip(exact, run(engine, jobs, forced=forced), strict=True):
            assert (one.logits - other.logits).abs().max() < TOLERANCE
            if one.scalings is not None:
                assert (one.scalings - other.scalings).abs().max() < TOLERANCE
        for one, other in zip(exact, run(engine, jobs), strict=True):
            best = one.logits.topk(2).values
            unsure = (best[:, 0] - best[:, 1] < GREEDY_GAP).nonzero().flatten().tolist()
            sure = unsure[0] if unsure else len(one.tokens)
            stops, compared = stops + bool(unsure), compared + sure
            assert one.tokens[:sure] == other.tokens[:sure]
    record_property("tokens_compared", compared)
    record_property("stopped_at_nearly_equal_logits", stops)
    assert compared >= 100, f"{stops} of 16 comparisons stopped at nearly equal logits; the test says too little"


def test_the_fixture_is_not_vacuous(bitwise):
    """Different adapters, mixtures and k give different logits, so equality above is not equality of everything."""
    prompt = random_ids(9, 1)
    outcomes = run(bitwise, [Job(prompt, who, max_tokens=5) for who in WHO])
    for i, one in enumerate(outcomes):
        for j in range(i):
            same_k = "tgt_non_granular_index" in WHO[i] and "tgt_non_granular_index" in WHO[j]
            assert same_k or not torch.equal(one.logits[0], outcomes[j].logits[0])
