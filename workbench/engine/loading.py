"""Loading: how adapters and mixtures come to an engine, and leave it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.adapters.types import split_spec
from workbench.config import require_choice
from workbench.engine.options import require_loaded
from workbench.engine.sources import read_mixture, read_ordering
from workbench.errors import UserError, names
from workbench.ordering import Ordering

if TYPE_CHECKING:
    from workbench.engine.hf import BaseModel
    from workbench.engine.library import Library


class Loading:
    """The part of an engine that loads and unloads; between steps, from any thread."""

    library: Library
    model: BaseModel
    base_id: str

    def load_adapter(self, source: str | Path, name: str | None = None, *, pinned: bool = False, **where: Any) -> str:
        """Load a LoRA adapter and return its name; `adapters` has the manager with everything else.

        Args:
            source: folder, Hub id, demo/NAME, or `name=` one of them.
            name: what requests call it; by default the folder's name.
            pinned: keep it in a slot for good.
            **where: `revision`, `token`, `offline` of a Hub id.
        """
        self.require_outside()
        self.require_open()
        if name is None:
            name, source = split_spec(str(source))
        self.library.load(source, name, pinned, **where)
        return name

    def load_mixture(
        self, source: str | Path = "demo", name: str | None = None, ordering: Ordering | str | Path | None = None,
        settings: dict[str, Any] | None = None, **where: Any,
    ) -> str:
        """Load an X-LoRA mixture and return its name.

        Args:
            source: "demo", folder or Hub id of an X-LoRA repository.
            name: what requests call it; by default the folder's name.
            ordering: fixes the adapter and site axes; an `Ordering` or its file. Made from the model when None. The
                adapters it says to preload are loaded too.
            settings: X-LoRA settings that override the repository's, such as `{"top_k_lora": 2}`.
            **where: `revision`, `token`, `offline` of a Hub id.
        """
        self.require_outside()
        self.require_open()
        given, size = read_ordering(ordering), self.model.hidden_size
        mixture = read_mixture(source, name, self.model.targets, self.base_id, size, given, settings, where)
        self.library.check_new(mixture.name)
        self.library.install(mixture, self.device)
        self.library.preload(given)
        return mixture.name

    def unload(self, name: str, *, in_use: str = "refuse") -> None:
        """Unload an adapter or mixture.

        Args:
            name: which.
            in_use: what to do when unfinished requests use it: "refuse", or "wait" for them to end.
        """
        self.require_outside()
        require_loaded(name, "adapter or mixture", [*self.adapters.names(), *self.mixtures])
        require_choice("unload", "in_use", in_use, ("refuse", "wait"))
        if in_use == "refuse" and (users := self._users(name)):
            raise UserError(
                f"{name!r} is in use by requests {names(users)}; wait for them, cancel them, or say in_use='wait'"
            )
        if name in self.adapters:
            self.adapters.unload(name, in_use=in_use).raise_for_status()
            while name in self.adapters:
                self._step_or_wait()
            return
        while not self.library.remove_mixture(name, in_use):
            if in_use == "refuse":
                raise UserError(f"mixture {name!r} is in use; wait for its requests, cancel them, or say in_use='wait'")
            self._step_or_wait()

    def _users(self, name: str) -> list[str]:
        with self.adapters.turn:
            requests = list(self.scheduler.requests())
        return [r.id for r in requests if name in r.names or (r.mixture is not None and r.mixture.name == name)]
