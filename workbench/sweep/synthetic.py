"""Adapters, mixtures and bases of random numbers, for what depends on shapes and not on what was learned.

Everything follows from a seed. Adapters are written as PEFT writes them and loaded like any other, so that a measured
engine takes no way of its own. Deltas are a tenth of their input in size: enough to change tokens, too little to
drown the base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_kernels.problems import POPULARITY, slots_for
from workbench.errors import UserError, names

if TYPE_CHECKING:
    from workbench.adapters import LoRATargetModule
    from workbench.engine import Engine

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# real shapes, by the names people know them by; "tiny" runs anywhere
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "tiny": {
        "model_type": "mistral", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": None,
    },
}  # fmt: skip
_DELTA = 0.1  # size of a delta, in sizes of its input
_FILE_DTYPE = torch.float16  # half the disk of float32; every value is exact in float32 again


def sites_of(targets: Mapping[str, LoRATargetModule], modules: Sequence[str] | None = None) -> list[str]:
    """Return the sites of a base whose last name is one of `modules`.

    Args:
        targets: module path -> site of the base.
        modules: None means the seven projections of llama-like models, or every linear module inside the blocks where
            a base has none of them.

    Raises:
        UserError: the base has no such module.
    """
    linear = [site for site, target in targets.items() if not target.is_embedding and "." in site]
    wanted = SEVEN if modules is None else modules
    found = [site for site in linear if site.rpartition(".")[2] in wanted]
    if not found and modules is None:
        found = linear
    if not found:
        kinds = sorted({site.rpartition(".")[2] for site in linear})
        raise UserError(f"the base has no modules {names(list(wanted))}; its linear modules are {names(kinds)}")
    return found


def write_adapter(
    folder: Path, targets: Mapping[str, LoRATargetModule], rank: int, seed: int, modules: Sequence[str] | None = None
) -> Path:
    """Write a random adapter in PEFT's layout and return its folder.

    Args:
        folder: made here; anything in it is replaced.
        targets: module path -> site of the base.
        rank: of every site.
        seed: of its factors.
        modules: see `sites_of`.
    """
    generator = torch.Generator().manual_seed(seed)
    sites = sites_of(targets, modules)
    tensors: dict[str, Tensor] = {}
    for site in sites:
        target = targets[site]
        down = torch.randn(rank, target.in_features, generator=generator) * target.in_features**-0.5
        up = torch.randn(target.out_features, rank, generator=generator) * (_DELTA * rank**-0.5)
        tensors[f"base_model.model.{site}.lora_A.weight"] = down.to(_FILE_DTYPE)
        tensors[f"base_model.model.{site}.lora_B.weight"] = up.to(_FILE_DTYPE)
    kinds = sorted({site.rpartition(".")[2] for site in sites})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": kinds}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def adapter_bytes(targets: Mapping[str, LoRATargetModule], rank: int, modules: Sequence[str] | None = None) -> int:
    """Return the size of one synthetic adapter's file, its header left out."""
    sites = [targets[site] for site in sites_of(targets, modules)]
    return _FILE_DTYPE.itemsize * rank * sum(site.in_features + site.out_features for site in sites)


