"""Fused projections, embeddings, DoRA, layouts and ranks, each against PEFT: `pytest tests/test_adapter_features.py`.

PEFT has no adapter on one projection of a fused module: there the reference is transformers' own model with W + BA
written into its weights.
"""


import pytest
import torch
from models import save_base, tiny_model
from peft import LoraConfig, get_peft_model
from peft_made import TOLERANCE, difference, logits_of, run, separate_adapter, write

from workbench import Engine, UserError
from workbench.adapters import LoRAModel
from workbench.adapters.projections import parts_of
from workbench.engine.hf import linear_targets


def heads_of_reference(kind, model, site, part):
    """The rows of one projection by the way transformers' own forward takes the fused output apart."""
    config, width = model.config, linear_targets(model)[site].out_features
    numbers = torch.arange(width)
    if kind == "gpt_neox":
        size = config.hidden_size // config.num_attention_heads
        return numbers.view(-1, 3 * size).chunk(3, dim=-1)[("q_proj", "k_proj", "v_proj").index(part)].reshape(-1)
    if kind == "gpt2":
        return numbers.split(config.hidden_size)[("q_proj", "k_proj", "v_proj").index(part)]
    if part in ("gate_proj", "up_proj"):
        return numbers.chunk(2)[part == "up_proj"]
    size = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return {"q_proj": numbers[:queries], "k_proj": numbers[queries : queries + keys], "v_proj": numbers[-keys:]}[part]


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox", "gpt2"])
def test_where_the_projections_of_a_fused_module_lie(kind):
    model = tiny_model(kind)
    fused = {site: target for site, target in linear_targets(model).items() if target.parts}
    assert len(fused) == (4 if kind == "phi3" else 2)
    for site, target in fused.items():
        assert torch.cat([part.outputs for part in target.parts]).sort().values.tolist() == list(
            range(target.out_features)
        )
        for part in target.parts:
            assert torch.equal(part.outputs, heads_of_reference(kind, model, site, part.name))


def test_a_layout_that_is_not_known_is_not_guessed():
    assert parts_of("h.0.attn.c_attn", 96, tiny_model("llama").config) == ()
    assert parts_of("layers.0.self_attn.qkv_proj", 66, tiny_model("phi3").config) == ()  # the widths do not add up


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("chosen", [None, ("q_proj", "v_proj"), ("k_proj", "up_proj")])
def test_separate_adapters_on_fused_bases_equal_the_changed_weight(kind, chosen, tmp_path):
    model = tiny_model(kind)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    tensors, deltas = separate_adapter(model, chosen=chosen)
    targets = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    engine.load_adapter(write(tmp_path / "separate", tensors, 3, 6, targets))
    for site, delta in deltas.items():
        weight = model.get_submodule(site).weight
        weight += delta.T if kind == "gpt2" else delta
    logits = run(engine, ["separate", None])
    assert difference(logits["separate"], logits_of(model)) < TOLERANCE
    assert difference(logits[None], logits_of(tiny_model(kind))) < TOLERANCE
    model = engine.adapters.entries()[0]
    assert model.rank == 3 * len(set(targets) & {"q_proj", "k_proj", "v_proj"})


def test_a_fused_adapter_on_a_separate_base_equals_the_changed_weights(tmp_path):
    model = tiny_model("llama")
    engine = Engine(save_base(model, tmp_path / "tiny"))
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for layer in range(2):
        for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            where = f"model.layers.{layer}.{fused}"
            members = [model.get_submodule(f"{where.rpartition('.')[0]}.{part}_proj") for part in parts]
            widths = [member.out_features for member in members]
            down = torch.randn(5, 32, generator=generator) * 0.2
            up = torch.randn(sum(widths), 5, generator=generator) * 0.1
            tensors |= {f"base_model.model.{where}.lora_A.weight": down, f"base_model.model.{where}.lora_B.weight": up}
            for member, rows in zip(members, up.split(widths), strict=True):
                member.weight += 2.0 * rows @ down
    engine.load_adapter(write(tmp_path / "fused", tensors, 5, 10, ["qkv_proj", "gate_up_proj"]))
    assert difference(run(engine, ["fused"])["fused"], logits_of(model)) < TOLERANCE


