"""Settings to compare: from what a call was given to a label and options for each.

A setting is options of `Engine.submit`, and `edits` besides. Labels name what differs: "exact", "k = 4", "adapter
german, temperature = 0.8".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from workbench.engine import Sampling
from workbench.engine.editing import label_of
from workbench.engine.options import sampling_of
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.engine import Engine

MOST = 8
WHO = ("mixture", "adapter", "merged_adapters")
_REUSE = ("tgt_non_granular_index", "policy")
_OTHERS = ("response_format", "continuation", "priority", "deadline_s", "on_text", "sampling", "edits")
# one value of these is a list by itself, so a list of them is not several settings
_LISTS = (
    "stop", "stop_token_ids", "dry_sequence_breakers", "logit_bias", "response_format", "continuation", "sampling",
)  # fmt: skip
_SAMPLING = tuple(field.name for field in fields(Sampling))
_KNOWN = (*WHO, *_REUSE, *_OTHERS, *_SAMPLING)


def settings_of(settings: Any, common: Mapping[str, Any], fewest: int = 2) -> dict[str, dict[str, Any]]:
    """Return label -> options of each setting, the common ones included.

    Args:
        settings: label -> options, a list of options, or None when one of `common` is a list: one setting per value.
        common: options of every setting; a setting's own come first.
        fewest: how many settings there must be.

    Raises:
        UserError: too few or too many, an option nobody knows, or something that is no options.
    """
    if settings is None:
        settings, common = _listed(common)
    listed = [key for key in common if _is_list(key, common[key])]
    if listed:
        raise UserError(f"{listed[0]} is a list, and settings are given too; a common option has one value")
    if isinstance(settings, Mapping):
        labelled = {_label(label): _options(f"setting {label!r}", own) for label, own in settings.items()}
    elif isinstance(settings, Sequence) and not isinstance(settings, str):
        each = [_options(f"setting {number}", own) for number, own in enumerate(settings)]
        labelled = dict(zip(labels_of([_merged(common, own) for own in each]), each, strict=True))
    else:
        raise UserError(
            f"settings must be a dict of label -> options, or a list of options, not {type(settings).__name__}"
        )
    if not fewest <= len(labelled) <= MOST:
        raise UserError(f"{fewest} to {MOST} settings can be compared, not {len(labelled)}")
    _options("the common options", common)
    return {label: _merged(common, own) for label, own in labelled.items()}


def labels_of(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each of several options: what differs from the first one's; equal ones are numbered."""
    keys = list(dict.fromkeys(key for each in options for key in each))
    differ = [key for key in keys if any(_differs(each, options[0], key) for each in options[1:])]
    found: list[str] = []
    for each in options:
        mine = differ if each is options[0] else [key for key in differ if _differs(each, options[0], key)]
        label = _said(each, mine)
        number = 1 + sum(other == label or other.startswith(f"{label} (") for other in found)
        found.append(label if number == 1 else f"{label} ({number})")
    return found


def require_comparable(engine: Engine, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise unless all mixtures that settings name have the same adapters at the same sites.

    Raises:
        UserError: two that differ, by name.
    """
    first = None
    for label, options in settings.items():
        mixture = engine.mixtures.get(options.get("mixture"))
        if mixture is None:
            continue  # none, or one that the engine will say it does not have
        if first is None:
            first = (label, mixture)
        known, other = first[1], mixture
        if set(known.adapter_names) != set(other.adapter_names):
            raise UserError(
                f"{first[0]!r} and {label!r} cannot be compared: mixture {known.name!r} has adapters "
                f"{names(known.adapter_names)}, mixture {other.name!r} has {names(other.adapter_names)}"
            )
        if set(known.sites) != set(other.sites):
            raise UserError(
                f"{first[0]!r} and {label!r} cannot be compared: mixtures {known.name!r} and {other.name!r} act at "
                "different sites"
            )


def _listed(common: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one setting per value of the one common option that is a list, and the other options."""
    listed = [key for key in common if _is_list(key, common[key])]
    if not listed:
        raise UserError(
            "nothing to compare: give settings, or a list as one option, such as tgt_non_granular_index=[None, 0, 4]"
        )
    if len(listed) > 1:
        raise UserError(
            f"{names(listed)} are lists, and only one option may be; give settings=[{{...}}, {{...}}] for what you mean"
        )
    key = listed[0]
    return [{key: value} for value in common[key]], {name: common[name] for name in common if name != key}


def _is_list(key: str, value: Any) -> bool:
    return key not in _LISTS and isinstance(value, Sequence) and not isinstance(value, str)


def _label(label: Any) -> str:
    if not isinstance(label, str) or not label.strip():
        raise UserError(f"the label of a setting must be text that can be read, not {label!r}")
    return label


def _options(what: str, own: Any) -> dict[str, Any]:
    """Return options as a dict, or raise the UserError that names the one nobody knows."""
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise UserError(f"{what} must be a dict of options such as {{'tgt_non_granular_index': 4}}, not {own!r}")
    for key in own:
        if key not in _KNOWN:
            raise UserError(f"{what}: unknown option {key!r}{nearest(key, _KNOWN)}")
    given = {key: own[key] for key in own if key in _SAMPLING}
    if given.get("n", 1) != 1 or given.get("best_of") not in (None, 1):
        raise UserError(f"{what}: a comparison shows one answer per setting; leave n and best_of out")
    try:
        sampling_of(own.get("sampling"), given)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    return dict(own)


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting's options; its own way of choosing adapters replaces the common one, reuse likewise."""
    kept = dict(common)
    for group in (WHO, _REUSE):
        if any(key in own for key in group):
            kept = {key: value for key, value in kept.items() if key not in group}
    if kept.get("mixture") is None and own.get("mixture") is None:
        kept = {key: value for key, value in kept.items() if key not in _REUSE}
    return {**kept, **own}


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    mine, theirs = one.get(key), other.get(key)
    return mine is not theirs and mine != theirs


def _said(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    parts = []
    if any(key in keys for key in WHO):
        parts.append(_who(options))
    if any(key in keys for key in _REUSE) and (options.get("mixture") is not None or not parts):
        policy, k = options.get("policy"), options.get("tgt_non_granular_index")
        reuse = "exact" if k is None else f"k = {k}"
        parts.append(reuse if policy is None else getattr(policy, "name", str(policy)))
    for key in keys:
        if key == "edits":
            if options.get(key) is not None or not parts:
                parts.append(_edits_said(options.get(key)))
        elif key in options and key not in (*WHO, *_REUSE):
            parts.append(f"{key} = {options[key]}")
    return ", ".join(parts) or "as given"


def _who(options: Mapping[str, Any]) -> str:
    merged = options.get("merged_adapters")
    if merged is not None:
        ids = merged.get("ids", ()) if isinstance(merged, Mapping) else getattr(merged, "ids", ())
        return f"merged {' + '.join(map(str, ids))}"
    for key in ("mixture", "adapter"):
        if options.get(key) is not None:
            return f"{key} {options[key]}"
    return "base model"


def _edits_said(edits: Any) -> str:
    if edits is None:
        return "not edited"
    each = list(edits.values()) if isinstance(edits, Mapping) else [edits]
    flat = [one for given in each for one in (given if isinstance(given, Sequence) else [given])]
    return ", ".join(label_of(one) if callable(one) else str(one) for one in flat)
