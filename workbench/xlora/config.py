"""X-LoRA settings: `xlora_config.json` of the xlora package, or PEFT's `adapter_config.json` with peft_type XLORA."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import UserError, names, nearest

# keys of either file that say nothing about inference here
_NO_EFFECT = frozenset({
    "adapters", "auto_mapping", "base_model_id", "base_model_name_or_path", "device", "enable_relu_and_dropout",
    "inference_mode", "peft_type", "peft_version", "revision", "stop_token_id", "task_type",
    "use_trainable_adapters", "xlora_dropout_p",
})  # fmt: skip


@dataclass(frozen=True)
class XLoRAConfig:
    """What decides an X-LoRA model's numbers; defaults are the xlora package's.

    Attributes:
        hidden_size: width of the base's hidden state, the classifier's input.
        layerwise_scalings: one set of weights per site; otherwise one for all sites.
        xlora_depth: number of linear layers of the classifier, at least 1.
        xlora_size: width of its inner layers.
        use_relu: ReLU between layers (PEFT always; the xlora package with `enable_relu_and_dropout`).
        use_bias: its linear layers have biases.
        enable_softmax: softmax over adapters.
        softmax_temperature: divides the logits before that softmax; above 0.
        top_k_lora: keep the k largest weights per token and site, without renormalising; None keeps all.
        enable_softmax_topk: softmax over the kept weights.
        scaling_pass_value: weight of every delta in the scaling pass; None is 1/n.
        global_scaling_weight: multiplies every delta, in both passes.
        topk_on_scaling_pass: apply top-k to the scaling pass's constant weights too, as PEFT does.
    """

    hidden_size: int
    layerwise_scalings: bool = False
    xlora_depth: int = 1
    xlora_size: int = 2048
    use_relu: bool = True
    use_bias: bool = True
    enable_softmax: bool = True
    softmax_temperature: float = 1.0
    top_k_lora: int | None = None
    enable_softmax_topk: bool = False
    scaling_pass_value: float | None = 0.0
    global_scaling_weight: float = 1.0
    topk_on_scaling_pass: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "xlora_depth", "xlora_size"):
            _whole(name, getattr(self, name))
        if self.top_k_lora is not None:
            _whole("top_k_lora", self.top_k_lora)
        for name in ("layerwise_scalings", "use_relu", "use_bias", "enable_softmax", "enable_softmax_topk"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"X-LoRA config: {name} must be true or false, not {getattr(self, name)!r}")
        _number("softmax_temperature", self.softmax_temperature)
        _number("global_scaling_weight", self.global_scaling_weight)
        if self.scaling_pass_value is not None:
            _number("scaling_pass_value", self.scaling_pass_value)
        if not self.softmax_temperature > 0:
            raise UserError(f"X-LoRA config: softmax_temperature must be above 0, not {self.softmax_temperature}")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str, hidden_size: int | None = None) -> XLoRAConfig:
        """Read either file's JSON object.

        Args:
            given: the object.
            where: the file, for errors.
            hidden_size: the base's, used when the file leaves it out.

        Raises:
            UserError: a missing `hidden_size`, or a value of the wrong type or range.
        """
        peft = str(given.get("peft_type", "")).upper() == "XLORA"
        fields = set(cls.__dataclass_fields__) - {"use_relu", "topk_on_scaling_pass"}
        unknown = [key for key in given if key not in fields and key not in _NO_EFFECT]
        if unknown:
            # files in the wild carry keys of their authors' own: they cannot be refused, but must not pass unseen
            warnings.warn(f"{where}: {names(unknown)} not known and without effect{nearest(unknown[0], fields)}",
                          stacklevel=2)
        values = {key: given[key] for key in fields if key in given}
        if values.get("hidden_size") is None:
            if hidden_size is None:
                raise UserError(f"{where}: hidden_size is missing; it must be the base model's hidden size")
            values["hidden_size"] = hidden_size
        if not peft:
            values["use_relu"] = given.get("enable_relu_and_dropout", True)
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {str(error).removeprefix('X-LoRA config: ')}") from None

    def change(self, **settings: Any) -> XLoRAConfig:
        """Return a copy with some settings changed; an unknown one is a UserError."""
        for name in settings:
            if name not in self.__dataclass_fields__:
                raise UserError(f"unknown X-LoRA setting {name!r}{nearest(name, self.__dataclass_fields__)}")
        return replace(self, **settings)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"X-LoRA config: {name} must be a whole number of at least 1, not {value!r}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"X-LoRA config: {name} must be a finite number, not {value!r}")
