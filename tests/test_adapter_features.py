"""Fused projections, embeddings, DoRA, layouts and ranks, each against PEFT: `pytest tests/test_adapter_features.py`.

PEFT has no adapter on one projection of a fused module: there the reference is transformers' own model with W + BA
written into its weights.
"""

import json

import pytest
import torch
from models import Probe, random_ids, save_base, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from workbench import Engine, UserError
from workbench.adapters import LoRAModel
from workbench.adapters.projections import parts_of
from workbench.engine.hf import linear_targets

# PEFT warns of settings that are tested on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]
TOLERANCE = 1e-5
IDS = random_ids(12, seed=3)
PROMPT = 4


def run(engine: Engine, names, ids=IDS) -> dict[str, torch.Tensor]:
    """Return name -> logits `[token, vocab]` of each (None is the base): all in one batch, decoded and whole."""
    probe = Probe(engine, forced={f"{name}": ids[PROMPT:] for name in names})
    for name in names:
        engine.submit(ids[:PROMPT], request_id=f"{name}", adapter=name, max_tokens=len(ids) - PROMPT, ignore_eos=True)
        engine.submit(ids, request_id=f"{name} whole", adapter=name, max_tokens=1, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
    probe.close()
    found = {}
    for name in names:
        decoded = probe.decoded(f"{name}", PROMPT - 1, len(ids) - PROMPT)
        found[name] = torch.cat([decoded, probe.decoded(f"{name} whole", len(ids) - 1, 1)])
    return found


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([IDS])).logits[0, PROMPT - 1 :]


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    error = float((left - right).abs().max())
    return error if error == error else float("inf")


# fused projections


def write(folder, tensors, rank, alpha, targets, **config):
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def separate_adapter(model, kind, rank=3, chosen=None):
    """Return an adapter on the separate projections of a fused base, and site -> the change of the fused weight."""
    generator = torch.Generator().manual_seed(7)
    tensors, deltas = {}, {}
    for site, target in linear_targets(model).items():
        for part in target.parts:
            if chosen and part.name not in chosen:
                continue
            down = torch.randn(rank, target.in_features, generator=generator) * target.in_features**-0.5
            up = torch.randn(part.width, rank, generator=generator) * 0.1
            path = f"base_model.model.{site.rpartition('.')[0]}.{part.name}"
            tensors |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
            delta = deltas.setdefault(site, torch.zeros(target.out_features, target.in_features))
            delta[part.outputs] += 2.0 * up @ down
    return tensors, deltas


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
    tensors, deltas = separate_adapter(model, kind, chosen=chosen)
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
    tensors, _ = separate_adapter(model, "phi3")
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
    tensors, _ = separate_adapter(model, "phi3", chosen=("q_proj",))
    site = "base_model.model.model.layers.0.self_attn.qkv_proj"
    tensors |= {f"{site}.lora_A.weight": torch.ones(3, 32), f"{site}.lora_B.weight": torch.ones(64, 3)}
    read = LoRAModel.read(write(tmp_path / "both", tensors, 3, 6, ["q_proj"]))
    with pytest.raises(UserError, match="two of its sites name the same module .*qkv_proj"):
        read.fit(linear_targets(model), "tiny")


def test_a_lost_projection_is_noticed_on_a_fused_base(tmp_path):
    model = tiny_model("phi3")
    tensors, _ = separate_adapter(model, "phi3", chosen=("q_proj", "k_proj"))
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


# embeddings, heads and DoRA, as PEFT saves them


def peft_saves(folder, kind, targets, changes=None, seed=0, **config):
    """Let PEFT make, fill and save an adapter; return its own logits."""
    made = get_peft_model(
        tiny_model(kind, **(changes or {})), LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **config)
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in made.named_parameters():
        if "magnitude" in name:
            value.data *= 0.5 + torch.rand(value.shape, generator=generator)
        elif "lora_" in name:
            value.data.copy_(0.2 * torch.randn(value.shape, generator=generator))
    made.save_pretrained(folder)
    return logits_of(made)


EMBEDDINGS = {
    "llama": ("embed_tokens", "q_proj"),
    "gemma": ("embed_tokens",),  # multiplied by sqrt(hidden) inside the module
    "gemma2": ("embed_tokens", "lm_head"),  # and tied
    "granite": ("embed_tokens",),  # multiplied after the module
    "gpt2": ("wte", "wpe", "c_attn"),  # positions too
    "gpt_neox": ("embed_in", "embed_out"),
    "opt": ("embed_tokens", "q_proj"),
}


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embedding_adapters_equal_peft(kind, tmp_path):
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"))
    theirs = {
        "plain": peft_saves(tmp_path / "plain", kind, [*EMBEDDINGS[kind]], r=4, lora_alpha=6, seed=1),
        "one": peft_saves(tmp_path / "one", kind, [EMBEDDINGS[kind][0]], r=7, use_rslora=True, seed=2),
        None: logits_of(tiny_model(kind)),
    }
    for name in ("plain", "one"):
        engine.load_adapter(tmp_path / name)
        assert difference(theirs[name], theirs[None]) > 0.05
    logits = run(engine, [*theirs])
    for name, expected in theirs.items():
        assert difference(logits[name], expected) < TOLERANCE, name


