"""Adapters of embeddings, output heads and DoRA against PEFT: `pytest tests/test_embeddings_and_dora.py`."""

import json

import pytest
import torch
from models import Adapter, MixtureSpec, Probe, save_base, tiny_model
from peft import XLoraConfig, get_peft_model
from peft_made import IDS, PROMPT, TOLERANCE, difference, edit, logits_of, peft_saves, run, separate_adapter, write
from safetensors.torch import load_file, save_file

from workbench import Engine, UserError
from workbench.adapters import LoRAConfig, LoRAModel
from workbench.engine.hf import linear_targets

# PEFT warns of settings that are tested on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

EMBEDDINGS = {
    "llama": ("embed_tokens", "q_proj"),
    "gemma": ("embed_tokens",),  # multiplied by sqrt(hidden) inside the module
    "gemma2": ("embed_tokens", "lm_head"),  # and tied
    "granite": ("embed_tokens",),  # multiplied after the module
    "gpt2": ("wte", "wpe", "c_attn"),  # positions too
    "gpt_neox": ("embed_in", "embed_out"),
    "opt": ("embed_tokens", "q_proj"),
}


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
    settings = {"layerwise_scalings": True, "xlora_depth": 1, "global_scaling_weight": 1.5}
    targets = {"0": ["embed_tokens", "v_proj"], "1": ["embed_tokens"]}
    for name, chosen in targets.items():
        peft_saves(tmp_path / "m" / name, kind, chosen, r=3 + int(name), seed=int(name))
    model = tiny_model(kind)
    model.config.use_cache = False
    paths = {name: str(tmp_path / "m" / name) for name in targets}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=paths, **settings)
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
    engine.enqueue(IDS, request_id="m", mixture="m", max_tokens=1)
    while engine.scheduler.has_work():
        engine.step()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([IDS])).logits[0, -1]
    assert difference(probe.logits["m", "adapted", len(IDS) - 1], expected) < TOLERANCE
    padded = Engine(tmp_path / "tiny", row_padding=32)
    padded.load_mixture(tmp_path / "m", "m")
    probe = Probe(padded)
    padded.enqueue(IDS, request_id="m", mixture="m", max_tokens=1)
    while padded.scheduler.has_work():
        padded.step()
    assert difference(probe.logits["m", "adapted", len(IDS) - 1], expected) < TOLERANCE


DORA = {
    "llama": (["q_proj", "v_proj", "down_proj"], {"attention_bias": True}),
    "gemma": (["embed_tokens", "o_proj", "lm_head"], {}),
    "gpt2": (["c_attn", "c_proj", "wte"], {}),
    "phi3": (["qkv_proj", "gate_up_proj"], {}),
}


def watch(engine: Engine, names, order) -> dict:
    """Return (name, position) -> hidden row of base requests and adapters submitted in `order`."""
    probe = Probe(engine, forced={f"{name}": IDS[PROMPT:] for name in names})
    for name in order:
        engine.enqueue(IDS[:PROMPT], request_id=f"{name}", adapter=name, max_tokens=6, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
    probe.close()
    return probe.logits


@pytest.mark.parametrize("kind", DORA)
def test_dora_equals_peft_beside_plain_adapters_and_base_rows(kind, tmp_path):
    targets, changes = DORA[kind]
    base = save_base(tiny_model(kind, **changes), tmp_path / "tiny")
    theirs = {
        "dora": peft_saves(tmp_path / "dora", kind, targets, changes, r=4, seed=1, use_dora=True),
        "dora 1": peft_saves(tmp_path / "dora 1", kind, targets[:1], changes, r=1, use_rslora=True, use_dora=True),
        "plain": peft_saves(tmp_path / "plain", kind, targets, changes, r=6, seed=3),
        None: logits_of(tiny_model(kind, **changes)),
    }
    engine = Engine(base)
    for name in ("dora", "dora 1", "plain"):
        engine.load_adapter(tmp_path / name)
    logits = run(engine, [*theirs])
    for name, expected in theirs.items():
        assert difference(logits[name], expected) < TOLERANCE, name
    assert difference(theirs["dora"], theirs[None]) > 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dora_and_embeddings_in_half_precision_stay_near_float32(dtype, tmp_path):
    """The row factors are float32 in every dtype: the error is that of the base's own rounding."""
    base = save_base(tiny_model("gemma"), tmp_path / "tiny")
    theirs = peft_saves(tmp_path / "dora", "gemma", ["embed_tokens", "o_proj"], r=4, use_dora=True)
    engine = Engine(base, dtype=dtype)
    engine.load_adapter(tmp_path / "dora")
    logits = run(engine, ["dora", None])
    rounding = difference(logits[None], logits_of(tiny_model("gemma")))
    assert difference(logits["dora"], theirs) < 3 * rounding
    table = engine.slots.sites["model.embed_tokens"]
    assert table.a.dtype == getattr(torch, dtype) and all(gain.dtype == torch.float32 for gain in table.gains.values())


def test_base_rows_beside_dora_are_bitwise_those_of_an_engine_without(tmp_path):
    base = save_base(tiny_model("llama"), tmp_path / "tiny")
    peft_saves(tmp_path / "dora", "llama", ["embed_tokens", "q_proj", "down_proj"], r=4, use_dora=True)
    with_padding = {"row_padding": 32, "attention": "reference"}
    engine = Engine(base, **with_padding)
    engine.load_adapter(tmp_path / "dora")
    together = watch(engine, ["dora"], ["dora", None])
    alone = watch(engine, ["dora"], ["dora"]) | watch(Engine(base, **with_padding), [], [None])
    assert {key[0] for key in together} == {"dora", "None"}
    shared = [key for key in together if key in alone]
    assert {key[0] for key in shared} == {"dora", "None"} and len(shared) >= 8
    for key in shared:
        assert torch.equal(together[key], alone[key]), key


def test_a_dora_adapter_comes_back_from_host_and_disk_unchanged(tmp_path):
    base = save_base(tiny_model("llama"), tmp_path / "tiny")
    theirs = {}
    for seed, name in enumerate(("one", "two", "three")):
        theirs[name] = peft_saves(tmp_path / name, "llama", ["q_proj"], r=2, seed=seed, use_dora=name != "two")
    for host_bytes in (None, 0):
        engine = Engine(base, lora=LoRAConfig(max_num_loras=1, max_host_bytes=host_bytes))
        for name in theirs:
            engine.load_adapter(tmp_path / name)
        for name in ("one", "two", "one", "three", "two"):
            assert difference(run(engine, [name])[name], theirs[name]) < TOLERANCE
    engine.unload("three")
    assert not any(table.gains for table in engine.slots.sites.values())


@pytest.mark.parametrize("wanted", [None, ("q_proj", "v_proj")])
def test_dora_of_separate_projections_on_a_fused_base(wanted, tmp_path):
    model = tiny_model("phi3")
    tensors, _ = separate_adapter(model, chosen=wanted)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    for site, target in linear_targets(model).items():
        weight = model.get_submodule(site).weight
        for part in target.parts:
            path = f"base_model.model.{site.rpartition('.')[0]}.{part.name}"
            if f"{path}.lora_A.weight" not in tensors:
                continue
            whole = weight[part.outputs] + 2.0 * tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
            magnitude = 0.5 + torch.rand(part.width, generator=torch.Generator().manual_seed(part.width))
            tensors[f"{path}.lora_magnitude_vector"] = magnitude
            weight[part.outputs] = magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)
    targets = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    engine.load_adapter(write(tmp_path / "dora", tensors, 3, 6, targets, use_dora=True))
    assert difference(run(engine, ["dora"])["dora"], logits_of(model)) < TOLERANCE


