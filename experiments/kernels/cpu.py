"""What adapters cost on a CPU: rows of several adapters, merged and mixed, over the same rows of the base model.

Example:
    python experiments/kernels/cpu.py --rows 16 --rounds 40 --threads 2

`layers` times the 210 linear layers of the demo base one after the other, without and with the deltas of synthetic
adapters. `forward` times whole decode forwards of the engine's model, logits included, that differ in nothing but what
their rows want. `engine` times decode steps of the engine, scheduling and sampling included. Kinds alternate, each once
per round in an order of its own; a figure is the median over rounds of the ratio to the base's call of the same round,
with the quartiles. Results go to experiments/kernels/results/cpu.json with the machine and its load, one entry per run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_kernels.segments import segments
from workbench import Engine
from workbench.adapters import LoRAConfig, partition
from workbench.adapters.linear import EVERY_SITE, LoRALinear, MixtureSegment, RowWeights
from workbench.engine.batch import StepBatch
from workbench.sweep.machine import environment
from workbench.sweep.synthetic import adapter_of_each, load_adapters, random_prompts, write_adapters, write_mixture

RESULTS = Path(__file__).parent / "results" / "cpu.json"
POPULARITIES = ("identical", "uniform", "skewed", "distinct")
NUM_ADAPTERS = 4  # of "uniform", of merges and of the mixture
STEPS = 5  # timed at a stretch by `engine`


@dataclass(frozen=True)
class Kind:
    """Rows that want the same sort of adapters.

    Attributes:
        name: what they are called.
        weights: their weights, made anew for every forward.
        in_loop: compute each adapter's rows in a call of their own, to compare.
    """

    name: str
    weights: Callable[[], RowWeights]
    in_loop: bool = False


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="decode rows of a forward")
    parser.add_argument("--rank", type=int, default=8, help="rank of every adapter")
    parser.add_argument("--rounds", type=int, default=40, help="calls of each kind, at least 4")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--parts", default="layers,forward,engine", help="any of layers, forward, engine")
    asked = parser.parse_args()
    parts = {"layers": layers, "forward": forward, "engine": steps}
    chosen = asked.parts.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(parts)}")
    if asked.rounds < 4 or asked.rows < 1 or asked.rank < 1 or asked.threads < 1:
        parser.error("--rounds must be at least 4, --rows, --rank and --threads at least 1")
    torch.set_num_threads(asked.threads)
    load = os.getloadavg()
    engine = Engine("demo", lora=LoRAConfig(max_num_loras=max(NUM_ADAPTERS, asked.rows)))
    with tempfile.TemporaryDirectory() as folder:
        targets, hidden_size = engine.model.targets, engine.model.hidden_size
        sources = write_adapters(Path(folder) / "adapters", targets, max(NUM_ADAPTERS, asked.rows), asked.rank)
        for name in load_adapters(engine, sources):
            engine.adapters.pin(name)
        mixture = write_mixture(Path(folder) / "mix", targets, hidden_size, NUM_ADAPTERS, asked.rank, engine.base_id, 1)
        engine.load_mixture(mixture, "mix")
    found = {"settings": vars(asked), "machine": environment("cpu"), "load_before": load}
    for name in chosen:
        found[name] = parts[name](engine, asked)
        print(table(name, found[name]), flush=True)
    found["load_after"] = os.getloadavg()
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    RESULTS.write_text(json.dumps([*known, found], indent=1) + "\n", encoding="utf-8")


def kinds(engine: Engine, num_rows: int) -> list[Kind]:
    """Return every kind of rows; the base's comes first."""
    every = [module.site for module in engine.model.model.modules() if isinstance(module, LoRALinear)]
    site_index = {site: index for index, site in enumerate(every)}
    few = tuple(range(NUM_ADAPTERS))
    scalings = torch.softmax(2 * torch.randn(num_rows, len(every), NUM_ADAPTERS), dim=-1)
    constant = torch.full((1, 1, NUM_ADAPTERS), 1 / NUM_ADAPTERS)
    half = num_rows // 2
    found = [Kind("base", lambda: RowWeights(num_rows)), Kind("base again", lambda: RowWeights(num_rows))]
    for popularity in POPULARITIES:
        slots = sorted(adapter_of_each(popularity, num_rows, max(num_rows, NUM_ADAPTERS) if popularity == "distinct"
                                       else NUM_ADAPTERS))  # fmt: skip
        found.append(Kind(popularity, lambda slots=slots: RowWeights(num_rows, segments(slots))))
    again = next(kind for kind in found if kind.name == "uniform")
    halves = adapter_of_each("uniform", half, NUM_ADAPTERS)

    def mixed(start: int, weights: Tensor, index: Any) -> MixtureSegment:
        return MixtureSegment(start, num_rows, few, weights, index)

    return [
        *found,
        Kind("uniform again", again.weights),
        Kind("uniform, in a loop", again.weights, in_loop=True),
        Kind("merged", lambda: RowWeights(num_rows, (), (mixed(0, constant, EVERY_SITE),))),
        Kind("xlora", lambda: RowWeights(num_rows, (), (mixed(0, scalings, site_index),))),
        Kind("xlora, half scaling rows", lambda: RowWeights(num_rows, (), (mixed(half, scalings[half:], site_index),))),
        Kind("lora and xlora", lambda: RowWeights(
            num_rows, segments(sorted(halves)), (mixed(half, scalings[half:], site_index),))),
    ]  # fmt: skip


