"""The sections of the check on a card that need the engine: exact on a tiny model, fast on a model of real shape."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.adapters.types import LoRAConfig
from workbench.config import EngineConfig
from workbench.engine import Engine
from workbench.engine.base import BaseInfo
from workbench.engine.hf import NAME, BaseModel, context_of, packed_attention
from workbench.engine.prompts import Prompts
from workbench.sweep.checking import CheckFailed, check, generate
from workbench.sweep.gpu_check import Record, Setting, cut_short
from workbench.sweep.measure import Point, Results, measure_all
from workbench.sweep.synthetic import base_config, load_adapters, random_model, save_base, write_mixture
from workbench.sweep.workload import Workload

MIXTURE = "mixture"
NUM_ADAPTERS, RANK = 4, 16
_CLOSE = 1e-3  # log-probabilities of one token on a card and on a CPU, float32, two layers
_DECODE_REPEATS = 3


class _OutOfTime(Exception):
    """A measurement would have gone past its section's deadline."""


def exact(setting: Setting) -> Iterator[Record]:
    """Yield whether every mode's batch gives what its requests give alone, and what a CPU gives, in float32."""
    with tempfile.TemporaryDirectory(prefix="workbench-gpu-check-") as folder:
        root = Path(folder)
        save_base(random_model(base_config("tiny"), torch.float32, "cpu"), root / "tiny")
        lengths = {"concurrency": 7, "tokens": 5 if setting.toy else 12, "prompt_tokens": 6 if setting.toy else 19}
        with _closing(_tiny(root, str(setting.device))) as engine, _closing(_tiny(root, "cpu")) as on_cpu:
            for name, workload in _workloads(engine, lengths).items():
                if not setting.has_time():
                    yield cut_short(name)
                    return
                yield _equal(name, engine, on_cpu, workload)


def decode(setting: Setting) -> Iterator[Record]:
    """Yield throughput of base, LoRA and X-LoRA decoding on a random model of Mistral-7B's shape in bfloat16."""
    shape, dtype = ("tiny", "float32") if setting.toy else ("mistral-7b", "bfloat16")
    tokens, prompt = (4, 6) if setting.toy else (32, 32)
    config = base_config(shape)
    model = random_model(config, getattr(torch, dtype), setting.device, attn_implementation=NAME)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with _closing(engine_of(model, shape, dtype, setting.device)) as engine:
        with tempfile.TemporaryDirectory(prefix="workbench-gpu-check-") as folder:
            adapters = _load(engine, Path(folder), config.hidden_size)
        yield {"ok": True, "model": shape, "dtype": dtype, "weights_bytes": num_bytes, "adapters": len(adapters),
               "rank": RANK, "tokens": tokens, "prompt_tokens": prompt}
        for group in _groups(adapters, tokens, prompt):
            try:
                results = _measured(engine, group, setting)
            except CheckFailed as error:
                yield {"ok": False, "problem": f"{'; '.join(group)}: {error}"}
            except _OutOfTime:
                yield cut_short("; ".join(group))
                return
            else:
                yield from _records(results, next(iter(group)))


def engine_of(model: nn.Module, label: str, dtype: str, device: torch.device, **options: Any) -> Engine:
    """Return an engine on a model that is in memory already, without tokenizer; prompts are token ids.

    Args:
        model: a causal LM made with `attn_implementation=workbench.engine.hf.NAME`.
        label: what it is called.
        dtype, device: of its weights.
        **options: fields of `EngineConfig`.
    """
    config = EngineConfig(**{"dtype": dtype, "device": str(device), "prefix_cache": False, **options})
    prompts = Prompts(None, model.config.vocab_size, context_of(model.config), label)
    info = BaseInfo(config, Path(), label, model.config, prompts, frozenset())
    _register_attention()
    return Engine(info=info, model=BaseModel(model, label, config.max_len), lora=LoRAConfig())


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def _tiny(root: Path, device: str) -> Engine:
    engine = Engine(root / "tiny", device=device)
    _load(engine, root / f"files-{len(list(root.iterdir()))}", engine.model.hidden_size)
    return engine


def _load(engine: Engine, folder: Path, hidden_size: int) -> tuple[str, ...]:
    """Load a random mixture, and its adapters once more by themselves; return the adapters' names."""
    made = write_mixture(folder, engine.model.targets, hidden_size, NUM_ADAPTERS, RANK, engine.base_id)
    engine.load_mixture(made, MIXTURE)
    return load_adapters(engine, {path.name: path for path in sorted(made.iterdir()) if path.is_dir()})


