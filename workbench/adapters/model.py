"""One adapter read from disk: per site its A and B, with alpha / rank folded into B once.

Contract: every tensor of the file ends up in a factor pair or in an error; nothing is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from workbench.adapters.config import AdapterConfig
from workbench.adapters.factors import Factors, is_finite
from workbench.adapters.fitting import fit
from workbench.adapters.modules import LoRATargetModule
from workbench.adapters.peft_save import own_factors
from workbench.adapters.tensorfile import read_tensors
from workbench.errors import UserError
from workbench.jsonfile import read_file

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "LoRAModel", "LoRATargetModule", "read_tensors"]
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, eq=False)
class LoRAModel:
    """An adapter, ready to be put into a slot.

    Attributes:
        name: what requests call it.
        config: its checked config.
        a: site -> float32 `[rank, in]`.
        b: site -> float32 `[rank, out]`, B transposed (a view), times its scale.
        content_hash: SHA-256 of the config's and weights' bytes, hex.
        embeddings: sites that look up rows of A instead of multiplying by it.
        magnitudes: site -> DoRA's magnitudes, float32 `[out]`, until `fit` has seen the base's weights.
        base_copies: site -> a copy of the base's weight that the file holds, until `fit` has compared it.
        gains: site -> DoRA's row factors g, float32 `[out]`, after `fit`: B is multiplied by them, the base's output
            without its bias is still to be.
        joined_from: the largest rank of its sites as they were read, where `fit` joined several of them into one.
    """

    name: str
    config: AdapterConfig
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    content_hash: str
    embeddings: frozenset[str] = frozenset()
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    base_copies: Mapping[str, Tensor] = field(default_factory=dict)
    gains: Mapping[str, Tensor] = field(default_factory=dict)
    joined_from: int | None = None

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> LoRAModel:
        """Read the adapter in `folder` (`adapter_config.json` and `adapter_model.safetensors`).

        Raises:
            UserError: a missing, corrupt or pickle file, a feature we cannot apply, tensors that do not pair up.
        """
        return cls.from_files(folder / CONFIG_FILE, folder / WEIGHTS_FILE, name or folder.name)

    @classmethod
    def from_files(cls, config_path: Path, weights_path: Path, name: str) -> LoRAModel:
        """Read an adapter whose two files have other names than PEFT's."""
        what = f"adapter {name!r}"
        # each file is read once, so that the hash is that of what was parsed, even if a file changes meanwhile
        settings = read_file(config_path, "adapter config")
        config = AdapterConfig.from_bytes(settings, config_path)
        digest = hashlib.sha256(settings)
        tensors = own_factors(read_tensors(weights_path, what, digest), weights_path.parent.name)
        factors = Factors.parse(tensors, config, name)
        a: dict[str, Tensor] = {}
        b: dict[str, Tensor] = {}
        for site, (down, up) in _without_ballast(factors.pairs).items():
            scale = config.scale_at(site, down.shape[0])
            a[site], b[site] = down, up.mul_(scale).T
            if not is_finite(b[site]):
                raise UserError(f"adapter {name!r}: lora_B of {site!r} times its scale {scale:g} is infinite")
        return cls(
            name, config, a, b, digest.hexdigest(), factors.embeddings, factors.magnitudes, factors.base_copies
        )

    def pinned(self) -> LoRAModel:
        """Return this adapter with its factors in page-locked memory; needs a CUDA device."""
        a = {site: tensor.pin_memory() for site, tensor in self.a.items()}
        return replace(self, a=a, b={site: tensor.pin_memory() for site, tensor in self.b.items()})

    @property
    def sites(self) -> tuple[str, ...]:
        """Module paths it changes, by name."""
        return tuple(self.a)

    @property
    def rank(self) -> int:
        """The largest rank of its sites, as it was trained."""
        return self.joined_from or max(a.shape[0] for a in self.a.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of its factors in float32."""
        kept = (self.a, self.b, self.gains or self.magnitudes)
        return sum(t.numel() * t.element_size() for side in kept for t in side.values())

    @property
    def is_dora(self) -> bool:
        """Whether it rescales the base's output."""
        return bool(self.gains or self.magnitudes)

    def fit(self, targets: Mapping[str, LoRATargetModule], base: str) -> LoRAModel:
        """Return this adapter with its sites renamed to the base model's module paths.

        Args:
            targets: module path -> site of the base.
            base: the base's name, for errors.

        Adapters of fused projections and of separate ones fit bases of either sort. Where the targets know the base's
        weights, DoRA's row factors are computed, and copies of base weights that PEFT saves are compared with them.

        Raises:
            UserError: sites the base does not have, or whose widths differ, or sites of the base that the adapter's
                config names and its weights leave out; all are listed. A weight that DoRA needs and nobody can read.
        """
        return fit(self, targets, base)

    def require_additive(self, where: str) -> None:
        """Check that its deltas can be weighted and added; a UserError says why `where` refuses it."""
        if self.is_dora:
            raise UserError(
                f"{where}: adapter {self.name!r} is refused, as it uses use_dora: DoRA rescales the base's output, so "
                "its delta is nothing that could be weighted and added to others; run it alone"
            )


def _without_ballast(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return factors that keep no more than themselves in memory: views of a file keep all of it."""
    used = sum(factor.nbytes for pair in pairs.values() for factor in pair)
    if max(factor.untyped_storage().nbytes() for pair in pairs.values() for factor in pair) <= 1.1 * used:
        return pairs
    return {site: (down.clone(), up.clone()) for site, (down, up) in pairs.items()}
