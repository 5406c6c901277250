"""`workbench demo`: a real model, four adapters, and a page that shows which of them speaks at which token."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli import show
from workbench.errors import UserError
from workbench.instrument.run import open_run, remove_run

if TYPE_CHECKING:
    from workbench.engine import Engine
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
    parser.add_argument("--out", default="workbench-demo", metavar="DIR",
                        help="folder for the page, picture, trace and run (default workbench-demo)")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, write its files and print the report."""
    clock = time.perf_counter()
    from workbench.engine.sampling import Sampling

    # greedy, but for a penalty without which so small a model soon repeats itself
    sampling = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True, repetition_penalty=1.2)
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out!r} cannot be made: {error.strerror}") from None
    segments = read_segments()
    texts = [segment["text"] for segment in segments]
    prompts = [_SEPARATOR.join(texts), *texts]
    earlier = _earlier_run(out / "run", prompts)
    _say(arguments, "loading the base model and four adapters")
    engine = _engine(arguments, prompts)
    load_time_s = time.perf_counter() - clock
    _say(arguments, f"continuing them together, and each alone, by {arguments.max_tokens} tokens")
    clock = time.perf_counter()
    if earlier:
        remove_run(out / "run")
    with engine.record("scalings", run=out / "run") as recorder:
        answers = engine.generate(prompts, mixture="demo", sampling=sampling,
                                  tgt_non_granular_index=arguments.tgt_non_granular_index)
    generate_time_s = time.perf_counter() - clock
    if failed := [each.error for each in answers if each.error]:
        raise UserError(failed[0])
    completion, *alone = answers
    trace = recorder.trace(completion.request_id)
    clock = time.perf_counter()
    files = {**write_files(trace, out), "run": str(out / "run")}
    times = {"load_time_s": load_time_s, "generate_time_s": generate_time_s,
             "figure_time_s": time.perf_counter() - clock}
    report = {
        "base": engine.base_id, "dtype": engine.config.dtype, "adapters": list(trace.adapters),
        "segments": lead_by_segment(trace, segments),
        "continuations": [
            {"domain": segment["domain"], **_lead(recorder.trace(each.request_id), slice(None)), "text": each.text}
            for segment, each in zip(segments, alone, strict=True)
        ],
        "text": completion.text, "usage": vars(completion.usage),
        "scalings_computed": completion.scalings_computed, "scalings_reused": completion.scalings_reused,
        "drafts_accepted": sum(each.drafts_accepted for each in answers),
        "drafts_rejected": sum(each.drafts_rejected for each in answers),
        "tok_s": sum(len(each.token_ids) for each in answers) / generate_time_s,
        "forwards": engine.counters()["forwards"], **files, **times,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_report(report, trace)
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
        lead = _lead(trace, slice(inside[0], inside[-1] + 1))
        found.append({"domain": segment["domain"], **lead, "tokens": len(inside)})
        first = last + len(_SEPARATOR)
    return found


def _lead(trace: Trace, tokens: slice) -> dict[str, Any]:
    share = trace.share(tokens)
    top = max(share, key=share.__getitem__)
    return {"top_adapter": top, "share": share[top], "shares": share}


def write_files(trace: Trace, out: Path) -> dict[str, str]:
    """Write the trace, the page and the picture; return their paths."""
    paths = {"trace": out / "demo.safetensors", "figure": out / "demo.html", "picture": out / "demo.png"}
    trace.save(paths["trace"])
    show.write(trace, [paths["figure"], paths["picture"]], "Four adapters, one model: which of them speaks where")
    return {key: str(path) for key, path in paths.items()}


def _earlier_run(folder: Path, prompts: list[str]) -> bool:
    """Whether an earlier demo's run lies there, which this one may replace.

    Raises:
        UserError: something else does.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    # that of a demo that was killed may have no request yet
    if not set(open_run(folder).requests["prompt"]) <= set(prompts):
        raise UserError(f"{str(folder)!r} holds a run that is not the demo's; choose another --out")
    return True


def _engine(arguments: argparse.Namespace, prompts: list[str]) -> Engine:
    """Load the engine, once everything that needs no weights is known to fit."""
    from workbench.config import EngineConfig
    from workbench.engine import Engine
    from workbench.engine.base import BaseInfo
    from workbench.engine.options import policy_of

    policy_of(arguments.tgt_non_granular_index, None, "demo")
    info = BaseInfo.read(EngineConfig(base=arguments.base or "demo", dtype="float32"))
    for prompt in prompts:
        info.prompts.encode(prompt, arguments.max_tokens)
    return Engine.from_mixture("demo", info=info)


def _print_report(report: dict[str, Any], trace: Trace) -> None:
    from workbench.display import text_report

    print(text_report(trace))
    print()
    print(f"{'segment':<12}{'tokens':>7}   {'leading adapter':<17}{'share':>7}")
    for segment in report["segments"]:
        right = "" if segment["top_adapter"] == segment["domain"] else "   (another was expected)"
        found = f"{segment['top_adapter']:<17}{segment['share']:>7.2f}{right}"
        print(f"{segment['domain']:<12}{segment['tokens']:>7}   {found}")
    print("\neach segment alone, continued in the same batch:")
    for each in report["continuations"]:
        text = " ".join(each["text"].split())
        print(f"{each['domain']:<12}{each['top_adapter']:<12}{each['share']:>5.2f}   {text[:70]}")
    usage, drafts = report["usage"], report["drafts_accepted"] + report["drafts_rejected"]
    print(f"\n{1 + len(report['continuations'])} requests in one batch: {report['tok_s']:.1f} tokens/s generated, "
          f"{report['forwards']} forwards, {report['dtype']}; {report['drafts_accepted']} of {drafts} drafts accepted")
    print(f"the first: {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated; scalings of "
          f"{report['scalings_computed']} inputs computed, {report['scalings_reused']} reused")
    print(f"\nopen {report['figure']} to look at every token, site and adapter")
    print(f"(picture: {report['picture']}; trace: {report['trace']}; run: {report['run']})")


def _say(arguments: argparse.Namespace, what: str) -> None:
    if not arguments.json:
        print(f"{what} ...", file=sys.stderr)
