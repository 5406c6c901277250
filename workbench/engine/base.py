"""What is known of a base model before its weights are read: enough to refuse what will not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench import hub
from workbench.adapters.model import LoRATargetModule
from workbench.config import EngineConfig
from workbench.engine.hf import context_of, label_of, linear_targets, load_config
from workbench.engine.prompts import Prompts, eos_ids, load_tokenizer
from workbench.errors import UserError
from workbench.ordering import meta_model


@dataclass(frozen=True, eq=False)
class BaseInfo:
    """A base model's folder, config and tokenizer.

    Attributes:
        config: the engine's settings.
        folder: where its files lie.
        label: the id it goes by.
        hf_config: transformers' config.
        prompts: turns prompts into token ids, and refuses those that do not fit.
        eos_ids: tokens that end a sequence.
    """

    config: EngineConfig
    folder: Path
    label: str
    hf_config: Any
    prompts: Prompts
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, config: EngineConfig) -> BaseInfo:
        """Find the base that `config` names and read everything but its weights.

        Raises:
            UserError: not found, not supported, a `max_len` beyond its context, or a device that is not here.
        """
        _require_device(config.device)
        folder = hub.resolve_base(config.base, revision=config.revision, token=config.token, offline=config.offline)
        label = label_of(config.base, folder)
        hf_config = load_config(folder, label, config.trust_remote_code)
        context = context_of(hf_config)
        if config.max_len is not None and config.max_len > context:
            raise UserError(f"max_len {config.max_len} is beyond the context of base {label!r}, {context} tokens")
        tokenizer = load_tokenizer(folder, config.trust_remote_code)
        prompts = Prompts(tokenizer, hf_config.vocab_size, config.max_len or context, label)
        return cls(config, folder, label, hf_config, prompts, eos_ids(folder, hf_config, tokenizer))

    def targets(self) -> Mapping[str, LoRATargetModule]:
        """Return module path -> site of its linear modules, from the architecture alone."""
        return linear_targets(meta_model(self.hf_config))


def _require_device(device: str | None) -> None:
    index = (device or "cpu").removeprefix("cuda").lstrip(":") or "0"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index.isdigit() and int(index) >= count:
        raise UserError(f"engine: 'device' is {device!r}, but torch finds {count or 'no'} CUDA devices here; use 'cpu'")
