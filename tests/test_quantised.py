"""LoRA around any linear-like module, quantised ones too: `pytest tests/test_quantised.py`.

torchao's int8 runs on a CPU. bitsandbytes', AWQ's and GPTQ's layers need a GPU: stand-ins here have their attributes.
"""

import importlib.util

import pytest
import torch
from models import CONFIGS, Adapter, save_base, tiny_model
from peft_made import TOLERANCE, difference, logits_of, peft_saves, run
from torch import nn
from transformers.pytorch_utils import Conv1D

from lora_kernels.segments import Segment
from workbench import Engine, UserError
from workbench.adapters.linear import LoRALinear, MixtureSegment, Routing, RowWeights
from workbench.adapters.modules import dense_weight, widths_of
from workbench.adapters.slots import SiteTable
from workbench.engine.hf import BaseModel, linear_targets
from workbench.engine.prepack import PackedLinear
from workbench.ordering import meta_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]
has_torchao = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not has_torchao, reason="needs torchao")
WIDE_IN, WIDE_OUT, ROWS = 32, 48, 9


class AwqLike(nn.Module):
    """int8 codes, a scale for each output, as AWQ, HQQ and GPTQModel lay out their layers: no `weight`."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scales", scale)
        self.register_buffer("qweight", (layer.weight / scale).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.qweight * self.scales, self.bias)


class GptqLike(AwqLike):
    """AutoGPTQ's names of the widths."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        self.infeatures, self.outfeatures = self.in_features, self.out_features
        del self.in_features, self.out_features


class Bnb4bitLike(nn.Linear):
    """A subclass of nn.Linear whose weight is packed codes, as bitsandbytes' Linear4bit."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features)
        self._real, self.bias = layer.weight, layer.bias
        del self.weight
        packed = torch.zeros(self.in_features * self.out_features // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self._real, self.bias)


class Bnb8bitLike(Bnb4bitLike):
    """bitsandbytes' Linear8bitLt: the codes have the weight's shape, and torch would turn them into floats."""

    class Int8Params(nn.Parameter):
        pass

    def __init__(self, layer: nn.Linear):
        super().__init__(layer)
        codes = (layer.weight * 100).to(torch.int8)
        self.weight = self.Int8Params(codes, requires_grad=False)


def torchao_linear(config_name: str):
    def quantise(layer: nn.Linear) -> nn.Module:
        import torchao.quantization as quantization

        holder = nn.Sequential(layer)
        quantization.quantize_(holder, getattr(quantization, config_name)())
        return holder[0]

    return quantise


def torch_dynamic(layer: nn.Linear) -> nn.Module:
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return torch.ao.nn.quantized.dynamic.Linear.from_float(layer)


def conv1d(layer: nn.Linear) -> nn.Module:
    made = Conv1D(layer.out_features, layer.in_features).requires_grad_(False)
    made.weight.copy_(layer.weight.T)
    made.bias.copy_(layer.bias)
    return made


KINDS = {
    "linear": lambda layer: layer,
    "conv1d": conv1d,
    "packed": PackedLinear,
    "torch dynamic": torch_dynamic,
    "awq": AwqLike,
    "gptq": GptqLike,
    "bitsandbytes": Bnb4bitLike,
    "bitsandbytes int8": Bnb8bitLike,
    "torchao int8": torchao_linear("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao_linear("Int8DynamicActivationInt8WeightConfig"),
}
READABLE = ("linear", "conv1d", "packed", "torchao int8", "torchao int8 dynamic")


def layers(only=tuple(KINDS)):
    marks = {kind: needs_torchao if "torchao" in kind else () for kind in KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks[kind]) for kind in only])


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        return KINDS[kind](nn.Linear(WIDE_IN, WIDE_OUT).requires_grad_(False))


@layers()
@torch.no_grad()
def test_a_wrapped_module_adds_deltas_and_leaves_base_rows_alone(kind):
    module = make(kind)
    assert widths_of(module) == (WIDE_IN, WIDE_OUT)
    generator = torch.Generator().manual_seed(1)
    table = SiteTable(torch.zeros(0, WIDE_IN), torch.zeros(0, WIDE_OUT))
    factors = [[torch.randn(r, wide, generator=generator) for wide in (WIDE_IN, WIDE_OUT)] for r in (3, 5)]
    for slot, pair in enumerate(factors):
        table.put(slot, *pair)
    routing = Routing()
    layer = LoRALinear(module, "site", table, routing)
    x = torch.randn(1, ROWS, WIDE_IN, generator=generator)
    base = module(x)[0]
    assert torch.equal(layer(x)[0], base)
    weights = torch.rand(3, 1, 2, generator=generator)
    mixture = MixtureSegment(6, 9, (0, 1), weights, {"site": 0})
    deltas = [x[0] @ a.T @ b for a, b in factors]
    expected = base.clone()
    expected[2:5] += deltas[1][2:5]
    for index, delta in enumerate(deltas):
        expected[6:] += weights[:, 0, index, None] * delta[6:]
    for whole in (False, True):
        routing.rows = RowWeights(ROWS, (Segment(2, 5, 1),), (mixture,), whole)
        out = layer(x)[0]
        assert torch.equal(out[:2], base[:2]) and torch.equal(out[5], base[5])
        assert difference(out, expected) < 2e-5


@layers()
@torch.no_grad()
def test_a_weight_is_read_exactly_or_refused_by_name(kind):
    module = make(kind)
    if kind not in READABLE:
        with pytest.raises(UserError, match=f"the weight of that .*{type(module).__name__} is packed or quantised"):
            dense_weight(module)
        return
    weight = dense_weight(module)
    assert weight.shape == (WIDE_OUT, WIDE_IN)
    columns = module(torch.eye(WIDE_IN)) - module.bias
    assert difference(weight.T, columns) < (2e-2 if kind == "torchao int8 dynamic" else 1e-6)


# whole models


def quantise(model: nn.Module, kind: str) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, KINDS[kind](module))
    return model


def engine_on(model: nn.Module, folder, monkeypatch) -> Engine:
    """Return an engine that runs `model` itself."""
    from transformers import AttentionInterface

    from workbench.engine.paged_attention import NAME, packed_attention

    def load(path, name, dtype, device, max_len, *_, **__):
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)
        return BaseModel(model, name, max_len)

    monkeypatch.setattr(BaseModel, "load", load)
    return Engine(save_base(tiny_model("llama"), folder))


@torch.no_grad()
def with_deltas(model: nn.Module, adapter: Adapter) -> torch.Tensor:
    """Return logits of transformers' own forward, hooks adding the deltas."""
    tensors, handles = adapter.factors(tiny_model("llama")), []
    for key in tensors:
        if ".lora_A." not in key:
            continue
        site, down, up = key.split(".lora_A.")[0], tensors[key], tensors[key.replace("lora_A", "lora_B")]
        path = site.removeprefix("base_model.model.")
        scale = adapter.scale_at(path)

        def add(_, inputs, output, down=down, up=up, scale=scale):
            return output + inputs[0] @ down.T @ up.T * scale

        handles.append(model.get_submodule(path).register_forward_hook(add))
    try:
        return logits_of(model)
    finally:
        for handle in handles:
            handle.remove()


