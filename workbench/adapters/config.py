"""`adapter_config.json` of one LoRA adapter, as PEFT writes it.

What we cannot apply exactly is refused by name here, before any weight is read: an adapter never loads with a part of
it left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import parse_bytes, read_file, read_json

# keys that describe training, saving, or initialisation that leaves the base weights alone
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_dora", "use_rslora",
})  # fmt: skip
# key -> why an adapter that sets it is refused
_REFUSED = {
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
        use_dora: the rows of W + BA get the lengths in `lora_magnitude_vector`.
        rank_pattern: module pattern -> rank, overriding `r`.
        alpha_pattern: module pattern -> alpha, overriding `lora_alpha`.
        target_modules: list, regular expression or "all-linear"; None when the file names none.
        exclude_modules: list or regular expression of modules that are no targets after all.
        layers_to_transform: numbers of the blocks that are targets; None is all.
        layers_pattern: names of the list of blocks, where there are several lists.
        base_model_name_or_path: the base it was trained on; a label, not a requirement.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    base_model_name_or_path: str | None = None

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        """Read an `adapter_config.json`.

        Raises:
            UserError: missing or malformed file, or a feature that cannot be applied exactly.
        """
        return cls.from_bytes(read_file(path, "adapter config"), path)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> AdapterConfig:
        """Check and convert the content of the adapter config that was read from `path`."""
        where = f"adapter config {str(path)!r}"
        return cls.from_dict(_as_object(parse_bytes(content, where), where), str(path))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> AdapterConfig:
        """Check and convert the JSON object of an adapter config; `where` names it in errors."""
        _refuse_unsupported(given, where)
        rank, alpha = given.get("r", 8), given.get("lora_alpha", 8)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise UserError(f"{where}: r must be a whole number of at least 1, not {rank!r}")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise UserError(f"{where}: lora_alpha must be a finite number, not {alpha!r}")
        for switch in ("use_rslora", "use_dora"):
            if given.get(switch) not in (True, False, None):
                raise UserError(f"{where}: {switch} must be true or false, not {given[switch]!r}")
        return cls(
            r=rank,
            lora_alpha=float(alpha),
            use_rslora=bool(given.get("use_rslora")),
            use_dora=bool(given.get("use_dora")),
            rank_pattern=_pattern(given, "rank_pattern", where, int),
            alpha_pattern=_pattern(given, "alpha_pattern", where, float),
            target_modules=_modules(given, "target_modules", where),
            exclude_modules=_modules(given, "exclude_modules", where),
            layers_to_transform=_blocks(given, where),
            layers_pattern=_listed(_modules(given, "layers_pattern", where)),
            base_model_name_or_path=given.get("base_model_name_or_path"),
        )

    def rank_at(self, site: str) -> int:
        """Return the rank this config gives `site`."""
        return int(_matched(self.rank_pattern, site, self.r))

    def scale_at(self, site: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA, of `site` with its true `rank`."""
        alpha = float(_matched(self.alpha_pattern, site, self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def sites_left_out(self, sites: Iterable[str], present: Iterable[str]) -> list[str]:
        """Return those of a model's linear `sites` that this config targets and that are not `present`."""
        have = set(present)
        return [site for site in sites if site not in have and self._targets(site)]

    def _targets(self, site: str) -> bool:
        """Whether PEFT would put an adapter with this config at `site`."""
        if self.target_modules is None or _names_site(self.exclude_modules, site):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return "." in site  # all but the output head, which no block holds
            return _names_site(self.target_modules, site)
        if site in self.target_modules or self.layers_to_transform is None:
            return _names_site(self.target_modules, site)
        lists = "|".join(self.layers_pattern) or r"[^.]*"
        block = re.match(rf"(?:^|.*?\.)(?:{lists})\.(\d+)\.", site)
        chosen = block is not None and int(block[1]) in self.layers_to_transform
        return chosen and _names_site(self.target_modules, site)


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from `path`; a UserError names the file as `what` when it is missing or malformed."""
    return _as_object(read_json(path, what), f"{what} {str(path)!r}")


def _as_object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must hold a JSON object, not a {type(value).__name__}")
    return value


def _matched(pattern: Mapping[str, Any], site: str, default: Any) -> Any:
    # PEFT's rule: a key is a regular expression for the end of the module path; the first that matches wins
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", site):
            return value
    return default


def _names_site(modules: tuple[str, ...] | str | None, site: str) -> bool:
    # PEFT's rule: a text is a regular expression for the whole path, a list has whole paths or their last parts
    if isinstance(modules, str):
        return re.fullmatch(modules, site) is not None
    return any(site == name or site.endswith(f".{name}") for name in modules or ())


def _modules(given: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | str | None:
    value = given.get(key)
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value) or None
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {key} must be a list of module names or one regular expression, not {value!r}")
    try:
        re.compile(value or "")
    except re.error as error:
        raise UserError(f"{where}: {key} {value!r} is no regular expression: {error}") from None
    return value or None


def _listed(modules: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return (modules,) if isinstance(modules, str) else modules or ()


def _blocks(given: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    value = given.get("layers_to_transform")
    blocks = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in blocks):
        raise UserError(f"{where}: layers_to_transform must be block numbers, not {value!r}")
    return tuple(blocks) or None


def _pattern(given: Mapping[str, Any], key: str, where: str, kind: type) -> dict[str, Any]:
    value = given.get(key) or {}
    fits = isinstance(value, dict) and all(
        isinstance(number, (int, kind)) and not isinstance(number, bool) and (kind is float or number >= 1)
        for number in value.values()
    )
    if not fits:
        wanted = "numbers" if kind is float else "whole numbers of at least 1"
        raise UserError(f"{where}: {key} must map module patterns to {wanted}, not {value!r}")
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
        hint = nearest(unknown[0], [*_HARMLESS, *_REFUSED])
        raise UserError(f"{where}: {names(unknown)} set, but not known here{hint}; the adapter is refused unread")
