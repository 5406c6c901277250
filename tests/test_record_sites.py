"""What is measured at layers and sites of every architecture, and at embeddings, output heads and DoRA.

Run: pytest tests/test_record_sites.py
"""

from __future__ import annotations

import pytest
import torch
from measured_alone import assert_measured, measured_alone
from models import Adapter, lora_sites, random_ids, save_base, tiny_model
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft_made import peft_saves

from workbench import Engine, LoRAConfig, UserError
from workbench.engine.hf import SUPPORTED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
KINDS = ("scalings", "logits:top:3", "delta_norm", "hidden_norm", "entropy")


@pytest.mark.parametrize("kind", SUPPORTED)
def test_hidden_and_delta_norms_of_every_architecture(kind, tmp_path):
    model, adapter = tiny_model(kind), Adapter("all-linear", seed=1)
    engine = Engine(save_base(model, tmp_path / "tiny"), max_rows_per_step=8)
    engine.load_adapter(adapter.write(tmp_path / "a", model))
    ids, sites = random_ids(9, seed=9), lora_sites(model, "all-linear")
    with engine.record(*KINDS) as recorder:
        done = engine.generate([ids, ids], adapter=["a", None], max_tokens=3, ignore_eos=True)
    for completion, adapters in zip(done, ({"a": adapter}, {}), strict=True):
        trace = recorder.trace(completion.request_id)
        mine = sites if adapters else []
        assert trace.sites == tuple(mine) and trace.has_scalings == bool(adapters)
        weights = torch.ones(trace.num_tokens - 1, len(mine), len(adapters))
        assert_measured(trace, measured_alone(model, adapters, mine, weights, trace.token_ids[:-1].tolist()))
    labels = recorder.trace(done[0].request_id).extra("hidden_norm").labels["layer"]
    assert labels == ("layer 0", "layer 1", "final norm")


SPECIAL = {
    "head and embedding": ("llama", ["embed_tokens", "q_proj", "lm_head"], {}),
    "tied, scaled embedding": ("gemma2", ["embed_tokens", "lm_head"], {}),
    "transposed weights, positions": ("gpt2", ["wte", "wpe", "c_attn", "c_proj"], {}),
    "DoRA": ("llama", ["q_proj", "down_proj"], {"use_dora": True}),
    "DoRA of an embedding": ("gemma", ["embed_tokens", "o_proj"], {"use_dora": True}),
}


@torch.no_grad()
def by_peft(kind: str, folder, ids: list[int]) -> dict[str, torch.Tensor]:
    """Return site -> `[token]`, how far the adapter moves each output of PEFT's own model, by the base's length."""
    made, found = PeftModel.from_pretrained(tiny_model(kind), folder).eval(), {}

    def hook(site: str):
        def measure(module, inputs, output):
            base = module.base_layer(*inputs)
            bias = getattr(module.base_layer, "bias", None)
            plain = base if bias is None else base - bias
            found[site] = ((output - base).norm(dim=-1) / plain.norm(dim=-1)).reshape(-1)

        return measure

    for name, module in made.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            module.register_forward_hook(hook(name))
    made(input_ids=torch.tensor([ids]))
    return found


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("drafting", [False, True])
def test_delta_norms_of_special_sites_are_those_of_peft(case, drafting, tmp_path):
    kind, targets, config = SPECIAL[case]
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"), row_padding=8 if drafting else 0)
    peft_saves(tmp_path / "a", kind, targets, r=4, lora_alpha=6, seed=1, **config)
    engine.load_adapter(tmp_path / "a")
    prompts = [random_ids(5, seed=1), random_ids(11, seed=2)]
    with engine.record(*KINDS) as recorder:
        done = engine.generate([*prompts, prompts[0]], adapter=["a", "a", None], max_tokens=4, ignore_eos=True)
    for completion in done[:2]:
        trace = recorder.trace(completion.request_id)
        norms, expected = trace.extra("delta_norm"), by_peft(kind, tmp_path / "a", trace.token_ids[:-1].tolist())
        assert set(norms.labels["site"]) == set(trace.sites) == set(expected)
        for index, site in enumerate(trace.sites):
            values = torch.from_numpy(norms.values[:-1, index, 0])
            is_head = site in ("lm_head", "embed_out")
            # rows without logits never met the head
            ran = slice(trace.prompt_tokens - 1, None) if is_head else slice(None)
            assert values[: trace.prompt_tokens - 1].isnan().all() == is_head
            torch.testing.assert_close(values[ran], expected[site][ran], rtol=1e-4, atol=1e-6)
            assert (values[ran] > 0).all()