@pytest.mark.parametrize("config", [{}, {"ensure_weight_tying": True}])
def test_adapters_of_tied_weights_equal_peft(config, tmp_path):
    """Without `ensure_weight_tying`, PEFT changes the embedding alone; with it, both are in the file."""
    changes = {"tie_word_embeddings": True}
    engine = Engine(save_base(tiny_model("llama", **changes), tmp_path / "tiny"))
    theirs = {}
    for name, targets in {"embedding": ["embed_tokens"], "both": ["embed_tokens", "lm_head"]}.items():
        theirs[name] = peft_saves(tmp_path / name, "llama", targets, changes, r=4, **config)
        engine.load_adapter(tmp_path / name)
    head = LoRAModel.read(tmp_path / "embedding").sites
    assert ("lm_head" in head) == bool(config)
    logits = run(engine, [*theirs])
    for name, expected in theirs.items():
        assert difference(logits[name], expected) < TOLERANCE, name


def test_a_base_weight_in_the_file_must_be_the_base_weight(tmp_path):
    base = save_base(tiny_model("llama"), tmp_path / "tiny")
    peft_saves(tmp_path / "grown", "llama", ["embed_tokens"])
    path = tmp_path / "grown" / "adapter_model.safetensors"
    tensors = load_file(path)
    (key,) = [key for key in tensors if key.endswith("embed_tokens.base_layer.weight")]
    engine = Engine(base)
    save_file({**tensors, key: tensors[key].bfloat16()}, path)
    engine.load_adapter(tmp_path / "grown", "rounded")
    save_file({**tensors, key: tensors[key] + 0.1}, path)
    with pytest.raises(UserError, match=r"base weight of 'model\.embed_tokens' that differs .*tokens added"):
        engine.load_adapter(tmp_path / "grown")
    save_file({**tensors, key: torch.cat([tensors[key], tensors[key][:1]])}, path)
    with pytest.raises(UserError, match="that differs from that of base"):
        engine.load_adapter(tmp_path / "grown")


def test_factors_of_an_embedding_do_not_fit_a_linear_module(tmp_path):
    model = tiny_model("llama")
    site = "base_model.model.lm_head"
    tensors = {f"{site}.lora_embedding_A": torch.ones(2, 32), f"{site}.lora_embedding_B": torch.ones(97, 2)}
    read = LoRAModel.read(write(tmp_path / "head", tensors, 2, 2, ["lm_head"]))
    with pytest.raises(UserError, match="lm_head is a linear module in the base, its factors are those of an embed"):
        read.fit(linear_targets(model), "tiny")


@pytest.mark.filterwarnings("ignore:the mixture was made for base")
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_mixtures_of_embedding_adapters_equal_peft(kind, tmp_path):
    from peft import XLoraConfig

    settings = {"layerwise_scalings": True, "xlora_depth": 1, "global_scaling_weight": 1.5}
    targets = {"0": ["embed_tokens", "v_proj"], "1": ["embed_tokens"]}
    for name, chosen in targets.items():
        peft_saves(tmp_path / "m" / name, kind, chosen, r=3 + int(name), seed=int(name))
    model = tiny_model(kind)
    model.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=32, adapters={name: str(tmp_path / "m" / name) for name in targets}, **settings
    )
    theirs = get_peft_model(model, config).eval()
    (last,) = [m for m in theirs.base_model.internal_xlora_classifier.layers if isinstance(m, torch.nn.Linear)]
    last.weight.data.normal_(generator=torch.Generator().manual_seed(5)).mul_(0.2)
    last.bias.data.zero_()
    (tmp_path / "m" / "xlora_config.json").write_text(
        json.dumps({"hidden_size": 32, "base_model_id": "tiny", "adapters": list(targets), **settings})
    )
    save_file({"last.weight": last.weight.data, "last.bias": last.bias.data},
              tmp_path / "m" / "xlora_classifier.safetensors")  # fmt: skip
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"))
    engine.load_mixture(tmp_path / "m", "m")
    assert engine.mixtures["m"].sites[0] == "model.embed_tokens" and len(engine.mixtures["m"].sites) == 3
    probe = Probe(engine)
    engine.submit(IDS, request_id="m", mixture="m", max_tokens=1)
    while engine.scheduler.has_work():
        engine.step()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([IDS])).logits[0, -1]
    assert difference(probe.logits["m", "adapted", len(IDS) - 1], expected) < TOLERANCE
