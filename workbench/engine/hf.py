"""The base model: all contact with transformers' internals.

Rows are packed: `input_ids[1, row]`, `position_ids[1, row]`, no cache of transformers' own; our attention is
registered by name and gets the batch as a keyword. No mask function is registered for that name: transformers then
returns no mask at once, where a registered one would make it look for packed sequences, a host synchronisation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.adapters.config import read_object
from workbench.adapters.embedding import LoRAEmbedding
from workbench.adapters.linear import LoRALinear, Routing
from workbench.adapters.modules import LoRATargetModule, dense_weight, embedding_widths, widths_of
from workbench.adapters.projections import parts_of
from workbench.adapters.slots import SlotTable
from workbench.engine.attention_plan import ShapeProbe
from workbench.engine.batch import StepBatch
from workbench.engine.blocks import KVShape
from workbench.engine.paged_attention import NAME, packed_attention
from workbench.engine.prepack import prepack
from workbench.errors import UserError, names, nearest

# packed == separate was checked on each of these; the canary test does it again on whatever transformers is installed
SUPPORTED = (
    "llama", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "phi", "phi3", "starcoder2", "qwen2", "qwen3",
    "qwen3_moe", "granite", "cohere", "olmo2", "gpt_neox", "opt", "gpt2", "smollm3",
)  # fmt: skip
_PROGRESS_BYTES = 1 << 30  # a smaller model loads before a bar could be read


class BaseModel:
    """A causal LM of transformers, run on packed rows.

    Args:
        model: the loaded model, its attention implementation set to ours.
        name: what errors and labels call it.
        max_len: longest sequence it will be asked for, tokens.
    """

    def __init__(self, model: nn.Module, name: str, max_len: int | None = None):
        self.model, self.name = model, name
        self.config = model.config
        check_supported(self.config, name)
        model.eval().requires_grad_(False)
        self.context = context_of(self.config)
        if max_len is not None and max_len > self.context:
            raise UserError(f"max_len {max_len} is beyond the context of base {name!r}, {self.context} tokens")
        self.max_len = max_len or self.context
        self.notes = _fix_longrope(model, self.max_len)
        self.targets: Mapping[str, LoRATargetModule] = linear_targets(model)
        self._head = _head_of(model)
        self.routing = Routing()

    @classmethod
    def load(
        cls, folder: Path, name: str, dtype: torch.dtype, device: torch.device, max_len: int | None = None,
        trust_remote_code: bool = False, packed: bool = True,
    ) -> BaseModel:
        """Load a model folder; `packed` reorders linear weights for a CPU.

        Raises:
            UserError: no or bad config, an architecture we do not support, missing or corrupt weights.
        """
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, packed_attention)
        config = load_config(folder, name, trust_remote_code)
        bars = folder_bytes(folder) > _PROGRESS_BYTES
        try:
            with _progress_bars(bars):
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, config=config, dtype=dtype, attn_implementation=NAME, use_safetensors=True,
                    local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code,
                    ignore_mismatched_sizes=True,
                )
        except Exception as error:  # transformers and safetensors raise many kinds; all mean the files do not load
            raise UserError(f"base {name!r}: its weights in {folder} do not load: {first_line(error)}") from None
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"base {name!r}: {len(missing)} weights are missing from {folder}: {names(missing, 4)}")
        if wrong := sorted(f"{key} is {list(has)}, not {list(asked)}" for key, has, asked in info["mismatched_keys"]):
            raise UserError(f"base {name!r}: {len(wrong)} weights do not fit its config: {'; '.join(wrong[:4])}")
        loaded = cls(model.to(device), name, max_len)
        if packed:
            prepack(loaded.model)
            loaded._head = _head_of(loaded.model)
        return loaded

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def probe(self) -> tuple[ShapeProbe, KVShape]:
        """Learn what one token's KV and hidden row take, by a forward of one row that attends to nothing."""
        probe = ShapeProbe()
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            output = self.model.base_model(
                input_ids=ids, position_ids=ids, use_cache=False, step_batch=SimpleNamespace(attention=probe)
            )
        # not always the config's hidden_size: some architectures project it once more
        return probe, probe.shape(output.last_hidden_state.shape[-1], self.dtype)

    def wrap(self, site: str, slots: SlotTable) -> None:
        """Put a `LoRALinear`, or a `LoRAEmbedding`, around a site, once."""
        parent_name, _, child = site.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        layer = getattr(parent, child)
        if not isinstance(layer, LoRALinear):
            target = self.targets[site]
            table = slots.site(site, target.in_features, target.out_features)
            wrapper = LoRAEmbedding if target.is_embedding else LoRALinear
            setattr(parent, child, wrapper(layer, site, table, self.routing))
            if parent is self.model:
                self._head = _head_of(self.model)

    def unwrap(self) -> None:
        """Take every `LoRALinear` off again; the model is the one that was loaded."""
        for name, module in list(self.model.named_modules()):
            if isinstance(module, LoRALinear):
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, module.base_layer)
        self._head = _head_of(self.model)

    def hidden(self, batch: StepBatch) -> Tensor:
        """Run one forward; return the hidden state after the final norm, `[row, hidden]`."""
        self.routing.rows = batch.weights
        try:
            output = self.model.base_model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, step_batch=batch
            )
        finally:
            self.routing.rows = None
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """Return float32 logits `[row, vocab]` of the batch's `logit_rows`.

        They come from the causal LM's own forward: architectures cap or scale them after `lm_head`.
        """
        rows = batch.logit_rows
        if not rows:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        count = len(rows)
        if batch.row_padding:
            rows += rows[-1:] * (-count % batch.row_padding)
        self.routing.rows = batch.weights.select(rows)
        try:
            self._head._modules[self.model.base_model_prefix].last_hidden_state = hidden[None, rows]
            output = self._head(input_ids=batch.token_ids[None, rows], use_cache=False)
        finally:
            self.routing.rows = None
        return output.logits[0, :count].float()


