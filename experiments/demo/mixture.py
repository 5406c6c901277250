"""The X-LoRA forward in its shortest exact form, used to train the demo's classifier and to measure it.

This is independent of the engine on purpose: the figures in the model card do not depend on the code they
are meant to check.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")


def sites(model: nn.Module) -> list[str]:
    """Return the adapted module paths in registration order: q, k, v, o, gate of each block."""
    return [name for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS]


class Mixture:
    """A frozen base with every adapter at every site, weighted per token and site.

    `down[site]` is [adapter * rank, in], `up[site]` is [out, adapter * rank] with alpha/rank folded in, both in the
    base's dtype.
    """

    def __init__(self, model: nn.Module, folders: list[Path]) -> None:
        self.model = model
        self.sites = sites(model)
        self.num_adapters = len(folders)
        self.scalings: Tensor | None = None
        self._stack(folders)
        for index, site in enumerate(self.sites):
            model.get_submodule(site).register_forward_hook(self._hook(index))

    def _stack(self, folders: list[Path]) -> None:
        dtype = self.model.dtype
        loaded = [(load_file(folder / "adapter_model.safetensors"),
                   json.loads((folder / "adapter_config.json").read_text())) for folder in folders]
        self.rank = loaded[0][1]["r"]
        self.down, self.up = [], []
        for site in self.sites:
            key = f"base_model.model.{site}.lora_"
            self.down.append(torch.cat([tensors[key + "A.weight"].float() for tensors, _ in loaded]).to(dtype))
            self.up.append(torch.cat([tensors[key + "B.weight"].float() * (config["lora_alpha"] / config["r"])
                                      for tensors, config in loaded], dim=1).to(dtype))

    def _hook(self, index: int):
        def add_deltas(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if self.scalings is None:
                return output
            weights = self.scalings[..., index, :].repeat_interleave(self.rank, dim=-1).to(output.dtype)
            return output + (inputs[0] @ self.down[index].T * weights) @ self.up[index].T
        return add_deltas

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the base's hidden states after the final norm, float32 [batch, token, hidden]."""
        self.scalings = None
        with torch.no_grad():
            return self.model.model(ids, use_cache=False).last_hidden_state.float()

    def loss(self, ids: Tensor, scalings: Tensor | None) -> Tensor:
        """Return the next-token loss in nats, float32 [batch, token - 1]; `scalings` [batch, token, site, adapter]."""
        self.scalings = scalings
        logits = self.model(ids, use_cache=False).logits[:, :-1]
        self.scalings = None
        return nn.functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


def softmax_scalings(classifier: nn.Linear, hidden: Tensor, num_adapters: int) -> Tensor:
    """Return the scalings float32 [batch, token, site, adapter]; output unit `site * num_adapters + adapter`."""
    return classifier(hidden).unflatten(-1, (-1, num_adapters)).softmax(dim=-1)
