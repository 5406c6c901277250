"""Train the demo: four LoRA adapters, then an X-LoRA classifier over them, on two CPU cores in under an hour.

Each adapter is saved as soon as it is done, and a rerun goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpora import DOMAINS, build
from mixture import TARGETS, Mixture, sites, softmax_scalings
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE_ID = "lora-workbench/smollm2-135m-instruct-q4_1"
RANK, ALPHA = 4, 8
BATCH, LENGTH = 4, 128
ADAPTER_STEPS = {"python": 240, "german": 160, "spanish": 160, "scripture": 160}
ADAPTER_RATE, CLASSIFIER_RATE = 2e-3, 1e-3


@dataclass(frozen=True)
class Round:
    """A stretch of the classifier's training; `naming` weighs the term that names the right adapter."""

    steps: int
    naming: float


# After the first round the mixture kept only 82 % of the Python adapter's gain: its scalings were too soft.
ROUNDS = (Round(steps=140, naming=0.1), Round(steps=100, naming=0.3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the converted pinned base")
    parser.add_argument("--packages", type=Path, required=True, help="where the Debian packages were unpacked")
    parser.add_argument("--out", type=Path, required=True, help="folder the mixture is written to")
    parser.add_argument("--cache", type=Path, required=True, help="folder for tokenised corpora")
    args = parser.parse_args()
    streams = {domain: token_stream(domain, args.base, args.packages, args.cache) for domain in DOMAINS}
    for domain in DOMAINS:
        if not (args.out / domain / "adapter_model.safetensors").exists():
            train_adapter(domain, streams[domain], args.base, args.out / domain)
    train_classifier(streams, args.base, args.out, args.cache)


def token_stream(domain: str, base: Path, packages: Path, cache: Path) -> np.ndarray:
    """Return the training documents of `domain` as one row of token ids, in an order fixed by their content."""
    path = cache / f"{domain}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(base)
        ids = tokenizer(list(build(domain, packages).train), add_special_tokens=False)["input_ids"]
        np.save(path, np.concatenate([np.asarray(row, dtype=np.int32) for row in ids]))
    stream = np.load(path)
    print(f"{domain}: {len(stream)} training tokens", flush=True)
    return stream


def train_adapter(domain: str, stream: np.ndarray, base: Path, out: Path) -> None:
    """Train one LoRA adapter on random windows of `stream` and save it as PEFT does, in float16."""
    torch.manual_seed(DOMAINS.index(domain))
    windows = np.random.default_rng(DOMAINS.index(domain))
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    steps = ADAPTER_STEPS[domain]
    optimizer, schedule = optimiser(model.parameters(), ADAPTER_RATE, steps)
    start, losses = time.time(), []
    for step in range(steps):
        ids = torch.stack([window(stream, LENGTH, windows) for _ in range(BATCH)])
        loss = model(ids, labels=ids, use_cache=False).loss
        losses.append(float(take_step(loss, model, optimizer, schedule)))
        if step % 10 == 9:
            report(domain, step, steps, start, loss=np.mean(losses[-10:]))
    model.peft_config["default"].base_model_name_or_path = BASE_ID
    model.half().save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)


def train_classifier(streams: dict[str, np.ndarray], base: Path, out: Path, cache: Path) -> None:
    """Train the classifier over the frozen adapters, one round after the other, and write the mixture."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).requires_grad_(False)
    mixture = Mixture(model, [out / domain for domain in DOMAINS])
    newline = int(AutoTokenizer.from_pretrained(base)("\n")["input_ids"][0])
    classifier = nn.Linear(model.config.hidden_size, len(mixture.sites) * len(DOMAINS))
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    for number, settings in enumerate(ROUNDS):
        path = cache / f"classifier-{number}.safetensors"
        if not path.exists():
            train_round(settings, classifier, mixture, lambda generator: passage(streams, newline, generator), number)
            save_file({"last." + name: tensor.half() for name, tensor in classifier.state_dict().items()}, path)
        saved = load_file(path)
        classifier.load_state_dict({name: saved["last." + name].float() for name in ("weight", "bias")})
    write_mixture(model, path, out)


def train_round(settings: Round, classifier: nn.Linear, mixture: Mixture, draw, number: int) -> None:
    """Train `classifier` in place on passages of one, two and four domains; `draw(generator)` gives one of them."""
    generator = np.random.default_rng(100 + number)
    optimizer, schedule = optimiser(classifier.parameters(), CLASSIFIER_RATE, settings.steps)
    start = time.time()
    for step in range(settings.steps):
        pairs = [draw(generator) for _ in range(BATCH)]
        ids, owners = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
        scalings = softmax_scalings(classifier, mixture.hidden(ids), len(DOMAINS))
        modelling = mixture.loss(ids, scalings).mean()
        right = scalings.gather(-1, owners[..., None, None].expand(*scalings.shape[:-1], 1))
        naming = -right.clamp_min(1e-9).log().mean()
        take_step(modelling + settings.naming * naming, classifier, optimizer, schedule)
        if step % 10 == 9:
            figures = {"loss": modelling, "naming": naming, "right": right.mean()}
            report(f"classifier {number}", step, settings.steps, start, **figures)


def optimiser(parameters, rate: float, steps: int):
    """Return AdamW over the trainable parameters with a warm-up of a tenth and a cosine to a tenth of the rate."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=rate, weight_decay=0.0)
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        return min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def take_step(loss: Tensor, module: nn.Module, optimizer, schedule) -> Tensor:
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    return loss.detach()


def window(stream: np.ndarray, length: int, generator: np.random.Generator) -> Tensor:
    """Return `length` consecutive token ids from a random place, int64."""
    start = int(generator.integers(0, len(stream) - length))
    return torch.from_numpy(stream[start:start + length].astype(np.int64))


def passage(streams: dict[str, np.ndarray], newline: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return (token ids, index of the right adapter), both int64 [LENGTH], for one, two or four domains in turn."""
    count = int(generator.choice([1, 2, 4], p=[0.4, 0.35, 0.25]))
    order = generator.permutation(len(DOMAINS))[:count]
    cuts = {1: [], 2: [int(generator.integers(24, LENGTH - 24))], 4: [LENGTH // 4, LENGTH // 2, LENGTH * 3 // 4]}[count]
    bounds = [0, *cuts, LENGTH]
    ids, owners = [], []
    for domain, start, stop in zip(order, bounds, bounds[1:], strict=False):
        piece = window(streams[DOMAINS[domain]], stop - start, generator)
        if stop < LENGTH:
            piece[-1] = newline
        ids.append(piece)
        owners.append(torch.full((stop - start,), int(domain)))
    return torch.cat(ids), torch.cat(owners)


def write_mixture(model: nn.Module, classifier: Path, out: Path) -> None:
    """Write the classifier, its configuration and the ordering in the layout of the xlora package."""
    shutil.copyfile(classifier, out / "xlora_classifier.safetensors")
    config = {"base_model_id": BASE_ID, "hidden_size": model.config.hidden_size, "adapters": list(DOMAINS),
              "enable_softmax": True, "enable_softmax_topk": False, "softmax_temperature": 1.0,
              "layerwise_scalings": True, "top_k_lora": None, "xlora_depth": 1, "xlora_size": 2048,
              "enable_relu_and_dropout": True, "use_bias": True, "xlora_dropout_p": 0.2,
              "use_trainable_adapters": False, "scaling_pass_value": 0.0, "global_scaling_weight": 1.0}
    ordering = {"order": list(DOMAINS), "layers": {site: index for index, site in enumerate(sites(model))},
                "base_model_id": BASE_ID}
    for name, data in (("xlora_config.json", config), ("ordering.json", ordering)):
        (out / name).write_text(json.dumps(data, indent=2) + "\n")


def report(what: str, step: int, steps: int, start: float, **figures: float) -> None:
    shown = "  ".join(f"{name} {float(value):.3f}" for name, value in figures.items())
    print(f"{what} {step + 1}/{steps}  {shown}  {(time.time() - start) / (step + 1):.2f} s/step", flush=True)


if __name__ == "__main__":
    main()
