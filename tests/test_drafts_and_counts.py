"""Drafts change nothing, rows are accounted for, default settings agree: `pytest tests/test_drafts_and_counts.py`.

With the default settings teacher-forced logits agree to 1e-5 with the bitwise ones, and so do tokens wherever the two
best logits are not nearly equal.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import (
    BITWISE,
    SAMPLINGS,
    SPECS,
    TARGETS,
    TOLERANCE,
    Job,
    assert_same,
    engine_on,
    run,
    write_shelf,
)
from models import (
    GREEDY_GAP,
    Adapter,
    MixtureSpec,
    Probe,
    random_ids,
    save_base,
    tiny_model,
)

from workbench import Engine
from workbench.engine.batch import ADAPTED, SCALING

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def bitwise(shelf) -> Engine:
    return engine_on(shelf, prefix_cache=False, **BITWISE)


@pytest.fixture(scope="module")
def plain(shelf) -> Engine:
    return engine_on(shelf, drafting=False, prefix_cache=False, **BITWISE)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "top-k", "everything"])
def test_drafting_changes_no_result(bitwise, plain, sampling):
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
def test_rows_and_scalings_are_accounted_for(bitwise, plain, prompt, new, k, drafting):
    engine = bitwise if drafting else plain
    probe = Probe(engine)
    before = engine.counters()
    done = engine.generate(random_ids(prompt), mixture="mix", tgt_non_granular_index=k, max_tokens=new, ignore_eos=True)
    after = engine.counters()
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
