"""From a `Plan` to an engine with everything loaded, to points, and from their results to one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from workbench import hub
from workbench.adapters.types import LoRAConfig, split_spec
from workbench.config import EngineConfig
from workbench.engine import Engine
from workbench.engine.base import BaseInfo
from workbench.engine.sources import base_setting, check_adapter, named_base
from workbench.errors import UserError
from workbench.sweep.machine import environment
from workbench.sweep.measure import TIMED, Measurement, Point, Results
from workbench.sweep.plan import SYNTHETIC, Plan
from workbench.sweep.synthetic import adapter_of_each, load_adapters, write_adapters, write_mixture
from workbench.sweep.workload import Workload

MIXTURE = "mixture"
SCHEMA = 1


def open_engine(plan: Plan, base: str | None, **options: Any) -> Engine:
    """Return an engine on which nothing but a given mixture is loaded; all that can be checked early, is.

    Args:
        plan: what will run on it.
        base: as for `Engine`; None is the base that the plan's mixture names, else the demo's.
        **options: fields of `EngineConfig`.

    Raises:
        UserError: a base, mixture, adapter or length that does not fit.
    """
    mixture = _given_mixture(plan, base)
    if base is None and mixture not in (None, hub.DEMO):
        base = named_base(mixture, None, options)
    config = EngineConfig().change(**base_setting(base), **options)
    config = config.change(**_room(config, plan))
    info = BaseInfo.read(config)
    if plan.prompt_tokens + plan.tokens > info.prompts.max_len:
        raise UserError(
            f"--prompt-tokens {plan.prompt_tokens} and --tokens {plan.tokens} make {plan.prompt_tokens + plan.tokens}, "
            f"but base {info.label!r} has room for {info.prompts.max_len}"
        )
    targets = info.targets() if plan.sources else {}
    for name, source in map(split_spec, plan.sources):
        check_adapter(source, name, targets, info.label, {"offline": config.offline})
    # before weights are read: how many adapters there are is known by now
    for _, popularity in plan.pairs():
        adapter_of_each(popularity, plan.concurrency, plan.num_adapters, plan.seed)
    ranks = {"max_lora_rank": max(LoRAConfig.max_lora_rank, plan.synthetic_rank)}
    lora = LoRAConfig(max_num_loras=plan.num_slots(LoRAConfig.max_num_loras), **ranks)
    if mixture is None:
        return Engine(info=info, lora=lora)
    return Engine.from_mixture(mixture, name=MIXTURE, info=info, lora=lora)


def points(plan: Plan, engine: Engine, folder: Path) -> list[Point]:
    """Load what the plan asks for, synthetic files going into `folder`, and return its points.

    Raises:
        UserError: an adapter or mixture that does not load, or no room for synthetic ones.
    """
    targets = engine.model.targets
    if "xlora" in plan.modes and MIXTURE not in engine.mixtures:
        made = write_mixture(
            folder / MIXTURE, targets, engine.model.hidden_size, plan.num_adapters, plan.synthetic_rank, engine.base_id,
            plan.seed,
        )
        engine.load_mixture(made, MIXTURE)
    adapters: tuple[str, ...] = ()
    if plan.sources:
        adapters = tuple(engine.load_adapter(source) for source in plan.sources)
    elif plan.has_adapters:
        sources = write_adapters(folder / "adapters", targets, plan.num_adapters, plan.synthetic_rank, plan.seed)
        adapters = load_adapters(engine, sources)
    return [
        Point(name, engine, _workload(plan, mode, popularity, adapters))
        for name, (mode, popularity) in zip(plan.names(), plan.pairs(), strict=True)
    ]


def document(plan: Plan, measured: list[Point], results: Results, command: str) -> dict[str, Any]:
    """Return everything about a bench as JSON-able values; with one point its figures stand at the top too."""
    engine = measured[0].engine
    records = [_record(point, found) for point, found in zip(measured, results.points, strict=True)]
    baseline = plan.baseline or records[0]["name"]
    ratios = results.ratios(baseline) if len(records) > 1 else {}
    whole = {
        "schema": SCHEMA, "command": command, "base": engine.base_id, "dtype": engine.config.dtype,
        "device": str(engine.device), "drafting": engine.config.drafting, "slots": engine.adapters.config.max_num_loras,
        "prompts": "random ids" if engine.tokenizer is None else "text", **environment(engine.device),
        "load_before": results.load_before, "load_after": results.load_after, "seconds": results.seconds,
        "baseline": baseline if ratios else None,
        "ratios": {name: {key: asdict(each) for key, each in of.items()} for name, of in ratios.items()},
        "points": records,
    }  # fmt: skip
    return {**(records[0] if len(records) == 1 else {}), **whole}


def table(found: Mapping[str, Any]) -> str:
    """Return a bench document as a few lines of text."""
    header = ("point", "tok/s", "95 %", "first token ms", "ms/token", "forwards/token", "ratio", "95 %")
    rows = [header, *(_row(record, found) for record in found["points"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) if not i else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    if found["baseline"]:
        lines.append(f"ratio: of median tok/s to {found['baseline']}'s")
    first = found["points"][0]
    lines.append(
        f"{first['concurrency']} requests of {first['prompt_tokens']} + {first['tokens']} tokens ({found['prompts']}), "
        f"medians of {first['repeats']} repeats; {found['base']}, {found['dtype']}, {found['gpu'] or found['cpu']}, "
        f"{found['threads']} threads, load {found['load_before']} to {found['load_after']}"
    )
    if (found["load_before"] or 0) > found["cores"]:
        lines.append(f"other programs are running (load {found['load_before']} on {found['cores']} cores): the figures "
                     "are of a busy machine")
    compared = sum(record["checked"]["compared"] for record in found["points"])
    ties = sum(record["checked"]["near_ties"] for record in found["points"])
    lines.append(f"checked: {compared} requests have the tokens they have alone" + (
        f", {ties} of them up to a choice between two nearly equal tokens" if ties else ""))
    return "\n".join(lines)


def _given_mixture(plan: Plan, base: str | None) -> str | None:
    """Return the mixture to load, None for none or one that must be made first."""
    if "xlora" not in plan.modes or plan.mixture == SYNTHETIC:
        return None
    if plan.mixture is not None:
        return plan.mixture
    # a number or rank that nothing else reads is asked of the mixture's adapters: the demo's have their own
    asks = not plan.has_adapters and (plan.adapters or plan.rank)
    return hub.DEMO if base in (None, hub.DEMO) and not asks else None


def _room(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """Return settings without which the requests would not all run at once, or would find each other's work done."""
    settings: dict[str, Any] = {
        "max_requests": max(config.max_requests, plan.concurrency),
        "max_rows_per_step": max(config.max_rows_per_step, 2 * plan.concurrency),
    }
    if "prefix_cache" in {item.name for item in fields(config)}:
        # every repeat has the same prompts
        settings["prefix_cache"] = False
    return settings