def layers(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """The linear layers alone, each on an input of its own."""
    wrapped = [module for module in engine.model.model.modules() if isinstance(module, LoRALinear)]
    inputs = {width: torch.randn(1, asked.rows, width) for width in {layer.in_features for layer in wrapped}}
    pairs = [(layer, inputs[layer.in_features]) for layer in wrapped]

    def call(kind: Kind) -> float:
        began = time.perf_counter()
        weights = kind.weights()
        engine.model.routing.rows = None if weights.is_base else weights
        for layer, x in pairs:
            layer(x)
        engine.model.routing.rows = None
        return time.perf_counter() - began

    return compared(kinds(engine, asked.rows), call, asked.rounds)


def forward(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """Whole forwards of rows that are decoded: one row of each of as many requests."""
    batch = decode_batch(engine, asked.rows)

    def call(kind: Kind) -> float:
        began = time.perf_counter()
        own = replace(batch, weights=kind.weights())
        engine.model.logits(engine.model.hidden(own), own)
        return time.perf_counter() - began

    return compared(kinds(engine, asked.rows), call, asked.rounds)


def steps(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of the engine: as many requests as rows, each of which adds a row to every step."""
    names = list(engine.adapters.names())
    who: dict[str, list[dict[str, Any]]] = {
        "base": [{}] * asked.rows,
        "base again": [{}] * asked.rows,
        "uniform": [{"adapter": names[row % NUM_ADAPTERS]} for row in range(asked.rows)],
        # scalings of the last prompt token serve all later ones: one dense row a request
        "xlora, index 0": [{"mixture": "mix", "tgt_non_granular_index": 0}] * asked.rows,
    }
    prompts = random_prompts(asked.rows, 16, engine.model.vocab_size)
    kinds = [Kind(name, lambda: RowWeights(0)) for name in who]

    def call(kind: Kind) -> float:
        requests = [
            engine.enqueue(prompt, max_tokens=STEPS + 2, ignore_eos=True, **own)
            for prompt, own in zip(prompts, who[kind.name], strict=True)
        ]
        while not all(request.generated for request in requests):
            engine.step()
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        spent = (time.perf_counter() - began) / STEPS
        for request in requests:
            engine.cancel(request)
        return spent

    return compared(kinds, call, max(4, asked.rounds // STEPS))


def decode_batch(engine: Engine, num_rows: int) -> StepBatch:
    """Return the batch of a step in which `num_rows` requests of the base decode one row each."""
    seen: list[StepBatch] = []
    inner, requests = engine.model.hidden, []

    def watched(batch: StepBatch) -> Tensor:
        seen.append(batch)
        return inner(batch)

    engine.model.hidden = watched
    try:
        for prompt in random_prompts(num_rows, 64, engine.model.vocab_size):
            requests.append(engine.enqueue(prompt, max_tokens=64, ignore_eos=True))
        while not seen or len(seen[-1].spans) < num_rows or seen[-1].num_rows != num_rows:
            engine.step()
    finally:
        engine.model.hidden = inner
    for request in requests:
        # its blocks stay what they are until others need them
        engine.cancel(request)
    return seen[-1]


def compared(kinds: list[Kind], call: Callable[[Kind], float], rounds: int) -> dict[str, Any]:
    """Return each kind's median time, and its cost over the base in percent of the base; a call returns seconds."""
    order = random.Random(0)
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    with torch.inference_mode():
        for kind in kinds * 2:
            call(kind)
        for _ in range(rounds):
            for kind in order.sample(kinds, len(kinds)):
                with calls_cost_nothing(kind.in_loop):
                    times[kind.name].append(call(kind))
    found = {}
    for name, own in times.items():
        extra = [100 * (mine / base - 1) for mine, base in zip(own, times["base"], strict=True)]
        low, median, high = statistics.quantiles(extra, n=4)
        fastest = [statistics.quantiles(each, n=10)[0] for each in (own, times["base"])]
        found[name] = {
            "median_ms": round(1000 * statistics.median(own), 3),
            "extra_percent": round(median, 1), "quartiles_percent": [round(low, 1), round(high, 1)],
            "throughput_kept": round(1 / (1 + median / 100), 3),
            "extra_percent_of_fastest_tenth": round(100 * (fastest[0] / fastest[1] - 1), 1),
        }  # fmt: skip
    return found


@contextmanager
def calls_cost_nothing(chosen: bool) -> Iterator[None]:
    """While open, if chosen, neighbouring segments share no call unless they lose nothing by it."""
    if not chosen:
        yield
        return
    known, partition.CALL_MACS = partition.CALL_MACS, 0
    partition.partition.cache_clear()
    try:
        yield
    finally:
        partition.CALL_MACS = known
        partition.partition.cache_clear()


def table(title: str, found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{title:26} median ms   extra %   (quartiles)      fastest tenth %   throughput kept"]
    for name, each in found.items():
        low, high = each["quartiles_percent"]
        lines.append(
            f"{name:26} {each['median_ms']:9.2f} {each['extra_percent']:9.1f}   ({low:5.1f} to {high:5.1f})"
            f" {each['extra_percent_of_fastest_tenth']:12.1f} {each['throughput_kept']:17.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
