"""Measure the shipped mixture on held-out text, in float32, and write results.json.

Four questions: how much each adapter lowers the perplexity of its own domain; how much of that the mixture keeps;
how often the right adapter leads on a passage of one domain; and whether each segment of the demo prompt is led by
the right adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from corpora import DOMAINS, build
from mixture import Mixture, softmax_scalings
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the converted pinned base")
    parser.add_argument("--packages", type=Path, required=True, help="where the Debian packages were unpacked")
    parser.add_argument("--mixture", type=Path, required=True, help="the folder with xlora_config.json")
    parser.add_argument("--passages", type=int, default=64, help="held-out passages per domain, of 128 tokens each")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32).requires_grad_(False)
    mixture = Mixture(model, [args.mixture / domain for domain in DOMAINS])
    classifier = read_classifier(args.mixture)
    start = time.time()
    results = {"dtype": "float32", "tokens_per_passage": LENGTH, "passages_per_domain": args.passages, "domains": {}}
    for domain in DOMAINS:
        batches = passages(domain, tokenizer, args.packages, args.passages).split(8)
        results["domains"][domain] = measure(domain, batches, mixture, classifier)
        print(domain, json.dumps(results["domains"][domain]), f"{time.time() - start:.0f} s", flush=True)
    results["demo_prompt"] = demo_prompt(args.mixture, tokenizer, mixture, classifier)
    print(json.dumps(results["demo_prompt"], indent=1))
    args.out.write_text(json.dumps(results, indent=2) + "\n")


def read_classifier(folder: Path) -> nn.Linear:
    tensors = load_file(folder / "xlora_classifier.safetensors")
    classifier = nn.Linear(*reversed(tensors["last.weight"].shape))
    classifier.load_state_dict({"weight": tensors["last.weight"].float(), "bias": tensors["last.bias"].float()})
    return classifier.requires_grad_(False)


def passages(domain: str, tokenizer, packages: Path, count: int) -> Tensor:
    """Return `count` passages spread evenly over the held-out text, int64 [passage, LENGTH]."""
    rows = tokenizer(list(build(domain, packages).held_out), add_special_tokens=False)["input_ids"]
    ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    starts = np.linspace(0, len(ids) - LENGTH, count).astype(int)
    return torch.from_numpy(np.stack([ids[start:start + LENGTH] for start in starts]))


def measure(domain: str, batches: tuple[Tensor, ...], mixture: Mixture, classifier: nn.Linear) -> dict:
    """Return the losses (nats per token), perplexities and shares of one domain's passages."""
    right = DOMAINS.index(domain)
    losses: dict[str, list[Tensor]] = {"base": [], "mixture": [], **{name: [] for name in DOMAINS}}
    shares = []
    for ids in batches:
        scalings = softmax_scalings(classifier, mixture.hidden(ids), len(DOMAINS))
        shares.append(scalings.mean(dim=(1, 2)))
        with torch.no_grad():
            losses["base"].append(mixture.loss(ids, None))
            losses["mixture"].append(mixture.loss(ids, scalings))
            for index, name in enumerate(DOMAINS):
                one = nn.functional.one_hot(torch.tensor(index), len(DOMAINS)).float()
                losses[name].append(mixture.loss(ids, one.expand_as(scalings)))
    mean = {name: float(torch.cat(values).mean()) for name, values in losses.items()}
    share = torch.cat(shares)
    perplexity = {name: math.exp(loss) for name, loss in mean.items()}
    return {
        "loss": rounded(mean), "perplexity": rounded(perplexity),
        "perplexity_drop": round(1 - perplexity[domain] / perplexity["base"], 4),
        "mixture_perplexity_drop": round(1 - perplexity["mixture"] / perplexity["base"], 4),
        "gain_kept": round((mean["base"] - mean["mixture"]) / (mean["base"] - mean[domain]), 4),
        "gain_kept_in_perplexity": round(
            (perplexity["base"] - perplexity["mixture"]) / (perplexity["base"] - perplexity[domain]), 4),
        "right_adapter_leads": round(float((share.argmax(-1) == right).float().mean()), 4),
        "mean_share": rounded(dict(zip(DOMAINS, share.mean(0).tolist(), strict=True))),
    }


def demo_prompt(folder: Path, tokenizer, mixture: Mixture, classifier: nn.Linear) -> list[dict]:
    """Return, for each segment of the one prompt made of all four, its mean scalings and its leading adapter."""
    segments = json.loads((folder / "prompts.json").read_text())
    text = "\n\n".join(segment["text"] for segment in segments)  # as `workbench demo` joins them
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    scalings = softmax_scalings(classifier, mixture.hidden(torch.tensor([encoded["input_ids"]])), len(DOMAINS))
    share, starts = scalings[0].mean(1), [offset[0] for offset in encoded["offset_mapping"]]
    found, begin = [], 0
    for segment in segments:
        end = begin + len(segment["text"])
        rows = share[[begin <= start < end for start in starts]]
        mean = dict(zip(DOMAINS, rows.mean(0).tolist(), strict=True))
        found.append({"domain": segment["domain"], "top_adapter": max(mean, key=mean.get), "tokens": len(rows),
                      "share": rounded(mean)})
        begin = end + len("\n\n")
    return found


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


if __name__ == "__main__":
    main()
