"""One adapter read from disk: per site its A and B, with alpha / rank folded into B once.

Contract: every tensor of the file ends up in a factor pair or in an error; nothing is dropped.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.adapters.config import AdapterConfig
from workbench.adapters.peft_save import own_factors
from workbench.errors import TransientError, UserError, names, nearest
from workbench.jsonfile import read_file

_TENSOR = re.compile(r"^(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight$")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoRATargetModule:
    """A site of a base model: a linear module that LoRA can change.

    Attributes:
        name: module path, `model.layers.3.self_attn.q_proj`.
        in_features, out_features: its widths.
    """

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, eq=False)
class LoRAModel:
    """An adapter, ready to be put into a slot.

    Attributes:
        name: what requests call it.
        config: its checked config.
        a: site -> float32 `[rank, in]`.
        b: site -> float32 `[rank, out]`, B transposed, times its scale.
        content_hash: SHA-256 of the config's and weights' bytes, hex.
    """

    name: str
    config: AdapterConfig
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    content_hash: str

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
        weights = read_weights(weights_path, what)
        pairs = _factor_pairs(own_factors(parse_tensors(weights, weights_path, what), weights_path.parent.name), name)
        a: dict[str, Tensor] = {}
        b: dict[str, Tensor] = {}
        for site, (down, up) in pairs.items():
            rank = _true_rank(name, site, down, up, config)
            a[site] = down.contiguous()
            b[site] = up.T.contiguous().mul_(config.scale_at(site, rank))
            if not _is_finite(b[site]):
                scale = config.scale_at(site, rank)
                raise UserError(f"adapter {name!r}: lora_B of {site!r} times its scale {scale:g} is infinite")
        digest = hashlib.sha256(settings)
        digest.update(weights)
        return cls(name, config, a, b, digest.hexdigest())

    @property
    def sites(self) -> tuple[str, ...]:
        """Module paths it changes, by name."""
        return tuple(self.a)

    @property
    def rank(self) -> int:
        """The largest rank of its sites."""
        return max(a.shape[0] for a in self.a.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of its factors in float32."""
        return sum(t.numel() * t.element_size() for side in (self.a, self.b) for t in side.values())

    def fit(self, targets: Mapping[str, LoRATargetModule], base: str) -> LoRAModel:
        """Return this adapter with its sites renamed to the base model's module paths.

        Args:
            targets: module path -> site of the base.
            base: the base's name, for errors.

        Raises:
            UserError: sites the base does not have, or whose widths differ, or sites of the base that the adapter's
                config names and its weights leave out; all are listed.
        """
        renamed = {site: _target_of(site, targets) for site in self.a}
        missing = [site for site, target in renamed.items() if target is None]
        if missing:
            hint = nearest(missing[0], targets)
            raise UserError(
                f"adapter {self.name!r} does not fit base {base!r}: {len(missing)} of its {len(self.a)} sites are not "
                f"in the model: {names(missing, 4)}{hint}"
            )
        wrong = []
        for site, target in renamed.items():
            want = (targets[target].in_features, targets[target].out_features)
            have = (self.a[site].shape[1], self.b[site].shape[1])
            if want != have:
                wrong.append(f"{target} is {want[0]} -> {want[1]} in the base, {have[0]} -> {have[1]} in the adapter")
        if wrong:
            raise UserError(
                f"adapter {self.name!r} does not fit base {base!r} at {len(wrong)} sites: {'; '.join(wrong[:4])}"
            )
        if left_out := self.config.sites_left_out(targets, renamed.values()):
            raise UserError(
                f"adapter {self.name!r}: its weights lack {len(left_out)} of the sites that its config targets in base "
                f"{base!r}: {names(left_out, 4)} (PEFT 0.20 and later lose them when they save an X-LoRA model)"
            )
        if len(set(renamed.values())) != len(renamed):
            raise UserError(f"adapter {self.name!r}: two of its sites name the same module of base {base!r}")
        a = {renamed[site]: tensor for site, tensor in self.a.items()}
        b = {renamed[site]: tensor for site, tensor in self.b.items()}
        return LoRAModel(self.name, self.config, a, b, self.content_hash)


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Read a safetensors file; `what` names it in errors. Pickle files are refused, never opened.

    Raises:
        UserError: no such file, a pickle file in its place, or corrupt content.
    """
    return parse_tensors(read_weights(path, what), path, what)


def read_weights(path: Path, what: str) -> bytes:
    """Return the bytes of a safetensors file; `what` names it in errors.

    Raises:
        UserError: no such file, or a pickle file in its place; TransientError: the disk fails.
    """
    if not path.is_file():
        pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickles:
            raise UserError(
                f"{what}: {path.parent} has only pickle weights ({names(pickles)}), which can run code when opened and "
                "are refused; convert them to safetensors"
            )
        raise UserError(f"{what}: weights not found: {path}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise TransientError(f"{what}: {path} cannot be read: {error.strerror or error}") from None


def parse_tensors(content: bytes, path: Path, what: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's `content` by name, in memory of their own.

    They never lie in a mapping of the file: an adapter overwritten on disk would change, or crash, the one that runs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if content.startswith(b"version https://git-lfs"):
        raise UserError(f"{what}: {path} is a Git LFS pointer, not the weights; fetch them with 'git lfs pull'")
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{what}: {path} is not a readable safetensors file (truncated or corrupt?): {error}") from None
    # the library gives them in another order each time, and messages would follow
    return dict(sorted(tensors.items()))


def _factor_pairs(tensors: Mapping[str, Tensor], name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return site -> its float32 A `[rank, in]` and B `[out, rank]`."""
    halves: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in tensors.items():
        match = _TENSOR.match(key)
        if match is None:
            strange.append(key)
            continue
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"adapter {name!r}: tensor {key!r} is {kind}; expected {', '.join(_DTYPES.values())}")
        tensor = tensor.float()
        if not _is_finite(tensor):
            raise UserError(f"adapter {name!r}: tensor {key!r} has NaN or infinite values")
        if tensor.dim() != 2:
            raise UserError(f"adapter {name!r}: tensor {key!r} has shape {list(tensor.shape)}; a matrix was expected")
        site = match["path"].removeprefix("base_model.model.")
        factors = halves.setdefault(site, {})
        if match["factor"] in factors:
            raise UserError(f"adapter {name!r}: two tensors hold lora_{match['factor']} of {site!r}")
        factors[match["factor"]] = tensor
    if strange:
        raise UserError(
            f"adapter {name!r}: {len(strange)} tensors are neither lora_A nor lora_B of a linear module: "
            f"{names(strange, 4)}; nothing may be dropped, so the adapter is refused"
        )
    single = [site for site, factors in halves.items() if len(factors) < 2]
    if single:
        raise UserError(f"adapter {name!r}: only one of lora_A and lora_B is there for {names(single, 4)}")
    if not halves:
        raise UserError(f"adapter {name!r}: its weights file holds no LoRA tensors")
    return {site: (factors["A"], factors["B"]) for site, factors in halves.items()}


def _is_finite(tensor: Tensor) -> bool:
    # a sum is finite only if every summand is, and costs a tenth of looking at each; a sum of large ones may overflow
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def _true_rank(name: str, site: str, down: Tensor, up: Tensor, config: AdapterConfig) -> int:
    rank = down.shape[0]
    if rank != up.shape[1] or rank < 1:
        raise UserError(
            f"adapter {name!r}: at {site} lora_A is {list(down.shape)} and lora_B {list(up.shape)}; "
            "the first dimension of A and the last of B must be the same rank"
        )
    if config.rank_at(site) != rank:
        raise UserError(f"adapter {name!r}: config says rank {config.rank_at(site)} at {site}, the tensors have {rank}")
    return rank


def _target_of(site: str, targets: Mapping[str, LoRATargetModule]) -> str | None:
    if site in targets:
        return site
    # other wrappers around the base give other prefixes: accept the one module path that ends alike
    alike = [t for t in targets if t.endswith("." + site) or site.endswith("." + t)]
    return alike[0] if len(alike) == 1 else None