def test_a_replayed_row_keeps_what_the_head_measured(tmp_path):
    """Recomputed after a preemption, known tokens get no logits, so their rows do not meet the head again."""
    model = tiny_model("llama")
    save_base(model, tmp_path / "tiny")
    peft_saves(tmp_path / "a", "llama", ["q_proj", "lm_head"], r=4, seed=1)
    size = Engine(tmp_path / "tiny").memory.pool.shape.block_bytes
    engine = Engine(tmp_path / "tiny", kv_bytes=7 * size, prefix_cache=False)
    engine.load_adapter(tmp_path / "a")
    with engine.record(*KINDS) as recorder:
        prompts = [random_ids(20, seed=i) for i in range(4)]
        done = engine.generate(prompts, adapter="a", max_tokens=20, ignore_eos=True)
    assert engine.counters()["preemptions"] > 0
    for completion in done:
        trace = recorder.trace(completion.request_id)
        expected = by_peft("llama", tmp_path / "a", trace.token_ids[:-1].tolist())
        values = torch.from_numpy(trace.extra("delta_norm").values)[19:-1, trace.sites.index("lm_head"), 0]
        torch.testing.assert_close(values, expected["lm_head"][19:], rtol=1e-4, atol=1e-6)
        assert not trace.extra("entropy").is_missing[19:-1].any()


def test_an_adapter_that_took_anothers_slot_is_not_mistaken_for_it(tmp_path):
    """One slot for two adapters, whose requests take turns: what was measured of each is its own."""
    model = tiny_model("llama")
    adapters = {"a": Adapter(("q_proj", "v_proj"), seed=1), "b": Adapter(("q_proj",), rank=2, seed=2)}
    engine = Engine(save_base(model, tmp_path / "tiny"), lora=LoRAConfig(max_num_loras=1))
    for name, adapter in adapters.items():
        engine.load_adapter(adapter.write(tmp_path / name, model))
    names = ["a", "b", "a", "b"]
    with engine.record(*KINDS) as recorder:
        done = engine.generate([random_ids(4, seed=i) for i in range(4)], adapter=names, max_tokens=3, ignore_eos=True)
    assert engine.counters()["slot_evictions"] > 0
    for completion, name in zip(done, names, strict=True):
        trace, mine = recorder.trace(completion.request_id), {name: adapters[name]}
        sites = lora_sites(model, adapters[name].targets)
        assert trace.sites == tuple(sites) and trace.adapters == (name,)
        weights = torch.ones(trace.num_tokens - 1, len(sites), 1)
        assert_measured(trace, measured_alone(model, mine, sites, weights, trace.token_ids[:-1].tolist()))


def test_sites_that_nobody_has_are_refused_before_anything_runs(tmp_path):
    model = tiny_model("llama")
    engine = Engine(save_base(model, tmp_path / "tiny"))
    with pytest.raises(UserError, match=r"no site of base 'tiny' matches '\*.q_prj'; did you mean '\*.q_proj'\?"):
        engine.record("delta_norm", sites="*.q_prj")
    engine.record("delta_norm", sites="*.k_proj").close()
    engine.load_adapter(Adapter(("q_proj", "v_proj")).write(tmp_path / "a", model))
    with pytest.raises(UserError, match=r"no site of the loaded adapters matches '\*.k_proj'.*end in '\*.q_proj'"):
        engine.record("delta_norm", sites=["*.q_proj", "*.k_proj"])
    with engine.record(sites="*.0.*.q_proj") as recorder:
        done = engine.generate(random_ids(3), adapter="a", max_tokens=2, ignore_eos=True)
    assert recorder.trace(done.request_id).sites == ("model.layers.0.self_attn.q_proj",)
    with engine.record("scalings", sites="*.q_proj") as recorder:
        engine.load_adapter(Adapter(("up_proj",), seed=3).write(tmp_path / "b", model))
        done = engine.generate(random_ids(3), adapter="b", max_tokens=2, ignore_eos=True)
    with pytest.raises(UserError, match=r"no scalings to trace: none of its sites matches '\*.q_proj'"):
        recorder.trace(done.request_id)
