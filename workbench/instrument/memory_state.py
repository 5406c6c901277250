"""What lies where in an engine's memory at one moment: adapters in slots, KV blocks and who holds them.

Numbers and names only, so that it can be kept, drawn and compared without the engine. Nothing here imports it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import UserError

FREE, CACHED, PRIVATE, PUBLISHED, SHARED = range(5)
KINDS = ("free", "cached", "private", "published", "shared")
BASE = "base"


@dataclass(frozen=True)
class SlotState:
    """One slot.

    Attributes:
        slot: its number.
        adapter: what lies in it, None if nothing does.
        num_bytes: of its factors.
        rank: its largest.
        leases: running requests that use it.
        is_pinned: it stays for good.
        mixture: the mixture it is part of, or None.
    """

    slot: int
    adapter: str | None = None
    num_bytes: int = 0
    rank: int = 0
    leases: int = 0
    is_pinned: bool = False
    mixture: str | None = None


@dataclass(frozen=True)
class StreamState:
    """The KV of one kind of row of one request.

    Attributes:
        request_id: whose.
        kind: "adapted" or "scaling".
        runs_on: the adapter's or mixture's name, or "base".
        is_mixture: whether that is a mixture.
        blocks: its blocks in token order; dropped ones are left out.
    """

    request_id: str
    kind: str
    runs_on: str
    is_mixture: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MemoryState:
    """Slots and KV pool at one moment.

    Attributes:
        slots: by number.
        slot_bytes: of the slots' stacks, unused rows included.
        block_tokens: tokens a block holds.
        block_bytes: bytes of a block.
        references: int64 `[block]`: how many streams hold it.
        is_published: bool `[block]`: others can find it in the prefix cache.
        streams: of the requests that run.

    Raises:
        UserError: the two arrays differ in length, or a stream holds a block that there is not.
    """

    slots: tuple[SlotState, ...]
    slot_bytes: int
    block_tokens: int
    block_bytes: int
    references: np.ndarray
    is_published: np.ndarray
    streams: tuple[StreamState, ...] = ()

    def __post_init__(self) -> None:
        references, published = np.asarray(self.references, np.int64), np.asarray(self.is_published, bool)
        if references.ndim != 1 or references.shape != published.shape:
            shapes = f"{list(references.shape)} and {list(published.shape)}"
            raise UserError(f"references and is_published must have one entry per block each; they have {shapes}")
        object.__setattr__(self, "references", references)
        object.__setattr__(self, "is_published", published)
        for stream in self.streams:
            outside = [block for block in stream.blocks if not 0 <= block < len(references)]
            if outside:
                raise UserError(
                    f"the {stream.kind} stream of {stream.request_id!r} holds block {outside[0]}; there are "
                    f"{len(references)} blocks"
                )

    @property
    def num_blocks(self) -> int:
        return len(self.references)

    def kinds(self) -> np.ndarray:
        """Return int8 `[block]`: FREE, CACHED (nobody holds it, it can be found), PRIVATE (one stream's own),
        PUBLISHED (one stream holds it, it can be found), SHARED (several hold it)."""
        kinds = np.where(self.references == 0, np.where(self.is_published, CACHED, FREE), PRIVATE)
        kinds = np.where((self.references == 1) & self.is_published, PUBLISHED, kinds)
        return np.where(self.references > 1, SHARED, kinds).astype(np.int8)

    def counts(self) -> dict[str, int]:
        """Return how many blocks there are of each kind."""
        found = np.bincount(self.kinds(), minlength=len(KINDS))
        return dict(zip(KINDS, found.tolist(), strict=True))


def memory_state(engine: Any) -> MemoryState:
    """Return an engine's memory as it is between two steps; waits for the step under way.

    Raises:
        UserError: it has no slots and no KV pool.
    """
    pool = getattr(getattr(engine, "memory", None), "pool", None)
    if pool is None or not hasattr(engine, "slots"):
        raise UserError(f"memory_state() takes an Engine, not {type(engine).__name__}")
    # slots and blocks change inside a step only, and steps hold the turn
    with getattr(engine.adapters, "turn", contextlib.nullcontext()):
        num_blocks = pool.num_blocks
        published = np.zeros(num_blocks, dtype=bool)
        published[list(pool._key_of)] = True
        return MemoryState(
            slots=_slots(engine),
            slot_bytes=int(engine.slots.num_bytes),
            block_tokens=pool.hidden.shape[0] // num_blocks,
            block_bytes=int(pool.shape.block_bytes),
            references=np.fromiter(map(pool.references, range(num_blocks)), np.int64, num_blocks),
            is_published=published,
            streams=tuple(stream for request in engine.scheduler.running for stream in _streams(request)),
        )


def _slots(engine: Any) -> tuple[SlotState, ...]:
    entries = {entry.slot: entry for entry in engine.adapters.entries() if entry.slot is not None}
    mixtures = {slot: name for name, mixture in engine.mixtures.items() for slot in mixture.slots}
    users = [getattr(request.mixture, "name", None) for request in engine.scheduler.running]
    found = []
    loaded = engine.slots.adapters
    for slot in range(max(loaded, default=-1) + 1):
        if slot not in loaded:
            found.append(SlotState(slot))
            continue
        model, entry, mixture = loaded[slot], entries.get(slot), mixtures.get(slot)
        # a mixture holds its slots whether anybody runs on it or not
        leases = entry.leases if entry is not None else users.count(mixture)
        found.append(
            SlotState(slot, model.name, int(model.num_bytes), int(model.rank), leases,
                      bool(entry is not None and entry.pinned), mixture)
        )  # fmt: skip
    return tuple(found)


def _streams(request: Any) -> list[StreamState]:
    if request.mixture is not None:
        runs_on, is_mixture = request.mixture.name, True
    elif request.merged is not None:
        runs_on, is_mixture = "+".join(request.names), False
    else:
        runs_on, is_mixture = request.adapter or BASE, False
    return [
        StreamState(request.id, kind, runs_on, is_mixture, tuple(block for block in stream.blocks if block >= 0))
        for kind, stream in request.streams.items()
    ]