def _workloads(engine: Engine, lengths: dict[str, int]) -> dict[str, Workload]:
    names = tuple(engine.adapters.names())
    xlora = Workload("xlora", mixture=MIXTURE, **lengths)
    return {
        "base": Workload("base", **lengths),
        "lora": Workload("lora", adapters=names, **lengths),
        "lora, half base": Workload("lora", adapters=names, popularity="half_base", **lengths),
        "merged": Workload("merged", adapters=names, **lengths),
        "xlora": xlora,
        "xlora, k 0": replace(xlora, tgt_non_granular_index=0),
        "xlora, k 3": replace(xlora, tgt_non_granular_index=3),
    }


def _equal(name: str, engine: Engine, on_cpu: Engine, workload: Workload) -> Record:
    """Return the record of one mode: batched as alone, and on the card as on a CPU."""
    try:
        checked = check(engine, workload)
        prompts = workload.prompts(engine)
        pairs = [generate(each, prompts, workload.tokens, **workload.options()) for each in (engine, on_cpu)]
    except CheckFailed as error:
        return {"ok": False, "mode": name, "problem": f"{name}: {error}"}
    furthest, same = 0.0, 0
    for here, there in zip(*pairs, strict=True):
        for i, token in enumerate(here.token_ids):
            furthest = max(furthest, abs(here.logprobs[i] - there.logprobs[i]))
            # after a choice between two equals the texts are two texts
            if token != there.token_ids[i]:
                break
            same += 1
    record = {
        "ok": furthest <= _CLOSE, "mode": name, "compared": checked.compared, "near_ties": checked.near_ties,
        "tokens_as_on_cpu": same, "tokens": workload.concurrency * workload.tokens, "logprob_difference": furthest,
    }  # fmt: skip
    if not record["ok"]:
        record["problem"] = f"{name}: log-probabilities differ from a CPU's by {furthest:.1e}, more than {_CLOSE:g}"
    return record


def _groups(adapters: tuple[str, ...], tokens: int, prompt: int) -> Iterator[dict[str, Workload]]:
    """Yield points to measure by turns, the most telling ones first; the first of each is the others' baseline."""
    def of(mode: str, rows: int, **more: Any) -> Workload:
        return Workload(mode, rows, tokens, prompt, **more)

    yield {
        "base, 16 rows": of("base", 16),
        "lora, 16 rows, 4 adapters": of("lora", 16, adapters=adapters),
        "xlora, 16 requests": of("xlora", 16, mixture=MIXTURE),
        "xlora, 16 requests, k 0": of("xlora", 16, mixture=MIXTURE, tgt_non_granular_index=0),
    }
    yield {"base, 32 rows": of("base", 32), "lora, 32 rows, 4 adapters": of("lora", 32, adapters=adapters)}
    yield {"base, 1 row": of("base", 1), "lora, 1 row": of("lora", 1, adapters=adapters[:1])}


def _measured(engine: Engine, group: dict[str, Workload], setting: Setting) -> Results:
    def go_on(_: str = "") -> None:
        if not setting.has_time():
            raise _OutOfTime

    go_on()
    points = [Point(name, engine, workload) for name, workload in group.items()]
    return measure_all(points, repeats=1 if setting.toy else _DECODE_REPEATS, progress=go_on)


def _records(results: Results, baseline: str) -> Iterator[Record]:
    ratios = results.ratios(baseline)
    for point in results.points:
        own = {key: each.value for key, each in ratios.get(point.name, {}).items()}
        found = point.to_dict()
        against = f"; {own['decode_tok_s']:.2f} of base, {1 / own['forward_ms']:.2f} per forward" if own else ""
        yield {
            "ok": True, **found, "baseline": baseline if own else None, "ratios": own,
            "line": f"{point.name:<28}{found['decode_tok_s']:>9.1f} tok/s decoding, {found['forward_ms']:.2f} ms and "
            f"{found['rows_per_forward']:.1f} rows a forward, {found['forwards_per_token']:.2f} forwards a token"
            f"{against}",
        }  # fmt: skip


@contextlib.contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        (engine.close if hasattr(engine, "close") else engine.adapters.close)()
