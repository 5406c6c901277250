"""The ordering fixes both axes of the scalings: which adapter is class i, and which site has index l.

It can be read, checked against a model, or made from one: a causal LM on the meta device is enough, so making one
needs the architecture's config and no weights. torch is imported only by the functions that look at a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import read_json

if TYPE_CHECKING:
    import torch

FIELDS = ("order", "layers", "base_model_id", "preload_adapters")
PRELOAD_FIELDS = ("name", "adapter_model_id")


@dataclass(frozen=True)
class Ordering:
    """`order[i]` is class i of the classifier; `layers[site]` is the site's index, None means "derive it"."""

    order: tuple[str, ...]
    layers: dict[str, int] | None = None
    base_model_id: str | None = None
    preload_adapters: tuple[dict, ...] = field(default=())

    @classmethod
    def read(cls, path: str | Path) -> Ordering:
        """Read and check an ordering file."""
        return cls.from_dict(read_json(path, "ordering"), where=f"ordering {str(path)!r}")

    @classmethod
    def from_dict(cls, data: object, where: str = "ordering") -> Ordering:
        """Check every field of `data` as read from JSON; `where` begins each error."""
        if not isinstance(data, Mapping):
            raise UserError(f"{where} is {_kind(data)}, expected an object with the keys {names(FIELDS)}")
        for key in data:
            if key not in FIELDS:
                hint = nearest(key, FIELDS)
                raise UserError(f"{where} has an unknown key {key!r}, expected only {names(FIELDS)}{hint}")
        base = data.get("base_model_id")
        if base is not None and not (isinstance(base, str) and base.strip()):
            raise UserError(f"{where}: 'base_model_id' is {base!r}, expected the name of a model or null")
        return cls(
            order=_checked_order(data, where),
            layers=_checked_layers(data.get("layers"), where),
            base_model_id=base,
            preload_adapters=_checked_preload(data.get("preload_adapters"), where),
        )

    @classmethod
    def make(
        cls,
        model: torch.nn.Module,
        target_modules: str | Iterable[str],
        order: Sequence[str],
        base_model_id: str | None,
    ) -> Ordering:
        """Number the sites of `model` in registration order, as training X-LoRA does."""
        sites = lora_sites(model, target_modules)
        layers = {site: index for index, site in enumerate(sites)}
        return cls.from_dict({"order": list(order), "layers": layers, "base_model_id": base_model_id}, "new ordering")

    def to_dict(self) -> dict:
        """Return the JSON form; `preload_adapters` only when there are any."""
        data: dict = {"order": list(self.order), "layers": self.layers, "base_model_id": self.base_model_id}
        if self.preload_adapters:
            data["preload_adapters"] = [dict(entry) for entry in self.preload_adapters]
        return data

    def write(self, path: str | Path) -> None:
        """Write the JSON form to `path`."""
        try:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"ordering {str(path)!r} cannot be written: {error.strerror}") from None

    def site_index(self, sites: Sequence[str]) -> dict[str, int]:
        """Return site -> index on the site axis, for `sites` in registration order, after checking that they fit."""
        self.verify(sites)
        return dict(self.layers) if self.layers is not None else {site: index for index, site in enumerate(sites)}

    def verify(self, sites: Sequence[str], adapters: Sequence[str] | None = None) -> None:
        """Check that the ordering fits a model's LoRA `sites` and, when given, the `adapters` that were found.

        Raises UserError with all offenders. Adapters that the ordering does not name are ignored.
        """
        problems = []
        if self.layers is not None:
            unknown = [site for site in self.layers if site not in set(sites)]
            missing = [site for site in sites if site not in self.layers]
            if unknown:
                hint = nearest(unknown[0], missing or sites)
                problems.append(
                    f"'layers' names {_count(unknown, 'site')} that the model does not have: {names(unknown)}{hint}"
                )
            if missing:
                problems.append(f"'layers' lacks {_count(missing, 'site')} of the model: {names(missing)}")
        absent = [name for name in self.order if adapters is not None and name not in adapters]
        if absent:
            hint = nearest(absent[0], [name for name in adapters if name not in self.order])
            problems.append(
                f"'order' names {_count(absent, 'adapter')} without a folder: {names(absent)}{hint}; "
                f"found {names(sorted(adapters))}"
            )
        if problems:
            raise UserError("the ordering does not fit: " + "; ".join(problems))


