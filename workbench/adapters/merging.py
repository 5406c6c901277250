"""Merges that requests ask for, as adapters of a manager: made on its worker threads, cached by content, forgotten
and made again like any adapter that lies on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from workbench.adapters.merge import MergedAdapters
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.adapters.manager import LoRAManager


@dataclass(frozen=True)
class MergeSource:
    """Where a merged adapter comes from.

    Attributes:
        merged: which adapters, and how.
        parts: (name, source, `revision`, `token`, `offline`) of each, in the order of the ids.
    """

    merged: MergedAdapters
    parts: tuple[tuple[str, str, Mapping[str, Any]], ...]


def merged_of(given: MergedAdapters | Mapping[str, Any] | None) -> MergedAdapters | None:
    """Return a request's merge, given as itself, as JSON, or not at all."""
    return given if given is None or isinstance(given, MergedAdapters) else MergedAdapters.from_dict(given)


def check_merge(manager: LoRAManager, merged: MergedAdapters) -> None:
    """Raise unless every adapter of a merge is loaded, and those of a constant row fit into the slots together."""
    for name in merged.ids:
        if name not in manager:
            known = manager.names()
            hint = nearest(name, known)
            raise UserError(f"merged_adapters: no adapter {name!r} is loaded{hint}; loaded: {names(known)}")
    if merged.is_constant_row and len(merged.ids) > manager.config.max_num_loras:
        raise UserError(
            f"merged_adapters: a linear merge of {len(merged.ids)} adapters runs each of them, but there are "
            f"{manager.config.max_num_loras} slots; raise max_num_loras"
        )


def load_merged(manager: LoRAManager, merged: MergedAdapters) -> str:
    """Make a merge that is not a constant row, unless it is there already, and return the name it runs under.

    Raises:
        UserError: adapters that cannot be read or merged.
    """
    entries = {entry.name: entry for entry in manager.entries()}
    parts = [entries[name] for name in merged.ids]
    facts = {**asdict(merged), "hashes": [entry.content_hash for entry in parts]}
    name = "merged-" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    if name not in manager:
        sources = tuple((entry.name, entry.source, entry.where) for entry in parts)
        manager.reader.merges[name] = MergeSource(merged, sources)
        manager.load(name, name).raise_for_status()
    return name
