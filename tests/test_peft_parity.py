"""Logits and scalings equal PEFT's, teacher-forced, in float32: `pytest tests/test_peft_parity.py`.

PEFT recomputes the whole sequence; the engine prefills one request and decodes another token by token, drafts and all.
PEFT calls the adapters "0" to "n-1" and uses top-k in the scaling pass too, so the engine is told to do the same.
"""

import itertools
import json
import random
from unittest import mock

import pytest
import torch
from models import Adapter, MixtureSpec, Probe, peft_names, random_ids, save_base, tiny_model
from peft import PeftModel, XLoraConfig, get_peft_model
from peft.tuners.xlora.layer import XLoraLayer
from safetensors.torch import save_file

from workbench import Engine

# PEFT warns of settings that are tested on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:`enable_softmax_topk`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:the mixture was made for base"),
]
TOLERANCE = 1e-5
IDS = random_ids(12, seed=3)
PROMPT = 4  # tokens of the request that is decoded; the other one is all prompt

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": _LLAMA,
    "mistral": _LLAMA[:5],
    "gemma": _LLAMA,
    "phi3": ("o_proj", "qkv_proj", "gate_up_proj", "down_proj"),
    "qwen2": _LLAMA,
    "starcoder2": (*_LLAMA[:4], "c_fc", "c_proj"),
    "mixtral": _LLAMA[:4],
}


def adapters_of(shape: str, kind: str) -> dict[str, Adapter]:
    """Return three adapters that differ as `shape` says."""
    targets = TARGETS[kind]
    # PEFT's "all-linear" takes in fused experts, which no linear site stands for
    everything = targets if kind == "mixtral" else "all-linear"
    plain = [Adapter(targets, seed=seed) for seed in range(3)]
    made = {
        "alike": plain,
        "ranks": [Adapter(targets, rank=r, alpha=a, seed=r) for r, a in ((1, 3), (5, 8), (8, 8))],
        "targets": [Adapter(targets[:1], seed=1), Adapter(targets[1:3], rank=3, seed=2), Adapter(targets, seed=3)],
        "rslora": [plain[0], Adapter(targets, alpha=4, config={"use_rslora": True}), Adapter(everything, rank=2)],
        "patterns": [
            plain[0],
            Adapter(targets, config={"rank_pattern": {targets[0]: 7, f"layers.1.self_attn.{targets[1]}": 2},
                                     "alpha_pattern": {targets[0]: 3}}),
            Adapter(targets, alpha=2, dtype=torch.float16, seed=4),
        ],
    }  # fmt: skip
    if kind == "phi3":  # its second target is in the attention block, the third is not
        made["patterns"][1] = Adapter(targets, config={"rank_pattern": {"layers.1.self_attn.o_proj": 2, "qkv_proj": 7}})
    return {str(index): adapter for index, adapter in enumerate(made[shape])}


FACTORS = {
    "kind": list(TARGETS),
    "adapters": ["alike", "ranks", "targets", "rslora", "patterns"],
    "xlora_depth": [1, 2, 3],
    "layerwise_scalings": [True, False],
    "top_k_lora": [None, 2, 1],
    "softmax_temperature": [1.0, 0.4, 3.0],
    "enable_softmax": [True, False],
    "enable_softmax_topk": [False, True],
    "scaling_pass_value": [0.0, 0.3, None],
    "global_scaling_weight": [1.0, 2.0, 0.5],
    "xlora_dropout_p": [0.2, 0.0],  # PEFT's classifier has other indices without dropout
}


def pairs_of(case: dict) -> set:
    return set(itertools.combinations(case.items(), 2))


