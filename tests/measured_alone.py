"""What a recorder should measure, computed by transformers' own model on one sequence alone; shared by tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from models import Adapter
from torch import Tensor, nn

from workbench.instrument.trace import Trace


@dataclass
class Alone:
    """Values of one sequence.

    Attributes:
        logits: `[token, vocab]`.
        layers: `[token, layer + 1]`, norms of the layers' outputs and of the state after the final norm.
        deltas: `[token, site, adapter]`, ‖w·BAx‖ / ‖Wx‖.
    """

    logits: Tensor
    layers: Tensor
    deltas: Tensor


@torch.no_grad()
def measured_alone(
    model: nn.Module, adapters: Mapping[str, Adapter], sites: Sequence[str], weights: Tensor, ids: Sequence[int]
) -> Alone:
    """Run `ids` with adapters weighted by `weights` `[token, site, adapter]`; hooks add the deltas and measure."""
    factors = [(adapter, adapter.factors(model)) for adapter in adapters.values()]
    deltas = torch.zeros(len(ids), len(sites), len(factors))

    def add(index: int, site: str):
        def hook(module, inputs, output):
            bias = getattr(module, "bias", None)
            x, base = inputs[0].reshape(len(ids), -1), output.reshape(len(ids), -1)
            base = base if bias is None else base - bias
            for column, (adapter, tensors) in enumerate(factors):
                if f"base_model.model.{site}.lora_A.weight" in tensors:
                    down, up = (tensors[f"base_model.model.{site}.lora_{half}.weight"].float() for half in "AB")
                    moved = weights[:, index, column, None] * (x @ down.T @ up.T) * adapter.scale_at(site)
                    deltas[:, index, column] = moved.norm(dim=-1) / base.norm(dim=-1)
                    output = output + moved.view(output.shape)
            return output

        return model.get_submodule(site).register_forward_hook(hook)

    norms: list[Tensor] = []
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    layers = next(each for each in lists if len(each) == model.config.num_hidden_layers)
    handles = [add(index, site) for index, site in enumerate(sites)]
    for layer in layers:
        handles.append(
            layer.register_forward_hook(
                lambda module, inputs, output: norms.append((output[0] if isinstance(output, tuple) else output)[0])
            )
        )
    try:
        done = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    states = done.hidden_states
    assert len(norms) == len(layers) == len(states) - 1
    for ours, theirs in zip(norms[:-1], states[1:-1], strict=True):
        assert torch.equal(ours, theirs[0]), "transformers' own hidden states are those of the layers"
    lengths = torch.stack([each.norm(dim=-1) for each in (*norms, states[-1][0])], 1)
    return Alone(done.logits[0], lengths, deltas)


def assert_measured(trace: Trace, alone: Alone, every: int = 1, tolerance: float = 1e-4) -> None:
    """Check everything a trace measured against a sequence alone; positions that did not run have to be missing."""
    num_inputs = len(alone.logits)
    should = torch.arange(trace.num_tokens) % every == 0
    should[num_inputs:] = False
    should[: trace.metadata["cached_tokens"]] = False
    assert should.any()
    for name, expected in {"hidden_norm": alone.layers, "delta_norm": alone.deltas}.items():
        if name in trace.extras:
            values = torch.from_numpy(trace.extra(name).values)
            assert torch.equal(~values.isnan().flatten(1).any(1), should), f"{name} is missing, or is there too often"
            torch.testing.assert_close(values[should], expected[should[:num_inputs]], rtol=tolerance, atol=tolerance)
    answered = should & (torch.arange(trace.num_tokens) >= trace.prompt_tokens - 1)
    assert_answers(trace, alone, answered, tolerance)


def assert_answers(trace: Trace, alone: Alone, answered: Tensor, tolerance: float = 1e-4) -> None:
    """Check entropy and top tokens where `answered` (bool `[token]`), and that there are none elsewhere."""
    logprobs = torch.log_softmax(alone.logits.double(), -1)
    entropy = torch.from_numpy(trace.extra("entropy").values)
    assert torch.equal(~entropy.isnan(), answered)
    expected = -(logprobs.exp() * logprobs).sum(-1)[answered[: len(logprobs)]]
    torch.testing.assert_close(entropy[answered].double(), expected, rtol=0, atol=tolerance)
    ids = torch.from_numpy(trace.extra("logits:top.ids").values)
    values = torch.from_numpy(trace.extra("logits:top.logprobs").values)
    assert torch.equal((ids >= 0).all(1), answered) and torch.equal(~values.isnan().any(1), answered)
    top = logprobs[answered[: len(logprobs)]].topk(ids.shape[1])
    torch.testing.assert_close(values[answered].double(), top.values, rtol=0, atol=tolerance)
    gaps = top.values.diff(dim=1).abs().amin(1) > 10 * tolerance
    assert torch.equal(ids[answered][gaps], top.indices[gaps]) and gaps.any()