def folder_bytes(folder: Path) -> int:
    """Return the size of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def label_of(source: str, folder: Path) -> str:
    """Return the id a base goes by: a Hub id as given, else what its own config says, else the folder's name."""
    if not Path(source).exists() and "/" in source:
        return source
    named = read_object(folder / "config.json", "config").get("_name_or_path")
    return named if named and not Path(named).is_absolute() else folder.resolve().name


def load_config(folder: Path, name: str, trust_remote_code: bool = False) -> Any:
    """Return transformers' config of a model folder; a UserError for one that is broken or not supported."""
    from transformers import AutoConfig

    kind = read_object(folder / "config.json", "config").get("model_type")
    if isinstance(kind, str):
        _require_supported(kind, name)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers validates configs with several exception types of its own
        raise UserError(f"base {name!r}: {folder} has no usable config.json: {first_line(error)}") from None
    check_supported(config, name)
    return config


def _require_supported(kind: str, name: str) -> None:
    if kind not in SUPPORTED:
        raise UserError(
            f"base {name!r} is a {kind!r} model, which is not supported{nearest(kind, SUPPORTED)}. Supported: "
            f"{', '.join(SUPPORTED)}"
        )


def check_supported(config: Any, name: str) -> None:
    """Refuse, by name, an architecture or setting whose packed rows would not be right; a UserError says which."""
    _require_supported(config.model_type, name)
    if getattr(config, "use_bidirectional_attention", None):
        raise UserError(
            f"base {name!r} has use_bidirectional_attention={config.use_bidirectional_attention!r}: its tokens see "
            "those after them, so it cannot continue a text one token at a time"
        )
    for rope in _rope_types(config):
        if "dynamic" in rope:
            raise UserError(
                f"base {name!r} uses {rope!r} RoPE scaling, whose frequencies follow the longest neighbour in the "
                "batch; a request's tokens would depend on other requests, so it is refused"
            )


class _GivenHidden(nn.Module):
    """Stands where a causal LM has its base model, and answers with a hidden state already computed."""

    last_hidden_state: Tensor

    @property
    def decoder(self) -> nn.Module:
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.last_hidden_state)


class _Output(SimpleNamespace):
    # models copy fields their output has and we do not (past_key_values, router_logits, cross_attentions)
    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _head_of(model: nn.Module) -> nn.Module:
    head = copy.copy(model)
    head.__dict__["_modules"] = dict(model._modules)
    head._modules[model.base_model_prefix] = _GivenHidden()
    return head


def linear_targets(model: nn.Module) -> dict[str, LoRATargetModule]:
    """Return module path -> site of every linear module and embedding, in registration order.

    Weights may be on the meta device: the sites then know the structure alone.
    """
    found = {}
    input_embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear) or name.endswith(".base_layer"):
            continue
        weight = None if _on_meta(module) else functools.partial(_weight_at, model, name)
        if lookup := embedding_widths(module, module is input_embedding):
            found[name] = LoRATargetModule(name, *lookup, is_embedding=True, weight=weight)
        elif widths := widths_of(module):
            parts = parts_of(name, widths[1], model.config)
            found[name] = LoRATargetModule(name, *widths, parts=parts, weight=weight)
    return found


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def _weight_at(model: nn.Module, site: str) -> Tensor:
    module = model.get_submodule(site)
    return dense_weight(module.base_layer if isinstance(module, LoRALinear) else module)


def context_of(config: Any) -> int:
    """Return the most tokens a sequence may have."""
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**31)


def _rope_types(config: Any) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(each["rope_type"]) for each in [parameters, *nested] if each.get("rope_type")]


def _fix_longrope(model: nn.Module, max_len: int) -> tuple[str, ...]:
    """Choose longrope's factors once, from the longest sequence: transformers asks the whole packed batch."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    notes = []
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        original = module.config.rope_parameters["original_max_position_embeddings"]
        chosen = "long" if max_len > original else "short"
        inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=max_len)
        module.inv_freq = inv_freq.to(module.inv_freq)
        module.rope_type = "longrope, fixed"
        notes.append(f"longrope uses its {chosen} factors for every sequence, as max_len is {max_len} tokens "
                     f"(the limit between the sets is {original})")
    return tuple(notes[:1])


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, with the next where it ends in a colon; its kind if empty."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join([first.strip(), *(line.strip() for line in rest[:1] if first.rstrip().endswith(":"))])[:300]