def test_patterns_of_a_config_hold_for_the_modules_that_it_does_not_name(tmp_path):
    """Merging divides B by the scale its config gives: the config of a fitted adapter must still give it."""
    model = tiny_model("phi3")
    tensors, _ = separate_adapter(model)
    cases = {"plain": {}, "rslora": {"use_rslora": True}, "odd": {"alpha_pattern": {"k_proj": 1}}}
    for name, settings in cases.items():
        targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
        read = LoRAModel.read(write(tmp_path / name, tensors, 3, 6, targets, **settings))
        fitted = read.fit(linear_targets(model), "tiny")
        for site in fitted.sites:
            rank = len(fitted.a[site])
            assert fitted.config.rank_at(site) == rank
            alike = name != "odd" or "mlp" in site
            expected = read.config.scale_at("model.layers.0.self_attn.q_proj", 3) if alike else 1.0
            assert fitted.config.scale_at(site, rank) == pytest.approx(expected)


def test_a_whole_module_and_one_of_its_projections_are_refused(tmp_path):
    model = tiny_model("phi3")
    tensors, _ = separate_adapter(model, chosen=("q_proj",))
    site = "base_model.model.model.layers.0.self_attn.qkv_proj"
    tensors |= {f"{site}.lora_A.weight": torch.ones(3, 32), f"{site}.lora_B.weight": torch.ones(64, 3)}
    read = LoRAModel.read(write(tmp_path / "both", tensors, 3, 6, ["q_proj"]))
    with pytest.raises(UserError, match="two of its sites name the same module .*qkv_proj"):
        read.fit(linear_targets(model), "tiny")


def test_a_lost_projection_is_noticed_on_a_fused_base(tmp_path):
    model = tiny_model("phi3")
    tensors, _ = separate_adapter(model, chosen=("q_proj", "k_proj"))
    kept = {key: value for key, value in tensors.items() if "layers.1.self_attn.k_proj" not in key}
    read = LoRAModel.read(write(tmp_path / "lost", kept, 3, 6, ["q_proj", "k_proj"]))
    with pytest.raises(UserError, match=r"weights lack 1 of the sites .*layers\.1\.self_attn\.k_proj"):
        read.fit(linear_targets(model), "tiny")
    whole = {key: value for key, value in tensors.items() if "layers.1." not in key}
    read = LoRAModel.read(write(tmp_path / "block", whole, 3, 6, ["q_proj", "k_proj"]))
    with pytest.raises(UserError, match="weights lack 2 of the sites"):
        read.fit(linear_targets(model), "tiny")
    read = LoRAModel.read(write(tmp_path / "chosen", whole, 3, 6, ["q_proj", "k_proj"], layers_to_transform=[0]))
    assert read.fit(linear_targets(model), "tiny").sites == ("model.layers.0.self_attn.qkv_proj",)


def test_a_fused_module_of_unknown_layout_is_refused_by_name(tmp_path):
    site = "base_model.model.model.layers.0.self_attn.query_key_value"
    tensors = {f"{site}.lora_A.weight": torch.ones(2, 32), f"{site}.lora_B.weight": torch.ones(96, 2)}
    read = LoRAModel.read(write(tmp_path / "neox", tensors, 2, 2, ["query_key_value"]))
    with pytest.raises(UserError, match="'query_key_value' fuses projections .* differs from model to model"):
        read.fit(linear_targets(tiny_model("llama")), "tiny")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_adapters_of_fused_experts_are_refused_by_name(kind, tmp_path):
    model = tiny_model(kind)
    targets = linear_targets(model)
    made = get_peft_model(
        tiny_model(kind), LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], r=2)
    )
    made.save_pretrained(tmp_path / "parameters")
    with pytest.raises(UserError, match="target_parameters .it targets parameters .such as fused experts"):
        LoRAModel.read(tmp_path / "parameters")
    site = "base_model.model.model.layers.0.mlp.experts.0.w1"
    tensors = {f"{site}.lora_A.weight": torch.ones(2, 32), f"{site}.lora_B.weight": torch.ones(48, 2)}
    read = LoRAModel.read(write(tmp_path / "old", tensors, 2, 2, ["w1"]))
    with pytest.raises(UserError, match="LoRA on fused experts is not supported"):
        read.fit(targets, "tiny")
