"""A mixture: adapters, classifier and ordering, checked against a base model before any adapter weight is kept."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_kernels.scalings import keep_top_k
from workbench.adapters.model import LoRAModel, LoRATargetModule, read_tensors
from workbench.errors import UserError
from workbench.ordering import Ordering
from workbench.xlora.classifier import Classifier, complete_layers
from workbench.xlora.config import XLoRAConfig
from workbench.xlora.files import MixtureFiles


@dataclass(frozen=True, eq=False)
class Mixture:
    """One X-LoRA model on one base.

    Attributes:
        name: what requests call it.
        config: its settings.
        adapters: in class order.
        sites: the site axis of the scalings, in index order.
        classifier: the network.
        ordering: what fixed both axes.
        slots: slot of each adapter, set when an engine loads it.
    """

    name: str
    config: XLoRAConfig
    adapters: tuple[LoRAModel, ...]
    sites: tuple[str, ...]
    classifier: Classifier
    ordering: Ordering
    slots: tuple[int, ...] = ()

    @classmethod
    def read(
        cls,
        files: MixtureFiles,
        name: str,
        targets: Mapping[str, LoRATargetModule],
        base: str,
        hidden_size: int,
        ordering: Ordering | None = None,
        **settings: Any,
    ) -> Mixture:
        """Read a mixture and check it against a base model.

        Args:
            files: the repository's parts.
            name: what requests will call it.
            targets: the base's linear modules, in registration order.
            base: its id, for errors and the ordering's label.
            hidden_size: its hidden size.
            ordering: fixes both axes; made from the repository and the base when None.
            **settings: X-LoRA settings that override the repository's.

        Raises:
            UserError: anything that does not fit; all offenders are listed.
        """
        config = XLoRAConfig.from_dict(files.config, str(files.config_path), hidden_size).change(**settings)
        if config.hidden_size != hidden_size:
            raise UserError(
                f"mixture {name!r} was made for hidden size {config.hidden_size}, base {base!r} has {hidden_size}"
            )
        order = ordering.order if ordering is not None and ordering.order else files.order()
        files.require(order)
        tensors = read_tensors(files.classifier_path, f"mixture {name!r}")
        # before the adapters: a save that lost classifier layers has broken adapters too, and this says why
        complete_layers(tensors, config, str(files.classifier_path))
        adapters = tuple(LoRAModel.from_files(*files.adapters[a], a).fit(targets, base) for a in order)
        for adapter in adapters:
            adapter.require_additive(f"mixture {name!r}")
        touched = {site for adapter in adapters for site in adapter.sites}
        sites = tuple(site for site in targets if site in touched)
        if ordering is not None and ordering.layers is not None:
            ordering.verify(sites, list(files.adapters))
            sites = tuple(sorted(ordering.layers, key=ordering.layers.__getitem__))
        _warn_of_other_base(ordering, files, base)
        classifier = Classifier.from_tensors(tensors, config, len(sites), len(adapters), str(files.classifier_path))
        made = Ordering(
            order=tuple(order), layers={site: i for i, site in enumerate(sites)},
            base_model_id=(ordering.base_model_id if ordering else None) or files.base_model_id or base,
        )
        return cls(name, config, adapters, sites, classifier, made)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapter axis of the scalings."""
        return self.ordering.order

    @property
    def site_index(self) -> Mapping[str, int]:
        """Site -> index on the site axis of the scalings."""
        return self.ordering.layers

    @property
    def num_bytes(self) -> int:
        """Bytes of its adapters' factors in float32."""
        return sum(adapter.num_bytes for adapter in self.adapters)

    @functools.cached_property
    def content_key(self) -> str:
        """SHA-256, in hex, of everything that decides its scalings and deltas: equal keys are equal mixtures."""
        digest = hashlib.sha256(json.dumps([asdict(self.config), self.sites], sort_keys=True).encode())
        for adapter in self.adapters:
            digest.update(adapter.content_hash.encode())
        for tensor in (tensor for layer in self.classifier.layers for tensor in layer if tensor is not None):
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def placed(self, slots: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Mixture:
        """Return the mixture with its adapters' slots and its classifier on the engine's device."""
        return replace(self, slots=slots, classifier=self.classifier.to(dtype, device))

    def scaling_pass_weights(self) -> Tensor | None:
        """Return the scaling pass's constant weights `[1, 1, n]`, global weight included; None when it is the base."""
        config, n = self.config, len(self.adapters)
        value = 1 / n if config.scaling_pass_value is None else config.scaling_pass_value
        if value == 0 or config.global_scaling_weight == 0:
            return None
        weights = torch.full((1, 1, n), float(value))
        if config.topk_on_scaling_pass and (config.top_k_lora is not None or config.enable_softmax_topk):
            weights = keep_top_k(weights, config.top_k_lora or n, config.enable_softmax_topk)
        return weights * config.global_scaling_weight


def _warn_of_other_base(ordering: Ordering | None, files: MixtureFiles, base: str) -> None:
    for source, named in (("ordering", ordering and ordering.base_model_id), ("mixture", files.base_model_id)):
        if named and named != base:
            warnings.warn(
                f"the {source} was made for base {named!r}, this engine runs {base!r}; the structure fits, the numbers "
                "are right only if the weights are the same",
                stacklevel=3,
            )
            return
