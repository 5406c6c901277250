"""LoRAManager: which adapters are known, where each lies, and who is using it.

An adapter lies on one of three tiers: in a slot (it can run), in host memory, or on disk. Worker threads read; slots
change only under `turn`, which an engine holds for each step, so never in the middle of a forward.

Contract: an adapter that a request runs on (a lease) or that is pinned never leaves its slot, and one that an
unfinished request names stays registered with the content it had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.adapters.entry import Entry, frame_of
from workbench.adapters.model import LoRAModel, LoRATargetModule
from workbench.adapters.reading import Reader
from workbench.adapters.slots import SlotTable
from workbench.adapters.tiers import Tiers
from workbench.adapters.turn import Turn
from workbench.adapters.types import LoRAConfig, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, split_spec
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas as pd


class LoRAManager:
    """Holds an engine's adapters; every method may be called from any thread.

    Args:
        slots: the engine's slot table.
        targets: module path -> site of the base.
        base: the base's name, for errors.
        config: how many, how large.
        place: called with a model before it goes into a slot (wraps its sites).
    """

    def __init__(
        self, slots: SlotTable, targets: Mapping[str, LoRATargetModule], base: str, config: LoRAConfig,
        place: Callable[[LoRAModel], None],
    ):
        self.config = config
        self.turn = Turn()
        self.reader = Reader(targets, base, config.max_lora_rank, pin=slots.device.type == "cuda")
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()  # taken after `turn`, never before it
        self._tiers = Tiers(slots, self.reader, config, place, self._lock)
        self.counts = self._tiers.counts
        # apart from the threads that read again: what a request waits for is not queued behind a thousand new ones
        self._loads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="lora-load")
        self._clock = 0

    def handle(self, request: LoRARequest) -> LoRAResponse:
        """Do what a request asks for."""
        if request.operation is LoRAOperation.LOAD:
            return self.load(request.lora_path, name=request.lora_name)
        return self.unload(request.lora_name)

    def load(self, source: str | Path, name: str | None = None, *, pinned: bool = False, **where: Any) -> LoRAResponse:
        """Read an adapter, check it, and register it; it takes a slot when a request needs it, or at once if pinned.

        Args:
            source: folder, Hub id, or `name=` either.
            name: what requests call it.
            pinned: keep it in a slot for good.
            **where: `revision`, `token`, `offline` of a Hub id.
        """
        try:
            named, source = split_spec(str(source)) if name is None else (name, str(source))
        except UserError as error:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, str(error))
        return self.load_all({named: source}, pinned=pinned, **where)[named]

    def load_all(
        self, sources: Mapping[str, str | Path], *, pinned: bool = False, **where: Any
    ) -> dict[str, LoRAResponse]:
        """Read several adapters on the worker threads at once; return each one's response."""
        numbers = {name: self._tick() for name in sources}
        started = {
            name: self._loads.submit(self._load, name, str(source), where, numbers[name])
            for name, source in sources.items()
        }
        answers = {name: future.result() for name, future in started.items()}
        if pinned:
            answers = {name: self._pin_loaded(name, numbers[name], answer) for name, answer in answers.items()}
        return answers

    def unload(self, name: str, *, in_use: str = "refuse") -> LoRAResponse:
        """Forget an adapter.

        Args:
            name: the adapter.
            in_use: what to do when unfinished requests name it: "refuse", or "wait" (it goes when the last of them
                ends, and no new request may name it).
        """
        if in_use not in ("refuse", "wait"):
            raise UserError(f"in_use must be 'refuse' or 'wait', not {in_use!r}{nearest(in_use, ('refuse', 'wait'))}")
        with self.turn, self._lock:
            entry = self._entries.get(name)
            if entry is None:
                hint = nearest(name, self._entries)
                return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, f"no adapter {name!r} is loaded{hint}")
            count = "1 request" if entry.num_uses == 1 else f"{entry.num_uses} requests"
            if entry.num_uses and in_use == "refuse":
                return LoRAResponse(
                    LoRAStatus.UNLOAD_ERROR,
                    f"adapter {name!r} is in use by {count}; wait for the end, cancel, or unload with in_use='wait'",
                )
            if entry.num_uses:
                entry.leaving = True
                return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} goes when the {count} that use it end")
            self._forget(entry)
            return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is unloaded")

    def pin(self, name: str) -> None:
        """Put an adapter into a slot and keep it there; waits until it is read.

        Raises:
            UserError: it is not loaded or is leaving, cannot be read, or finds no slot.
        """
        ticket = self.enter(name, ticket=0)  # before every request that waits
        try:
            while not self._pinned_now(name):
                self.wait(1.0)
        finally:
            self.leave(name, ticket)

    def unpin(self, name: str) -> None:
        """Let a pinned adapter leave its slot when another needs it."""
        with self._lock:
            self._entry(name).pinned = False

    def prefetch(self, name: str) -> None:
        """Begin to read an adapter, if it lies on disk and host memory has room for it; returns at once."""
        with self._lock:
            entry = self._entry(name)
            if entry.tier != "disk":
                return
            waits_longer = any(e is not entry and e.waiting and e.tier == "disk" for e in self._entries.values())
            if not waits_longer:
                self._tiers.read_ahead(entry)

    def enter(self, name: str, ticket: int | None = None) -> int:
        """Count a request that names an adapter, and return its ticket: the time at which it came.

        Until it leaves the adapter stays registered. The adapter is prefetched.

        Raises:
            UserError: it is not loaded, or is leaving.
        """
        with self._lock:
            entry = self._entry(name)
            if entry.leaving:
                raise UserError(f"adapter {name!r} is being unloaded; it takes no new requests")
            if not entry.users:
                entry.error = None  # of an earlier request, or of none
            ticket = self._tick() if ticket is None else ticket
            entry.waiting.add(ticket)
            entry.users += 1
            self.prefetch(name)
            return ticket

    def leave(self, name: str, ticket: int) -> None:
        """End what `enter` began."""
        with self.turn, self._lock:
            entry = self._entries[name]
            assert entry.users > 0, f"a request left {name!r} twice"
            entry.users -= 1
            entry.waiting.discard(ticket)
            self._forget_if_done(entry)
            self._tiers.host.trim()

    def acquire(self, name: str, ticket: int | None = None) -> int | None:
        """Return the slot of an adapter with a lease on it, or None when it cannot run yet.

        None means that it is being read, or that every slot is leased or pinned: ask again after the next step.

        Raises:
            UserError: it is not loaded, could not be read again, or can find no slot.
        """
        with self.turn, self._lock:
            entry = self._entry(name)
            if entry.slot is not None:
                self.counts["slot_hits"] += 1
            elif not self._tiers.bring_in(entry):
                return None
            entry.used = self._tick()
            entry.waiting.discard(ticket)
            entry.leases += 1
            return entry.slot

    def release(self, name: str) -> None:
        """End one lease."""
        with self.turn, self._lock:
            entry = self._entries[name]
            assert entry.leases > 0, f"a lease on {name!r} was ended twice"
            entry.leases -= 1
            self._forget_if_done(entry)

    def require_slots(self, wanted: Sequence[str]) -> None:
        """Raise unless the adapters that one request runs on at once can all be in slots, beside those pinned there."""
        with self._lock:
            pinned = [name for name, entry in self._tiers.in_slots.items() if entry.pinned and name not in wanted]
        if len(pinned) + len(wanted) > self.config.max_num_loras:
            raise UserError(
                f"{names(wanted)} cannot run together: {self.config.max_num_loras} slots hold them only without the "
                f"pinned {names(pinned, 4)}; unpin one, or raise max_num_loras"
            )

    def is_reading(self, name: str) -> bool:
        """Whether an adapter is on its way from disk."""
        with self._lock:
            return self._entry(name).loading is not None

    def wait(self, timeout_s: float) -> None:
        """Wait until a read under way ends, at most `timeout_s` seconds."""
        with self._lock:
            pending = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        if pending:
            wait(pending, timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Stop the worker threads."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._tiers.close()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Names of the registered adapters, in the order in which they were asked for."""
        return [entry.name for entry in self.entries()]

    def entries(self) -> list[Entry]:
        """What is known of each adapter, in the order in which they were asked for."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.number)

    def to_frame(self) -> pd.DataFrame:
        """Return a table of the adapters: name, tier, slot, rank, num_bytes, users, leases, pinned, leaving, source."""
        with self._lock:
            return frame_of(self.entries())

    @property
    def host_bytes(self) -> int:
        """Bytes of factors on the host, or on their way there, that are in no slot."""
        with self._lock:
            return self._tiers.host.num_bytes

    def _tick(self) -> int:
        with self._lock:
            self._clock += 1
            return self._clock

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            known = self.names()
            raise UserError(f"no adapter {name!r} is loaded{nearest(name, known)}; loaded: {names(known)}")
        return self._entries[name]

    def _load(self, name: str, source: str, where: Mapping[str, Any], number: int) -> LoRAResponse:
        """Read and register one adapter, on a worker thread."""
        if not isinstance(name, str) or not name.strip():
            return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, f"{name!r} cannot name the adapter from {source!r}")
        model = self.reader.read(name, source, where)
        if isinstance(model, LoRAResponse):
            return model
        with self._lock:
            known = self._entries.get(name)
            if known is not None and known.content_hash != model.content_hash:
                return LoRAResponse(
                    LoRAStatus.LOAD_NAME_EXISTS,
                    f"{name!r} is loaded already, with other content, from {known.source!r}; unload it first, or load "
                    "this one under another name",
                )
            if known is None:
                known = Entry(name, source, dict(where), model.content_hash, model.num_bytes, model.rank, number, model,
                              used=self._tick())
                self._entries[name] = known
                self._tiers.host.add(known)
                self._tiers.host.trim()
            else:
                # the same content from a new place: the old one may be gone when it is read again
                known.source, known.where, known.leaving = source, dict(where), False
        return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is loaded: rank {model.rank}, "
                            f"{len(model.sites)} sites, {model.num_bytes / 1e6:.2f} MB")

    def _pin_loaded(self, name: str, number: int, answer: LoRAResponse) -> LoRAResponse:
        if not answer.ok:
            return answer
        try:
            self.pin(name)
        except UserError as error:
            with self.turn, self._lock:
                entry = self._entries.get(name)
                # a load that fails leaves nothing behind, but what was there before stays
                if entry is not None and entry.number == number and not entry.num_uses:
                    self._forget(entry)
            return LoRAResponse(LoRAStatus.LOAD_ERROR, str(error))
        return answer

    def _pinned_now(self, name: str) -> bool:
        """Pin an adapter if it is read; False when it must be waited for."""
        with self.turn, self._lock:
            entry = self._entry(name)
            pinned = [other.name for other in self._tiers.in_slots.values() if other.pinned and other is not entry]
            if len(pinned) >= self.config.max_num_loras:
                raise UserError(f"no slot is left to pin {name!r}: {self._tiers.all_pinned(pinned)}")
            if entry.slot is None and not self._tiers.bring_in(entry):
                if entry.model is None:
                    return False
                raise UserError(f"no slot is free for {name!r}: requests use all {self.config.max_num_loras}")
            entry.used, entry.pinned = self._tick(), True
            return True

    def _forget_if_done(self, entry: Entry) -> None:
        if entry.leaving and not entry.num_uses:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._tiers.remove(entry)
        del self._entries[entry.name]
