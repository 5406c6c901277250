"""From a file's tensor names to factor pairs.

Contract: every tensor of the file ends up in a pair, in a magnitude, in a copy to compare, or in an error; nothing is
dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.adapters.config import AdapterConfig
from workbench.errors import UserError, names

# PEFT leaves the adapter's name out of its files; other tools do not
_LINEAR = re.compile(r"^(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight$")
_EMBEDDING = re.compile(r"^(?P<path>.+)\.lora_embedding_(?P<factor>[AB])(?:\.[^.]+)?$")
_MAGNITUDE = re.compile(r"^(?P<path>.+)\.lora_magnitude_vector(?:\.[^.]+){0,2}$")
_BASE_COPY = re.compile(r"^(?P<path>.+)\.base_layer\.weight$")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


@dataclass(eq=False)
class Factors:
    """An adapter file's tensors by site.

    Attributes:
        pairs: site -> float32 A `[rank, in]` and B `[out, rank]`.
        embeddings: those of the sites that are embeddings.
        magnitudes: site -> DoRA's magnitudes, float32 `[out]`.
        base_copies: site -> a copy of the base's weight, as stored. PEFT adds them when an embedding or the output
            head is a target.
    """

    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    base_copies: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def parse(cls, tensors: Mapping[str, Tensor], config: AdapterConfig, name: str) -> Factors:
        """Sort a file's tensors.

        Raises:
            UserError: a tensor of another kind, dtype or shape, NaN, halves without each other, ranks or magnitudes
                that contradict the config.
        """
        made = cls()
        halves: dict[str, dict[str, Tensor]] = {}
        strange = [key for key, tensor in tensors.items() if not made._take(key, tensor, halves, config, name)]
        if strange:
            raise UserError(
                f"adapter {name!r}: {len(strange)} tensors are neither lora_A nor lora_B of a linear module: "
                f"{names(strange, 4)}; nothing may be dropped, so the adapter is refused"
            )
        if single := [site for site, factors in halves.items() if len(factors) < 2]:
            raise UserError(f"adapter {name!r}: only one of lora_A and lora_B is there for {names(single, 4)}")
        if not halves:
            raise UserError(f"adapter {name!r}: its weights file holds no LoRA tensors")
        made.pairs = {site: (factors["A"], factors["B"]) for site, factors in halves.items()}
        for site, (down, up) in made.pairs.items():
            _check_rank(name, site, down, up, config)
        made._check_magnitudes(config, name)
        return made

    def _take(
        self, key: str, tensor: Tensor, halves: dict[str, dict[str, Tensor]], config: AdapterConfig, name: str
    ) -> bool:
        """Put one tensor where it belongs; False when it belongs nowhere."""
        if match := _BASE_COPY.match(key):
            self.base_copies[_site(match)] = tensor
            return True
        if config.use_dora and (match := _MAGNITUDE.match(key)):
            _put(self.magnitudes, _site(match), _checked(key, tensor, 1, name), "lora_magnitude_vector", name)
            return True
        match = _LINEAR.match(key) or _EMBEDDING.match(key)
        if match is None:
            return False
        site = _site(match)
        if match.re is _EMBEDDING:
            self.embeddings |= {site}
        factors, factor = halves.setdefault(site, {}), match["factor"]
        if factor in factors:
            raise UserError(f"adapter {name!r}: two tensors hold lora_{factor} of {site!r}")
        factors[factor] = _checked(key, tensor, 2, name)
        return True

    def _check_magnitudes(self, config: AdapterConfig, name: str) -> None:
        if not config.use_dora:
            return
        if missing := [site for site in self.pairs if site not in self.magnitudes]:
            raise UserError(
                f"adapter {name!r} is refused: its config sets use_dora, but lora_magnitude_vector is missing at "
                f"{len(missing)} sites: {names(missing, 4)}"
            )
        for site, magnitude in self.magnitudes.items():
            if site not in self.pairs:
                raise UserError(f"adapter {name!r}: lora_magnitude_vector of {site!r} has no lora_A and lora_B beside")
            have, want = magnitude.shape[0], self.pairs[site][1].shape[0]
            if have != want:
                raise UserError(
                    f"adapter {name!r}: lora_magnitude_vector of {site!r} has {have} entries; lora_B writes {want}"
                )


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    # a sum is finite only if every summand is, and costs a tenth of looking at each; a sum of large ones may overflow
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def _site(match: re.Match) -> str:
    return match["path"].removeprefix("base_model.model.")


def _put(store: dict[str, Tensor], site: str, tensor: Tensor, what: str, name: str) -> None:
    if site in store:
        raise UserError(f"adapter {name!r}: two tensors hold {what} of {site!r}")
    store[site] = tensor


def _checked(key: str, tensor: Tensor, dims: int, name: str) -> Tensor:
    """Return the tensor in float32."""
    if tensor.dtype not in _DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"adapter {name!r}: tensor {key!r} is {kind}; expected {', '.join(_DTYPES.values())}")
    tensor = tensor.float()
    if not is_finite(tensor):
        raise UserError(f"adapter {name!r}: tensor {key!r} has NaN or infinite values")
    if tensor.dim() != dims:
        kind = "a matrix" if dims == 2 else "a vector"
        raise UserError(f"adapter {name!r}: tensor {key!r} has shape {list(tensor.shape)}; {kind} was expected")
    return tensor


def _check_rank(name: str, site: str, down: Tensor, up: Tensor, config: AdapterConfig) -> None:
    rank = down.shape[0]
    if rank != up.shape[1] or rank < 1:
        raise UserError(
            f"adapter {name!r}: at {site} lora_A is {list(down.shape)} and lora_B {list(up.shape)}; "
            "the first dimension of A and the last of B must be the same rank"
        )
    if config.rank_at(site) != rank:
        raise UserError(f"adapter {name!r}: config says rank {config.rank_at(site)} at {site}, the tensors have {rank}")
