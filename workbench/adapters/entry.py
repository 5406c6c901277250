"""What a manager knows of one adapter, and all of it as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.adapters.model import LoRAModel

if TYPE_CHECKING:
    import pandas as pd

NEVER = 1 << 62  # later than every event


@dataclass(eq=False)
class Entry:
    """One registered adapter.

    Attributes:
        name, source: what it is called, and the folder or Hub id it came from.
        where: `revision`, `token`, `offline` of a Hub id; the token shows in nothing.
        content_hash: of what was first read; a later read must give the same.
        num_bytes: of its factors in float32.
        rank: its largest.
        number: its place in the order in which adapters were asked for.
        model: its factors on the host, or None when only the disk has them.
        slot: its slot, or None.
        users: unfinished requests that name it, queued ones too.
        leases: running requests; they use its slot.
        pinned: keep it in its slot.
        waiting: when each of the users that have no lease yet came (a clock that counts events).
        used: when a request last got its slot.
        loading: the read under way, if one is.
        error: why the last read failed, until a request is told.
        leaving: unload it when its last user ends.
    """

    name: str
    source: str
    where: Mapping[str, Any] = field(default_factory=dict, repr=False)
    content_hash: str = ""
    num_bytes: int = 0
    rank: int = 0
    number: int = 0
    model: LoRAModel | None = field(default=None, repr=False)
    slot: int | None = None
    users: int = 0
    leases: int = 0
    pinned: bool = False
    waiting: set[int] = field(default_factory=set)
    used: int = 0
    loading: Future | None = field(default=None, repr=False)
    error: str | None = None
    leaving: bool = False

    @property
    def tier(self) -> str:
        """Where it lies: "slot", "host" or "disk" (or "loading", when it is on its way from there)."""
        if self.slot is not None:
            return "slot"
        if self.model is not None:
            return "host"
        return "loading" if self.loading is not None else "disk"

    @property
    def asked(self) -> int:
        """When the request that waits longest for it came; `NEVER` when none waits."""
        return min(self.waiting, default=NEVER)

    @property
    def num_uses(self) -> int:
        """Uses that keep it registered."""
        return max(self.users, self.leases)


COLUMNS = ("name", "tier", "slot", "rank", "num_bytes", "users", "leases", "pinned", "leaving", "source")


def frame_of(entries: Iterable[Entry]) -> pd.DataFrame:
    """Return one row per adapter with `COLUMNS`; slot is missing (`<NA>`) outside of slots."""
    import pandas as pd

    rows = [[getattr(entry, column) for column in COLUMNS] for entry in entries]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"slot": "Int64"})
