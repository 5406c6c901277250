"""CPU: linear weights reordered once into oneDNN's blocked layout, instead of in every call.

The op is private to torch, so it is tried before it is trusted; where it is missing or wrong, layers stay as they are.
A forward of 128 rows of SmolLM2 took about half the time (float32, two AVX-512 cores, torch 2.13).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's layout only; `weight` unpacks it, exactly."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), 1)

    @property
    def weight(self) -> Tensor:
        """The weight `[out, in]`, a new dense copy."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def prepack(model: nn.Module) -> int:
    """Replace the model's linear layers by packed ones, one at a time; return how many were."""
    if not works(model.dtype) or model.device.type != "cpu":
        return 0
    # a quantised layer is an nn.Linear too, with a weight of another class
    plain = (nn.Linear, nn.Parameter)
    layers = [(name, m) for name, m in model.named_modules() if type(m) is plain[0] and type(m.weight) is plain[1]]
    for name, layer in layers:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(layer))
    return len(layers)


@functools.cache
def works(dtype: torch.dtype) -> bool:
    """Whether the packed layer agrees with `F.linear` here, in this dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    layer = nn.Linear(33, 17, dtype=dtype).requires_grad_(False)
    x = torch.randn(5, 33, dtype=dtype)
    try:
        packed = PackedLinear(layer)
        same = torch.equal(packed.weight, layer.weight)
        return same and torch.allclose(packed(x), F.linear(x, layer.weight, layer.bias), rtol=2e-2, atol=1e-4)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
