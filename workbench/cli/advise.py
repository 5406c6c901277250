"""`workbench advise`: the cheapest reuse policy that loses no more than one allows, on one's own mixture and texts."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, nearest

if TYPE_CHECKING:
    from workbench.sweep.advise import Advice, Candidate

_EXAMPLE = """examples:
  workbench advise --mixture demo --max-kl 0.01
  workbench advise --mixture ./my-xlora --base ./my-base --texts my-texts.jsonl --max-kl 0.005 --out frontier.html
  workbench advise --mixture demo --texts switching --max-kl 0.01 --policies 'exact,non_granular(8),lagged(1)' --json
"""
_WIDTH = 80
_SUFFIXES = (".html", ".png", ".svg", ".pdf")
_COLUMNS = ("policy", "KL", "95 % interval", "same top", "forwards/token", "tok/s")


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "advise", help="the cheapest reuse of scalings that loses little enough", epilog=_EXAMPLE,
        formatter_class=formatter,
        description="Measure what reusing scalings loses (KL against exact scalings, nats per token) and what it costs "
        "(forwards per token), for several policies, on your mixture and your texts; name the cheapest one whose KL "
        "stays below the limit with the upper end of its 95 % interval. Exit code 1 if none does.",
    )
    add = parser.add_argument
    add("--mixture", required=True, metavar="SOURCE", help="demo, a folder, or a Hub id")
    add("--max-kl", required=True, type=float, metavar="X", help="what may be lost, nats per token: 0.01 is little")
    add("--base", metavar="SOURCE", help="base model (default: the one the mixture was made for)")
    add("--texts", default="single", metavar="TEXTS",
        help="a file (text, or JSONL with 'text' in each line), or the demo's: single (default), single:DOMAIN, "
        "switching, long")
    add("--policies", action="append", metavar="P,P",
        help="candidates (default: exact, non_granular 0 4 16 64, periodic 2 4 8 16, lagged 1 2 4)")
    add("--passages", type=int, metavar="N", help="texts to measure on (default: 20, or as many as there are)")
    add("--passage-tokens", type=int, metavar="N", help="tokens of each (default 128)")
    add("--prefix-tokens", type=int, metavar="N", help="of these, tokens that are given as the prompt (default 32)")
    add("--dtype", help="float32 (default), bfloat16 or float16")
    add("--device", help="cpu, cuda or cuda:N (default: cuda when there is one)")
    add("--json", action="store_true", help="print one JSON document")
    add("--out", metavar="FILE", help=f"write the frontier as a page or a picture ({', '.join(_SUFFIXES)})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, measure and print."""
    from workbench.sweep.advise import advise, point_for, policies_of

    _require_out(arguments.out)
    # commas inside brackets belong to a name
    given = [name.strip() for text in arguments.policies or () for name in re.split(r",(?![^(]*\))", text)]
    policies = policies_of([name for name in given if name])
    if not 0 < arguments.max_kl < float("inf"):
        raise UserError(f"--max-kl must be a number of nats per token above 0, not {arguments.max_kl}")
    keys = ("mixture", "base", "texts", "passages", "passage_tokens", "prefix_tokens", "dtype", "device")
    point = point_for({key: getattr(arguments, key) for key in keys})
    from workbench.sweep.checking import CheckFailed
    from workbench.sweep.tasks import Prepared

    print("loading", file=sys.stderr)
    prepared = Prepared(point)
    try:
        with _bar(len(policies)) as bar:
            def progress(policy: str, total: int) -> None:
                bar.total = total
                bar.set_postfix_str(policy, refresh=False)
                bar.update()

            advice = advise(prepared.engine, prepared.mixture, point, arguments.max_kl, policies,
                            at_most=arguments.passages is None, progress=progress)
    except CheckFailed as error:
        print(f"no advice: {error}", file=sys.stderr)
        return 1
    finally:
        prepared.close()
    if arguments.json:
        print(json.dumps({"mixture": arguments.mixture, "base": arguments.base, **advice.to_dict()}))
    else:
        _say(advice)
    if arguments.out is not None:
        _write(Path(arguments.out), advice, arguments)
        print(f"frontier: {arguments.out}", file=sys.stderr)
    return 0 if advice.chosen is not None else 1


