"""Scoring a given continuation: as if it had been generated, reuse policy included, in chunks of any size.

Run: pytest tests/test_score.py
"""

from __future__ import annotations

import math

import pytest
import torch
from models import Adapter, MixtureSpec, random_ids, save_base, tiny_model

from workbench import Engine, UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
MODEL = tiny_model("llama")
ADAPTERS = {
    "a": Adapter(("q_proj", "v_proj"), rank=4, seed=1),
    "b": Adapter(("q_proj", "gate_proj"), rank=2, seed=2),
}
WHO = [
    {}, {"adapter": "a"}, {"merged_adapters": {"ids": ["a", "b"], "weights": [0.5, 0.7]}}, {"mixture": "mix"},
    {"mixture": "mix", "tgt_non_granular_index": 0}, {"mixture": "mix", "tgt_non_granular_index": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    save_base(MODEL, folder / "tiny")
    for name, adapter in ADAPTERS.items():
        adapter.write(folder / name, MODEL)
    MixtureSpec(ADAPTERS, {"layerwise_scalings": True}).write(folder / "mix", MODEL)
    return folder


def engine_on(shelf, **options) -> Engine:
    engine = Engine.from_mixture(shelf / "mix", base=shelf / "tiny", **options)
    for name in ADAPTERS:
        engine.load_adapter(shelf / name)
    return engine


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("max_rows", [3, 512])
def test_scores_are_the_log_probabilities_of_generating(shelf, who, max_rows):
    engine = engine_on(shelf, max_rows_per_step=max_rows)
    prompt = random_ids(7)
    made = engine.generate(prompt, max_tokens=8, ignore_eos=True, **who)
    scored = engine.score(prompt, list(made.token_ids), **who)
    assert scored.token_ids == made.token_ids and scored.finish_reason == "length"
    assert scored.logprobs == pytest.approx(made.logprobs, abs=1e-5)
    assert (scored.scalings_computed, scored.scalings_reused) == (made.scalings_computed, made.scalings_reused)


def test_a_continuation_nobody_would_choose_is_scored_by_the_model(shelf):
    prompt, given = random_ids(5, 1), random_ids(6, 2)
    with torch.inference_mode():
        logprobs = torch.log_softmax(MODEL(torch.tensor([prompt + given])).logits[0], dim=-1)
    expected = logprobs[torch.arange(4, 10), torch.tensor(given)].tolist()
    assert engine_on(shelf).score(prompt, given).logprobs == pytest.approx(expected, abs=1e-5)


def test_scoring_beside_generating_changes_neither(shelf):
    engine = engine_on(shelf)
    alone = engine.generate(random_ids(4), mixture="mix", max_tokens=6, ignore_eos=True)
    request = engine.enqueue(random_ids(4), mixture="mix", max_tokens=6, ignore_eos=True)
    engine.step()
    scored = engine.score(random_ids(9, 3), random_ids(4, 4), mixture="mix")
    while request.finish_reason is None:
        engine.step()
    assert tuple(request.generated) == alone.token_ids
    assert scored.logprobs == pytest.approx(engine.score(random_ids(9, 3), random_ids(4, 4), mixture="mix").logprobs)


def test_a_scored_request_has_a_trace(shelf):
    engine = engine_on(shelf)
    with engine.record() as recorder:
        scored = engine.score(random_ids(5), random_ids(3, 1), mixture="mix")
    trace = recorder.trace(scored.request_id)
    assert trace.token_ids.tolist() == random_ids(5) + random_ids(3, 1)
    assert trace.computed.tolist() == [True] * 7 + [False]


def test_one_token_is_enough_and_none_is_not(shelf):
    engine = engine_on(shelf)
    assert math.isfinite(engine.score(random_ids(3), [5], mixture="mix").logprobs[0])
    with pytest.raises(UserError, match="empty"):
        engine.score(random_ids(3), [])
    with pytest.raises(UserError, match="0 to 96"):
        engine.score(random_ids(3), [97])
    with pytest.raises(UserError, match="room for 128"):
        engine.score(random_ids(100), random_ids(40))
