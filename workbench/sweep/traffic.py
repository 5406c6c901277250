"""Traffic: which requests arrive, when, how long, and on what; and running them.

Contract: traffic is a function of a point's settings, its seed and the repeat; equal points see equal requests. Each
kind of draw (lengths, tokens, prompts, times, adapters) has numbers of its own, so that points that agree in what
decides a kind agree in its draws, whatever else they differ in. Every repeat draws anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import parse_json
from workbench.sweep.point import PointSettings
from workbench.sweep.synthetic import draw_adapters, random_prompts, text_prompts
from workbench.sweep.workload import demo_text

if TYPE_CHECKING:
    from workbench.engine import Engine
    from workbench.engine.request import Request

_LINE_KEYS = ("at_s", "prompt_tokens", "tokens", "adapter")
_IDLE_S = 0.0005
# a kind's place decides its numbers
_DRAWS = ("lengths", "tokens", "prompts", "times", "adapters", "slots")


@dataclass(frozen=True)
class Arrival:
    """One request to come.

    Attributes:
        at_s: seconds after the beginning; None as soon as there is a place for it (closed arrivals).
        prompt: token ids.
        tokens: to generate, all of them.
        options: of `Engine.submit`: adapter, mixture, merged_adapters, policy.
    """

    at_s: float | None
    prompt: list[int]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A request that has ended.

    Attributes:
        request: the engine's.
        arrival: what was asked.
        late_s: seconds between the time it was to arrive and the time it was queued: a step was running.
        ended_s: seconds after the beginning.
        forwards: the engine's, from when it was queued until it ended.
    """

    request: Request
    arrival: Arrival
    late_s: float = 0.0
    ended_s: float = 0.0
    forwards: int = 0


def traffic(
    point: PointSettings, engine: Engine, adapters: Sequence[str], mixture: str | None, repeat: int = 0
) -> list[Arrival]:
    """Return a point's requests in the order of their arrival.

    Args:
        point: of task "throughput".
        engine: whose tokens prompts are made of.
        adapters: names of the loaded adapters, for lora and merged.
        mixture: name of the loaded mixture, for xlora.
        repeat: which time the point runs, from 0.

    Raises:
        UserError: a trace that cannot be read, or says what the engine cannot run.
    """
    if point.arrivals == "trace":
        return _from_file(point, engine, adapters, mixture, repeat)
    count = point.requests
    lengths = _lengths(point.prompt_tokens, count, draws(point, repeat, "lengths"))
    tokens = _lengths(point.tokens, count, draws(point, repeat, "tokens"))
    prompts = _prompts(engine, lengths, draws(point, repeat, "prompts"))
    times = arrival_times(point, draws(point, repeat, "times"))
    options = _options(point, count, adapters, mixture, draws(point, repeat, "adapters"))
    return [Arrival(*each) for each in zip(times, prompts, tokens, options, strict=True)]


def draws(point: PointSettings, repeat: int, kind: str) -> np.random.Generator:
    """Return where one kind of a point's draws comes from."""
    return np.random.default_rng([_DRAWS.index(kind), repeat, point.seed])


def arrival_times(point: PointSettings, random: np.random.Generator) -> list[float | None]:
    """Return seconds after the beginning at which the requests arrive; None for closed arrivals.

    Times between arrivals are exponential with mean 1/rate (Poisson), or gamma with that mean and a coefficient of
    variation `cv`: shape 1/cv², scale cv²/rate.
    """
    if point.arrivals == "closed":
        return [None] * point.requests
    cv = point.cv if point.arrivals == "gamma" else 1.0
    gaps = random.gamma(1 / cv**2, cv**2 / point.rate, point.requests)
    return np.cumsum(gaps).tolist()


def serve(engine: Engine, arrivals: Sequence[Arrival], concurrency: int | None = None) -> list[Served]:
    """Run requests as they arrive and return them as they ended; whatever goes wrong, none stays in the engine.

    Args:
        engine: idle.
        arrivals: in order.
        concurrency: how many closed arrivals run at once; None is all.

    Raises:
        UserError: a request that the engine refuses.
    """
    waiting, served = list(reversed(arrivals)), []
    open_: dict[Request, tuple[Arrival, float, int]] = {}
    started = time.perf_counter()
    try:
        while waiting or open_:
            now = time.perf_counter() - started
            while waiting and _is_due(waiting[-1], now, len(open_), concurrency):
                arrival = waiting.pop()
                options = {"max_tokens": arrival.tokens, "ignore_eos": True, "seed": 0, **arrival.options}
                request = engine.enqueue(arrival.prompt, **options)
                late = 0.0 if arrival.at_s is None else max(0.0, time.perf_counter() - started - arrival.at_s)
                open_[request] = arrival, late, _num_forwards(engine)
            if not open_:
                time.sleep(max(_IDLE_S, waiting[-1].at_s - now))
                continue
            finished = engine.step()
            now = time.perf_counter() - started
            for request in finished:
                if request in open_:
                    arrival, late, before = open_.pop(request)
                    served.append(Served(request, arrival, late, now, _num_forwards(engine) - before))
    finally:
        for request in open_:
            engine.cancel(request)
    return served


