"""What a unit does: find its engine, run its task, return its figures.

Engines are kept between units, as many as memory comfortably holds, and each is used by points that load the same
things: a sweep that interleaves its repeats would otherwise load a model for every unit.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.sweep.memory import held_bytes
from workbench.sweep.point import ADAPTED, PointSettings

if TYPE_CHECKING:
    from workbench.engine import Engine

MIXTURE = "mixture"
SYNTHETIC = "synthetic"
_SHARE = 0.4  # of the machine's memory, for engines that wait for their next unit
# what a container may use: "max" where there is no limit
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Prepared:
    """An engine with what a point needs loaded.

    Attributes:
        engine: the engine.
        adapters: names of the loaded adapters, for lora and merged.
        mixture: the mixture's name, for xlora.
        num_bytes: about what it holds.
    """

    def __init__(self, point: PointSettings):
        self._files = tempfile.TemporaryDirectory(prefix="workbench-sweep-")
        self.adapters: tuple[str, ...] = ()
        self.mixture: str | None = None
        self.engine: Engine | None = None
        try:
            self._open(point)
            self._load(point)
        except BaseException:
            self.close()
            raise
        self.num_bytes = sum(held_bytes(self.engine).values())

    def close(self) -> None:
        """Let everything go."""
        if self.engine is not None:
            self.engine.close()
        self._files.cleanup()

    def _open(self, point: PointSettings) -> None:
        from workbench.adapters.types import LoRAConfig
        from workbench.engine import Engine

        ranks = point.rank if isinstance(point.rank, tuple) else (point.rank or LoRAConfig.max_lora_rank,)
        lora = LoRAConfig(max_num_loras=num_slots(point), max_lora_rank=max(LoRAConfig.max_lora_rank, *ranks))
        if point.mode == "xlora" and point.mixture != SYNTHETIC:
            self.engine = Engine.from_mixture(point.mixture, name=MIXTURE, lora=lora, **engine_options(point))
            self.mixture = MIXTURE
        else:
            self.engine = Engine(lora=lora, **engine_options(point))

    def _load(self, point: PointSettings) -> None:
        from workbench.sweep.synthetic import load_adapters, write_adapter, write_mixture

        engine, folder = self.engine, Path(self._files.name)
        targets = engine.model.targets
        if point.mode == "xlora" and point.mixture == SYNTHETIC:
            rank = point.rank[0] if isinstance(point.rank, tuple) else point.rank
            made = write_mixture(folder, targets, engine.model.hidden_size, point.adapters, rank, engine.base_id,
                                 point.seed)
            engine.load_mixture(made, MIXTURE)
            self.mixture = MIXTURE
        elif point.mode in ADAPTED:
            ranks = point.rank if isinstance(point.rank, tuple) else (point.rank,)
            sources = {
                f"synthetic-{i}": write_adapter(folder / f"synthetic-{i}", targets, ranks[i % len(ranks)],
                                                point.seed * 1_000_003 + i)
                for i in range(point.adapters)
            }
            self.adapters = load_adapters(engine, sources)


def engine_options(point: PointSettings) -> dict[str, Any]:
    """Return the settings of a point's engine: those it says, and room for as many requests as it runs at once."""
    from workbench.config import EngineConfig

    needed = {}
    if point.concurrency is not None:
        # an X-LoRA request that generates has two rows in a step
        needed = {"max_requests": point.concurrency, "max_rows_per_step": 2 * point.concurrency}
    raised = {key: value for key, value in needed.items() if value > getattr(EngineConfig, key)}
    return {**raised, **point.engine}


def num_slots(point: PointSettings) -> int:
    """Return how many adapters an engine of this point runs at once: as many as its requests can ask for."""
    from workbench.adapters.types import LoRAConfig
    from workbench.config import EngineConfig

    if point.mode not in ADAPTED:
        return LoRAConfig.max_num_loras
    at_once = point.concurrency or point.max_requests or EngineConfig.max_requests
    most = point.adapters if point.mode == "merged" else min(point.adapters, at_once)
    return point.slots or max(LoRAConfig.max_num_loras, most)


class Engines:
    """Prepared engines; the one used longest ago is closed first when they grow too large.

    Args:
        make: of a point, what is kept; it has `num_bytes` and `close()`.
        budget_bytes: what all of them may hold; None is a part of the machine's memory.
    """

    def __init__(self, make: Callable[[PointSettings], Any] = Prepared, budget_bytes: float | None = None):
        self._make, self._kept, self._num_made = make, OrderedDict(), 0
        self._budget = memory_bytes() * _SHARE if budget_bytes is None else budget_bytes

    def get(self, point: PointSettings) -> Any:
        """Return the engine of a point, made if need be."""
        key = engine_key(point)
        if key not in self._kept:
            # room for one more like the largest, before it is loaded
            while self._kept and self._held() + max(each.num_bytes for each in self._kept.values()) > self._budget:
                self._kept.popitem(last=False)[1].close()
            self._num_made += 1
            self._kept[key] = self._make(point)
        self._kept.move_to_end(key)
        return self._kept[key]

    @property
    def is_first(self) -> bool:
        """Whether no more than one engine was ever made here: what the process holds is that one's."""
        return self._num_made <= 1

    def close(self) -> None:
        """Close all of them."""
        while self._kept:
            self._kept.popitem()[1].close()

    def _held(self) -> int:
        return sum(each.num_bytes for each in self._kept.values())


def engine_key(point: PointSettings) -> str:
    """Return what two points must agree in to share an engine."""
    loaded: dict[str, Any] = {"mixture": point.mixture}
    if point.mode in ADAPTED or point.mixture == SYNTHETIC:
        loaded |= {"mode": point.mode, "adapters": point.adapters, "rank": point.rank, "seed": point.seed,
                   "slots": num_slots(point)}  # fmt: skip
    return json.dumps([engine_options(point), loaded], sort_keys=True)


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its container's."""
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):
            continue
        own = min(own, limit)
    return own


_engines: Engines | None = None


def share_memory(workers: int) -> None:
    """Let this process keep no more engines than one of so many processes of this machine may."""
    global _engines
    if _engines is None:
        _engines = Engines(budget_bytes=memory_bytes() * _SHARE / workers)


def measure(point: PointSettings, repeat: int, folder: Path) -> dict[str, Any]:
    """Run one unit in this process and return its figures.

    Args:
        point: what.
        repeat: which time, from 0.
        folder: empty; what is worth keeping of the unit goes there.
    """
    global _engines
    _engines = _engines or Engines()
    prepared = _engines.get(point)
    if point.task == "fidelity":
        from workbench.sweep.fidelity import measure_fidelity

        return measure_fidelity(point, repeat, prepared, folder)
    from workbench.sweep.throughput import measure_throughput

    return measure_throughput(point, repeat, prepared, folder, is_alone=_engines.is_first)


def close_engines() -> None:
    """Close the engines that this process keeps."""
    global _engines
    if _engines is not None:
        _engines.close()
    _engines = None