def write_adapters(
    folder: Path, targets: Mapping[str, LoRATargetModule], count: int, rank: int, seed: int = 0
) -> dict[str, Path]:
    """Write `count` random adapters below `folder` and return name -> folder.

    Raises:
        UserError: the disk has no room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = count * adapter_bytes(targets, rank), shutil.disk_usage(folder).free
    if needed > 0.9 * free:
        raise UserError(
            f"{count} adapters of rank {rank} take {needed / 1e9:.1f} GB, but {str(folder)!r} has {free / 1e9:.1f} GB "
            "free; ask for fewer, a smaller rank, or set TMPDIR to a larger disk"
        )
    made = {f"synthetic-{number}": seed * 1_000_003 + number for number in range(count)}
    return {name: write_adapter(folder / name, targets, rank, own) for name, own in made.items()}


def load_adapters(engine: Engine, sources: Mapping[str, Path]) -> tuple[str, ...]:
    """Load adapters into an engine and return their names.

    Raises:
        UserError: the first that does not load.
    """
    for answer in engine.adapters.load_all(sources).values():
        answer.raise_for_status()
    return tuple(sources)


def write_mixture(
    folder: Path, targets: Mapping[str, LoRATargetModule], hidden_size: int, count: int, rank: int, base_id: str,
    seed: int = 0,
) -> Path:
    """Write an X-LoRA repository of random adapters with a random classifier, and return its folder.

    Its adapters are those of `write_adapters` with this seed. Logits have a standard deviation near 2, so that the
    leading adapter changes from token to token.

    Args:
        folder: made here.
        targets: module path -> site of the base.
        hidden_size: the base's.
        count, rank: of the adapters.
        base_id: the base's name, which the mixture says it was made for.
        seed: of every number.
    """
    sources = write_adapters(folder, targets, count, rank, seed)
    num_outputs = count * len(sites_of(targets))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, hidden_size, generator=generator) * 2 * hidden_size**-0.5
    tensors = {"last.weight": weight, "last.bias": torch.randn(num_outputs, generator=generator)}
    save_file(tensors, folder / "xlora_classifier.safetensors")
    config = {
        "hidden_size": hidden_size, "base_model_id": base_id, "adapters": list(sources), "layerwise_scalings": True,
        "xlora_depth": 1,
    }  # fmt: skip
    (folder / "xlora_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def adapter_of_each(popularity: str, num_requests: int, num_adapters: int, seed: int = 0) -> tuple[int, ...]:
    """Return which adapter each request of one batch uses, below `num_adapters`, or -1 for the base.

    As `lora_kernels.problems.slots_for`, but for "uniform": it deals the requests evenly over all adapters. For
    requests that come one after another see `draw_adapters`.

    Raises:
        UserError: an unknown popularity, or "distinct" with fewer adapters than requests.
    """
    if popularity == "distinct" and num_adapters < num_requests:
        raise UserError(
            f"popularity 'distinct' gives each of {num_requests} requests an adapter of its own, but there are "
            f"{num_adapters}; raise --adapters, or use 'uniform'"
        )
    # the kernels' uniform uses as many adapters as is usual for that many rows; here their number is given
    kind = "distinct" if popularity == "uniform" else popularity
    try:
        return slots_for(kind, num_requests, num_adapters, seed)
    except ValueError as error:
        raise UserError(str(error).removeprefix("slots_for: ")) from None


def draw_adapters(
    popularity: str, num_requests: int, num_adapters: int, random: np.random.Generator
) -> tuple[int, ...]:
    """Return which adapter each of a sweep's requests uses, in the order of arrival: below `num_adapters`, or -1.

    Arrivals of one adapter do not lie together, unlike the rows of a kernel's problem.

    Args:
        popularity: identical: all use adapter 0; uniform: each request draws among all adapters; distinct: as
            different as possible: all adapters in a drawn order, again and again; half_base: half the requests
            (rounded up) are the base's, the rest uniform; skewed, zipf:S, all_base: as many of each as
            `lora_kernels.problems.slots_for` has, in a drawn order.
        num_requests: how many.
        num_adapters: at least 1.
        random: where draws come from.

    Raises:
        UserError: an unknown popularity.
    """
    if popularity == "uniform":
        return tuple(random.integers(num_adapters, size=num_requests).tolist())
    if popularity == "distinct":
        return tuple(np.resize(random.permutation(num_adapters), num_requests).tolist())
    if popularity == "half_base":
        slots = [*draw_adapters("uniform", num_requests // 2, num_adapters, random), *[-1] * -(-num_requests // 2)]
    else:
        slots = adapter_of_each(popularity, num_requests, num_adapters, int(random.integers(2**31)))
    return tuple(random.permutation(slots).tolist())


def popularity_named(text: str) -> str:
    """Return a popularity as it is written in ids: "zipf:1.50" is "zipf:1.5".

    Raises:
        UserError: an unknown one.
    """
    adapter_of_each(text, 1, 1)
    kind, colon, power = text.partition(":")
    return f"{kind}:{float(power)}" if colon else text


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, num_tokens), generator=generator).tolist()


def text_prompts(token_ids: Sequence[int], count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return `count` pieces of a text's tokens, each from a place of its own; the text repeats as often as needed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(token_ids), generator=generator).tolist()
    starts = [order[number % len(order)] for number in range(count)]
    return [[token_ids[(start + i) % len(token_ids)] for i in range(num_tokens)] for start in starts]


def base_config(shape: str, **changes: Any) -> Any:
    """Return transformers' config of a shape in `SHAPES`, with some values changed."""
    from transformers import CONFIG_MAPPING

    values = {**SHAPES[shape], **changes}
    kind = values.pop("model_type")
    return CONFIG_MAPPING[kind](**values, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)


@torch.no_grad()
def random_model(
    config: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0, **options: Any
) -> nn.Module:
    """Return a causal LM of random weights, made on its device: no download, no file, no copy on the host.

    Args:
        config: transformers' config, see `base_config`.
        dtype, device: of its weights.
        seed: of its weights.
        **options: of `AutoModelForCausalLM.from_config`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        # matrices that keep their input's size, and a head whose logits have unit size
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval().requires_grad_(False)


def save_base(model: nn.Module, folder: Path) -> Path:
    """Write a model's folder, without a tokenizer, and return it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    return folder


def popularities() -> Iterable[str]:
    """Return the names that `adapter_of_each` knows; zipf takes any exponent."""
    return POPULARITY
