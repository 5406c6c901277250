"""What the manager's tests share: a tiny base, adapters whose greedy tokens tell them apart, and each one's tokens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from models import GREEDY_GAP, Adapter, Probe, random_ids, save_base, tiny_model

from workbench import Engine
from workbench.adapters import LoRAConfig, LoRAModel
from workbench.config import EngineConfig
from workbench.engine.base import BaseInfo

MODEL = tiny_model("llama", num_hidden_layers=1)
RANKS = (1, 2, 3, 4, 8)
PROMPTS = tuple(tuple(random_ids(length, seed)) for seed, length in enumerate((3, 5, 9)))
NUM_TOKENS = 6
OPTIONS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
_ROOT = tempfile.TemporaryDirectory(prefix="manager-")


@functools.cache
def info(max_requests: int = 64) -> BaseInfo:
    """Return the tiny base, looked at once."""
    folder = Path(_ROOT.name) / "tiny"
    if not folder.exists():
        save_base(MODEL, folder)
    return BaseInfo.read(EngineConfig(base=str(folder), max_requests=max_requests))


@functools.cache
def folder(content: int) -> Path:
    """Return the folder of an adapter; `content` is its place in `RANKS`."""
    # `alpha` in the file is larger than what the factors were made for: deltas of twice the base's size
    adapter = Adapter(("q_proj", "down_proj"), rank=RANKS[content], seed=content, config={"lora_alpha": 48.0})
    return adapter.write(Path(_ROOT.name) / f"content-{content}", MODEL)


@functools.cache
def model_of(content: int) -> LoRAModel:
    """Return what is in that folder."""
    return LoRAModel.read(folder(content))


def engine_with(max_requests: int = 64, **settings: object) -> Engine:
    """Return a fresh engine on the tiny base; `settings` are the manager's."""
    return Engine(info=info(max_requests), lora=LoRAConfig(**settings))


@functools.cache
def alone(content: int | None, prompt: int = 0) -> tuple[int, ...]:
    """Return the tokens of an adapter (None: the base) that has an engine for itself; no two logits are close."""
    engine = engine_with()
    probe = Probe(engine)
    if content is not None:
        engine.load_adapter(folder(content), "it")
    done = engine.generate(PROMPTS[prompt], adapter=None if content is None else "it", **OPTIONS)
    rows = probe.decoded(done.request_id, len(PROMPTS[prompt]) - 1, NUM_TOKENS)
    best = rows.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > GREEDY_GAP, "rounding could choose another token: take other prompts"
    return tuple(done.token_ids)


def sources(*contents: int) -> dict[str, str]:
    """Return a name and a source for each."""
    return {f"a{content}": str(folder(content)) for content in contents}


def finish(engine: Engine, *requests) -> list[tuple[int, ...]]:
    """Run requests to their end and return their tokens."""
    while any(request.finish_reason is None for request in requests):
        engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return [tuple(request.generated) for request in requests]


def check_tables(engine: Engine, contents: dict[str, int]) -> None:
    """Check that slots, stacks, leases and bytes of an engine agree with each other and with what was loaded."""
    manager = engine.adapters
    entries = {entry.name: entry for entry in manager.entries()}
    assert set(entries) == set(contents)
    in_slots = {entry.slot: entry for entry in entries.values() if entry.slot is not None}
    assert len(in_slots) == sum(entry.slot is not None for entry in entries.values()), "a slot is used twice"
    assert len(in_slots) <= manager.config.max_num_loras
    assert set(engine.slots.adapters) == set(in_slots)
    for slot, entry in in_slots.items():
        wanted = model_of(contents[entry.name])
        assert entry.content_hash == wanted.content_hash
        for site, table in engine.slots.sites.items():
            first, last = table.spans[slot]
            assert torch.equal(table.a[first:last], wanted.a[site]) and torch.equal(table.b[first:last], wanted.b[site])
    for table in engine.slots.sites.values():
        spans = sorted(table.spans.values())
        assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False)), "rows are shared"
    unfinished = list(engine.scheduler.requests())
    for name, entry in entries.items():
        mine = [request for request in unfinished if request.adapter == name]
        assert entry.users == len(mine) and entry.leases == sum(request.has_lease for request in mine)
        assert all(request.slot == entry.slot for request in mine if request.has_lease), "an adapter in use left"
        assert not entry.pinned or entry.slot is not None, "a pinned adapter left its slot"
    on_host = [entry.num_bytes for entry in entries.values() if entry.tier in ("host", "loading")]
    assert manager.host_bytes == sum(on_host)
    limit = manager.config.max_host_bytes
    assert limit is None or sum(on_host) <= limit or len(on_host) == 1, "host memory is over its limit"
