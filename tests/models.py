"""Tiny random models, adapters and mixtures on disk, and a probe that reads what an engine computes.

Weights are drawn so that outputs have the size of a trained model's; every setting that can hide a mistake by its
default (soft caps, multipliers, windows, partial rotary, biases, tied heads) has another value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from workbench.engine import Engine
from workbench.engine.batch import ADAPTED
from workbench.engine.choosing import Answer
from workbench.ordering import lora_sites

VOCAB = 97
GREEDY_GAP = 1e-4  # below this distance of the two best logits, rounding may choose either

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA2 = {
    **_GROUPED, **_WINDOWS, "head_dim": 12, "query_pre_attn_scalar": 20, "final_logit_softcapping": 1.5,
    "attn_logit_softcapping": 1.0,
}  # fmt: skip

# settings are chosen so that ignoring any one of them changes the logits
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {**_GROUPED, "sliding_window": 6, "head_dim": 12},
    "gemma": {**_GROUPED, "head_dim": 12, "attention_bias": True},
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    },
    "mixtral": {**_GROUPED, "sliding_window": 6, "num_local_experts": 4},
    "phi": {
        **_GROUPED, "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "phi3": {
        **_GROUPED, "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "starcoder2": {**_GROUPED, "sliding_window": 6},
    "qwen2": {**_GROUPED, "use_sliding_window": True, "max_window_layers": 1, **_WINDOWS},
    "qwen3": {**_GROUPED, "head_dim": 12, "use_sliding_window": True, **_WINDOWS},
    "qwen3_moe": {
        **_GROUPED, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6,
    },
    "granite": {
        **_GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 0.4, "residual_multiplier": 0.6,
        "attention_multiplier": 0.7,
    },
    "cohere": {**_GROUPED, "logit_scale": 0.3, "use_qk_norm": True},
    "olmo2": {**_GROUPED, "attention_bias": True},
    "gpt_neox": {
        **_SIZES, "use_parallel_residual": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "opt": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {
        "vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48,
        "bos_token_id": 0, "eos_token_id": 1, "scale_attn_by_inverse_layer_idx": True,
    },
    "smollm3": {
        **_GROUPED, "no_rope_layers": [1, 0], "use_sliding_window": True, **_WINDOWS,
    },
}  # fmt: skip


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a random causal LM in float32 with eager attention, transformers' own."""
    config = CONFIG_MAPPING[kind](**{**CONFIGS[kind], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, value in model.named_parameters():
        if value.dim() < 2:
            value.add_(0.1 * torch.randn_like(value))
        else:
            fan_in = value.shape[0] if kind == "gpt2" and ".c_" in name else value.shape[-1]
            # a tied embedding is the output head too: as a head it must not make logits of size 10
            value.normal_(std=1.0 if id(value) in embeddings and not _tied(model) else fan_in**-0.5)
    return model


def _tied(model: nn.Module) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def save_base(model: nn.Module, folder: Path) -> Path:
    """Write a model without a tokenizer and return its folder."""
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Adapter:
    """An adapter to write: which modules, how large, and any further config key."""

    targets: Sequence[str] | str = ("q_proj", "v_proj")
    rank: int = 4
    alpha: float = 8.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)

    def factors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return A and B of every site in PEFT's names; deltas are about a third of the base's output in size."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        tensors = {}
        for site in lora_sites(model, self.targets):
            layer = model.get_submodule(site)
            wide_in, wide_out = layer.weight.shape if not isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
            rank, scale = self.rank_at(site), self.scale_at(site)
            down = torch.randn(rank, wide_in, generator=generator) * wide_in**-0.5
            up = torch.randn(wide_out, rank, generator=generator) * rank**-0.5 / (3 * scale)
            tensors[f"base_model.model.{site}.lora_A.weight"] = down.to(self.dtype)
            tensors[f"base_model.model.{site}.lora_B.weight"] = up.to(self.dtype)
        return tensors

    def rank_at(self, site: str) -> int:
        return int(self._value(site, "rank_pattern", self.rank))

    def scale_at(self, site: str) -> float:
        rank = self.rank_at(site)
        return self._value(site, "alpha_pattern", self.alpha) / (rank**0.5 if self.config.get("use_rslora") else rank)

    def _value(self, site: str, pattern: str, default: float) -> float:
        values = self.config.get(pattern, {})
        return next((v for key, v in values.items() if site.endswith(key)), default)

    def json(self) -> dict[str, Any]:
        """Return its `adapter_config.json`."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.alpha,
            "target_modules": targets, "lora_dropout": 0.1, "bias": "none", **self.config,
        }  # fmt: skip

    def write(self, folder: Path, model: nn.Module) -> Path:
        """Write the adapter and return its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.json()))
        save_file(self.factors(model), folder / "adapter_model.safetensors")
        return folder


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture to write: adapters by name in class order, and X-LoRA settings."""

    adapters: Mapping[str, Adapter]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def sites(self, model: nn.Module) -> list[str]:
        """Return the union of the adapters' sites, in registration order."""
        touched = {site for adapter in self.adapters.values() for site in lora_sites(model, adapter.targets)}
        return [name for name, _ in model.named_modules() if name in touched]

    def layers(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return weight and bias of each classifier layer; its logits have a standard deviation near 2.

        Without a softmax they are the weights themselves, and near 0.5: deltas of many times the base's size would
        make rounding visible, PEFT's first.
        """
        generator = torch.Generator().manual_seed(2000 + self.seed)
        depth, size = self.settings.get("xlora_depth", 1), self.settings.get("xlora_size", 2048)
        out = len(self.adapters) * (len(self.sites(model)) if self.settings.get("layerwise_scalings") else 1)
        hidden = model.config.hidden_size
        widths = [hidden, *[size] * (depth - 1), out]
        made = []
        for number, (i, o) in enumerate(zip(widths[:-1], widths[1:], strict=True), 1):
            gain = 0.3 if number == depth and not self.settings.get("enable_softmax", True) else 1.0
            weight = torch.randn(o, i, generator=generator) * 2 * gain * i**-0.5
            made.append((weight, gain * torch.randn(o, generator=generator)))
        return made

    def json(self, model: nn.Module) -> dict[str, Any]:
        """Return its `xlora_config.json`."""
        return {
            "hidden_size": model.config.hidden_size, "base_model_id": "tiny", "adapters": list(self.adapters),
            **self.settings,
        }  # fmt: skip

    def write(self, folder: Path, model: nn.Module, stride: int = 3) -> Path:
        """Write the xlora package's layout and return the folder; inner layers are `stride` indices apart."""
        for name, adapter in self.adapters.items():
            adapter.write(folder / name, model)
        (folder / "xlora_config.json").write_text(json.dumps(self.json(model)))
        save_file(xlora_names(self.layers(model), stride), folder / "xlora_classifier.safetensors")
        return folder


def xlora_names(layers: Sequence[tuple[Tensor, Tensor | None]], stride: int = 3) -> dict[str, Tensor]:
    """Name classifier layers as the xlora package does."""
    stems = [f"inner.{index * stride}" for index in range(len(layers) - 1)] + ["last"]
    return _named(stems, layers)


def peft_names(layers: Sequence[tuple[Tensor, Tensor | None]], stride: int = 3) -> dict[str, Tensor]:
    """Name classifier layers as PEFT does."""
    prefix = "base_model.internal_xlora_classifier.layers"
    return _named([f"{prefix}.{index * stride}" for index in range(len(layers))], layers)


def _named(stems: Sequence[str], layers: Sequence[tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    pairs = zip(stems, layers, strict=True)
    return {
        f"{stem}.{kind}": tensor
        for stem, layer in pairs
        for kind, tensor in zip(("weight", "bias"), layer, strict=True)
        if tensor is not None
    }


@torch.no_grad()
def by_definition(
    model: nn.Module, spec: MixtureSpec, ids: Sequence[int], forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits `[token, vocab]` and scalings `[token, site, adapter]` of X-LoRA, written down once more.

    Two whole forwards of transformers' own model; hooks add the deltas. Knows softmax, top-k, the scaling pass's value
    and the global weight; dropout is off. `forced` scalings take the classifier's place.
    """
    settings, sites = spec.settings, spec.sites(model)
    factors = {name: (adapter, adapter.factors(model)) for name, adapter in spec.adapters.items()}

    def run(weights: Tensor):
        def add(site: str, index: int):
            def hook(_, inputs, output):
                for column, (adapter, tensors) in enumerate(factors.values()):
                    if f"base_model.model.{site}.lora_A.weight" in tensors:
                        down, up = (tensors[f"base_model.model.{site}.lora_{half}.weight"].float() for half in "AB")
                        delta = inputs[0] @ down.T @ up.T * adapter.scale_at(site)
                        output = (
                            output + settings.get("global_scaling_weight", 1) * weights[:, index, column, None] * delta
                        )
                return output

            return model.get_submodule(site).register_forward_hook(hook)

        handles = [add(site, index) for index, site in enumerate(sites)]
        try:
            return model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    value = settings.get("scaling_pass_value", 0.0)
    n = len(spec.adapters)
    constant = torch.full((len(ids), len(sites), n), 1 / n if value is None else value)
    hidden = run(constant).hidden_states[-1][0]
    for number, (weight, bias) in enumerate(spec.layers(model)):
        hidden = (hidden.relu() if number else hidden) @ weight.T + bias
    scalings = hidden.reshape(len(ids), -1, n).expand(-1, len(sites), -1)
    if settings.get("enable_softmax", True):
        scalings = torch.softmax(scalings / settings.get("softmax_temperature", 1.0), dim=-1)
    if settings.get("top_k_lora"):
        kth = scalings.sort(dim=-1, descending=True).values[..., settings["top_k_lora"] - 1, None]
        scalings = scalings * (scalings >= kth)
    return run(scalings if forced is None else forced).logits[0], scalings


class Probe:
    """Copies what an engine computes; rows run again (rejected drafts) keep the last values.

    Args:
        engine: watched from now on.
        forced: request id -> tokens that its adapted stream is made to choose, whatever the logits say.

    Attributes:
        logits, hidden: (request id, stream kind, position) -> float32 row.
        batches: the rows of every forward, as (request id, stream kind, first position, rows).
    """

    def __init__(self, engine: Engine, forced: Mapping[str, Sequence[int]] | None = None):
        self.logits: dict[tuple[str, str, int], Tensor] = {}
        self.hidden: dict[tuple[str, str, int], Tensor] = {}
        self.batches: list[list[tuple[str, str, int, int]]] = []
        self._engine, self._forced = engine, forced or {}
        self._inner_hidden, self._inner_choose = engine.model.hidden, engine.sampler
        engine.model.hidden, engine.sampler = self._watch_hidden, self._watch_choose

    def close(self) -> None:
        """Stop watching."""
        self._engine.model.hidden, self._engine.sampler = self._inner_hidden, self._inner_choose

    def decoded(self, request_id: str, first: int, count: int, kind: str = ADAPTED) -> Tensor:
        """Return logits `[count, vocab]` of the rows from position `first`."""
        return torch.stack([self.logits[request_id, kind, first + i] for i in range(count)])

    def _watch_hidden(self, batch):
        hidden = self._inner_hidden(batch)
        self.batches.append([])
        for span in batch.spans:
            plan = span.plan
            self.batches[-1].append((plan.request.id, plan.kind, plan.first, span.stop - span.start))
            for offset, row in enumerate(hidden[span.start : span.stop]):
                self.hidden[plan.request.id, plan.kind, plan.first + offset] = row.clone()
        return hidden

    def _watch_choose(self, logits, batch):
        rows = iter(logits)
        for span in batch.logit_spans:
            plan = span.plan
            for position in range(plan.stop - plan.num_logits, plan.stop):
                self.logits[plan.request.id, plan.kind, position] = next(rows).clone()
        answers = self._inner_choose(logits, batch)
        for (request, kind), said in answers.items():
            if kind == ADAPTED and request.id in self._forced and said[-1].choice is not None:
                token = self._forced[request.id][len(request.generated)]
                said[-1] = Answer(said[-1].choice._replace(token=token))
        return answers


def byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose token i + 3 is byte i, after <s>, </s> and <pad>; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # the byte-level alphabet shows every byte as one printable character
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2, **{letters[byte]: byte + 3 for byte in range(256)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    fast.save_pretrained(folder)
    return folder


def byte_ids(text: str | bytes) -> list[int]:
    """Return the byte tokenizer's ids of a text."""
    return [byte + 3 for byte in (text.encode() if isinstance(text, str) else text)]


def random_ids(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Return token ids, none of them a special one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def greedy_tokens_agree(tokens: Sequence[int], logits: Tensor) -> bool:
    """Whether each token is the argmax of its `logits` row, up to the first row with nearly two maxima."""
    for token, row in zip(tokens, logits, strict=True):
        best, second = row.topk(2).values
        if best - second < GREEDY_GAP:
            return True
        if token != int(row.argmax()):
            return False
    return True
