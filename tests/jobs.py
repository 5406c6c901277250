"""Requests to run together on a small mixture, and what each gave; shared by the tests of the engine's truths."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import VOCAB, Adapter, MixtureSpec, Probe, random_ids, save_base, tiny_model

from workbench import Engine
from workbench.engine.batch import ADAPTED

TOLERANCE = 1e-5
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
ADAPTERS = {
    "python": Adapter(TARGETS, rank=4, seed=1),
    "german": Adapter(TARGETS[:2], rank=2, alpha=3, seed=2),
    "law": Adapter(TARGETS, rank=7, seed=3, config={"use_rslora": True}),
}
SPECS = {
    "mix": MixtureSpec(ADAPTERS, {"layerwise_scalings": True, "xlora_depth": 2, "xlora_size": 16}),
    "lifted": MixtureSpec(
        {"b": ADAPTERS["german"], "a": ADAPTERS["python"]}, {"scaling_pass_value": 0.4, "top_k_lora": 1}
    ),
}
ALL_SAMPLING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2,
}  # fmt: skip


@dataclass
class Job:
    """A request to run: its prompt, who runs it, after how many steps it comes, and is cancelled, if ever."""

    prompt: list[int]
    who: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 4
    cancel_after: int | None = None
    arrive_after: int = 0


@dataclass
class Outcome:
    """What a job gave: tokens, logits `[row, vocab]` from the last prompt token on, scalings of its inputs."""

    tokens: list[int]
    logits: torch.Tensor
    scalings: torch.Tensor | None
    request: Any


def write_shelf(folder: Path, kind: str = "mistral") -> Path:
    """Write a base ("tiny"; a mistral has a sliding window), its adapters and its mixtures, and return the folder."""
    model = tiny_model(kind)
    save_base(model, folder / "tiny")
    for name, adapter in ADAPTERS.items():
        adapter.write(folder / name, model)
    for name, spec in SPECS.items():
        spec.write(folder / name, model)
    return folder


def engine_on(shelf: Path, loaded: bool = True, **options) -> Engine:
    """Make an engine on a shelf, with everything on it loaded unless told otherwise."""
    engine = Engine(shelf / "tiny", **options)
    if loaded:
        for name in ADAPTERS:
            engine.load_adapter(shelf / name)
        for name in SPECS:
            engine.load_mixture(shelf / name, name)
    return engine


def run(engine: Engine, jobs: list[Job], record: bool = True, forced: dict | None = None) -> list[Outcome]:
    """Run jobs together to their ends and return their outcomes in the same order."""
    probe = Probe(engine, forced)
    recorder = engine.record("scalings") if record else None
    found = {}
    try:
        for steps in range(1000):
            for i, job in enumerate(jobs):
                if job.arrive_after == steps:
                    options = {"seed": 7, "max_tokens": job.max_tokens, "ignore_eos": True, **job.who, **job.sampling}
                    found[i] = engine.enqueue(job.prompt, request_id=f"job-{i}", **options)
                if job.cancel_after is not None and job.arrive_after + job.cancel_after == steps:
                    engine.cancel(found[i])
            if len(found) == len(jobs) and not engine.scheduler.has_work():
                break
            engine.step()
    finally:
        for request in found.values():
            engine.cancel(request)
        requests = [found[i] for i in sorted(found)]
        probe.close()
        if recorder:
            recorder.__exit__()
    outcomes = []
    for request, job in zip(requests, jobs, strict=True):
        rows = [probe.logits[request.id, ADAPTED, len(job.prompt) - 1 + i] for i in range(len(request.generated))]
        scalings = None
        if recorder and request.mixture is not None:
            trace = recorder.trace(request.id)
            scalings = torch.from_numpy(trace.values[trace.source >= 0])
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
        outcomes.append(Outcome(request.generated, logits, scalings, request))
    return outcomes


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bitwise."""
    assert one.tokens == other.tokens
    assert torch.equal(one.logits, other.logits)
    if one.scalings is not None and other.scalings is not None:
        assert torch.equal(one.scalings, other.scalings)


def everyone() -> list[Job]:
    """One job of every sort; prompts from 1 token to more than one forward holds."""
    return [
        Job(random_ids(5, 1)),
        Job(random_ids(40, 2), {"adapter": "python"}),
        Job(random_ids(7, 3), {"mixture": "mix"}),
        Job(random_ids(1, 4), {"adapter": "german"}),
        Job(random_ids(23, 5), {"mixture": "lifted"}),
        Job(random_ids(3, 6), {"mixture": "mix", "tgt_non_granular_index": 1}, max_tokens=6),
        Job(random_ids(9, 7), {"mixture": "mix"}, {**ALL_SAMPLING, "seed": 3}),
        Job(random_ids(2, 8), {}, {"temperature": 1.0}),
    ]


SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.5, "top_k": 5, "seed": 2},
    {**ALL_SAMPLING, "seed": 3},
]
WHO = [{}, {"adapter": "python"}, {"adapter": "german"}, {"adapter": "law"}, {"mixture": "lifted"}] + [
    {"mixture": "mix", "tgt_non_granular_index": k} for k in (None, 0, 1, 3)
]
