"""Requests that merge adapters: right numbers, in one batch with others, and every refusal for that request alone.

Run: pytest tests/test_merged_requests.py
"""

from __future__ import annotations

import pytest
import torch
from models import Adapter, MixtureSpec, random_ids, save_base, tiny_model

from workbench import Engine, UserError
from workbench.adapters import LoRAConfig, LoRAModel
from workbench.adapters.merge import MergedAdapters, merge

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
MODEL = tiny_model("llama")
TARGETS = ("q_proj", "v_proj", "gate_proj")
ADAPTERS = {
    "a": Adapter(TARGETS, rank=4, seed=1),
    "b": Adapter(TARGETS[:2], rank=4, alpha=3, seed=2),
    "c": Adapter(TARGETS, rank=7, seed=3),
}
GREEDY = {"max_tokens": 5, "ignore_eos": True}
TIES = {"ids": ["a", "b"], "weights": [1.0, 0.5], "merge_strategy": "ties", "density": 0.5}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with a base, three adapters and a mixture of them."""
    folder = tmp_path_factory.mktemp("shelf")
    save_base(MODEL, folder / "tiny")
    for name, adapter in ADAPTERS.items():
        adapter.write(folder / name, MODEL)
    MixtureSpec(ADAPTERS).write(folder / "mix", MODEL)
    return folder


def engine_on(shelf, **lora) -> Engine:
    engine = Engine(shelf / "tiny", lora=LoRAConfig(**lora))
    for name in ADAPTERS:
        engine.load_adapter(shelf / name)
    return engine


def by_hand(deltas: dict[str, torch.Tensor], tokens: list[int], count: int) -> list[float]:
    """Return the log-probabilities of the last `count` tokens of the model with `deltas` added to its weights."""
    model = tiny_model("llama")
    with torch.no_grad():
        for site, delta in deltas.items():
            model.get_submodule(site).weight += delta
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    rows = torch.arange(len(tokens) - count - 1, len(tokens) - 1)
    return logprobs[rows, torch.tensor(tokens[-count:])].tolist()


def deltas_of(model: LoRAModel, weight: float = 1.0) -> dict[str, torch.Tensor]:
    return {site: weight * model.b[site].T @ model.a[site] for site in model.sites}


def loaded(shelf, engine, name: str) -> LoRAModel:
    return LoRAModel.read(shelf / name, name).fit(engine.model.targets, "tiny")


def test_a_linear_merge_adds_the_deltas_whatever_the_ranks(shelf):
    engine, prompt = engine_on(shelf), random_ids(6)
    done = engine.generate(prompt, merged_adapters={"ids": ["a", "c"], "weights": [0.7, -0.4]}, **GREEDY)
    first, second = (deltas_of(loaded(shelf, engine, n), w) for n, w in (("a", 0.7), ("c", -0.4)))
    total = {site: first[site] + second[site] for site in first}
    assert done.logprobs == pytest.approx(by_hand(total, [*prompt, *done.token_ids], 5), abs=1e-5)


@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_other_merges_run_as_the_adapter_that_merging_makes(shelf, strategy):
    engine, prompt = engine_on(shelf), random_ids(6, 1)
    given = {**TIES, "merge_strategy": strategy}
    done = engine.generate(prompt, merged_adapters=given, **GREEDY)
    parts = [loaded(shelf, engine, name) for name in given["ids"]]
    made = merge(parts, MergedAdapters.from_dict(given), "made")
    assert done.logprobs == pytest.approx(by_hand(deltas_of(made), [*prompt, *done.token_ids], 5), abs=1e-5)


def test_merged_requests_beside_others_are_as_alone(shelf):
    engine = engine_on(shelf)
    engine.load_mixture(shelf / "mix", "mix")
    who = [
        {}, {"adapter": "a"}, {"mixture": "mix"}, {"merged_adapters": TIES}, {"adapter": "b"},
        {"merged_adapters": {"ids": ["c", "b"], "weights": [0.5, 0.5]}},
        {"merged_adapters": {"ids": ["c", "b"], "weights": [0.9, 0.1]}},
    ]  # fmt: skip
    prompts = [random_ids(4 + n, n) for n in range(len(who))]
    alone = [engine.generate(prompt, **one, **GREEDY) for prompt, one in zip(prompts, who, strict=True)]
    lists = {key: [one.get(key) for one in who] for key in ("adapter", "mixture", "merged_adapters")}
    together = engine.generate(prompts, **lists, **GREEDY)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_merge_is_made_once(shelf, monkeypatch):
    engine = engine_on(shelf)
    made = []
    monkeypatch.setattr("workbench.adapters.reading.merge", lambda *a: made.append(a) or merge(*a))
    for density in (0.5, 0.5, 0.75, 0.5):
        engine.generate(random_ids(3), merged_adapters={**TIES, "density": density}, **GREEDY)
    assert len(made) == 2


def test_merges_share_few_slots_and_leave_no_lease(shelf):
    engine = engine_on(shelf, max_num_loras=2)
    pairs = [["a", "b"], ["b", "c"], ["c", "a"]] * 4
    done = engine.generate([random_ids(3, n) for n in range(12)], merged_adapters=[{"ids": p} for p in pairs], **GREEDY)
    assert [each.finish_reason for each in done] == ["length"] * 12
    assert all(entry.leases == entry.users == 0 for entry in engine.adapters.entries())
    for name in ADAPTERS:
        engine.unload(name)
    assert not engine.slots.adapters


@pytest.mark.parametrize(("given", "said"), [
    ({"ids": ["a", "bb"]}, "no adapter 'bb' is loaded; did you mean 'b'"),
    ({"ids": []}, "'ids' is empty"),
    ({"ids": ["a"], "weights": [1, 2]}, "one weight per id"),
    ({"ids": ["a"], "merge_strategy": "tie"}, "did you mean 'ties'"),
    ({"ids": ["a", "b"], "merge_strategy": "ties"}, "density"),
    ({"ids": ["a", "c"], "merge_strategy": "ties", "density": 0.5}, "different ranks"),
    ({"ids": ["a", "b", "c"]}, "raise max_num_loras"),
    ({"idz": ["a"]}, "did you mean 'ids'"),
])
def test_what_cannot_be_merged_is_that_requests_mistake(shelf, given, said):
    engine = engine_on(shelf, max_num_loras=2)
    prompts = [random_ids(3), random_ids(4)]
    bad, good = engine.generate(prompts, merged_adapters=[given, None], **GREEDY)
    assert said in bad.error and good.finish_reason == "length"
    assert all(entry.users == 0 for entry in engine.adapters.entries())


def test_a_merge_and_an_adapter_exclude_each_other(shelf):
    with pytest.raises(UserError, match="name one of adapter .* and merged_adapters"):
        engine_on(shelf).generate(random_ids(3), adapter="a", merged_adapters=TIES, **GREEDY)


def test_an_adapter_of_a_running_merge_is_not_unloaded(shelf):
    engine = engine_on(shelf)
    request = engine.enqueue(random_ids(3), merged_adapters={"ids": ["a", "b"]}, request_id="mine", **GREEDY)
    engine.step()
    with pytest.raises(UserError, match="'b' is in use by requests 'mine'"):
        engine.unload("b")
    engine.cancel(request)
    engine.unload("b")
