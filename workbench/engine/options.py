"""What a request may be asked with, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from workbench.engine.sampling import Sampling
from workbench.errors import UserError, names, nearest
from workbench.xlora import ReusePolicy, exact, non_granular, policy_named
from workbench.xlora.policy import trusted

_PER_PROMPT = (
    "adapter", "mixture", "merged_adapters", "tgt_non_granular_index", "policy", "seed", "response_format",
    "continuation",
)  # fmt: skip
_OTHERS = ("sampling", "on_text", "request_id", "distributions", "priority", "deadline_s")


def check_arguments(
    adapter: Any, mixture: Any, on_text: Any, request_id: Any, distributions: Any, continuation: Any
) -> None:
    """Raise for an argument of a request that is of no use."""
    for key, value in (("adapter", adapter), ("mixture", mixture), ("request_id", request_id)):
        if value is not None and (not isinstance(value, str) or not value):
            raise UserError(f"{key} must be a name, not {value!r}")
        if value is not None and any("\ud800" <= char <= "\udfff" for char in value):
            raise UserError(f"{key} must be valid Unicode; {value!r} holds half of a surrogate pair")
    if on_text is not None and not callable(on_text):
        raise UserError(f"on_text must be a function that takes text, not {on_text!r}")
    if not isinstance(distributions, bool):
        raise UserError(f"distributions must be True or False, not {distributions!r}")
    if distributions and continuation is None:
        raise UserError("distributions are kept of a continuation that is scored; ask score for them")


def require_loaded(name: str | None, kind: str, loaded: Iterable[str]) -> None:
    """Raise unless `name` is None or loaded; `kind` says what it would be."""
    if name is not None and name not in loaded:
        raise UserError(f"no {kind} {name!r} is loaded{nearest(name, loaded)}; loaded: {names(list(loaded))}")


def require_one(**given: object) -> None:
    """Raise when more than one of the ways to choose adapters is given."""
    named = {key: value for key, value in given.items() if value is not None}
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise UserError(f"name one of {one} ({first!r}) and {other} ({second!r}), not both")


def sampling_of(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    """Return `sampling` (greedy by default) with some fields changed; an unknown one is a UserError."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise UserError(f"sampling must be a Sampling, not {sampling!r}; its fields may be given by themselves")
    known = Sampling.__dataclass_fields__
    for name in options:
        if name not in known:
            hint = nearest(name, [*known, *_PER_PROMPT, *_OTHERS])
            raise UserError(f"unknown setting {name!r}{hint}; sampling has {names(list(known), 40)}")
    return replace(sampling or Sampling(), **options)


def policy_of(k: int | None, policy: ReusePolicy | str | None, mixture: str | None) -> ReusePolicy | None:
    """Return the reuse policy of a request: `exact` unless it says otherwise, None without a mixture."""
    if k is not None and policy is not None:
        raise UserError(f"give tgt_non_granular_index ({k}) or policy ({getattr(policy, 'name', policy)}), not both")
    if isinstance(policy, str):
        policy = policy_named(policy)
    if policy is not None:
        policy = trusted(policy)
    if mixture is None:
        if k is not None or policy is not None:
            raise UserError("tgt_non_granular_index and policy say how a mixture's scalings are reused; name a mixture")
        return None
    if k is not None:
        return non_granular(k)
    return policy if policy is not None else exact()


def split_options(options: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """Return how tokens are chosen and everything else; an unknown option is a UserError that names the nearest."""
    others = {key: value for key, value in options.items() if key in _PER_PROMPT[:5] + _PER_PROMPT[6:] + _OTHERS}
    fields = {key: value for key, value in options.items() if key not in others}
    return sampling_of(others.pop("sampling", None), fields), others


def batch_of(prompts: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return each prompt with its own options; some may be given as one value for each prompt."""
    each: list[dict[str, Any]] = [{} for _ in prompts]
    for key, value in options.items():
        listed = key in _PER_PROMPT and isinstance(value, (list, tuple)) and not _is_one(key, value, len(prompts))
        if listed and len(value) != len(prompts):
            count = len(prompts)
            raise UserError(f"{key} has {len(value)} entries for {count} prompts; give one per prompt, or one for all")
        for index, own in enumerate(each):
            own[key] = value[index] if listed else value
    return list(zip(prompts, each, strict=True))


def _is_one(key: str, value: Sequence[Any], count: int) -> bool:
    # a continuation may be a list of token ids
    return key == "continuation" and count == 1 and all(isinstance(each, Integral) for each in value)
