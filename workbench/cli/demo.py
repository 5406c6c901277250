"""`workbench demo`: a real model, four adapters, and a page that shows which of them speaks at which token."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine
    from workbench.instrument.trace import Trace

_EXAMPLE = """examples:
  workbench demo
  workbench demo --tgt-non-granular-index 4 --json
  workbench demo --out /tmp/demo --max-tokens 100
"""
_SEPARATOR = "\n\n"


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "demo", help="see a mixture switch between adapters, token by token", epilog=_EXAMPLE,
        formatter_class=formatter,
        description="Run the demo mixture (four adapters: Python code, German, Spanish, scripture) on a small "
        "language model in float32. The prompt changes its domain three times; the report says which adapter led "
        "where. The first run downloads the base model (93 MB) and converts it.",
    )
    parser.add_argument("--tgt-non-granular-index", type=int, metavar="K",
                        help="compute scalings for the prompt and the first K generated tokens, then reuse the K-th's")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens to generate (default 64)")
    parser.add_argument("--base", metavar="SOURCE", help="another base, which the mixture was not trained on")
    parser.add_argument("--out", default="workbench-demo", metavar="DIR", help="folder for the page, picture and trace")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, write its files and print the report."""
    from workbench.engine.sampling import Sampling

    sampling = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True)
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out!r} cannot be made: {error.strerror}") from None
    _say(arguments, "loading the base model and four adapters")
    clock = time.perf_counter()
    engine = _engine(arguments.base)
    load_time_s = time.perf_counter() - clock
    segments = read_segments()
    prompt = _SEPARATOR.join(segment["text"] for segment in segments)
    _say(arguments, f"generating {arguments.max_tokens} tokens")
    clock = time.perf_counter()
    with engine.record("scalings") as recorder:
        completion = engine.generate(prompt, mixture="demo", sampling=sampling,
                                     tgt_non_granular_index=arguments.tgt_non_granular_index)
    generate_time_s = time.perf_counter() - clock
    trace = recorder.trace(completion.request_id)
    clock = time.perf_counter()
    files = write_files(trace, out)
    times = {"load_time_s": load_time_s, "generate_time_s": generate_time_s,
             "figure_time_s": time.perf_counter() - clock}
    report = {
        "base": engine.base_id, "dtype": engine.config.dtype, "adapters": list(trace.adapters),
        "segments": lead_by_segment(trace, segments), "text": completion.text, "usage": vars(completion.usage),
        "scalings_computed": completion.scalings_computed, "scalings_reused": completion.scalings_reused,
        "drafts_accepted": completion.drafts_accepted, "drafts_rejected": completion.drafts_rejected,
        "forwards": engine.stats()["forwards"], **files, **times,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_report(report, trace, completion)
    return 0


def read_segments() -> list[dict[str, str]]:
    """Return the demo prompt's segments: domain (the adapter that should lead) and text."""
    from workbench import hub

    return json.loads((hub.resolve_mixture("demo") / "prompts.json").read_text(encoding="utf-8"))


def lead_by_segment(trace: Trace, segments: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return, per segment of the prompt, the adapter with the largest mean scaling over its tokens and all sites."""
    starts, at = [], 0
    for token in trace.tokens:
        starts.append(at)
        at += len(token)
    found, first = [], 0
    for segment in segments:
        last = first + len(segment["text"])
        inside = [index for index, start in enumerate(starts) if first <= start < last and not trace.generated[index]]
        share = trace.share(slice(inside[0], inside[-1] + 1))
        top = max(share, key=share.__getitem__)
        found.append({"domain": segment["domain"], "top_adapter": top, "share": share[top], "shares": share,
                      "tokens": len(inside)})
        first = last + len(_SEPARATOR)
    return found


def write_files(trace: Trace, out: Path) -> dict[str, str]:
    """Write the trace, the page and the picture; return their paths."""
    from workbench.display import show

    shown = show(trace, title="Four adapters, one model: which of them speaks where")
    paths = {"trace": out / "demo.safetensors", "figure": out / "demo.html", "picture": out / "demo.png"}
    trace.save(paths["trace"])
    shown.save(paths["figure"])
    shown.save(paths["picture"])
    return {key: str(path) for key, path in paths.items()}


def _engine(base: str | None) -> Engine:
    from workbench.engine import Engine

    return Engine.from_mixture("demo", base=base, dtype="float32")


def _print_report(report: dict[str, Any], trace: Trace, completion: Completion) -> None:
    from workbench.display import text_report

    print(text_report(trace))
    print()
    print(f"{'segment':<12}{'tokens':>7}   {'leading adapter':<17}{'share':>7}")
    for segment in report["segments"]:
        right = "" if segment["top_adapter"] == segment["domain"] else "   (another was expected)"
        found = f"{segment['top_adapter']:<17}{segment['share']:>7.2f}{right}"
        print(f"{segment['domain']:<12}{segment['tokens']:>7}   {found}")
    usage, drafts = completion.usage, completion.drafts_accepted + completion.drafts_rejected
    print(f"\n{usage.prompt_tokens} prompt tokens at {usage.avg_prompt_tok_per_sec:.0f} tok/s, "
          f"{usage.completion_tokens} generated at {usage.avg_compl_tok_per_sec:.1f} tok/s, {report['dtype']}")
    print(f"scalings: {report['scalings_computed']} computed, {report['scalings_reused']} reused; drafts: "
          f"{completion.drafts_accepted} of {drafts} accepted; {report['forwards']} forwards")
    print(f"\nopen {report['figure']} to look at every token, site and adapter")
    print(f"(picture: {report['picture']}; trace: {report['trace']})")


def _say(arguments: argparse.Namespace, what: str) -> None:
    if not arguments.json:
        print(f"{what} ...", file=sys.stderr)
