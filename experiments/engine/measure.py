"""What the engine's machinery saves and costs: the prefix cache, running together, and a step's own Python.

Example:
    python experiments/engine/measure.py --parts prefix,together,steps --rounds 7

Every figure is a ratio of medians of rounds that alternate between the two sides, on the demo base and mixture, in
float32. Results go to experiments/engine/results/measure.json with the machine and its load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from workbench import Engine
from workbench.instrument.run_meta import cpu_name

RESULTS = Path(__file__).parent / "results" / "measure.json"
WHO: dict[str, dict[str, Any]] = {"base": {}, "lora": {"adapter": "python"}, "xlora": {"mixture": "demo"}}


def main() -> None:
    """Run the parts asked for and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="prefix,together,steps", help="any of prefix, together, steps")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each pair, at least 1")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="prompt length of the prefix part")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated in the other parts")
    asked = parser.parse_args()
    engine = Engine.from_mixture("demo")
    engine.load_adapter("demo/python")
    results: dict[str, Any] = {}
    parts = {"prefix": prefix, "together": together, "steps": steps}
    for name in asked.parts.split(","):
        if name not in parts:
            parser.error(f"there is no part {name!r}; choose from {', '.join(parts)}")
        results[name] = parts[name](engine, asked)
        print(name, json.dumps(results[name], indent=1))
    results["machine"] = {
        "cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "load": os.getloadavg(), "date": time.strftime("%Y-%m-%d"),
        "rounds": asked.rounds,
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**known, **results}, indent=1) + "\n")


def prefix(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of a prompt that was seen before, over that of a new one."""
    found: dict[str, Any] = {}
    for name, who in WHO.items():
        first, second = [], []
        for round_ in tqdm(range(asked.rounds), desc=f"prefix {name}", leave=False):
            prompt = prompt_of(asked.prompt_tokens, 1000 + round_ + 100 * list(WHO).index(name))
            first.append(time_to_first(engine, prompt, who))
            second.append(time_to_first(engine, prompt, who))
        found[name] = compared(second, first)
    cold, warm, rows = [], [], []
    for round_ in tqdm(range(asked.rounds), desc="prefix xlora after base", leave=False):
        cold.append(time_to_first(engine, prompt_of(asked.prompt_tokens, 5000 + round_), WHO["xlora"]))
        prompt = prompt_of(asked.prompt_tokens, 6000 + round_)
        time_to_first(engine, prompt, WHO["base"])
        before = engine.counters()["scaling_rows"]
        warm.append(time_to_first(engine, prompt, WHO["xlora"]))
        rows.append(engine.counters()["scaling_rows"] - before)
    found["xlora after base"] = {**compared(warm, cold), "scaling_rows": statistics.median(rows)}
    return found


def together(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of 16 requests at once, over those of one alone."""
    found: dict[str, Any] = {}
    for name, who in WHO.items():
        alone, many = [], []
        for round_ in tqdm(range(asked.rounds), desc=f"together {name}", leave=False):
            prompts = [prompt_of(32, 10_000 + 16 * round_ + i) for i in range(16)]
            alone.append(throughput(engine, prompts[:1], who, asked.tokens))
            many.append(throughput(engine, prompts, who, asked.tokens))
        found[name] = {"tok_s_alone": statistics.median(alone), "tok_s_16": statistics.median(many),
                       "ratio": statistics.median(m / a for m, a in zip(many, alone, strict=True))}  # fmt: skip
    return found


def steps(engine: Engine, asked: argparse.Namespace) -> dict[str, Any]:
    """Where a decode step of 16 rows spends its time, and the share of the engine's own Python."""
    found: dict[str, Any] = {}
    for name, who in WHO.items():
        watch = Stopwatch(engine)
        try:
            requests = [
                engine.enqueue(prompt_of(32, 20_000 + i), max_tokens=asked.tokens + 8, ignore_eos=True, **who)
                for i in range(16)
            ]
            for _ in range(6):  # prompts, and the first tokens
                engine.step()
            watch.reset()
            for _ in range(asked.tokens):
                watch.step()
        finally:
            watch.close()
            for request in requests:
                engine.cancel(request)
        found[name] = watch.summary()
    return found


class Stopwatch:
    """Times the parts of a step; what is left is the step's own bookkeeping."""

    PARTS = ("hidden", "logits", "classifier", "sampler", "next_batch", "commit")

    def __init__(self, engine: Engine):
        self._engine, self._step = engine, engine.step
        self._owners = {"hidden": engine.model, "logits": engine.model, "next_batch": engine.scheduler,
                        "commit": engine.scheduler, "classifier": engine, "sampler": engine}  # fmt: skip
        self._inner = {name: getattr(owner, name) for name, owner in self._owners.items()}
        for name, owner in self._owners.items():
            setattr(owner, name, self._timed(name))
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._spent: dict[str, list[float]] = defaultdict(list)

    def step(self) -> None:
        """Run and time one step."""
        began = time.perf_counter()
        self._step()
        self._spent["step"].append(time.perf_counter() - began)

    def close(self) -> None:
        """Put the engine's own functions back."""
        for name, owner in self._owners.items():
            setattr(owner, name, self._inner[name])

    def summary(self) -> dict[str, float]:
        """Return median milliseconds of each part, and the share of the engine's own Python in a step."""
        steps = [dict(zip(self._spent, times, strict=True)) for times in zip(*self._spent.values(), strict=True)]
        torch_work = ("hidden", "logits", "classifier", "sampler")
        own = [step["step"] - sum(step[name] for name in torch_work) for step in steps]
        shares = [mine / step["step"] for mine, step in zip(own, steps, strict=True)]
        medians = {f"{name}_ms": round(1000 * statistics.median(times), 3) for name, times in self._spent.items()}
        return {**medians, "own_ms": round(1000 * statistics.median(own), 3),
                "own_share": round(statistics.median(shares), 4)}  # fmt: skip

    def _timed(self, name: str):
        inner = self._inner[name]

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._spent[name].append(time.perf_counter() - began)

        return timed


def prompt_of(length: int, seed: int) -> list[int]:
    """Return token ids of the given length, none special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (length,), generator=generator).tolist()


def time_to_first(engine: Engine, prompt: list[int], who: dict[str, Any]) -> float:
    """Return the seconds from asking to the first token."""
    return engine.generate(prompt, max_tokens=1, ignore_eos=True, **who).usage.prompt_time_s


def throughput(engine: Engine, prompts: list[list[int]], who: dict[str, Any], tokens: int) -> float:
    """Return generated tokens per second, from the first token known to the last."""
    done = engine.generate(prompts, max_tokens=tokens, ignore_eos=True, **who)
    first = min(each.usage.prompt_time_s for each in done)
    last = max(each.usage.total_time_s for each in done)
    return sum(len(each.token_ids) - 1 for each in done) / (last - first)


def compared(mine: list[float], other: list[float]) -> dict[str, float]:
    """Return medians in milliseconds and the median of the rounds' ratios."""
    ratio = statistics.median(m / o for m, o in zip(mine, other, strict=True))
    first_ms, second_ms = (round(1000 * statistics.median(times), 2) for times in (other, mine))
    return {"first_ms": first_ms, "second_ms": second_ms, "ratio": round(ratio, 4)}


if __name__ == "__main__":
    main()