def lora_sites(model: torch.nn.Module, target_modules: str | Iterable[str]) -> list[str]:
    """Return the paths of the modules that carry LoRA weights, in registration order, matched as PEFT matches them.

    A list matches a whole path or its last parts; a string is a regular expression for the whole path; "all-linear"
    means every linear layer except the output head. Raises UserError for a target that matches nothing, or a module
    that can carry no LoRA.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
    if isinstance(target_modules, str) and target_modules.lower() == "all-linear":
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return [name for name in linear if head is None or modules[name] is not head]
    found = _matching_paths(list(modules), target_modules, linear)
    wrong = [name for name in found if not isinstance(modules[name], nn.Linear | Conv1D | nn.Embedding)]
    if wrong:
        kind = type(modules[wrong[0]]).__name__
        raise UserError(
            f"target_modules matches {wrong[0]!r}, which is {_article(kind)} and can carry no LoRA weights"
            f"{nearest(wrong[0], linear)}"
        )
    return found


def _matching_paths(paths: Sequence[str], target_modules: str | Iterable[str], linear: Sequence[str]) -> list[str]:
    leaves = sorted({path.rsplit(".", 1)[-1] for path in linear})
    if isinstance(target_modules, str):
        try:
            pattern = re.compile(target_modules)
        except re.error as error:
            raise UserError(f"target_modules {target_modules!r} is not a regular expression: {error}") from None
        found = [path for path in paths if pattern.fullmatch(path)]
        if not found:
            raise UserError(
                f"target_modules {target_modules!r}, a regular expression for whole module paths, matches "
                f"none of this model, whose linear layers are named {names(leaves)}"
            )
        return found
    targets = list(target_modules)
    unmatched = [name for name in targets if not any(_names_path(name, path) for path in paths)]
    if unmatched or not targets:
        hint = nearest(unmatched[0], leaves) if unmatched else ""
        raise UserError(
            f"target_modules names {names(unmatched)}, found nowhere in this model, whose linear layers "
            f"are named {names(leaves, 16)}{hint}"
        )
    return [path for path in paths if any(_names_path(name, path) for name in targets)]


def _names_path(target: object, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


def meta_model(config: object) -> torch.nn.Module:
    """Return the causal LM of a config on the meta device: structure and shapes, no weights.

    `config` is a config object, the dict in a config.json, that file's path, or the folder that holds it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _model_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        kind = config.model_type
        raise UserError(f"no causal language model can be built from this {kind!r} config: {_reason(error)}") from None


