"""`workbench inspect`: what is in an adapter, mixture, ordering or trace, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from workbench.errors import UserError, names

_EXAMPLE = """examples:
  workbench inspect demo
  workbench inspect ./my-adapter --base demo
  workbench inspect ./xlora-repository --json
  workbench inspect trace.safetensors
"""


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "inspect", help="what is in an adapter or mixture, and what is wrong with it", epilog=_EXAMPLE,
        formatter_class=formatter, description="Look into an adapter, mixture, ordering or trace without loading a "
        "base model. Exit code 2 when something is wrong with it.",
    )
    parser.add_argument("path", metavar="PATH", help="folder, file, Hub id, demo or demo/NAME")
    parser.add_argument("--base", metavar="SOURCE", help="also check that it fits this base (its config is enough)")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Inspect and print."""
    facts, problems = inspect(arguments.path, arguments.base)
    if arguments.json:
        print(json.dumps({**facts, "problems": problems}))
    else:
        width = max(map(len, facts))
        for key, value in facts.items():
            for line_number, line in enumerate(value if isinstance(value, list) else [value]):
                print(f"{key if not line_number else '':<{width}}  {line}")
        print("\n".join(f"problem: {problem}" for problem in problems) or "no problems found")
    return 2 if problems else 0


def inspect(path: str, base: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return facts and problems of whatever lies at `path`."""
    file = Path(path)
    if file.is_file() and file.name.endswith("config.json"):
        raise UserError(f"{path!r} is one file of an adapter, mixture or base; inspect its folder {str(file.parent)!r}")
    if file.is_file() and file.suffix == ".json":
        return _ordering(file)
    if (file / "config.json").is_file():
        return _base(file)
    if file.is_file() and file.suffix == ".safetensors" and "adapter" not in file.name:
        return _trace(file)
    targets = _targets(base) if base else None
    if path == "demo" or _is_mixture(file if file.exists() else _fetched(path)):
        return _mixture(path, targets, base)
    return _adapter(path, targets, base)


def _base(folder: Path) -> tuple[dict[str, Any], list[str]]:
    from workbench import hub
    from workbench.engine.hf import context_of, linear_targets, load_config
    from workbench.ordering import meta_model

    facts: dict[str, Any] = {"kind": "base model", "path": str(folder)}
    try:
        hub.check_base(folder)
        config = load_config(folder, folder.name)
        modules = Counter(site.rsplit(".", 1)[-1] for site in linear_targets(meta_model(config)))
    except UserError as error:
        return facts, [str(error)]
    facts |= {"architecture": config.model_type, "context": f"{context_of(config)} tokens"}
    return facts | {"linear sites": ", ".join(f"{name} x{count}" for name, count in modules.items())}, []


def _fetched(source: str) -> Path:
    """Return the folder of an adapter or mixture that is not here; the source itself when there is none."""
    from workbench import hub
    from workbench.errors import ContentError

    try:
        return hub.resolve_adapter(source)
    except ContentError:  # found, and no adapter
        return hub.resolve_mixture(source)
    except UserError:  # said again, as a problem, when it is read
        return Path(source)


def _is_mixture(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    from workbench.adapters.config import read_object

    config = folder / "adapter_config.json"
    if not config.is_file():
        ludwig = any((folder / inner / config.name).is_file() for inner in ("model_weights", "model/model_weights"))
        return not ludwig and not any(folder.glob("adapter_model.*"))
    try:
        return str(read_object(config, "adapter config").get("peft_type", "")).upper() == "XLORA"
    except UserError:  # said again, as a problem, when the adapter is read
        return False


def _targets(base: str) -> Any:
    from workbench import hub
    from workbench.engine.hf import linear_targets
    from workbench.ordering import meta_model

    return linear_targets(meta_model(hub.resolve_config(base)))


def _adapter(path: str, targets: Any, base: str | None) -> tuple[dict[str, Any], list[str]]:
    from workbench import hub
    from workbench.adapters import LoRAModel

    facts: dict[str, Any] = {"kind": "adapter", "path": path}
    try:
        folder = hub.resolve_adapter(path)
        adapter = LoRAModel.read(folder, Path(path).name)
        facts |= adapter_facts(adapter)
        if targets is not None:
            adapter.fit(targets, base)
            facts["fits base"] = base
    except UserError as error:
        return facts, [str(error)]
    return facts, []


def adapter_facts(adapter: Any) -> dict[str, Any]:
    """Return what a `LoRAModel` holds, as readable values."""
    ranks = Counter(a.shape[0] for a in adapter.a.values())
    modules = Counter(site.rsplit(".", 1)[-1] for site in adapter.sites)
    config = adapter.config
    return {
        "rank": ", ".join(f"{rank} at {count} sites" for rank, count in sorted(ranks.items())),
        "alpha": f"{config.lora_alpha:g}{' (rsLoRA)' if config.use_rslora else ''}",
        "sites": f"{len(adapter.sites)}: " + ", ".join(f"{name} x{count}" for name, count in modules.items()),
        "size": f"{adapter.num_bytes / 1e6:.2f} MB in float32",
        "trained on": config.base_model_name_or_path or "not said",
        "sha256": adapter.content_hash,
    }


def _mixture(path: str, targets: Any, base: str | None) -> tuple[dict[str, Any], list[str]]:
    from workbench import hub
    from workbench.adapters import LoRAModel
    from workbench.adapters.model import read_tensors
    from workbench.xlora import Classifier, XLoRAConfig, find_mixture

    facts: dict[str, Any] = {"kind": "mixture", "path": path}
    problems: list[str] = []
    try:
        files = find_mixture(hub.resolve_mixture(path))
        facts |= {"layout": files.layout, "base": files.base_model_id or "not said",
                  "adapters": names(sorted(files.adapters), 40)}
    except UserError as error:
        return facts, [str(error)]
    sites: set[str] = set()
    for name, parts in files.adapters.items():
        try:
            adapter = LoRAModel.from_files(*parts, name)
            sites |= set(adapter.sites)
            if targets is not None:
                adapter.fit(targets, base)
        except UserError as error:
            problems.append(str(error))
    facts["sites"] = len(sites)
    try:
        config = XLoRAConfig.from_dict(files.config, str(files.config_path), None)
        facts["settings"] = [f"{key} = {getattr(config, key)}" for key in config.__dataclass_fields__]
        facts["order"] = names(files.order(), 40)
        if not problems:
            tensors = read_tensors(files.classifier_path, f"mixture {path!r}")
            Classifier.from_tensors(tensors, config, len(sites), len(files.order()), str(files.classifier_path))
            facts["classifier"] = "complete: " + ", ".join(f"{k} {list(t.shape)}" for k, t in tensors.items())
    except UserError as error:
        problems.append(str(error))
    return facts, problems


def _ordering(file: Path) -> tuple[dict[str, Any], list[str]]:
    from workbench.ordering import Ordering

    facts: dict[str, Any] = {"kind": "ordering", "path": str(file)}
    try:
        ordering = Ordering.read(file)
    except UserError as error:
        return facts, [str(error)]
    facts |= {"base": ordering.base_model_id or "not said", "adapters": names(ordering.order, 40),
              "sites": "derived from the model" if ordering.layers is None else len(ordering.layers)}
    return facts, []


def _trace(file: Path) -> tuple[dict[str, Any], list[str]]:
    from workbench.instrument.trace import Trace

    facts: dict[str, Any] = {"kind": "trace", "path": str(file)}
    try:
        trace = Trace.load(file)
    except UserError as error:
        return {"kind": "file", "path": str(file)}, [str(error)]
    shares = ", ".join(f"{name} {share:.3f}" for name, share in trace.share().items())
    return facts | {"tokens": f"{trace.num_tokens} ({trace.prompt_tokens} of the prompt)", "sites": len(trace.sites),
                    "mean scalings": shares, "mixture": str(trace.metadata.get("mixture"))}, []
