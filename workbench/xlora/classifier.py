"""The X-LoRA classifier: hidden states of the scaling pass -> scalings.

    h -> linear -> ReLU -> ... -> linear -> [token, site, adapter] -> softmax, top-k

h is the last hidden state after the final norm, each position by itself. Dropout is a training matter and absent. The
last layer and what follows it are one op (lora_kernels.scalings).
Checkpoints come with either naming: the xlora package's (`inner.K.*`, `last.*`; K counts ReLU and Dropout too) or
PEFT's (`internal_xlora_classifier.layers.K.*`). A checkpoint that lost layers, as saves by PEFT 0.20 and later do, is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_kernels.scalings import head_scalings
from workbench.errors import UserError, names
from workbench.xlora.config import XLoRAConfig

_PEFT_KEY = re.compile(r"^(?:.*\.)?internal_xlora_classifier\.layers\.(\d+)\.(weight|bias)$")
_INNER_KEY = re.compile(r"^(?:.*\.)?inner\.(\d+)\.(weight|bias)$")
_LAST_KEY = re.compile(r"^(?:.*\.)?last\.(weight|bias)$")


class Classifier:
    """The classifier's layers and settings.

    Args:
        config: its settings.
        layers: `(weight [out, in], bias [out] or None)` of each linear layer, first to last.
        num_sites: sites the scalings have, L.
        num_adapters: adapters they weigh, n.
    """

    def __init__(
        self, config: XLoRAConfig, layers: list[tuple[Tensor, Tensor | None]], num_sites: int, num_adapters: int
    ):
        self.config, self.layers = config, layers
        self.num_sites, self.num_adapters = num_sites, num_adapters

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], config: XLoRAConfig, num_sites: int, num_adapters: int, where: str
    ) -> Classifier:
        """Check a checkpoint's layers for completeness and shapes.

        Raises:
            UserError: missing layers, unknown tensors, or shapes other than the config, sites and adapters ask for.
        """
        found = complete_layers(tensors, config, where)
        depth, width, out = config.xlora_depth, config.xlora_size, num_adapters
        out *= num_sites if config.layerwise_scalings else 1
        widths = [config.hidden_size] + [width] * (depth - 1) + [out]
        expected = list(zip(widths[1:], widths[:-1], strict=True))
        layers = []
        for number, (pair, shape) in enumerate(zip(found, expected, strict=True), 1):
            which = f"{where}: classifier layer {number} of {depth}"
            layers.append(_checked_layer(pair, shape, config.use_bias, which))
        return cls(config, layers, num_sites, num_adapters)

    def to(self, dtype: torch.dtype, device: torch.device) -> Classifier:
        """Return the classifier with its layers in this dtype on this device."""
        moved = [(w.to(device, dtype), None if b is None else b.to(device, dtype)) for w, b in self.layers]
        return Classifier(self.config, moved, self.num_sites, self.num_adapters)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return scalings `[token, site, adapter]` in float32 of hidden states `[token, hidden]`."""
        *inner, (weight, bias) = self.layers
        config = self.config
        for inner_weight, inner_bias in inner:
            hidden = F.linear(hidden, inner_weight, inner_bias)
            hidden = F.relu(hidden) if config.use_relu else hidden
        made = head_scalings(
            hidden,
            weight,
            bias,
            self.num_adapters,
            softmax=config.enable_softmax,
            temperature=config.softmax_temperature,
            top_k=config.top_k_lora,
            softmax_topk=config.enable_softmax_topk,
        )
        # without layerwise scalings the head has one site, whose weights every site uses
        return made if config.layerwise_scalings else made.expand(-1, self.num_sites, -1).contiguous()


def complete_layers(tensors: Mapping[str, Tensor], config: XLoRAConfig, where: str) -> list[dict[str, Tensor]]:
    """Return the linear layers of a checkpoint, first to last, each with its "weight" and "bias".

    Raises:
        UserError: not as many as the config's depth, or tensors that belong to none.
    """
    layers: dict[float, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in tensors.items():
        if match := _PEFT_KEY.match(key) or _INNER_KEY.match(key):
            index, kind = float(match[1]), match[2]
        elif match := _LAST_KEY.match(key):
            index, kind = float("inf"), match[1]
        else:
            strange.append(key)
            continue
        if not torch.isfinite(tensor).all():
            raise UserError(f"{where}: tensor {key!r} has NaN or infinite values")
        layers.setdefault(index, {})[kind] = tensor
    if strange:
        raise UserError(f"{where}: {names(strange, 4)} belong to no classifier layer")
    if len(layers) != config.xlora_depth:
        _refuse_incomplete(sorted(layers), list(tensors), config.xlora_depth, where)
    return [layers[index] for index in sorted(layers)]


def _refuse_incomplete(indices: list[float], keys: list[str], depth: int, where: str) -> None:
    found = sorted({key.rpartition(".")[0] for key in keys})
    missing = ""
    if len(indices) < depth:
        missing = f"; missing: {names(_missing_layers(indices, keys, depth), 8)}"
    raise UserError(
        f"{where}: the classifier must have {depth} linear layers (xlora_depth), but the file holds {len(indices)}: "
        f"{names(found)}{missing}. A save by PEFT 0.20 or later loses classifier layers; save it again with an earlier "
        "PEFT, or export the classifier"
    )


def _missing_layers(indices: list[float], keys: list[str], depth: int) -> list[str]:
    if float("inf") in indices or any(_INNER_KEY.match(key) for key in keys):
        lost = [] if float("inf") in indices else ["last"]
        return lost + [f"{depth - len(indices) - len(lost)} of inner.*"] * (depth - len(indices) > len(lost))
    if not indices:
        return [f"all of internal_xlora_classifier.layers.* ({depth})"]
    # linear layers are evenly spaced, with ReLU and Dropout between them; saves lose the first ones, not the last
    stride = max(indices) / (depth - 1)
    return [f"internal_xlora_classifier.layers.{k * stride:g}" for k in range(depth) if k * stride not in indices]


def _checked_layer(
    pair: Mapping[str, Tensor], shape: tuple[int, int], use_bias: bool, where: str
) -> tuple[Tensor, Tensor | None]:
    if "weight" not in pair:
        raise UserError(f"{where} has a bias but no weight")
    weight, bias = pair["weight"], pair.get("bias")
    if tuple(weight.shape) != shape:
        raise UserError(
            f"{where} has shape {list(weight.shape)}, but {list(shape)} was expected (outputs of the last layer: "
            "sites x adapters if layerwise, else adapters)"
        )
    if use_bias and bias is None:
        raise UserError(f"{where} has no bias, but the config says use_bias")
    if not use_bias and bias is not None:
        raise UserError(f"{where} has a bias, but the config says use_bias is false")
    if bias is not None and tuple(bias.shape) != shape[:1]:
        raise UserError(f"{where} has a bias of shape {list(bias.shape)}, but {[shape[0]]} was expected")
    return weight, bias
