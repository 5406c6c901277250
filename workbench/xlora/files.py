"""Where the parts of an X-LoRA repository lie, in every layout that exists in the wild.

* the xlora package's: `xlora_config.json`, `xlora_classifier.safetensors`, a folder per adapter (also one level down);
* flat: the same, with `NAME_config.json`/`NAME_adapter_config.json` and `NAME_model.safetensors` beside each other;
* PEFT's: `adapter_config.json` with peft_type XLORA, `adapter_model.safetensors` with the classifier, a folder each.

Contract: adapter names match exactly (`adapter_1` is not `adapter_10`); other files are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.adapters.config import read_object
from workbench.adapters.model import CONFIG_FILE, WEIGHTS_FILE
from workbench.errors import UserError, names, nearest

XLORA_CONFIG = "xlora_config.json"
XLORA_CLASSIFIER = "xlora_classifier.safetensors"
_FLAT_CONFIG = re.compile(r"^(?P<name>.+?)[_.](?:adapter_)?config\.json$")


@dataclass(frozen=True)
class MixtureFiles:
    """An X-LoRA repository's parts.

    Attributes:
        folder: the repository.
        layout: "xlora", "flat" or "peft".
        config: the X-LoRA config file's JSON object, unchecked.
        config_path, classifier_path: its files.
        adapters: adapter name -> (config file, weights file), every adapter found.
    """

    folder: Path
    layout: str
    config: Mapping[str, Any]
    config_path: Path
    classifier_path: Path
    adapters: Mapping[str, tuple[Path, Path]]

    @property
    def base_model_id(self) -> str | None:
        """The base named by the config, if any."""
        return self.config.get("base_model_id") or self.config.get("base_model_name_or_path")

    def order(self) -> tuple[str, ...]:
        """Return the adapters in class order as far as the repository itself says.

        Raises:
            UserError: it does not say, so an ordering is needed.
        """
        listed = self.config.get("adapters")
        if isinstance(listed, (Mapping, list)) and listed:
            order = [str(name) for name in listed]
            if all(name in self.adapters for name in order):
                return tuple(order)
        numbers = {name: re.fullmatch(r"(.*?)(\d+)", name) for name in self.adapters}
        stems = {match[1] if match else None for match in numbers.values()}
        if len(stems) == 1 and None not in stems:
            return tuple(sorted(self.adapters, key=lambda name: int(numbers[name][2])))
        raise UserError(
            f"{self.config_path}: `adapters` does not list the adapters found in the repository "
            f"({names(sorted(self.adapters))}), so their class order is unknown; give an ordering file"
        )

    def require(self, order: tuple[str, ...]) -> None:
        """Check that every adapter of `order` was found; a UserError lists those that were not."""
        missing = [name for name in order if name not in self.adapters]
        if missing:
            bare = [name for name in missing if (self.folder / name).is_dir()]
            hint = f" (there is no {CONFIG_FILE} in {names(bare)})" if bare else nearest(missing[0], self.adapters)
            raise UserError(
                f"mixture {self.folder}: no adapter folder for {names(missing)} of the order{hint}. "
                f"Found: {names(sorted(self.adapters))}"
            )


def find_mixture(folder: Path) -> MixtureFiles:
    """Find the parts of the X-LoRA repository in `folder`.

    Raises:
        UserError: no X-LoRA config, a pickle or missing classifier, two adapters of one name, or no adapters.
    """
    if not folder.is_dir():
        raise UserError(f"mixture folder not found: {folder}")
    config_path, config = _find_config(folder)
    adapters = _adapter_folders(folder)
    if str(config.get("peft_type", "")).upper() == "XLORA":
        layout, classifier = "peft", folder / WEIGHTS_FILE
    else:
        layout = "xlora" if adapters else "flat"
        classifier = config_path.parent / XLORA_CLASSIFIER
        if not classifier.is_file():
            found = sorted(p for p in folder.rglob(f"*{XLORA_CLASSIFIER}") if p.is_file())
            classifier = found[0] if len(found) == 1 else classifier
        adapters = adapters or _flat_adapters(folder)
    if not adapters:
        raise UserError(
            f"mixture {folder}: no adapters found; expected a folder for each, with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    return MixtureFiles(folder, layout, config, config_path, classifier, adapters)


def _find_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    plain = folder / XLORA_CONFIG
    prefixed = sorted([*folder.glob(f"*{XLORA_CONFIG}"), *folder.glob(f"*/*{XLORA_CONFIG}")])
    tried = [path for path in dict.fromkeys([plain, *prefixed]) if path.is_file()]
    if tried:
        failure = None
        for path in tried:  # an old revision in the wild carries a broken copy beside a good one
            try:
                return path, read_object(path, "X-LoRA config")
            except UserError as error:
                failure = failure or error
        raise failure
    peft = folder / CONFIG_FILE
    if peft.is_file():
        config = read_object(peft, "adapter config")
        if str(config.get("peft_type", "")).upper() == "XLORA":
            return peft, config
        raise UserError(f"{folder} is a single {config.get('peft_type', 'LORA')} adapter, not an X-LoRA mixture: "
                        f"load it as an adapter, or name a folder with {XLORA_CONFIG}")
    raise UserError(f"{folder} is no X-LoRA mixture: it has neither {XLORA_CONFIG} nor a {CONFIG_FILE} of type XLORA")


def _adapter_folders(folder: Path) -> dict[str, tuple[Path, Path]]:
    found: dict[str, tuple[Path, Path]] = {}
    for config in sorted([*folder.glob(f"*/{CONFIG_FILE}"), *folder.glob(f"*/*/{CONFIG_FILE}")]):
        home = config.parent
        if not home.resolve().is_relative_to(folder.resolve()) and not _is_hub_snapshot(folder):
            raise UserError(f"mixture {folder}: {home.name} links to a place outside the folder; copy it in")
        if home.name in found:
            other = found[home.name][0].parent
            raise UserError(f"mixture {folder}: two folders are named {home.name!r}: {other} and {home}")
        found[home.name] = (config, home / WEIGHTS_FILE)
    return found


def _is_hub_snapshot(folder: Path) -> bool:
    # the Hub's cache links every file of a snapshot into its blob store
    return folder.parent.name == "snapshots"


def _flat_adapters(folder: Path) -> dict[str, tuple[Path, Path]]:
    found = {}
    for config in sorted(folder.glob("*.json")):
        match = _FLAT_CONFIG.match(config.name)
        if match is None or match["name"] == "xlora":
            continue
        for weights in (f"{match['name']}_model.safetensors", f"{match['name']}_adapter_model.safetensors",
                        f"{match['name']}.safetensors"):
            if (folder / weights).is_file():
                found[match["name"]] = (config, folder / weights)
                break
    return found