def _require_out(out: str | None) -> None:
    """Raise before anything is measured."""
    if out is None:
        return
    path = Path(out)
    if path.suffix not in _SUFFIXES:
        raise UserError(f"--out {out!r} ends in none of {', '.join(_SUFFIXES)}{nearest(path.suffix, _SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--out {out!r}: the folder {str(path.parent)!r} does not exist")


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="policies", unit="policy", ncols=_WIDTH)


def _say(advice: Advice) -> None:
    print(f"{_passages(advice)}, {advice.tokens} tokens scored; null floor (exact against itself): KL "
          f"{advice.floor.kl:.2g}")
    for line in _aligned([list(_COLUMNS), *(_cells(each) for each in advice.candidates)]):
        print(line)
    print(_verdict(advice))
    for note in advice.notes:
        print(f"unsure: {note}")


def _passages(advice: Advice) -> str:
    count = advice.distinct_texts
    of = "texts" if count is None else f"{count} text{'s' * (count != 1)}"
    return f"{advice.passages} passages of {of} ({advice.texts!r})"


def _verdict(advice: Advice) -> str:
    if advice.chosen is None:
        closest = min(advice.candidates, key=lambda each: each.kl_high)
        return (f"none of these policies stays below KL {advice.max_kl:g}; the closest is {closest.policy}, with up to "
                f"{closest.kl_high:.2g}")
    best = advice.chosen
    if best is advice.floor:
        return f"advice: exact - none that is cheaper stays below KL {advice.max_kl:g}"
    saved = round(1 - best.forwards_per_token / advice.floor.forwards_per_token, 2)
    fewer = f"{saved:.0%} fewer than" if saved > 0 else f"{-saved:.0%} more than" if saved < 0 else "as many as"
    return (f"advice: {best.policy} - KL {best.kl:.2g} (up to {best.kl_high:.2g}) stays below {advice.max_kl:g}, with "
            f"{best.forwards_per_token:.2f} forwards per token, {fewer} exact scalings")


def _cells(each: Candidate) -> list[str]:
    return [each.policy, f"{each.kl:.2g}", f"{each.kl_low:.2g} to {each.kl_high:.2g}", f"{each.top1:.1%}",
            f"{each.forwards_per_token:.2f}", f"{each.tok_s:.1f}"]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if not column else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _write(path: Path, advice: Advice, arguments: argparse.Namespace) -> None:
    from workbench.display.frontier_figure import frontier
    from workbench.display.saving import save
    from workbench.sweep.document import Block, Document

    picture = frontier(advice.to_frame(), limit=advice.max_kl)
    if path.suffix != ".html":
        picture.save(path)
        return
    blocks = [
        Block("text", _verdict(advice)), *([Block("list", advice.notes)] if advice.notes else []),
        Block("picture", "frontier.png", picture.description),
        Block("table", [list(_COLUMNS), *(_cells(each) for each in advice.candidates)],
              f"{_passages(advice)}; KL in nats per token against exact scalings"),
        Block("code", " ".join(shlex.quote(each) for each in command_of(arguments))),
    ]  # fmt: skip
    title = f"What reusing scalings loses: {arguments.mixture}"
    save(path, lambda suffix: Document(title, tuple(blocks), {"frontier.png": picture}).html().encode())


def command_of(arguments: argparse.Namespace) -> list[str]:
    """Return the command that measures the same again."""
    found = ["workbench", "advise"]
    for key in ("mixture", "base", "texts", "max_kl", "policies", "passages", "passage_tokens", "prefix_tokens",
                "dtype", "device"):  # fmt: skip
        value = getattr(arguments, key)
        if value is not None:
            found += [f"--{key.replace('_', '-')}", ",".join(value) if isinstance(value, list) else str(value)]
    return found
