"""What recording costs while 16 requests of a mixture decode: time with a recorder over time without, in pairs.

Two measurements, both interleaved so that what slows the machine down slows both sides:

    whole   generations from the first token to the last, the recorder's end included; for kinds that cost at the end
            of a request, such as scalings
    steps   single decode steps of one running batch; for kinds that cost in every step

Both clocks are read: processor time of one thread (`--threads 1`) is hardly disturbed by others on the machine.

First logits and tokens with every kind on are compared with those of no recorder, bit for bit; where they differ,
nothing is measured. The last line is one JSON document.

    python cost.py whole --threads 1
    python cost.py steps --threads 1 --kinds entropy delta_norm
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence

import torch

from workbench import Engine
from workbench.instrument.wanted import KINDS
from workbench.sweep.machine import environment, load_average
from workbench.sweep.statistics import ratio

PROMPTS = ("def mean(", "Der Apfel ", "El perro ", "And it came ")
TIMED_STEPS = 1  # in a row, of each side of a pair
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
Times = dict[bool, list[list[float]]]  # with a recorder, without -> seconds by each clock
# frozen after the prompt, a request has one row a step, and all of them are rows that a recorder looks at
WHO = {"mixture": "demo", "tgt_non_granular_index": 0, "ignore_eos": True, "seed": 1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=("whole", "steps"))
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), help="scalings if whole, else the others")
    parser.add_argument("--pairs", type=int, default=20, help="measured pairs of each kind (default: 20)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own)")
    parser.add_argument("--rows", type=int, default=16, help="requests that decode together (default: 16)")
    parser.add_argument("--tokens", type=int, default=12, help="tokens of each request in `whole` (default: 12)")
    options = parser.parse_args(argv)
    is_whole = options.measurement == "whole"
    # "cache" and "throughput" record the same table
    others = [kind for kind in KINDS if kind not in ("scalings", "cache")]
    kinds = options.kinds or (["scalings"] if is_whole else others)
    if options.threads:
        torch.set_num_threads(options.threads)
    engine = Engine.from_mixture("demo")
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.rows)]
    if not is_same(engine, prompts):
        print("logits or tokens differ between recording and not recording: nothing was measured", file=sys.stderr)
        return 1
    measure = whole if is_whole else steps
    before, found = load_average(), {}
    for kind in kinds:
        found[kind] = summary(measure(engine, prompts, kind, options))
        for clock, cost in found[kind].items():
            percent = [100 * (cost[key] - 1) for key in ("ratio", "low", "high")]
            print(f"{kind:12} {clock:10} {percent[0]:+6.2f} %  ({percent[1]:+.2f} to {percent[2]:+.2f})", flush=True)
    print(json.dumps({
        "measurement": options.measurement, "rows": options.rows, "pairs": options.pairs,
        "tokens": options.tokens if is_whole else None, "kinds": found, "load_average": before,
        "machine": environment(engine.device),
    }))  # fmt: skip
    engine.close()
    return 0


def is_same(engine: Engine, prompts: list[str]) -> bool:
    """Whether tokens and every row of logits are the same, bit for bit, with every kind on and with none."""
    sampler, seen = engine.sampler, []

    def watch(logits, batch):
        seen[-1].append(logits.clone())
        return sampler(logits, batch)

    engine.sampler, tokens = watch, []
    for kinds in ((), tuple(KINDS)):
        seen.append([])
        engine.memory.pool.clear()  # both compute everything
        recorder = engine.record(*kinds) if kinds else None
        tokens.append([done.token_ids for done in engine.generate(prompts, max_tokens=4, **WHO)])
        if recorder:
            recorder.close()
    engine.sampler = sampler
    off, on = seen
    same = len(off) == len(on) and all(torch.equal(*pair) for pair in zip(off, on, strict=True))
    return same and tokens[0] == tokens[1]


def summary(times: Times) -> dict[str, dict]:
    """Return each clock's median with a recorder over that without, with its bootstrap interval, and what was read."""
    found = {}
    for place, clock in enumerate(CLOCKS):
        on, off = ([each[place] for each in times[side]] for side in (True, False))
        cost = ratio(on, off)
        found[clock] = {"ratio": round(cost.value, 4), "low": round(cost.low, 4), "high": round(cost.high, 4)}
        found[clock] |= {f"{name}_ms": [round(1000 * t, 3) for t in side] for name, side in (("on", on), ("off", off))}
    return found


def now() -> list[float]:
    return [clock() for clock in CLOCKS.values()]


def since(began: list[float], count: int = 1) -> list[float]:
    return [(end - start) / count for end, start in zip(now(), began, strict=True)]


def whole(engine: Engine, prompts: list[str], kind: str, options: argparse.Namespace) -> Times:
    """Return the seconds of generations with and without a recorder."""
    times: Times = {True: [], False: []}
    for pair in range(-1, options.pairs):
        for is_on in (pair % 2 == 0, pair % 2 != 0):
            requests = [engine.enqueue(prompt, max_tokens=options.tokens, **WHO) for prompt in prompts]
            recorder = engine.record(kind) if is_on else None
            while not all(request.is_decoding and request.choices for request in requests):
                engine.step()
            gc.collect()
            began = now()
            while engine.scheduler.has_work():
                engine.step()
            if recorder:
                recorder.close()
            if pair >= 0:  # the first warms up
                times[is_on].append(since(began))
    return times


def steps(engine: Engine, prompts: list[str], kind: str, options: argparse.Namespace) -> Times:
    """Return the seconds of decode steps with and without a recorder, the step that makes its buffers left out."""
    times: Times = {True: [], False: []}
    most = 16 + 2 * (options.pairs + 1) * (TIMED_STEPS + 1)
    requests = [engine.enqueue(prompt, max_tokens=most, **WHO) for prompt in prompts]
    while not all(request.is_decoding and request.choices for request in requests):
        engine.step()
    for pair in range(-1, options.pairs):
        for is_on in (pair % 2 == 0, pair % 2 != 0):
            recorder = engine.record(kind) if is_on else None
            engine.step()
            began = now()
            for _ in range(TIMED_STEPS):
                engine.step()
            if pair >= 0:
                times[is_on].append(since(began, TIMED_STEPS))
            if recorder:
                recorder.close()
    for request in requests:
        engine.cancel(request)
    return times


if __name__ == "__main__":
    sys.exit(main())
