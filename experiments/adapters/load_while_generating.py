"""Do tokens keep coming while adapters load? `python load_while_generating.py`; JSON on the last line.

Four requests generate all the time on one thread. Another loads twenty adapters of 10 MB each; the seventh comes from a
disk that takes three seconds. Compared: the gaps between steps before, and while, the loads run. The slow adapter's
own requests wait; nobody else does. No figure is printed unless the tokens are those of a run without loads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench import Engine
from workbench.adapters import LoRAConfig
from workbench.adapters.reading import Reader

SLOW, SLOW_S, LOADS, RANK = "adapter-6", 3.0, 20, 64
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = {"ignore_eos": True}


def base(folder: Path) -> LlamaForCausalLM:
    """Write a small random llama whose adapters of rank 64 have 10 MB, and return it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )).eval().requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def adapter(folder: Path, model: LlamaForCausalLM, number: int) -> Path:
    """Write the random adapter of this number and return its folder."""
    generator = torch.Generator().manual_seed(number)
    folder.mkdir(parents=True)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(SITES):
            down = torch.randn(RANK, module.in_features, generator=generator) * module.in_features**-0.5
            up = torch.randn(module.out_features, RANK, generator=generator) * RANK**-0.5 / 3
            tensors |= {f"base_model.model.{name}.lora_{half}.weight": t for half, t in (("A", down), ("B", up))}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(SITES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def slow_disk() -> None:
    """Make reading one adapter take three seconds."""
    real = Reader.read

    def read(reader: Reader, name: str, source: str, where: Any) -> Any:
        if name == SLOW:
            time.sleep(SLOW_S)
        return real(reader, name, source, where)

    Reader.read = read


def generate(engine: Engine, requests: list, until: Any, gaps: list[float]) -> None:
    """Step until `until()`, and keep the time of each step."""
    while not until():
        started = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - started)
        if any(request.finish_reason for request in requests):
            sys.exit("a request ended too early: no figures")


def gaps_of(name: str, gaps: list[float]) -> dict[str, float]:
    """Return the figures of one phase."""
    ordered = sorted(gaps)
    return {
        f"{name}_steps": len(gaps), f"{name}_gap_ms_median": 1e3 * statistics.median(gaps),
        f"{name}_gap_ms_p99": 1e3 * ordered[int(0.99 * (len(gaps) - 1))], f"{name}_gap_ms_max": 1e3 * ordered[-1],
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    slow_disk()
    with tempfile.TemporaryDirectory() as root:
        model = base(Path(root) / "base")
        sources = {f"adapter-{i}": adapter(Path(root) / f"adapter-{i}", model, i) for i in range(LOADS)}
        first = adapter(Path(root) / "first", model, 99)
        engine = Engine(Path(root) / "base", lora=LoRAConfig(max_num_loras=4))
        engine.load_adapter(first, pinned=True)
        prompts = [[2 + number, 3, 4, 5] for number in range(4)]
        requests = [engine.enqueue(p, adapter="first", max_tokens=3000, **OPTIONS) for p in prompts]
        quiet, busy, slow = [], [], []
        generate(engine, requests, lambda: len(quiet) == 300, quiet)
        answers, ended = {}, {}

        def load_all() -> None:
            answers.update(engine.adapters.load_all(sources))
            ended["all"] = time.perf_counter()

        started = time.perf_counter()
        loader = threading.Thread(target=load_all)
        loader.start()
        generate(engine, requests, lambda: len(engine.adapters.names()) == LOADS, busy)  # all but the slow one
        ended["others"] = time.perf_counter()
        if SLOW in engine.adapters:
            sys.exit("the slow adapter was not slow: no figures")
        probe = engine.enqueue(prompts[0], adapter="adapter-19", max_tokens=3, **OPTIONS)
        generate(engine, requests, lambda: "all" in ended, slow)
        loader.join()
        if probe.finish_reason != "length" or not all(answer.ok for answer in answers.values()):
            sys.exit("an adapter that was loaded did not run: no figures")
        tokens = [list(request.generated) for request in requests]
        for request in requests:
            engine.cancel(request)
        undisturbed = Engine(Path(root) / "base")
        undisturbed.load_adapter(first)
        count = min(len(each) for each in tokens)
        again = undisturbed.generate(prompts, adapter="first", max_tokens=count, **OPTIONS)
        if [each[:count] for each in tokens] != [list(each.token_ids) for each in again]:
            sys.exit("tokens differ from those of a run without loads: no figures")
        print(json.dumps({
            "loads": LOADS, "bytes_each": engine.adapters.entries()[0].num_bytes, "slow_s": SLOW_S,
            "others_loaded_s": ended["others"] - started, "all_loaded_s": ended["all"] - started,
            **gaps_of("quiet", quiet), **gaps_of("loading", busy), **gaps_of("one_slow", slow),
            "tokens_while_loading": 4 * (len(busy) + len(slow)), "tokens_checked": 4 * count,
            "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
            "torch": torch.__version__,
        }))


if __name__ == "__main__":
    main()
