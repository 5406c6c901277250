"""From what a user calls an adapter to its factors, or to the status and the sentence that say why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench import hub
from workbench.adapters.merge import merge
from workbench.adapters.merging import MergeSource
from workbench.adapters.model import LoRAModel, LoRATargetModule
from workbench.adapters.types import LoRAResponse, LoRAStatus
from workbench.errors import ContentError, TransientError, UserError


@dataclass(frozen=True)
class Reader:
    """Reads adapters for one base; safe to call from any thread.

    Attributes:
        targets: module path -> site of the base.
        base: the base's name, for errors.
        max_rank: adapters of a larger rank are refused.
        pin: keep factors in page-locked memory, from which a GPU copies without waiting.
        merges: sources that are merges of other sources, by name.
    """

    targets: Mapping[str, LoRATargetModule]
    base: str
    max_rank: int
    pin: bool = False
    merges: dict[str, MergeSource] = field(default_factory=dict)

    def read(self, name: str, source: str, where: Mapping[str, Any]) -> LoRAModel | LoRAResponse:
        """Return the adapter, checked against the base, or why it cannot be had; raises nothing.

        Args:
            name: what requests call it.
            source: folder or Hub id.
            where: `revision`, `token`, `offline` of a Hub id.
        """
        try:
            model = self._read(name, source, where)
            return model.pinned() if self.pin else model
        except TransientError as error:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, str(error))
        except ContentError as error:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, str(error))
        except UserError as error:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, str(error))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} from {source!r} cannot be read: {reason}")
        # whatever else goes wrong is this adapter's: a thread that died of it would leave its requests waiting
        except Exception as error:
            return LoRAResponse(
                LoRAStatus.LOAD_ERROR, f"adapter {name!r} from {source!r}: unexpected {type(error).__name__}: {error}"
            )

    def _read(self, name: str, source: str, where: Mapping[str, Any]) -> LoRAModel:
        if source in self.merges:
            return self._merge(name, self.merges[source])
        folder = hub.resolve_adapter(source, **where)
        try:
            model = LoRAModel.read(folder, name).fit(self.targets, self.base)
        except TransientError:
            raise
        except UserError as error:
            raise ContentError(str(error)) from None
        if model.rank > self.max_rank:
            raise ContentError(
                f"adapter {name!r} has rank {model.rank}, but max_lora_rank is {self.max_rank}; raise max_lora_rank"
            )
        return model

    def _merge(self, name: str, source: MergeSource) -> LoRAModel:
        parts = [self._read(*part) for part in source.parts]
        for part in parts:
            if part.is_dora:
                raise ContentError(f"merged_adapters: {part.name!r} uses DoRA, which rescales the base; it runs alone")
        try:
            made = merge(parts, source.merged, name)
        except UserError as error:
            raise ContentError(str(error)) from None
        return replace(made, embeddings=frozenset().union(*(part.embeddings for part in parts)))