def _num_forwards(engine: Engine) -> int:
    return int(engine.counters()["forwards"])


def _is_due(arrival: Arrival, now_s: float, running: int, concurrency: int | None) -> bool:
    if arrival.at_s is None:
        return concurrency is None or running < concurrency
    return arrival.at_s <= now_s


def _options(
    point: PointSettings, count: int, adapters: Sequence[str], mixture: str | None, random: np.random.Generator
) -> list[dict[str, Any]]:
    """Return what each request runs on."""
    if point.mode == "lora":
        chosen = draw_adapters(point.popularity, count, len(adapters), random)
        return [{"adapter": adapters[number]} if number >= 0 else {} for number in chosen]
    if point.mode == "merged":
        merged = {"ids": list(adapters), "weights": [1 / len(adapters)] * len(adapters), "merge_strategy": "linear"}
        return [{"merged_adapters": merged} for _ in range(count)]
    if point.mode == "xlora":
        return [{"mixture": mixture, "policy": point.policy} for _ in range(count)]
    return [{} for _ in range(count)]


def _lengths(given: int | tuple[int, int], count: int, random: np.random.Generator) -> list[int]:
    low, high = given if isinstance(given, tuple) else (given, given)
    return random.integers(low, high + 1, count).tolist()


def _prompts(engine: Engine, lengths: Sequence[int], random: np.random.Generator) -> list[list[int]]:
    """Return prompts of these lengths: pieces of the demo's texts, or random ids for a base without a tokenizer."""
    longest, seed = max(lengths), int(random.integers(2**63))
    if engine.tokenizer is None:
        made = random_prompts(len(lengths), longest, engine.model.vocab_size, seed)
    else:
        made = text_prompts(engine.tokenizer(demo_text())["input_ids"], len(lengths), longest, seed)
    return [prompt[:length] for prompt, length in zip(made, lengths, strict=True)]


def _from_file(
    point: PointSettings, engine: Engine, adapters: Sequence[str], mixture: str | None, repeat: int
) -> list[Arrival]:
    """Return the requests of a JSONL file: at_s, prompt_tokens, tokens, and adapter, a number, where there are some."""
    path = point.file("trace")
    lines = read_lines(path)
    prompts = _prompts(engine, [line["prompt_tokens"] for line in lines.values()], draws(point, repeat, "prompts"))
    fixed = [{}] * len(lines)
    if point.mode != "lora":
        fixed = _options(point, len(lines), adapters, mixture, draws(point, repeat, "adapters"))
    arrivals = []
    for (number, line), prompt, options in zip(lines.items(), prompts, fixed, strict=True):
        wanted = line.get("adapter")
        if wanted is not None:
            where = f"trace {str(path)!r}, line {number}: 'adapter' is {wanted}"
            if point.mode != "lora":
                raise UserError(f"{where}, but mode {point.mode!r} lets no request choose one; leave it out")
            if wanted >= len(adapters):
                raise UserError(f"{where}, but there are {len(adapters)}, numbered from 0")
            options = {"adapter": adapters[wanted]}
        arrivals.append(Arrival(line["at_s"], prompt, line["tokens"], options))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a trace, checked, by their number in the file; empty ones are left out.

    Raises:
        UserError: the first line that does not fit, with its number, or none at all.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"trace {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        where = f"trace {str(path)!r}, line {number}"
        line = parse_json(text, where)
        if not isinstance(line, dict):
            raise UserError(f"{where} is {line!r}, expected an object with {names(_LINE_KEYS)}")
        for key in line:
            if key not in _LINE_KEYS:
                hint = nearest(key, _LINE_KEYS)
                raise UserError(f"{where}: unknown key {key!r}{hint}; the keys are {names(_LINE_KEYS)}")
        _require_line(line, where)
        found[number] = line
    if not found:
        raise UserError(f"trace {str(path)!r} holds no request")
    return found


def _require_line(line: dict[str, Any], where: str) -> None:
    at_s = line.get("at_s")
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < float("inf"):
        raise UserError(f"{where}: 'at_s' is {at_s!r}, expected seconds from the beginning")
    for key, least in (("prompt_tokens", 1), ("tokens", 1), ("adapter", 0)):
        value = line.get(key)
        if value is None and key == "adapter":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{where}: {key!r} is {value!r}, expected a whole number of at least {least}")
