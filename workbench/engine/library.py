"""Library: the adapters and mixtures of one engine, in slots and out of them, and the requests' leases on them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import torch

from workbench.adapters.manager import LoRAManager
from workbench.adapters.model import LoRAModel
from workbench.adapters.slots import SlotTable
from workbench.adapters.types import LoRAConfig
from workbench.engine.hf import BaseModel
from workbench.engine.request import Request
from workbench.errors import UserError, nearest
from workbench.ordering import Ordering
from workbench.xlora import Mixture


class Library:
    """What an engine's requests may name.

    Attributes:
        slots: the stacked factors.
        adapters: the plain adapters' manager.
        mixtures: by name.
    """

    def __init__(self, model: BaseModel, base_id: str, config: LoRAConfig):
        self._model = model
        self.slots = SlotTable(model.dtype, model.device)
        self.adapters = LoRAManager(self.slots, model.targets, base_id, config, self._wrap)
        self.mixtures: dict[str, Mixture] = {}
        self._mixture_users: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._lock = threading.Lock()

    def check_new(self, name: str) -> None:
        """Raise if a name is taken."""
        if name in self.adapters or name in self.mixtures:
            raise UserError(f"{name!r} is loaded already; unload it first, or load this one under another name")

    def install(self, mixture: Mixture, device: torch.device) -> None:
        """Put a mixture's adapters into slots of their own and keep it."""
        slots: list[int] = []
        with self.adapters.turn:
            self.check_new(mixture.name)
            try:
                for adapter in mixture.adapters:
                    self._wrap(adapter)
                    slots.append(self.slots.put(adapter))
            except BaseException:
                for slot in slots:
                    self.slots.drop(slot)
                raise
            self.mixtures[mixture.name] = mixture.placed(tuple(slots), self._model.dtype, device)

    def load(self, source: str, name: str, pinned: bool = False, **where: object) -> None:
        """Load a plain adapter under a name that no mixture has."""
        if name in self.mixtures:
            raise UserError(f"{name!r} is a mixture that is loaded; load the adapter under another name")
        self.adapters.load(source, name, pinned=pinned, **where).raise_for_status()

    def preload(self, ordering: Ordering | None) -> None:
        """Load the plain adapters that an ordering says to."""
        for entry in ordering.preload_adapters if ordering is not None else ():
            self.load(entry["adapter_model_id"], entry["name"])

    def remove_mixture(self, name: str, in_use: str) -> bool:
        """Forget a mixture and empty its slots; False when requests use it, and, for "wait", no new one may."""
        with self.adapters.turn, self._lock:
            if name not in self.mixtures:
                raise UserError(f"no mixture {name!r} is loaded{nearest(name, self.mixtures)}")
            if self._mixture_users[name]:
                if in_use == "wait":
                    self._leaving.add(name)
                return False
            self._leaving.discard(name)
            del self._mixture_users[name]
            for slot in self.mixtures.pop(name).slots:
                self.slots.drop(slot)
            return True

    def enter(self, request: Request) -> None:
        """Keep what a request names from being unloaded, until `leave`.

        Raises:
            UserError: it is not loaded any more, or is leaving.
        """
        entered: list[int] = []
        try:
            for name in request.names:
                entered.append(self.adapters.enter(name))
        finally:
            request.tickets = tuple(entered)
            request.entered = request.names[: len(entered)]
        if request.mixture is not None:
            name = request.mixture.name
            with self._lock:
                if self.mixtures.get(name) is not request.mixture or name in self._leaving:
                    raise UserError(f"mixture {name!r} is being unloaded; it takes no new requests")
                self._mixture_users[name] += 1
                request.holds_mixture = True

    def lease(self, request: Request) -> bool:
        """Keep a request's adapters in slots for it; False when it must wait.

        Raises:
            UserError: it can never run.
        """
        slots: list[int] = []
        if len(request.names) > 1:
            self.adapters.require_slots(request.names)
        for name, ticket in zip(request.names, request.tickets, strict=True):
            slot = self._acquire(name, ticket, held=request.names[: len(slots)])
            if slot is None:
                # a slow disk holds up its own requests only; want of a slot, in the end, those behind it too
                request.times_passed += not self.adapters.is_reading(name)
                return False
            slots.append(slot)
        request.has_lease = bool(slots)
        if request.merged is not None:
            request.merged_slots = tuple(slots)
            self._refuse_dora(slots)
        elif slots:
            request.slot = slots[0]
        return True

    def end_lease(self, request: Request) -> None:
        """Let a request's adapters leave their slots."""
        if request.has_lease:
            for name in request.names:
                self.adapters.release(name)
        request.has_lease = False

    def leave(self, request: Request) -> None:
        """End everything a finished request holds here."""
        self.end_lease(request)
        for name, ticket in zip(request.entered, request.tickets, strict=True):
            self.adapters.leave(name, ticket)
        request.entered = request.tickets = ()
        if request.holds_mixture:
            request.holds_mixture = False
            with self._lock:
                self._mixture_users[request.mixture.name] -= 1

    def _refuse_dora(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.slots.adapters[slot].is_dora:
                name = self.slots.adapters[slot].name
                raise UserError(f"merged_adapters: {name!r} uses DoRA, which rescales the base; it runs alone")

    def _acquire(self, name: str, ticket: int, held: Sequence[str]) -> int | None:
        """Lease one more adapter, or give back those held: a request that waits with leases could wait for ever."""
        slot = None
        try:
            slot = self.adapters.acquire(name, ticket)
        finally:
            if slot is None:
                for other in held:
                    self.adapters.release(other)
        return slot

    def _wrap(self, adapter: LoRAModel) -> None:
        for site in adapter.sites:
            self._model.wrap(site, self.slots)
