"""LoRAManager: which adapters are known, where each lies, and who is using it.

An adapter lies on one of three tiers: in a slot (it can run), in host memory, or on disk. Reading happens on worker
threads; slots change only on the thread that runs the engine, between forwards.

Contract: an adapter with a lease (a request that runs) or a pin never leaves its slot, and never changes content.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench import hub
from workbench.adapters.model import LoRAModel, LoRATargetModule
from workbench.adapters.slots import SlotTable
from workbench.adapters.types import LoRAConfig, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, split_spec
from workbench.errors import UserError, names, nearest


@dataclass(eq=False)
class Entry:
    """What the manager knows of one adapter.

    Attributes:
        name, source: what it is called, and the folder or Hub id it came from.
        where: `revision`, `token`, `offline` of a Hub id; the token shows in nothing.
        content_hash: of what was first read; a later read must give the same.
        num_bytes: of its factors in float32.
        rank: its largest.
        model: its factors on the host, or None when only the disk has them.
        slot: its slot, or None.
        leases: running requests that use it.
        pinned: keep it in its slot.
        used: when it was last asked for (a counter).
        loading: the read under way, if one is.
        leaving: unload it when its last lease ends.
    """

    name: str
    source: str
    where: Mapping[str, Any] = field(default_factory=dict, repr=False)
    content_hash: str = ""
    num_bytes: int = 0
    rank: int = 0
    model: LoRAModel | None = field(default=None, repr=False)
    slot: int | None = None
    leases: int = 0
    pinned: bool = False
    used: int = 0
    loading: Future | None = field(default=None, repr=False)
    leaving: bool = False

    @property
    def tier(self) -> str:
        """Where it lies: "slot", "host" or "disk" (or "loading", when it is on its way from there)."""
        if self.slot is not None:
            return "slot"
        if self.model is not None:
            return "host"
        return "loading" if self.loading is not None else "disk"


class LoRAManager:
    """Holds an engine's adapters.

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
        self.slots, self.targets, self.base, self.config = slots, targets, base, config
        self._place = place
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(config.num_workers, thread_name_prefix="lora-load")
        self._clock = 0
        self.counts = {"slot_hits": 0, "slot_loads": 0, "slot_evictions": 0, "disk_loads": 0}

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

    def load_all(self, sources: Mapping[str, str], *, pinned: bool = False, **where: Any) -> dict[str, LoRAResponse]:
        """Read several adapters on the worker threads at once; return each one's response."""
        started = {name: self._workers.submit(self._read, name, source, where) for name, source in sources.items()}
        return {
            name: self._register(name, str(sources[name]), where, future, pinned) for name, future in started.items()
        }

    def unload(self, name: str, *, in_use: str = "refuse") -> LoRAResponse:
        """Forget an adapter.

        Args:
            name: the adapter.
            in_use: what to do when running requests use it: "refuse", or "wait" (it goes when the last of them ends,
                and no new request may name it).
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                hint = nearest(name, self._entries)
                return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, f"no adapter {name!r} is loaded{hint}")
            if entry.leases and in_use != "wait":
                count = f"{entry.leases} running request{'s use' if entry.leases > 1 else ' uses'}"
                return LoRAResponse(LoRAStatus.UNLOAD_ERROR, f"{count} adapter {name!r}; wait for the end, or cancel")
            if entry.leases:
                entry.leaving = True
                return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} goes when its {entry.leases} requests end")
            self._forget(entry)
            return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is unloaded")

    def pin(self, name: str) -> None:
        """Put an adapter into a slot and keep it there."""
        with self._lock:
            entry = self._entry(name)
            if not entry.pinned and sum(e.pinned for e in self._entries.values()) >= self.config.max_num_loras:
                raise UserError(f"all {self.config.max_num_loras} slots hold pinned adapters; unpin one, or raise "
                                "max_num_loras")
            while (slot := self.acquire(name)) is None:
                if entry.loading is None:
                    raise UserError(f"no slot is free for {name!r}: requests use all {self.config.max_num_loras}")
                entry.loading.exception()
            assert slot == entry.slot
            entry.pinned = True
            self.release(name)

    def unpin(self, name: str) -> None:
        """Let a pinned adapter leave its slot when another needs it."""
        with self._lock:
            self._entry(name).pinned = False

    def prefetch(self, name: str) -> None:
        """Begin to read an adapter from disk, if that is where it lies; returns at once."""
        with self._lock:
            entry = self._entry(name)
            if entry.model is None and entry.loading is None:
                entry.loading = self._workers.submit(self._reread, entry)

    def acquire(self, name: str) -> int | None:
        """Return the slot of an adapter with a lease on it, or None when it cannot run yet.

        None means that it is being read, or that every slot is leased or pinned: ask again after the next step.

        Raises:
            UserError: it is not loaded, is leaving, or could not be read again.
        """
        with self._lock:
            entry = self._entry(name)
            if entry.leaving:
                raise UserError(f"adapter {name!r} is being unloaded; it takes no new requests")
            self._clock += 1
            entry.used = self._clock
            if entry.slot is not None:
                self.counts["slot_hits"] += 1
            elif not self._bring_in(entry):
                return None
            entry.leases += 1
            return entry.slot

    def release(self, name: str) -> None:
        """End one lease."""
        with self._lock:
            entry = self._entries[name]
            assert entry.leases > 0, f"a lease on {name!r} was ended twice"
            entry.leases -= 1
            if entry.leaving and not entry.leases:
                self._forget(entry)

    def wait(self, timeout_s: float) -> None:
        """Wait until a read under way ends, at most `timeout_s` seconds."""
        with self._lock:
            pending = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        if pending:
            done = threading.Event()
            for future in pending:
                future.add_done_callback(lambda _: done.set())
            done.wait(timeout_s)

    def close(self) -> None:
        """Stop the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Names of the registered adapters, in the order in which they were loaded."""
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """What is known of each adapter."""
        return list(self._entries.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of factors in host memory that are in no slot."""
        return sum(e.num_bytes for e in self._entries.values() if e.model is not None and e.slot is None)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            known = self.names()
            raise UserError(f"no adapter {name!r} is loaded{nearest(name, known)}; loaded: {names(known)}")
        return self._entries[name]

    def _bring_in(self, entry: Entry) -> bool:
        if entry.loading is not None:
            if not entry.loading.done():
                return False
            future, entry.loading = entry.loading, None
            entry.model = future.result()  # a UserError of the read is this request's
        if entry.model is None:
            self.prefetch(entry.name)
            return False
        if not self._make_room():
            return False
        self._place(entry.model)
        entry.slot = self.slots.put(entry.model)
        self.counts["slot_loads"] += 1
        self._trim_host()
        return True

    def _make_room(self) -> bool:
        held = [e for e in self._entries.values() if e.slot is not None]
        if len(held) < self.config.max_num_loras:
            return True
        idle = [e for e in held if not e.leases and not e.pinned]
        if not idle:
            return False
        oldest = min(idle, key=lambda e: e.used)
        self.slots.drop(oldest.slot)
        oldest.slot = None
        self.counts["slot_evictions"] += 1
        return True

    def _trim_host(self) -> None:
        limit = self.config.max_host_bytes
        if limit is None:
            return
        idle = sorted((e for e in self._entries.values() if e.model is not None and e.slot is None),
                      key=lambda e: e.used)
        while idle and self.host_bytes > limit:
            idle.pop(0).model = None

    def _forget(self, entry: Entry) -> None:
        if entry.slot is not None:
            self.slots.drop(entry.slot)
            entry.slot = None
        if entry.loading is not None:
            entry.loading.cancel()
        del self._entries[entry.name]

    def _read(self, name: str, source: str, where: Mapping[str, Any]) -> LoRAModel | LoRAResponse:
        """Read and check an adapter, on a worker thread; a user's mistake comes back as a response."""
        try:
            folder = hub.resolve_adapter(source, **where)
        except UserError as error:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, str(error))
        except OSError as error:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} from {source!r}: {error}")
        try:
            model = LoRAModel.read(folder, name).fit(self.targets, self.base)
        except UserError as error:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, str(error))
        except OSError as error:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} in {str(folder)!r}: {error}")
        if model.rank > self.config.max_lora_rank:
            return LoRAResponse(
                LoRAStatus.LOAD_INVALID_ADAPTER,
                f"adapter {name!r} has rank {model.rank}, but max_lora_rank is {self.config.max_lora_rank}; raise it",
            )
        return model

    def _reread(self, entry: Entry) -> LoRAModel:
        self.counts["disk_loads"] += 1
        model = self._read(entry.name, entry.source, entry.where)
        if isinstance(model, LoRAResponse):
            raise UserError(model.message)
        if model.content_hash != entry.content_hash:
            raise UserError(
                f"adapter {entry.name!r} in {entry.source!r} has changed since it was loaded; unload it, then load it "
                "again"
            )
        return model

    def _register(
        self, name: str, source: str, where: Mapping[str, Any], future: Future, pinned: bool
    ) -> LoRAResponse:
        model = future.result()
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
                self._clock += 1
                self._entries[name] = Entry(name, source, dict(where), model.content_hash, model.num_bytes, model.rank,
                                            model, used=self._clock)
                self._trim_host()
        if pinned:
            try:
                self.pin(name)
            except UserError as error:
                return LoRAResponse(LoRAStatus.LOAD_ERROR, str(error))
        return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is loaded: rank {model.rank}, "
                            f"{len(model.sites)} sites, {model.num_bytes / 1e6:.2f} MB")
