"""Right before fast: what must hold of a workload's results before any of its figures is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.sweep.workload import Workload

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine

# two tokens whose log-probabilities are nearer than this may change places with the batch's shape
GAPS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.3}
_CHECKED_TOKENS = 8  # a check must stay short beside the repeats
_BASE_TOKENS = 2
_SAMPLE = 4
_NO_DELTA = 1e-6  # log-probabilities nearer to the base's than this show no adapter


class CheckFailed(Exception):
    """A measured engine gave a wrong result; the text says which."""


@dataclass(frozen=True)
class Checked:
    """What a check looked at.

    Attributes:
        compared: requests whose tokens were compared with the same request alone.
        near_ties: those whose comparison ended early, at a choice between two nearly equal tokens.
        differ_from_base: requests that had to differ from the base, and did.
    """

    compared: int
    near_ties: int
    differ_from_base: int


def check(engine: Engine, workload: Workload) -> Checked:
    """Compare a workload's greedy tokens with those of its requests alone, and its adapters' with the base's.

    Raises:
        CheckFailed: a token that differs by more than rounding can, an adapter without effect, a wrong count.
    """
    prompts, tokens = workload.prompts(engine), min(workload.tokens, _CHECKED_TOKENS)
    batch = generate(engine, prompts, tokens, **workload.options())
    ties = 0
    sample = _sample(workload)
    for number in sample:
        own = workload.options_of(number)
        alone = generate(engine, [prompts[number]], tokens, **_listed(own))[0]
        if alone.token_ids != batch[number].token_ids:
            _require_tie(engine, prompts[number], alone, batch[number], own, _which(workload, number))
            ties += 1
    adapted = [number for number in sample if _has_adapter(workload.options_of(number))]
    base = generate(engine, [prompts[number] for number in adapted], _BASE_TOKENS) if adapted else []
    for number, plain in zip(adapted, base, strict=True):
        if not _differs(batch[number], plain):
            which = _which(workload, number)
            raise CheckFailed(f"{which} gives the base model's very tokens and log-probabilities: no adapter ran")
    return Checked(len(sample), ties, len(adapted))


def generate(engine: Engine, prompts: Sequence[list[int]], tokens: int, **options: Any) -> list[Completion]:
    """Continue prompts greedily by exactly `tokens` tokens each.

    Raises:
        CheckFailed: a request that failed, or has another number of tokens.
    """
    done = engine.generate(list(prompts), max_tokens=tokens, ignore_eos=True, seed=0, **options)
    for number, each in enumerate(done, 1):
        if each.error:
            raise CheckFailed(f"request {number} of {len(prompts)} failed: {each.error}")
        if len(each.token_ids) != tokens:
            raise CheckFailed(f"request {number} of {len(prompts)} gave {len(each.token_ids)} tokens, not {tokens}")
    return done


def require_counts(completions: Sequence[Completion], workload: Workload) -> None:
    """Raise CheckFailed unless each request computed and reused the scalings that its lengths and policy ask for."""
    computed = workload.scalings_computed
    expected = (computed, workload.inputs - computed if workload.mode == "xlora" else 0)
    for number, each in enumerate(completions, 1):
        found = (each.scalings_computed, each.scalings_reused)
        if found != expected:
            raise CheckFailed(f"request {number} computed and reused {found} scalings, expected {expected}")


def _sample(workload: Workload) -> list[int]:
    """Return a few requests, of as many adapters as possible."""
    chosen: dict[Any, int] = {}
    for number in range(workload.concurrency):
        chosen.setdefault(workload.options_of(number).get("adapter"), number)
    step = max(1, workload.concurrency // _SAMPLE)
    ordered = [*chosen.values(), *range(0, workload.concurrency, step)]
    return sorted(list(dict.fromkeys(ordered))[:_SAMPLE])


def _which(workload: Workload, number: int) -> str:
    return f"request {number + 1} of {workload.concurrency} in mode {workload.mode!r}"


def _has_adapter(own: dict[str, Any]) -> bool:
    return any(own.get(key) for key in ("adapter", "mixture", "merged_adapters"))


def _listed(own: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: [value] for key, value in own.items()}


def _require_tie(
    engine: Engine, prompt: list[int], alone: Completion, batched: Completion, own: dict[str, Any], which: str
) -> None:
    """Raise unless the first token that differs was a choice between two nearly equal ones."""
    at = next(i for i, pair in enumerate(zip(alone.token_ids, batched.token_ids, strict=True)) if pair[0] != pair[1])
    shared = list(alone.token_ids[:at])
    ends = [each.token_ids[at] for each in (alone, batched)]
    likely, other = (engine.score(prompt, [*shared, token], **own).logprobs[-1] for token in ends)
    allowed = GAPS[engine.config.dtype]
    if abs(likely - other) > allowed:
        raise CheckFailed(
            f"{which} chooses token {ends[1]} in its batch, but {ends[0]} alone, at place {at}: their "
            f"log-probabilities differ by {abs(likely - other):.4f}, more than {allowed:g} ({engine.config.dtype})"
        )


def _differs(batched: Completion, base: Completion) -> bool:
    if batched.token_ids[:_BASE_TOKENS] != base.token_ids:
        return True
    return any(abs(a - b) > _NO_DELTA for a, b in zip(batched.logprobs, base.logprobs, strict=False))
