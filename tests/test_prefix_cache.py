"""What requests find of each other's KV, what they must not find, and that it changes nothing.

Run: pytest tests/test_prefix_cache.py
"""

from __future__ import annotations

import pytest
import torch
from byte_engine import MODEL, SPEC, TOLERANCE, assert_idle, engine_on, finish, shelf  # noqa: F401 - fixtures
from models import Adapter, MixtureSpec, Probe, by_definition, byte_ids

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
PROMPT = "the same forty-eight letters, then something else"[:48]
LIFTED = MixtureSpec(
    {"a": Adapter(("q_proj", "up_proj"), seed=1), "b": Adapter(("q_proj",), rank=2, seed=2)},
    {"layerwise_scalings": True, "scaling_pass_value": 0.5},
)
WHO = [{}, {"adapter": "a"}, {"mixture": "mix"}, {"mixture": "lifted"}, {"mixture": "mix", "tgt_non_granular_index": 1}]


@pytest.fixture(scope="module")
def folders(shelf):
    LIFTED.write(shelf / "lifted", MODEL)
    return shelf


@pytest.fixture
def engine(folders):
    made = engine_on(folders)
    made.load_mixture(folders / "lifted", "lifted")
    return made


def told(engine, prompt, **options):
    return engine.generate(prompt, max_tokens=6, ignore_eos=True, **options)


@pytest.mark.parametrize("who", WHO, ids=str)
def test_a_second_request_finds_the_first_ones_prompt_and_says_the_same(engine, who):
    recorder = engine.record() if "mixture" in who else None
    first, second = told(engine, PROMPT, **who), told(engine, PROMPT, **who)
    # the last prompt token runs in any case: its logits choose the first token
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert second.token_ids == first.token_ids
    assert second.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)
    assert second.scalings_computed == first.scalings_computed
    if recorder:
        one, other = recorder.trace(first.request_id), recorder.trace(second.request_id)
        assert (one.source == other.source).all()
        assert abs(one.values - other.values)[:-1].max() < TOLERANCE
    assert_idle(engine)


@pytest.mark.parametrize("who", WHO, ids=str)
def test_what_the_last_step_made_is_found_too(engine, who):
    assert engine.generate(PROMPT, max_tokens=1, ignore_eos=True, **who).cached_tokens == 0
    assert engine.generate(PROMPT, max_tokens=1, ignore_eos=True, **who).cached_tokens == 32


def test_a_mixture_finds_its_scaling_pass_in_a_base_requests_blocks_and_the_other_way_round(engine):
    told(engine, PROMPT)
    before = engine.counters()["scaling_rows"]
    probe, recorder = Probe(engine), engine.record()
    mixed = told(engine, PROMPT, mixture="mix")
    assert (mixed.cached_tokens, mixed.cached_scaling_tokens) == (0, 32)
    assert engine.counters()["scaling_rows"] - before < 48
    ids = [*byte_ids(PROMPT), *mixed.token_ids]
    logits, scalings = by_definition(MODEL, SPEC, ids)
    assert (probe.decoded(mixed.request_id, 47, 6) - logits[47:53]).abs().max() < TOLERANCE
    assert abs(recorder.trace().values[:-1] - scalings[:-1].numpy()).max() < TOLERANCE
    other = "yet another beginning of forty-eight letters, here"[:48]
    told(engine, other, mixture="mix")
    assert told(engine, other).cached_tokens == 32


def test_a_scaling_pass_that_adds_something_is_not_the_base(engine):
    told(engine, PROMPT)
    assert told(engine, PROMPT, mixture="lifted").cached_scaling_tokens == 0
    assert told(engine, PROMPT, mixture="lifted").cached_scaling_tokens == 32


@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("other", range(4))
def test_adapters_and_mixtures_find_their_own_only(engine, one, other):
    told(engine, PROMPT, **WHO[one])
    found = told(engine, PROMPT, **WHO[other]).cached_tokens
    # a mixture leaves its scaling pass for base requests
    assert found == (32 if one == other or (one, other) == (2, 0) else 0)


