"""Ways to attend with decoded rows on a CPU, timed: `python experiments/engine/attention.py`.

Sizes are SmolLM2-135M's: 30 layers, 9 heads on 3 KV heads of 64, float32. A figure is one step's attention: planning,
writing the new rows and attending, in every layer. Ways take turns and the least of the rounds counts; with one thread
it is processor time, which neighbours on the machine disturb less. Each way is checked against the reference first.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from workbench.engine import attention_plan as planning
from workbench.engine.blocks import BlockPool, KVShape
from workbench.engine.paged import PagedStream

LAYERS, HEADS, KV_HEADS, WIDTH, HIDDEN = 30, 9, 3, 64, 576
NEVER, ALWAYS = -1, 1 << 30
# way -> the longest sequence that is copied, and how short a span counts as decoded
WAYS = {"a call per row": (NEVER, 0), "padded copy": (ALWAYS, 2), "in place": (NEVER, 2)}
RESULTS = Path(__file__).parent / "results" / "attention.json"


class Step:
    """Rows that decode together, each with `length` tokens before it, the first `shared` of them in common."""

    def __init__(self, num_rows: int, length: int, shared: int = 0, ragged: bool = False, scattered: bool = False):
        shape = KVShape(dict.fromkeys(range(LAYERS), (KV_HEADS, WIDTH, WIDTH)), HIDDEN, torch.float32)
        self.pool = BlockPool(shape, num_rows * (length // 16 + 2) + 4, "cpu")
        for side in (*self.pool.keys.values(), *self.pool.values.values()):
            side.normal_()
        self.spans = []
        lengths = [length * (row + 1) // num_rows if ragged else length for row in range(num_rows)]
        streams = [PagedStream(self.pool, b"base") for _ in lengths]
        for number, stream in enumerate(streams):
            tokens = [0] * shared + [number + 1] * (length - shared)
            stream.lookup(tokens, shared)
            stop = lengths[number] + 1
            for end in range(stream.length, stop + 1, 16) if scattered else ():
                stream.reserve(end)
            stream.reserve(stop, stop)
            stream.commit(stop - 1)
            stream.publish(tokens, shared)
            plan = SimpleNamespace(first=stop - 1, stop=stop, stream=stream)
            self.spans.append(SimpleNamespace(start=number, stop=number + 1, plan=plan))
        self.query = torch.randn(HEADS, num_rows, WIDTH)
        self.key = torch.randn(KV_HEADS, num_rows, WIDTH)

    def run(self, way: str | None) -> torch.Tensor:
        """Attend in every layer and return the last layer's rows."""
        copied, decoded = WAYS[way] if way else (0, 0)
        planning._PADDED_TOKENS, planning._DECODE_ROWS = copied, decoded
        plan = planning.attention_plan(self.spans, self.pool, reference=way is None)
        for layer in range(LAYERS):
            out = plan.attend(layer, self.query, self.key, self.key, WIDTH**-0.5, None, None)
        return out


def timed(step: Step, rounds: int, clock) -> dict[str, float]:
    """Return way -> milliseconds of one step."""
    expected = step.run(None)
    least = dict.fromkeys(WAYS, float("inf"))
    for number in range(rounds + 1):
        for way in WAYS:
            begun = clock()
            out = step.run(way)
            if number:
                least[way] = min(least[way], (clock() - begun) * 1e3)
            else:
                assert (out - expected).abs().max() < 1e-5, f"{way} is wrong"
    return {way: round(value, 2) for way, value in least.items()}


def main() -> None:
    """Time every case, print a table, and add the results to the JSON file beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    cases = [{"num_rows": n, "length": length} for n in (1, 4, 16) for length in (16, 64, 128, 256, 512, 1024)]
    cases += [{"num_rows": 16, "length": 512, "ragged": True}, {"num_rows": 16, "length": 128, "ragged": True}]
    cases += [{"num_rows": 16, "length": 640, "shared": 512}, {"num_rows": 16, "length": 144, "shared": 64}]
    results = []
    print(f"{'case':48}" + "".join(f"{way:>16}" for way in WAYS) + "   ms a step")
    with torch.inference_mode():
        for case in cases:
            times = timed(Step(**case), options.rounds, clock)
            results.append({**case, "threads": options.threads, "ms": times})
            label = ", ".join(f"{key} {value}" for key, value in case.items())
            print(f"{label:48}" + "".join(f"{times[way]:16.2f}" for way in WAYS), flush=True)
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [each for each in old if each["threads"] != options.threads]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept + results, indent=1) + "\n")


if __name__ == "__main__":
    main()