# with dynamic layers a rounding error of the input can move a code, and torch's own takes one range for a whole batch
@layers(["packed", "awq", "gptq", "bitsandbytes", "bitsandbytes int8", "torchao int8"])
def test_an_adapter_on_a_quantised_base_equals_its_definition(kind, tmp_path, monkeypatch):
    with torch.no_grad():
        engine = engine_on(quantise(tiny_model("llama"), kind), tmp_path / "tiny", monkeypatch)
        reference = quantise(tiny_model("llama"), kind)
    adapter = Adapter(("q_proj", "v_proj", "down_proj"), rank=5, seed=2)
    engine.load_adapter(adapter.write(tmp_path / "a", tiny_model("llama")))
    logits = run(engine, ["a", None])
    assert difference(logits["a"], with_deltas(reference, adapter)) < TOLERANCE
    assert difference(logits[None], logits_of(reference)) < TOLERANCE
    assert difference(logits["a"], logits[None]) > 0.05


@needs_torchao
def test_a_torchao_folder_runs_with_lora_and_dora_as_in_peft(tmp_path):
    from peft import PeftModel
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain = save_base(tiny_model("llama"), tmp_path / "plain")
    settings = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings).save_pretrained(tmp_path / "int8")
    engine = Engine(tmp_path / "int8", row_padding=32)
    assert "Int8" in type(engine.model.model.model.layers[0].self_attn.q_proj.weight).__name__
    for name, dora in {"lora": False, "dora": True}.items():
        peft_saves(tmp_path / name, "llama", ["q_proj", "down_proj"], r=4, use_dora=dora)
        engine.load_adapter(tmp_path / name)
    logits = run(engine, ["lora", "dora", None])
    for name, ours in logits.items():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
        theirs = theirs if name is None else PeftModel.from_pretrained(theirs, tmp_path / name)
        assert difference(ours, logits_of(theirs.eval())) < TOLERANCE


# the model as it was


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("padding", [0, 32])
def test_unwrapping_restores_the_model_exactly(kind, padding, tmp_path):
    engine = Engine(save_base(tiny_model(kind), tmp_path / "tiny"), row_padding=padding)
    model = engine.model.model
    modules, order = dict(model.named_modules()), [*model.state_dict()]
    tensors = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    before = run(engine, [None])[None]
    targets = ["c_attn", "wte", "c_proj"] if kind == "gpt2" else ["o_proj", "embed_tokens", "lm_head", "down_proj"]
    targets = targets[:3] if kind == "mixtral" else targets
    peft_saves(tmp_path / "a", kind, targets, r=3, fan_in_fan_out=kind == "gpt2")
    engine.load_adapter(tmp_path / "a")
    changed = run(engine, ["a"])["a"]
    assert difference(changed, before) > 0.01
    wrapped = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(wrapped) == len(engine.slots.sites) > 2
    engine.model.unwrap()
    assert list(dict(model.named_modules())) == list(modules)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert [*model.state_dict()] == order
    for key, value in model.state_dict().items():
        assert value.data_ptr() == tensors[key][0] and torch.equal(value, tensors[key][1])
    assert torch.equal(run(engine, [None])[None], before)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_sites_of_a_model_are_its_linear_modules_and_embeddings(kind):
    model = tiny_model(kind)
    found = linear_targets(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    assert [name for name, target in found.items() if not target.is_embedding] == linear
    embeddings = [name for name, target in found.items() if target.is_embedding]
    assert [model.get_submodule(name) for name in embeddings][0] is model.get_input_embeddings()
    assert embeddings[1:] == (["transformer.wpe"] if kind == "gpt2" else [])
    bare = linear_targets(meta_model(model.config))
    assert bare == found and not any(target.weight for target in bare.values())