def _model_config(config: object) -> object:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        where = "model config"
        if isinstance(config, str | Path):
            path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
            config, where = read_json(path, "model config"), f"model config {str(path)!r}"
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            raise UserError(f"{where} has no 'model_type', expected the config.json of a causal language model")
        kind = config["model_type"]
        if kind not in CONFIG_MAPPING:
            hint = nearest(kind, CONFIG_MAPPING.keys())
            raise UserError(f"{where}: the architecture {kind!r} is not supported{hint}")
        try:
            config = CONFIG_MAPPING[kind].from_dict(dict(config))
        # the config classes validate with several exception types of their own
        except Exception as error:
            raise UserError(f"{where} is not a valid {kind!r} config: {_reason(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"the architecture {config.model_type!r} is not supported: it is no causal language model")
    return config


def make_from_config(
    config: object, target_modules: str | Iterable[str], order: Sequence[str], base_model_id: str | None
) -> Ordering:
    """Make an ordering from a model config alone (see `meta_model` for what a config may be)."""
    return Ordering.make(meta_model(config), target_modules, order, base_model_id)


def expand_names(text: str) -> list[str]:
    """Return the names in "a, b, adapter_1..adapter_9": comma-separated, where `..` counts up a trailing number."""
    result: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        result += _expand_range(part) if ".." in part else [part]
    _refuse_bad_names(result, f"adapter names {text!r}")
    return result


def _expand_range(part: str) -> list[str]:
    match = re.fullmatch(r"(.*?)(\d+)\.\.(.*?)(\d+)", part)
    if not match or match[3] not in (match[1], "") or int(match[4]) < int(match[2]):
        raise UserError(f"adapter names: {part!r} is no range, expected the form 'adapter_1..adapter_9'")
    prefix, first, _, last = match.groups()
    if int(last) - int(first) >= 10_000:
        raise UserError(f"adapter names: {part!r} is a range of more than 10000 names")
    width = len(first) if first.startswith("0") else 0
    return [f"{prefix}{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _checked_order(data: Mapping, where: str) -> tuple[str, ...]:
    order = data.get("order")
    if not isinstance(order, list | tuple):
        got = _kind(order) if "order" in data else "missing"
        raise UserError(f"{where}: 'order' is {got}, expected a list of adapter names, in the order of training")
    wrong = [name for name in order if not isinstance(name, str)]
    if wrong:
        raise UserError(f"{where}: 'order' holds {names(wrong)}, expected only adapter names (strings)")
    _refuse_bad_names(order, f"{where}: 'order'")
    return tuple(order)


def _refuse_bad_names(order: Sequence[str], where: str) -> None:
    """An adapter's name is also its folder, so a name must not lead out of the mixture's folder."""
    if not order:
        raise UserError(f"{where} is empty, expected at least one adapter name")
    bad = [name for name in order if name != name.strip() or "\\" in name or not _is_folder_name(name)]
    if bad:
        raise UserError(f"{where} holds {names(bad)}, expected names of folders inside the mixture")
    repeated = sorted({name for name in order if order.count(name) > 1})
    if repeated:
        raise UserError(f"{where} repeats {names(repeated)}, expected each adapter once")


def _is_folder_name(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _checked_layers(layers: object, where: str) -> dict[str, int] | None:
    if layers is None:
        return None
    if not isinstance(layers, Mapping):
        raise UserError(f"{where}: 'layers' is {_kind(layers)}, expected an object site -> index, or null to derive it")
    if not layers:
        raise UserError(f"{where}: 'layers' is empty, expected site -> index for every site, or null to derive it")
    wrong = [f"{site}: {json.dumps(index, default=repr)}" for site, index in layers.items() if type(index) is not int]
    if wrong:
        raise UserError(f"{where}: 'layers' holds {names(wrong)}, expected whole numbers")
    size, by_index = len(layers), {}
    for site, index in layers.items():
        by_index.setdefault(index, []).append(site)
    outside = [f"{site}: {index}" for site, index in layers.items() if not 0 <= index < size]
    shared = [f"{index}: {' and '.join(sites)}" for index, sites in sorted(by_index.items()) if len(sites) > 1]
    missing = [index for index in range(size) if index not in by_index]
    if outside or shared:
        parts = [f"out of range {names(outside)}"] * bool(outside) + [f"given twice {names(shared)}"] * bool(shared)
        parts += [f"missing {names(missing)}"] * bool(missing)
        detail = "; ".join(parts)
        raise UserError(f"{where}: the {size} indices of 'layers' must be 0 to {size - 1}, each once: {detail}")
    return dict(layers)


def _checked_preload(entries: object, where: str) -> tuple[dict, ...]:
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise UserError(f"{where}: 'preload_adapters' is {_kind(entries)}, expected a list of objects or null")
    for entry in entries:
        if (
            not isinstance(entry, Mapping)
            or set(entry) != set(PRELOAD_FIELDS)
            or not all(isinstance(value, str) and value for value in entry.values())
        ):
            raise UserError(
                f"{where}: 'preload_adapters' holds {entry!r}, expected objects with the texts {names(PRELOAD_FIELDS)}"
            )
    loaded = [entry["name"] for entry in entries]
    repeated = sorted({name for name in loaded if loaded.count(name) > 1})
    if repeated:
        raise UserError(f"{where}: 'preload_adapters' repeats {names(repeated)}, expected each name once")
    return tuple(dict(entry) for entry in entries)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def _count(items: Sequence, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
