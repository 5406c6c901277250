"""Which modules LoRA can change, and what a base's weight there is, whatever holds it.

A linear-like module is recognised by its two widths, so that layers of quantisation libraries are found without
importing the libraries. Its output is all a plain LoRA needs; DoRA needs the weight too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from workbench.adapters.projections import Part
from workbench.errors import UserError

# `in_features` is torch's name and bitsandbytes', AWQ's, HQQ's, torchao's; `infeatures` is AutoGPTQ's
_WIDTHS = (("in_features", "out_features"), ("infeatures", "outfeatures"))


@dataclass(frozen=True)
class LoRATargetModule:
    """A site of a base model: a linear module or an embedding that LoRA can change.

    Attributes:
        name: module path, `model.layers.3.self_attn.q_proj`.
        in_features, out_features: its widths; an embedding's are the number of tokens and the width of a row.
        is_embedding: whether it looks up rows instead of multiplying.
        parts: the projections fused in it, where the layout of its outputs is known.
        weight: returns its weight `[out, in]`, float32 or as stored; None where only the structure is known.
    """

    name: str
    in_features: int
    out_features: int
    is_embedding: bool = False
    parts: tuple[Part, ...] = ()
    weight: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)


def widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear-like module, None for any other."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        wide_in, wide_out = module.weight.shape
        return wide_in, wide_out
    for names in _WIDTHS:
        wide_in, wide_out = (getattr(module, name, None) for name in names)
        if type(wide_in) is int and type(wide_out) is int:
            return wide_in, wide_out
    return None


def embedding_widths(module: nn.Module, is_input: bool) -> tuple[int, int] | None:
    """Return (tokens, width) of an embedding that is called with ids alone, None for any other module.

    Subclasses may compute ids of their own (OPT's positions are offset), so only the model's input embedding may be
    one. An embedding with `max_norm` rewrites its weight when it is used.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    return (module.num_embeddings, module.embedding_dim) if is_input or type(module) is nn.Embedding else None


def dense_weight(module: nn.Module) -> Tensor:
    """Return the weight `[out, in]` of a linear-like module or, transposed, of an embedding.

    Raises:
        UserError: it is packed or quantised in a way that we cannot read; the text is the reason.
    """
    from transformers.pytorch_utils import Conv1D

    weight = getattr(module, "weight", None)
    # only a class that dequantises in its own way: torch's own method turns any codes into floats
    if isinstance(weight, Tensor) and getattr(type(weight), "dequantize", None) is not Tensor.dequantize:
        weight = _dequantised(weight)
    transposed = isinstance(module, (Conv1D, nn.Embedding))
    wide_in, wide_out = widths_of(module) or (module.num_embeddings, module.embedding_dim)
    want = (wide_in, wide_out) if transposed else (wide_out, wide_in)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.shape != want:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise UserError(f"the weight of that {kind} is packed or quantised and cannot be read")
    return (weight.T if transposed else weight).detach()


def _dequantised(weight: Tensor) -> Tensor | None:
    try:
        return weight.dequantize()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # not on this device, or not yet quantised
        return None


def row_norms(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return float32 `[out]` on the host: the norm of each row of W + BA.

    Args:
        weight: W, `[out, in]`.
        a: `[rank, in]`.
        b: `[rank, out]`, B transposed, scale included.
    """
    # not in inference mode: the numbers outlive the step that may be running
    with torch.inference_mode(False), torch.no_grad():
        device = weight.device
        whole = torch.addmm(weight.float(), b.to(device).T, a.to(device))
        return torch.linalg.vector_norm(whole, dim=1).cpu()
