"""Adapters that PEFT makes and saves, or that no tool makes, and the logits an engine gives with them."""

import json

import torch
from models import Probe, random_ids, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from workbench import Engine
from workbench.engine.hf import linear_targets

TOLERANCE = 1e-5
IDS = random_ids(12, seed=3)
PROMPT = 4


def run(engine: Engine, names, ids=IDS) -> dict[str, torch.Tensor]:
    """Return name -> logits `[token, vocab]` of each (None is the base): all in one batch, decoded and whole."""
    probe = Probe(engine, forced={f"{name}": ids[PROMPT:] for name in names})
    for name in names:
        engine.enqueue(ids[:PROMPT], request_id=f"{name}", adapter=name, max_tokens=len(ids) - PROMPT, ignore_eos=True)
        engine.enqueue(ids, request_id=f"{name} whole", adapter=name, max_tokens=1, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
    probe.close()
    found = {}
    for name in names:
        decoded = probe.decoded(f"{name}", PROMPT - 1, len(ids) - PROMPT)
        found[name] = torch.cat([decoded, probe.decoded(f"{name} whole", len(ids) - 1, 1)])
    return found


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([IDS])).logits[0, PROMPT - 1 :]


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    error = float((left - right).abs().max())
    return error if error == error else float("inf")


def write(folder, tensors, rank, alpha, targets, **config):
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def edit(folder, change, **config):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))


def peft_saves(folder, kind, targets, changes=None, seed=0, **config):
    """Let PEFT make, fill and save an adapter; return its own logits."""
    made = get_peft_model(
        tiny_model(kind, **(changes or {})), LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **config)
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in made.named_parameters():
        if "magnitude" in name:
            value.data *= 0.5 + torch.rand(value.shape, generator=generator)
        elif "lora_" in name:
            value.data.copy_(0.2 * torch.randn(value.shape, generator=generator))
    made.save_pretrained(folder)
    return logits_of(made)


def separate_adapter(model, rank: int = 3, chosen=None):
    """Return an adapter on the separate projections of a fused base, and site -> the change of the fused weight."""
    generator = torch.Generator().manual_seed(7)
    tensors, deltas = {}, {}
    for site, target in linear_targets(model).items():
        for part in target.parts:
            if chosen and part.name not in chosen:
                continue
            down = torch.randn(rank, target.in_features, generator=generator) * target.in_features**-0.5
            up = torch.randn(part.width, rank, generator=generator) * 0.2 * rank**-0.5
            path = f"base_model.model.{site.rpartition('.')[0]}.{part.name}"
            tensors |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
            delta = deltas.setdefault(site, torch.zeros(target.out_features, target.in_features))
            delta[part.outputs] += 2.0 * up @ down
    return tensors, deltas
