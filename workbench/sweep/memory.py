"""Memory of one engine: what it holds, and the most of it that its requests needed.

Contract: figures of an engine do not depend on which others the process holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.engine import Engine


@dataclass
class Peaks:
    """The most that a step's forward began with.

    Attributes:
        kv_bytes: of the KV blocks that requests held; cached ones that nobody held do not count.
        running: requests that ran at once.
    """

    kv_bytes: int = 0
    running: int = 0


def held_bytes(engine: Engine) -> dict[str, int]:
    """Return what an engine holds for good, in bytes.

    model_bytes: the base's weights; slots_bytes: factors of the adapters that can run; adapters_bytes: those of the
    adapters that wait in the host's memory.
    """
    model = engine.model.model
    return {
        "model_bytes": sum(each.numel() * each.element_size() for each in chain(model.parameters(), model.buffers())),
        "slots_bytes": int(engine.slots.num_bytes), "adapters_bytes": int(engine.adapters.host_bytes),
    }  # fmt: skip


@contextlib.contextmanager
def watched_peaks(engine: Engine) -> Iterator[Peaks]:
    """Give peaks that grow with every forward while the context is open.

    A forward begins when its blocks are taken, and before any request of it ends: nothing larger is missed.
    """
    peaks, pool = Peaks(), engine.memory.pool

    def look(*_: Any) -> None:
        peaks.kv_bytes = max(peaks.kv_bytes, pool.num_referenced * pool.shape.block_bytes)
        peaks.running = max(peaks.running, len(engine.scheduler.running))

    hook = engine.model.model.base_model.register_forward_pre_hook(look)
    try:
        yield peaks
    finally:
        hook.remove()
