"""`adapter_config.json` of one LoRA adapter, as PEFT writes it.

What we cannot apply exactly is refused by name here, before any weight is read: an adapter never loads with a part of
it left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import read_json

# keys that describe training, saving, or initialisation that leaves the base weights alone
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
})  # fmt: skip
# key -> why an adapter that sets it is refused
_REFUSED = {
    "use_dora": "DoRA rescales the base weight's columns",
    "modules_to_save": "it replaces whole modules of the base",
    "lora_bias": "it adds biases to B",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "activated LoRA switches on in the middle of a prompt",
    "trainable_token_indices": "it changes rows of the embedding",
    "target_parameters": "it targets parameters (such as fused experts) rather than linear modules",
    "use_qalora": "QA-LoRA pools the input in groups",
    "use_bdlora": "block-diagonal LoRA is another factorisation",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA rewrites the base weights",
    "corda_config": "CorDA rewrites the base weights",
    "lora_ga_config": "LoRA-GA rewrites the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "velora_config": "VeLoRA changes what the layer computes",
}
# initialisations after which the base keeps a residual: the adapter alone is not the trained model
_RESIDUAL_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "true", "false")


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of an adapter's config that decide its numbers.

    Attributes:
        r: default rank, at least 1.
        lora_alpha: default numerator of the scale.
        use_rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        rank_pattern: module pattern -> rank, overriding `r`.
        alpha_pattern: module pattern -> alpha, overriding `lora_alpha`.
        target_modules: list, regular expression or "all-linear"; None when the file names none.
        base_model_name_or_path: the base it was trained on; a label, not a requirement.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str | None = None
    base_model_name_or_path: str | None = None

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        """Read an `adapter_config.json`.

        Raises:
            UserError: missing or malformed file, or a feature that cannot be applied exactly.
        """
        return cls.from_dict(read_object(path, "adapter config"), str(path))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> AdapterConfig:
        """Check and convert the JSON object of an adapter config; `where` names it in errors."""
        _refuse_unsupported(given, where)
        rank, alpha = given.get("r", 8), given.get("lora_alpha", 8)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise UserError(f"{where}: r must be a whole number of at least 1, not {rank!r}")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise UserError(f"{where}: lora_alpha must be a finite number, not {alpha!r}")
        targets = given.get("target_modules")
        return cls(
            r=rank,
            lora_alpha=float(alpha),
            use_rslora=bool(given.get("use_rslora", False)),
            rank_pattern=_pattern(given, "rank_pattern", where),
            alpha_pattern=_pattern(given, "alpha_pattern", where),
            target_modules=tuple(targets) if isinstance(targets, list) else targets,
            base_model_name_or_path=given.get("base_model_name_or_path"),
        )

    def rank_at(self, site: str) -> int:
        """Return the rank this config gives `site`."""
        return int(_matched(self.rank_pattern, site, self.r))

    def scale_at(self, site: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA, of `site` with its true `rank`."""
        alpha = float(_matched(self.alpha_pattern, site, self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from `path`; a UserError names the file as `what` when it is missing or malformed."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{what} {str(path)!r} must hold a JSON object, not a {type(value).__name__}")
    return value


def _matched(pattern: Mapping[str, Any], site: str, default: Any) -> Any:
    # PEFT's rule: a key is a regular expression for the end of the module path; the first that matches wins
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", site):
            return value
    return default


def _pattern(given: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = given.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(number, (int, float)) for number in value.values()):
        raise UserError(f"{where}: {key} must map module patterns to numbers, not {value!r}")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{where}: {key} has {pattern!r}, which is no regular expression: {error}") from None
    return value


def _refuse_unsupported(given: Mapping[str, Any], where: str) -> None:
    kind = str(given.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise UserError(f"{where}: peft_type is {kind!r}; only LORA adapters can be loaded here")
    reasons = [f"{key} ({why})" for key, why in _REFUSED.items() if given.get(key)]
    if given.get("bias", "none") != "none":
        reasons.append(f"bias={given['bias']!r} (it changes biases of the base)")
    init = given.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_RESIDUAL_INITS):
        reasons.append(f"init_lora_weights={init!r} (it leaves a residual in the base; convert it to plain LoRA first)")
    elif isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        reasons.append(f"init_lora_weights={init!r} (not known here)")
    unknown = [key for key, value in given.items() if value and key not in _HARMLESS and key not in _REFUSED]
    if reasons:
        raise UserError(f"{where} is refused, as it cannot be applied exactly: it uses {'; '.join(reasons)}")
    if unknown:
        hint = nearest(unknown[0], _HARMLESS)
        raise UserError(f"{where}: {names(unknown)} set, but not known here{hint}; the adapter is refused unread")
