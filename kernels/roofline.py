"""The least time each op can take, computed from its cost and a bandwidth: `python -m lora_kernels.roofline`.

Nothing here is measured. A row is one decoder layer's projections (q, k, v, o, gate, up, down) in bfloat16, or, for
attention and the classifier's head, one call; the base's row is what its own weights and rows take.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from lora_kernels.checks import Cost
from lora_kernels.registry import OPS, SHAPES, Case

PER_LAYER = {"q": 2, "kv": 2, "up": 2, "down": 1}
BANDWIDTHS = {"2.0 TB/s": 2.0e12, "3.35 TB/s": 3.35e12, "4.8 TB/s": 4.8e12}
CASES = {
    "bgmv": [Case(32, 16), Case(32, 16, popularity="identical"), Case(32, 16, popularity="distinct"), Case(32, 64)],
    "sgmv": [Case(2048, 16), Case(2048, 64)],
    "mix": [Case(32, 16), Case(2048, 16)],
    "scalings": [Case(32), Case(2048)],
    "paged_attention": [Case(32, context=1024)],
}


def rows(shape: str) -> Iterator[tuple[str, Cost]]:
    """Yield what is computed and its cost, for one shape."""
    for num_rows in (32, 2048):
        yield f"base linears, {num_rows} rows", _base(shape, num_rows)
    for name, cases in CASES.items():
        op = OPS[name]
        for case in cases:
            words = [f"{case.num_rows} rows"] + [f"rank {case.rank}"] * ("rank" in op.axes)
            words += [case.popularity] * ("popularity" in op.axes)
            words += [f"{case.context} positions each"] * ("context" in op.axes)
            yield f"`{name}`, {', '.join(words)}", _cost(name, case, shape)


def _cost(name: str, case: Case, shape: str) -> Cost:
    op = OPS[name]
    layers = PER_LAYER if "layer" in op.axes else {case.layer: 1}
    flops = num_bytes = 0
    for layer, count in layers.items():
        at = replace(case, shape=shape, layer=layer, dtype=torch.bfloat16, device="meta")
        one = op.cost(op.make_problem(at))
        flops, num_bytes = flops + count * one.flops, num_bytes + count * one.num_bytes
    return Cost(flops, num_bytes)


def _base(shape: str, num_rows: int) -> Cost:
    flops = num_bytes = 0
    for layer, count in PER_LAYER.items():
        width_in, width_out = SHAPES[shape].layers[layer]
        flops += count * 2 * num_rows * width_in * width_out
        num_bytes += count * 2 * (width_in * width_out + num_rows * (width_in + width_out))
    return Cost(flops, num_bytes)


def table(shape: str) -> str:
    """Return the computed figures of one shape as a Markdown table."""
    lines = ["| computed | MB | GFLOP | " + " | ".join(f"µs at {name}" for name in BANDWIDTHS) + " |",
             "|---|" + "---:|" * (2 + len(BANDWIDTHS))]  # fmt: skip
    for words, cost in rows(shape):
        times = " | ".join(f"{1e6 * cost.num_bytes / rate:.1f}" for rate in BANDWIDTHS.values())
        lines.append(f"| {words} | {cost.num_bytes / 1e6:.2f} | {cost.flops / 1e9:.2f} | {times} |")
    return "\n".join(lines)


def main() -> int:
    """Print the tables of the large shapes."""
    print("\n\n".join(f"{shape}:\n\n{table(shape)}" for shape in ("7b", "70b")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
