"""`workbench generate`: one continuation, from the base, an adapter or a mixture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine

_EXAMPLE = """examples:
  workbench generate --prompt 'Once upon a time' --max-tokens 20
  workbench generate --mixture demo --prompt 'def main():' --tgt-non-granular-index 4 --trace t.safetensors --json
  workbench generate --base ./model --mixture ./xlora --ordering ./ordering.json --prompt-ids 1,2,3 --json
  workbench generate --chat --prompt 'What is a sonnet?' --temperature 0.8 --top-p 0.9 --seed 1
  workbench generate --prompt 'A date: ' --response-format '{"type": "regex", "regex": "[0-9]{4}-[01][0-9]"}'
"""


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "generate", help="continue a prompt", epilog=_EXAMPLE, formatter_class=formatter,
        description="Continue a prompt with the base model, one LoRA adapter, or an X-LoRA mixture. The base may be "
        "left out when the ordering or the mixture names it; without any of them it is the demo base.",
    )
    add_model_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--adapter", metavar="SOURCE", help="LoRA adapter: folder, Hub id or demo/NAME")
    which.add_argument("--mixture", metavar="SOURCE", help="X-LoRA mixture: demo, folder or Hub id")
    parser.add_argument("--ordering", metavar="FILE", help="ordering of the mixture's adapters and sites")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], type=_setting,
                        help="X-LoRA setting that overrides the mixture's, for instance top_k_lora=2")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-ids", metavar="IDS", type=_token_ids, help="comma-separated token ids")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's chat message")
    _add_sampling_options(parser)
    parser.add_argument("--trace", metavar="FILE", help="save the scalings of every token here (.safetensors)")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")
    parser.set_defaults(run=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which base runs, and how."""
    parser.add_argument("--base", metavar="SOURCE", help="base model: demo, folder or Hub id")
    parser.add_argument("--config", metavar="FILE", help="TOML file with [engine] and [lora_config]; options win")
    parser.add_argument("--dtype", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda when there is one)")
    parser.add_argument("--revision", help="revision of the base on the Hub")
    parser.add_argument("--offline", action="store_true", default=None, help="never ask the Hub; use its cache")
    parser.add_argument("--no-drafting", dest="drafting", action="store_false", default=None,
                        help="never run a scaling row in advance (same result, more forwards)")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that were given."""
    keys = ("dtype", "device", "revision", "offline", "drafting")
    return {key: value for key in keys if (value := getattr(arguments, key)) is not None}


def run(arguments: argparse.Namespace) -> int:
    """Generate and print."""
    if arguments.tgt_non_granular_index is not None and not arguments.mixture:
        raise UserError("--tgt-non-granular-index says how a mixture's scalings are reused; name one with --mixture")
    for option in ("policy", "trace", "ordering", "set"):
        value, option = getattr(arguments, option), f"--{option}"
        if value and not arguments.mixture:
            raise UserError(f"{option} needs a mixture; name one with --mixture")
    if arguments.chat and arguments.prompt is None:
        raise UserError("--chat needs the prompt as text (--prompt), not as token ids")
    if arguments.trace and not Path(arguments.trace).resolve().parent.is_dir():
        raise UserError(f"--trace {arguments.trace!r}: there is no folder {str(Path(arguments.trace).parent)!r}")
    if arguments.trace and Path(arguments.trace).suffix != ".safetensors":
        raise UserError(f"--trace {arguments.trace!r}: expected the name of a .safetensors file")
    from workbench.engine import Sampling
    from workbench.engine.options import policy_of, sampling_of
    from workbench.engine.response_format import ResponseFormat

    policy_of(arguments.tgt_non_granular_index, arguments.policy, arguments.mixture)
    keys = Sampling.__dataclass_fields__
    given = {key: value for key, value in vars(arguments).items() if key in keys and value is not None}
    sampling = sampling_of(None, {**given, **dict(arguments.sampling)})
    if sampling.num_answers > 1:
        raise UserError("generate prints one answer; for n and best_of use Engine.generate")
    wanted = ResponseFormat.of(_response_format(arguments.response_format))
    prompt = arguments.prompt if arguments.prompt is not None else arguments.prompt_ids
    if arguments.chat:
        prompt = [{"role": "user", "content": prompt}]
    engine, chosen = load(arguments, prompt, sampling.max_tokens)
    with engine.record("scalings") as recorder:
        completion = _generate(engine, arguments, prompt, {"sampling": sampling, "response_format": wanted, **chosen})
    if completion.error:
        raise UserError(completion.error)
    if arguments.trace:
        recorder.trace(completion.request_id).save(arguments.trace)
    if arguments.json:
        print(json.dumps({"base": engine.base_id, "dtype": engine.config.dtype, **chosen, **completion.to_dict(),
                          "trace": arguments.trace}))
    return 0


def load(arguments: argparse.Namespace, prompt: Any, max_tokens: int) -> tuple[Engine, dict[str, str]]:
    """Return the engine and what the request names: `{"adapter": name}`, `{"mixture": name}` or nothing.

    The prompt, the mixture and the adapter's files are checked before the base's weights are read.
    """
    from workbench.engine.base import BaseInfo
    from workbench.engine.engine import Engine
    from workbench.engine.sources import base_setting, check_adapter, named_base, read_ordering

    options = engine_options(arguments)
    ordering = read_ordering(arguments.ordering)
    base = arguments.base
    if base is None and arguments.mixture:
        base = named_base(arguments.mixture, ordering, options)
    config, lora = read_config(arguments.config)
    info = BaseInfo.read(config.change(**base_setting(base), **options))
    info.prompts.encode(prompt, max_tokens)
    if arguments.mixture:
        engine = Engine.from_mixture(
            arguments.mixture, ordering=ordering, settings=dict(arguments.set), info=info, lora=lora
        )
        return engine, {"mixture": next(iter(engine.mixtures))}
    if arguments.adapter is None:
        return Engine(info=info, lora=lora), {}
    where = {"offline": arguments.offline}
    check_adapter(arguments.adapter, Path(arguments.adapter).name, info.targets(), info.label, where)
    engine = Engine(info=info, lora=lora)
    return engine, {"adapter": engine.load_adapter(arguments.adapter, offline=arguments.offline)}


def read_config(path: str | None) -> tuple[Any, Any]:
    """Return the `EngineConfig` and `LoRAConfig` of a TOML file; a table it lacks, or no file, gives the defaults."""
    from workbench.adapters.types import SECTION, LoRAConfig
    from workbench.config import EngineConfig, read_tables

    tables = read_tables(path, ("engine", SECTION)) if path else {}
    engine, lora = tables.get("engine", {}), tables.get(SECTION, {})
    return EngineConfig.from_mapping(engine, f"[engine] of {path!r}"), LoRAConfig.from_mapping(
        lora, f"[{SECTION}] of {path!r}"
    )


def _generate(engine: Engine, arguments: argparse.Namespace, prompt: Any, options: dict[str, Any]) -> Completion:
    options |= {"tgt_non_granular_index": arguments.tgt_non_granular_index, "policy": arguments.policy}
    if arguments.json:
        return engine.generate(prompt, **options)
    pieces = engine.stream(prompt, **options)
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            print()
            _print_usage(end.value)
            return end.value


def _print_usage(completion: Completion) -> None:
    usage = completion.usage
    line = (f"[{completion.finish_reason}: {usage.prompt_tokens} prompt tokens at "
            f"{usage.avg_prompt_tok_per_sec:.1f}/s, "
            f"{usage.completion_tokens} generated at {usage.avg_compl_tok_per_sec:.1f}/s")
    if completion.scalings_computed:
        line += f"; scalings of {completion.scalings_computed} inputs computed, {completion.scalings_reused} reused"
    print(line + "]", file=sys.stderr)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-tokens", type=int, default=64, metavar="N", help="most tokens to generate (default 64)")
    add("--tgt-non-granular-index", type=int, metavar="K",
        help="compute scalings for the prompt and the first K generated tokens, then reuse the K-th's")
    add("--policy", metavar="NAME", help="whose scalings each token uses: exact, non_granular(K), periodic(N): compute "
        "every N-th, lagged(D): those of D tokens before")
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-k", type=int, metavar="K")
    add("--top-p", type=float, metavar="P")
    add("--min-p", type=float, metavar="P")
    add("--repetition-penalty", type=float, metavar="X")
    add("--presence-penalty", type=float, metavar="X")
    add("--frequency-penalty", type=float, metavar="X")
    add("--seed", type=int, metavar="N")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", default=None, help="go on past the end-of-sequence token")
    add("--sampling", metavar="NAME=VALUE", action="append", default=[], type=_setting,
        help="any other field of Sampling, such as min_tokens=8 or typical_p=0.9")
    add("--response-format", metavar="JSON",
        help="what the text must match, as JSON or a file of it: a JSON schema, a regex or a Lark grammar")


def _response_format(given: str | None) -> Any:
    if given is None:
        return None
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UserError(f"--response-format {given!r} is neither a JSON object nor a readable file") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"--response-format is no JSON: {error}") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no comma-separated list of token ids, such as 1,2,3") from None


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as top_k_lora=2")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{value!r} is no number, true, false or null (in {text!r})") from None
