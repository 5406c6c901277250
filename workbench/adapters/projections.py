"""Fused projections and their separate counterparts: one adapter, whichever of the two the base has.

    separate -> fused   ranks concatenate: A's are stacked, each B goes into its projection's outputs, zero elsewhere
    fused -> separate   every projection gets the whole A and its own outputs of B

Both are exact: W + BA is the same matrix, row by row. The layout of a fused module's outputs is known for the
architectures listed here only; what is not known is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
# fused names whose outputs are their projections one after the other, in every model that has them
SEQUENTIAL = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP}
# fused names whose layout differs from model to model: per head, per group of heads, or one after the other
AMBIGUOUS = ("query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack", "qkv", "in_proj")


@dataclass(frozen=True)
class Part:
    """One projection inside a fused module.

    Attributes:
        name: what it is called where it is a module of its own, `q_proj`.
        spans: its outputs, as `(first, last)` ranges of the fused module's, in its own order.
    """

    name: str
    spans: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Number of its outputs."""
        return sum(last - first for first, last in self.spans)

    @property
    def outputs(self) -> Tensor:
        """Its outputs in the fused module, int64 `[width]`."""
        return torch.cat([torch.arange(first, last) for first, last in self.spans])


def parts_of(site: str, out_features: int, config: Any) -> tuple[Part, ...]:
    """Return the projections fused in a base's module; none if it is not fused or its layout is not known.

    Args:
        site: its module path.
        out_features: its width.
        config: the base's config.
    """
    kind, name = getattr(config, "model_type", None), site.rpartition(".")[2]
    if kind == "phi3" and name == "gate_up_proj":
        found = _in_sequence(_GATE_UP, (out_features // 2,) * 2)
    elif kind == "phi3" and name == "qkv_proj":
        queries, keys = _head_widths(config)
        found = _in_sequence(_QKV, (queries, keys, keys))
    elif kind == "gpt2" and name == "c_attn":
        found = _in_sequence(_QKV, (out_features // 3,) * 3)
    elif kind == "gpt_neox" and name == "query_key_value":
        found = _by_head(_QKV, config.num_attention_heads, out_features)
    else:
        return ()
    return found if sum(part.width for part in found) == out_features else ()


def separate_groups(sites: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return path of a fused module that a base could have had -> the separate modules it has instead."""
    have = set(sites)
    groups = {}
    for fused, parts in SEQUENTIAL.items():
        for site in sites:
            parent, dot, name = site.rpartition(".")
            members = tuple(f"{parent}{dot}{part}" for part in parts)
            path = f"{parent}{dot}{fused}"
            if name == parts[0] and path not in have and have.issuperset(members):
                groups[path] = members
    return groups


def _head_widths(config: Any) -> tuple[int, int]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * size, config.num_key_value_heads * size


def _in_sequence(names: Iterable[str], widths: Iterable[int]) -> tuple[Part, ...]:
    parts, at = [], 0
    for name, width in zip(names, widths, strict=True):
        parts.append(Part(name, ((at, at + width),)))
        at += width
    return tuple(parts)


def _by_head(names: tuple[str, ...], heads: int, out_features: int) -> tuple[Part, ...]:
    """Each head's outputs lie together: those of the first projection, then the second's, then the third's."""
    size = out_features // heads // len(names)
    firsts = [head * size * len(names) for head in range(heads)]
    return tuple(
        Part(name, tuple((first + number * size, first + (number + 1) * size) for first in firsts))
        for number, name in enumerate(names)
    )
