"""Fused projections, embeddings, DoRA, layouts and ranks, each against PEFT: `pytest tests/test_adapter_features.py`.

PEFT has no adapter on one projection of a fused module: there the reference is transformers' own model with W + BA
written into its weights.
"""


import pytest
import torch
from models import Adapter, save_base, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft_made import TOLERANCE, difference, logits_of, run, separate_adapter, write
from safetensors.torch import load_file, save_file

from workbench import Engine, UserError
from workbench.adapters import LoRAModel
from workbench.adapters.peft_save import own_factors
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
@pytest.mark.parametrize(
    ("chosen", "rank"), [(None, 3), (("q_proj", "v_proj"), 7), (("k_proj", "up_proj"), 1), (None, 256)], ids=str
)
def test_separate_adapters_on_fused_bases_equal_the_changed_weight(kind, chosen, rank, tmp_path):
    model = tiny_model(kind)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    tensors, deltas = separate_adapter(model, rank, chosen)
    targets = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    engine.load_adapter(write(tmp_path / "separate", tensors, rank, 2 * rank, targets))
    for site, delta in deltas.items():
        weight = model.get_submodule(site).weight
        weight += delta.T if kind == "gpt2" else delta
    logits = run(engine, ["separate", None])
    assert difference(logits["separate"], logits_of(model)) < TOLERANCE
    assert difference(logits[None], logits_of(tiny_model(kind))) < TOLERANCE
    assert engine.adapters.entries()[0].rank == rank


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


# layouts


RENAMED = {
    "an adapter's name": lambda key: key.replace(".weight", ".default.weight"),
    "another name": lambda key: key.replace(".weight", ".my-adapter.weight"),
    "no prefix": lambda key: key.removeprefix("base_model.model."),
    "no model": lambda key: key.replace("base_model.model.model.", "base_model.model."),
    "twice wrapped": lambda key: f"base_model.model.{key}",
    "a module of another": lambda key: key.replace("base_model.model.", "base_model.model.language_model."),
}


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("how", RENAMED)
def test_keys_of_any_prefix_and_adapter_name_mean_the_same(kind, how, tmp_path):
    model = tiny_model(kind)
    adapter = Adapter(("o_proj", "down_proj"), rank=2)
    folder = adapter.write(tmp_path / "a", model)
    plain = LoRAModel.read(folder).fit(linear_targets(model), "tiny")
    path = folder / "adapter_model.safetensors"
    renamed = {RENAMED[how](key): tensor for key, tensor in load_file(path).items()}
    assert set(renamed) != set(load_file(path))
    save_file(renamed, path)
    other = LoRAModel.read(folder).fit(linear_targets(model), "tiny")
    assert other.sites and set(other.sites) == set(plain.sites)
    for site in plain.sites:
        assert torch.equal(other.a[site], plain.a[site]) and torch.equal(other.b[site], plain.b[site])


def test_embeddings_in_a_whole_save_of_a_mixture_are_told_apart():
    """As PEFT up to 0.19 names them: the saved adapter's own without a number, the others' with theirs."""
    path = "base_model.lora_model.model.model.embed_tokens"
    tensors = {
        f"{path}.{name}": torch.full((2,), float(number))
        for number, name in enumerate(
            ["lora_embedding_A", "lora_embedding_B", "lora_embedding_A.1", "lora_embedding_B.1", "base_layer.weight"]
        )
    }
    own = own_factors(tensors, "0")
    site = "base_model.model.model.embed_tokens"
    assert {key: int(value[0]) for key, value in own.items()} == {
        f"{site}.lora_embedding_A": 0,
        f"{site}.lora_embedding_B": 1,
    }


def test_what_ludwig_writes_is_read(tmp_path):
    """Ludwig saves with PEFT, into `model/model_weights`, the tokenizer beside it and its own settings above it."""
    model = tiny_model("llama")
    results = tmp_path / "results" / "experiment_run" / "model"
    folder = Adapter().write(results / "model_weights", model)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("# adapter")
    (results / "model_hyperparameters.json").write_text('{"model_type": "llm"}')
    (results / "training_set_metadata.json").write_text("{}")
    engine = Engine(save_base(model, tmp_path / "tiny"))
    engine.load_adapter(folder, "mine")
    for name, outer in (("model", results), ("run", results.parent)):
        engine.load_adapter(outer, name)
    mine, *others = engine.adapters.entries()
    assert [other.content_hash for other in others] == [mine.content_hash] * 2


# ranks


_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2": _LLAMA,
    "starcoder2": (*_LLAMA[:4], "c_fc", "c_proj"),
    "mixtral": _LLAMA[:4],
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
RANKS = (1, 4, 7, 8, 16, 48, 64, 96, 128, 256)


def ranks_of(kind: str) -> dict[str, Adapter]:
    """Return three adapters of three ranks; over all architectures, every rank comes in both dtypes."""
    config = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    first = 3 * [*TARGETS].index(kind)
    made = {}
    for number in range(first, first + 3):
        rank, dtype = RANKS[number % 10], (torch.float32, torch.bfloat16)[number // 10 % 2]
        made[f"{rank}"] = Adapter(TARGETS[kind], rank, 2.0 * rank, number, dtype, config)
    return made


def test_the_ranks_are_covered():
    seen = {(adapter.rank, adapter.dtype) for kind in TARGETS for adapter in ranks_of(kind).values()}
    assert seen == {(rank, dtype) for rank in RANKS for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("kind", TARGETS)
def test_adapters_of_any_rank_in_one_batch_equal_peft(kind, tmp_path):
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"))
    adapters = ranks_of(kind)
    for name, adapter in adapters.items():
        engine.load_adapter(adapter.write(tmp_path / name, tiny_model(kind)))
    logits = run(engine, [*adapters, None])
    assert difference(logits[None], logits_of(tiny_model(kind))) < TOLERANCE
    for name in adapters:
        theirs = PeftModel.from_pretrained(tiny_model(kind), tmp_path / name).eval()
        assert difference(logits[name], logits_of(theirs)) < TOLERANCE, name
        assert difference(logits[name], logits[None]) > 0.05, name