def pairwise(factors: dict[str, list]) -> list[dict]:
    """Return cases in which every two values of two factors meet at least once."""
    rng = random.Random(0)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(factors, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while missing:
        wanted = dict(min(missing, key=repr))
        drafts = [{name: wanted.get(name, rng.choice(factors[name])) for name in factors} for _ in range(200)]
        cases.append(max(drafts, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


CASES = pairwise(FACTORS)


class PeftRun:
    """PEFT's X-LoRA of a spec: `logits [token, vocab]` and the scalings its layers used, `[token, site, adapter]`."""

    def __init__(self, kind: str, spec: MixtureSpec, folder):
        model = tiny_model(kind)
        layers = spec.layers(model)
        model.config.use_cache = False
        settings = {k: v for k, v in spec.settings.items() if k != "scaling_pass_value"}
        paths = {name: str(folder / name) for name in spec.adapters}
        config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=paths, **settings)
        self.model = get_peft_model(model, config).eval()
        self.model.set_scaling_pass_value(spec.settings["scaling_pass_value"])
        linears = [m for m in self.model.base_model.internal_xlora_classifier.layers if isinstance(m, torch.nn.Linear)]
        for linear, (weight, bias) in zip(linears, layers, strict=True):
            linear.weight.data, linear.bias.data = weight, bias
        self._run()

    @torch.no_grad()
    def _run(self) -> None:
        used, inner = {}, XLoraLayer.get_maybe_topk_scalings

        def note(layer, scalings):  # the second pass comes last
            used[layer.layer_number] = inner(layer, scalings)
            return used[layer.layer_number]

        with mock.patch.object(XLoraLayer, "get_maybe_topk_scalings", note):
            self.logits = self.model(input_ids=torch.tensor([IDS])).logits[0]
        self.scalings = torch.stack([used[number][0] for number in range(len(used))], dim=1)


def decode_and_prefill(engine: Engine, **who):
    """Return both requests' logits `[token, vocab]` from position PROMPT - 1 on, and their traces."""
    probe = Probe(engine, forced={"decode": IDS[PROMPT:]})
    recording = engine.record("scalings")
    with recording:
        engine.enqueue(IDS[:PROMPT], request_id="decode", max_tokens=len(IDS) - PROMPT, ignore_eos=True, **who)
        engine.enqueue(IDS, request_id="prefill", max_tokens=1, **who)
        while engine.scheduler.has_work():
            engine.step()
    decoded = probe.decoded("decode", PROMPT - 1, len(IDS) - PROMPT)
    return torch.cat([decoded, probe.decoded("prefill", len(IDS) - 1, 1)]), recording


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    difference = (ours - theirs).abs().max()
    assert difference < TOLERANCE, f"{what} differ by {difference:.1e}"  # NaN is not below it either


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_xlora_equals_peft(case, tmp_path):
    settings = {k: v for k, v in case.items() if k not in ("kind", "adapters")}
    settings["xlora_size"] = 10
    spec = MixtureSpec(adapters_of(case["adapters"], case["kind"]), settings)
    model = tiny_model(case["kind"])
    stride = 3 if settings["xlora_dropout_p"] else 2
    mixture = spec.write(tmp_path / "mixture", model, stride)
    theirs = PeftRun(case["kind"], spec, mixture)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    engine.load_mixture(mixture, "m", settings={"topk_on_scaling_pass": True})
    logits, recording = decode_and_prefill(engine, mixture="m")
    assert_close(logits, theirs.logits[PROMPT - 1 :], "logits")
    for request, rows in (("decode", len(IDS) - 1), ("prefill", len(IDS))):
        values = torch.from_numpy(recording.trace(request).values)
        assert_close(values[:rows], theirs.scalings[:rows], f"scalings of {request}")


def test_the_cases_cover_every_pair():
    covered = set().union(*map(pairs_of, CASES))
    for (a, left), (b, right) in itertools.combinations(FACTORS.items(), 2):
        for x, y in itertools.product(left, right):
            assert ((a, x), (b, y)) in covered
    assert len(CASES) <= 50


@pytest.mark.parametrize("depth", [1, 3])
def test_a_classifier_that_peft_saved_whole_equals_peft(depth, tmp_path):
    """PEFT before 0.20 saved all layers; newer ones lose some, so the file is written from the model's state here."""
    settings = {"xlora_depth": depth, "xlora_size": 10, "layerwise_scalings": True, "scaling_pass_value": 0.0}
    spec = MixtureSpec(adapters_of("ranks", "llama"), settings)
    model = tiny_model("llama")
    written = spec.write(tmp_path / "xlora", model)
    theirs = PeftRun("llama", spec, written)
    saved = tmp_path / "peft"
    theirs.model.peft_config["default"].save_pretrained(saved)
    state = theirs.model.state_dict()
    save_file({k: v for k, v in state.items() if "internal_xlora_classifier" in k}, saved / "adapter_model.safetensors")
    assert set(peft_names(spec.layers(model))) == {k for k in state if "internal_xlora_classifier" in k}
    for name in spec.adapters:
        (written / name).rename(saved / name)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    engine.load_mixture(saved, "m")
    logits, _ = decode_and_prefill(engine, mixture="m")
    assert_close(logits, theirs.logits[PROMPT - 1 :], "logits")


SINGLE = {
    **TARGETS,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "opt": ("k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"),
    "phi": ("q_proj", "dense", "fc1", "fc2"),
    "cohere": _LLAMA,
    "gemma2": _LLAMA,
}


def adapters_alone(kind: str) -> dict[str, Adapter]:
    targets = SINGLE[kind]
    conv1d = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    everything = targets if kind == "mixtral" else "all-linear"
    return {
        "plain": Adapter(targets, seed=1, config=conv1d),
        "rank 1": Adapter(targets[:1], rank=1, alpha=2, seed=2, config=conv1d),
        "rslora": Adapter(targets, rank=9, alpha=4, seed=3, config={"use_rslora": True, **conv1d}),
        "bfloat16": Adapter(targets, rank=6, seed=4, dtype=torch.bfloat16, config=conv1d),
        "float16": Adapter(everything, alpha=3, seed=5, dtype=torch.float16, config=conv1d),
    }


@pytest.mark.parametrize("kind", SINGLE)
def test_single_adapters_in_one_batch_equal_peft(kind, tmp_path):
    """Every adapter and the base run together; PEFT runs each alone."""
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"))
    adapters = adapters_alone(kind)
    for name, adapter in adapters.items():
        engine.load_adapter(adapter.write(tmp_path / name, tiny_model(kind)))
    probe = Probe(engine, forced=dict.fromkeys([*adapters, "base"], IDS[PROMPT:]))
    for name in [*adapters, "base"]:
        engine.enqueue(IDS[:PROMPT], request_id=name, adapter=name if name != "base" else None,
                      max_tokens=len(IDS) - PROMPT, ignore_eos=True)  # fmt: skip
    while engine.scheduler.has_work():
        engine.step()
    for name in [*adapters, "base"]:
        model = tiny_model(kind)
        if name != "base":
            model = PeftModel.from_pretrained(model, tmp_path / name).eval()
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([IDS[:-1]])).logits[0, PROMPT - 1 :]
        assert_close(probe.decoded(name, PROMPT - 1, len(IDS) - PROMPT), theirs, f"logits of {name}")


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_of_the_output_head_equals_peft(tied, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=tied)
    adapter = Adapter(("lm_head", "q_proj"), seed=6)
    adapter.write(tmp_path / "head", model)
    engine = Engine(save_base(model, tmp_path / "tiny"))
    engine.load_adapter(tmp_path / "head")
    logits, _ = decode_and_prefill(engine, adapter="head")
    peft = PeftModel.from_pretrained(tiny_model("llama", tie_word_embeddings=tied), tmp_path / "head").eval()
    with torch.no_grad():
        assert_close(logits, peft(input_ids=torch.tensor([IDS])).logits[0, PROMPT - 1 :], "logits")


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": 0},
        {"exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3}},
    ],
    ids=json.dumps,
)
def test_an_adapter_that_peft_saved_equals_peft(config, tmp_path):
    """Written by PEFT this time, so its file format is PEFT's own."""
    from peft import LoraConfig

    model = tiny_model("llama")
    base = save_base(model, tmp_path / "tiny")
    made = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], **config)
    ).eval()
    torch.manual_seed(5)
    for name, value in made.named_parameters():
        if "lora_" in name:
            value.data.normal_(std=0.3)
    made.save_pretrained(tmp_path / "saved")
    engine = Engine(base)
    engine.load_adapter(tmp_path / "saved", "a")
    logits, _ = decode_and_prefill(engine, adapter="a")
    with torch.no_grad():
        assert_close(logits, made(input_ids=torch.tensor([IDS])).logits[0, PROMPT - 1 :], "logits")