def _workload(plan: Plan, mode: str, popularity: str, adapters: tuple[str, ...]) -> Workload:
    is_xlora = mode == "xlora"
    return Workload(
        mode, plan.concurrency, plan.tokens, plan.prompt_tokens, adapters if mode in ("lora", "merged") else (),
        popularity, MIXTURE if is_xlora else None, plan.tgt_non_granular_index if is_xlora else None, plan.seed,
    )


def _record(point: Point, found: Measurement) -> dict[str, Any]:
    """Return a point's record with what its adapters are."""
    engine, workload = point.engine, point.workload
    ranks: list[int] = []
    if workload.mode == "xlora":
        ranks = [adapter.rank for adapter in engine.mixtures[workload.mixture].adapters]
    elif workload.adapters:
        ranks = [entry.rank for entry in engine.adapters.entries() if entry.name in workload.adapters]
    used = {name for name in workload.options().get("adapter", ()) if name is not None}
    return {
        **found.to_dict(), "adapters": len(ranks),
        "adapters_used": len(used) if workload.mode == "lora" else len(ranks),
        "rank": max(ranks, default=None), "ranks": sorted(set(ranks)),
    }  # fmt: skip


def _row(record: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    against = found["ratios"].get(record["name"], {}).get(TIMED[0])
    ratio = (f"{against['value']:.3f}", f"{against['low']:.3f}-{against['high']:.3f}") if against else ("", "")
    return (
        record["name"], f"{record['tok_s']:.1f}", f"{record['tok_s_low']:.1f}-{record['tok_s_high']:.1f}",
        f"{record['ttft_ms']:.1f}", f"{record['time_per_token_ms']:.2f}", f"{record['forwards_per_token']:.2f}", *ratio,
    )