def test_dora_is_refused_in_mixtures_by_name(tmp_path):
    model = tiny_model("llama")
    MixtureSpec({"a": Adapter(), "b": Adapter(seed=1)}).write(tmp_path / "m", model)
    peft_saves(tmp_path / "m" / "b", "llama", ["q_proj"], use_dora=True)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    with pytest.raises(UserError, match="mixture 'm': adapter 'b' is refused, as it uses use_dora"):
        engine.load_mixture(tmp_path / "m", "m")
    assert not engine.slots.adapters


MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if k != MAGNITUDE}, {}, "lora_magnitude_vector is missing at 1 sites"),
        (lambda t: {**t, MAGNITUDE: torch.ones(47)}, {}, "has 47 entries; lora_B writes 48"),
        (lambda t: {**t, MAGNITUDE: torch.full((48,), torch.nan)}, {}, "has NaN or infinite values"),
        (lambda t: {**t, MAGNITUDE: torch.ones(48, 1)}, {}, "a vector was expected"),
        (lambda t: {**t, MAGNITUDE.replace("q_", "k_"): torch.ones(24)}, {}, "has no lora_A and lora_B beside"),
        (lambda t: {**t, MAGNITUDE + ".default.weight": torch.ones(48)}, {}, "two tensors hold lora_magnitude_vector"),
        (lambda t: t, {"use_dora": False}, "2 tensors are neither lora_A nor lora_B"),
    ],
)
def test_bad_magnitudes_are_refused(change, config, says, tmp_path):
    peft_saves(tmp_path / "dora", "llama", ["q_proj"], use_dora=True)
    edit(tmp_path / "dora", change, **config)
    with pytest.raises(UserError, match=says):
        LoRAModel.read(tmp_path / "dora").fit(linear_targets(tiny_model("llama")), "tiny")


def test_a_row_of_length_zero_is_refused(tmp_path):
    peft_saves(tmp_path / "dora", "llama", ["q_proj"], use_dora=True)
    edit(tmp_path / "dora", lambda t: {k: v * 0 if "lora_B" in k else v for k, v in t.items()})
    model = tiny_model("llama")
    model.model.layers[1].self_attn.q_proj.weight[3] = 0
    with pytest.raises(UserError, match=r"at 'model\.layers\.1\.self_attn\.q_proj' a row .* is zero"):
        LoRAModel.read(tmp_path / "dora").fit(linear_targets(model), "tiny")


def test_dora_needs_a_weight_that_can_be_read(tmp_path):
    peft_saves(tmp_path / "dora", "llama", ["q_proj"], use_dora=True)
    model = tiny_model("llama")
    layer = model.model.layers[0].self_attn
    layer.q_proj = torch.ao.nn.quantized.dynamic.Linear.from_float(quantisable(layer.q_proj))
    with pytest.raises(UserError, match=r"'model\.layers\.0\.self_attn\.q_proj', but the weight of that torch.ao"):
        LoRAModel.read(tmp_path / "dora").fit(linear_targets(model), "tiny")


def quantisable(layer):
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return layer