def test_the_key_is_the_content_not_the_name(engine, folders):
    first = told(engine, PROMPT, adapter="a")
    engine.load_adapter(folders / "mix" / "a", "again")
    assert told(engine, PROMPT, adapter="again").cached_tokens == 32
    engine.unload("a")
    engine.load_adapter(folders / "mix" / "b", "a")
    other = told(engine, PROMPT, adapter="a")
    assert other.cached_tokens == 0 and other.logprobs != first.logprobs


def test_tokens_with_reused_scalings_are_left_to_nobody(engine):
    long = engine.generate(PROMPT, mixture="mix", tgt_non_granular_index=0, max_tokens=40, ignore_eos=True)
    ids = [*byte_ids(PROMPT), *long.token_ids, *byte_ids("and more")]
    assert told(engine, ids, mixture="mix").cached_tokens == 48, "the prompt's own scalings were exact"
    exact = engine.generate(PROMPT, mixture="mix", max_tokens=40, ignore_eos=True)
    ids = [*byte_ids(PROMPT), *exact.token_ids, *byte_ids("and more")]
    assert told(engine, ids, mixture="mix").cached_tokens == 80


@pytest.mark.parametrize("who", WHO[:4], ids=str)
def test_a_second_turn_goes_on_from_the_first_and_equals_a_fresh_engine(engine, folders, who):
    first = engine.generate(PROMPT, max_tokens=24, ignore_eos=True, **who)
    ids = [*byte_ids(PROMPT), *first.token_ids, *byte_ids(" and then?")]
    second = told(engine, ids, **who)
    assert second.cached_tokens == 64
    fresh = engine_on(folders, prefix_cache=False)
    fresh.load_mixture(folders / "lifted", "lifted")
    alone = told(fresh, ids, **who)
    assert alone.cached_tokens == 0 and alone.token_ids == second.token_ids
    assert second.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_a_rejected_draft_is_in_no_block(engine):
    """Blocks that hold a drafted token's row are published only after the token was chosen."""
    probe = Probe(engine, forced={"mine": byte_ids("zqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzq")})
    request = engine.enqueue("hello", request_id="mine", mixture="mix", max_tokens=36, ignore_eos=True)
    finish(engine, request)
    assert request.drafts.count(0) > 10
    probe.close()
    ids = [*byte_ids("hello"), *request.generated]
    found = told(engine, ids, mixture="mix")
    fresh_logits, _ = by_definition(MODEL, SPEC, [*ids, *found.token_ids])
    expected = torch.log_softmax(fresh_logits[len(ids) - 1 :], -1)
    assert found.cached_tokens == 32
    wanted = [expected[i, token].item() for i, token in enumerate(found.token_ids)]
    assert found.logprobs == pytest.approx(wanted, abs=TOLERANCE)


def test_turned_off_it_finds_nothing(folders):
    engine = engine_on(folders, prefix_cache=False)
    assert [told(engine, PROMPT).cached_tokens for _ in range(2)] == [0, 0]
    assert engine.counters()["kv_cached_bytes"] == 0


@pytest.mark.parametrize("who", WHO, ids=str)
def test_scores_and_prompt_scores_are_those_of_a_fresh_engine(engine, folders, who):
    told(engine, PROMPT, **who)
    fresh = engine_on(folders, prefix_cache=False)
    fresh.load_mixture(folders / "lifted", "lifted")
    for options in ({"continuation": " next"}, {"prompt_logprobs": True, "max_tokens": 2, "ignore_eos": True}):
        warm, cold = (each.generate(PROMPT, **options, **who) for each in (engine, fresh))
        assert warm.logprobs == pytest.approx(cold.logprobs, abs=TOLERANCE)
        assert warm.prompt_logprobs == pytest.approx(cold.prompt_logprobs, abs=TOLERANCE)
        assert len(cold.prompt_logprobs) == (47 if "prompt_logprobs" in options else 0)
