"""Tiers: how an adapter gets from disk into host memory and into a slot, and what goes when there is no room.

Contract: whoever calls holds the manager's lock, and its turn where slots change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from workbench.adapters.entry import NEVER, Entry
from workbench.adapters.host import HostTier
from workbench.adapters.model import LoRAModel
from workbench.adapters.reading import Reader
from workbench.adapters.slots import SlotTable
from workbench.adapters.types import LoRAConfig, LoRAResponse
from workbench.errors import UserError, names


class Tiers:
    """Where each of a manager's adapters lies.

    Args:
        slots: the engine's slot table.
        reader: reads adapters.
        config: how many, how large.
        place: called with a model before it goes into a slot (wraps its sites).
        lock: the manager's.

    Attributes:
        in_slots: the adapters in slots, by name.
        host: those in host memory.
        counts: what has been moved, and how often a slot had what was asked for.
    """

    def __init__(
        self, slots: SlotTable, reader: Reader, config: LoRAConfig, place: Callable[[LoRAModel], None],
        lock: threading.RLock,
    ):
        self._slots, self._reader, self._place, self._lock = slots, reader, place, lock
        self.max_in_slots = config.max_num_loras
        self.in_slots: dict[str, Entry] = {}
        self.host = HostTier(config.max_host_bytes)
        self.counts = {"slot_hits": 0, "slot_loads": 0, "slot_evictions": 0, "disk_loads": 0}
        self._workers = ThreadPoolExecutor(config.num_workers, thread_name_prefix="lora-read")

    def bring_in(self, entry: Entry) -> bool:
        """Put an adapter into a slot; False, with a read begun where that is possible, when it cannot be done yet.

        Raises:
            UserError: the last read failed, every slot holds a pinned adapter, or the device has no room.
        """
        if entry.error is not None:
            message, entry.error = entry.error, None
            raise UserError(message)
        if entry.model is None:
            if entry.loading is None and self.host.has_room(entry, entry.asked):
                self._start_reading(entry)
            return False
        if not self._free_a_slot(entry):
            return False
        try:
            self._place(entry.model)
            entry.slot = self._slots.put(entry.model)
        except (RuntimeError, MemoryError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"adapter {entry.name!r} cannot be put into a slot: {first}") from error
        self.in_slots[entry.name] = entry
        self.host.discard(entry)
        self.counts["slot_loads"] += 1
        self.host.trim()
        return True

    def read_ahead(self, entry: Entry) -> None:
        """Begin to read an adapter if host memory has room beside what requests wait for."""
        if self.host.has_room(entry, NEVER):
            self._start_reading(entry)

    def remove(self, entry: Entry) -> None:
        """Take an adapter off every tier but the disk."""
        if entry.slot is not None:
            self._vacate(entry)
        if entry.loading is not None:
            entry.loading.cancel()
        self.host.discard(entry)

    def all_pinned(self, pinned: list[str]) -> str:
        """Return the end of a sentence about slots that hold nothing but pinned adapters."""
        held = f"all {self.max_in_slots} slots hold pinned adapters ({names(pinned, 4)})"
        return f"{held}; unpin one, or raise max_num_loras"

    def close(self) -> None:
        """Stop the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _free_a_slot(self, entry: Entry) -> bool:
        held = self.in_slots.values()
        if len(held) < self.max_in_slots:
            return True
        if all(other.pinned for other in held):
            raise UserError(f"adapter {entry.name!r} cannot run: {self.all_pinned([other.name for other in held])}")
        idle = [other for other in held if not other.leases and not other.pinned]
        if not idle:
            return False
        # those that nobody waits for first, the least recently used first; then whose turn comes last
        self._vacate(min(idle, key=lambda other: (1, -other.asked) if other.waiting else (0, other.used)))
        self.counts["slot_evictions"] += 1
        return True

    def _vacate(self, entry: Entry) -> None:
        self._slots.drop(entry.slot)
        entry.slot = None
        del self.in_slots[entry.name]
        self.host.add(entry)

    def _start_reading(self, entry: Entry) -> None:
        self.host.add(entry)
        entry.loading = self._workers.submit(self._read, entry)

    def _read(self, entry: Entry) -> None:
        """Read a registered adapter again, on a worker thread."""
        model = self._reader.read(entry.name, entry.source, entry.where)
        with self._lock:
            self.counts["disk_loads"] += 1
            entry.loading = None
            if isinstance(model, LoRAResponse):
                entry.error = model.message
            elif model.content_hash != entry.content_hash:
                entry.error = (
                    f"adapter {entry.name!r} in {entry.source!r} has changed since it was loaded; unload it, then load "
                    "it again"
                )
            else:
                entry.model = model
            if entry.model is None:
                self.host.discard(entry)
            self.host.trim()
