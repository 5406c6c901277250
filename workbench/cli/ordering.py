"""`workbench ordering make|check`: the file that fixes the adapter and site axes of the scalings."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from workbench.errors import UserError

_EXAMPLE = """examples:
  workbench ordering make --base demo --adapters python,german,spanish,scripture \\
      --target-modules q_proj,k_proj,v_proj,o_proj,gate_proj --out ordering.json
  workbench ordering make --config ./config.json --base-id org/model --adapters adapter_1..adapter_9 \\
      --target-modules all-linear
  workbench ordering check ordering.json --base demo --mixture demo
"""


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "ordering", help="make or check an ordering", epilog=_EXAMPLE, formatter_class=formatter,
        description="An ordering says which adapter is class i of the classifier, and which site has index l.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="write one from an architecture", epilog=_EXAMPLE, formatter_class=formatter,
                              description="Number the sites of a base in registration order. No weights are read.")
    source = make.add_mutually_exclusive_group(required=True)
    source.add_argument("--base", metavar="SOURCE", help="base model: demo, folder or Hub id")
    source.add_argument("--config", metavar="FILE", help="its config.json alone")
    make.add_argument("--base-id", metavar="ID", help="base_model_id to write (default: --base)")
    make.add_argument("--adapters", required=True, metavar="NAMES", help="class order: a,b,c or adapter_1..adapter_9")
    make.add_argument("--target-modules", required=True, metavar="NAMES",
                      help="module names (comma-separated), a regular expression after re:, or all-linear")
    make.add_argument("--out", metavar="FILE", help="where to write (default: standard output)")
    make.add_argument("--offline", action="store_true", default=None, help="never ask the Hub; use its cache")
    make.set_defaults(run=run_make)
    check = actions.add_parser("check", help="check one against a base or mixture", epilog=_EXAMPLE,
                               formatter_class=formatter, description="Check an ordering file by itself, and against "
                               "the sites of a mixture's adapters on a base. No base weights are read.")
    check.add_argument("file", metavar="FILE")
    check.add_argument("--base", metavar="SOURCE", help="base model: demo, folder or Hub id")
    check.add_argument("--mixture", metavar="SOURCE", help="X-LoRA mixture: demo, folder or Hub id")
    check.add_argument("--offline", action="store_true", default=None, help="never ask the Hub; use its cache")
    check.set_defaults(run=run_check)


def run_make(arguments: argparse.Namespace) -> int:
    """Make an ordering and write it."""
    from workbench import hub
    from workbench.ordering import expand_names, make_from_config

    order = expand_names(arguments.adapters)
    config = arguments.config or hub.resolve_config(arguments.base, offline=arguments.offline)
    base_id = arguments.base_id or (_base_id(arguments.base, config) if arguments.base else None)
    if base_id is None:
        raise UserError("--config says nothing of the model's name; give it with --base-id")
    made = make_from_config(config, _targets(arguments.target_modules), order, base_id)
    if arguments.out:
        made.write(arguments.out)
        print(f"{arguments.out}: {len(made.layers)} sites, {len(made.order)} adapters", file=sys.stderr)
    else:
        print(json.dumps(made.to_dict(), indent=1, ensure_ascii=False))
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Check an ordering and say what it holds."""
    from workbench.ordering import Ordering

    given = Ordering.read(arguments.file)
    checked = ["well formed"]
    if arguments.mixture or arguments.base:
        checked += _check_against(given, arguments)
    sites = "derived from the model" if given.layers is None else f"{len(given.layers)} sites"
    print(f"{arguments.file}: {len(given.order)} adapters, {sites}, base {given.base_model_id!r}; {', '.join(checked)}")
    return 0


def _check_against(given: Any, arguments: argparse.Namespace) -> list[str]:
    from workbench import hub
    from workbench.adapters import LoRAModel
    from workbench.engine.hf import linear_targets
    from workbench.engine.sources import named_base
    from workbench.ordering import meta_model
    from workbench.xlora import find_mixture

    base = arguments.base or named_base(arguments.mixture, given, {"offline": arguments.offline})
    targets = linear_targets(meta_model(hub.resolve_config(base, offline=arguments.offline)))
    if not arguments.mixture:
        if given.layers is None:
            return [f"no sites to look for in base {base!r}; name a mixture to check its adapters"]
        given.verify([site for site in targets if site in given.layers])
        return [f"its sites exist in base {base!r}"]
    files = find_mixture(hub.resolve_mixture(arguments.mixture, offline=arguments.offline))
    files.require(given.order)
    fitted = [LoRAModel.from_files(*files.adapters[name], name).fit(targets, base) for name in given.order]
    touched = {site for adapter in fitted for site in adapter.sites}
    given.verify([site for site in targets if site in touched], list(files.adapters))
    return [f"fits mixture {arguments.mixture!r} on base {base!r}"]


def _base_id(base: str, config: Path) -> str:
    from workbench.engine.hf import label_of

    return label_of(base, config)


def _targets(text: str) -> str | list[str]:
    if text.startswith("re:"):
        return text.removeprefix("re:")
    return text if text == "all-linear" else [part.strip() for part in text.split(",") if part.strip()]
