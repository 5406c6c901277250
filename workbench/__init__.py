"""A workbench for mixtures of LoRA adapters: run them exactly, record their scalings, look at them.

Names load on first use: reading a saved trace needs no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's OpenMP threads spin while they wait for each other, some 300 times a forward, by default so long that where
# another process wants a core each wait costs a time slice: a forward of the demo took 2000 ms instead of 130. Spinning
# shortly and then sleeping costs nothing on an idle machine (35 ms; sleeping at once: 52). It must be asked for before
# torch is loaded; who has asked for anything else is left alone.
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = "10000"

_HOME = {
    "AdapterConfig": "workbench.adapters",
    "Chat": "workbench.engine",
    "Comparison": "workbench.instrument.comparison",
    "compare": "workbench.live.compare",
    "compare_live": "workbench.live.compare_live",
    "Completion": "workbench.engine",
    "console": "workbench.live.console",
    "Engine": "workbench.engine",
    "EngineConfig": "workbench.config",
    "exact": "workbench.xlora",
    "Explore": "workbench.display",
    "explore": "workbench.display",
    "figures": "workbench.display",
    "Handle": "workbench.engine",
    "list_runs": "workbench.instrument.run_list",
    "LoRAConfig": "workbench.adapters",
    "LoRAManager": "workbench.adapters",
    "LoRAModel": "workbench.adapters",
    "LoRAOperation": "workbench.adapters",
    "LoRARequest": "workbench.adapters",
    "LoRAResponse": "workbench.adapters",
    "LoRAStatus": "workbench.adapters",
    "LoRATargetModule": "workbench.adapters",
    "LoRAType": "workbench.adapters",
    "Mixture": "workbench.xlora",
    "lagged": "workbench.xlora",
    "non_granular": "workbench.xlora",
    "open_run": "workbench.instrument.run",
    "open_runs": "workbench.instrument.run_list",
    "Ordering": "workbench.ordering",
    "periodic": "workbench.xlora",
    "Recorded": "workbench.instrument.recorded",
    "Recorder": "workbench.instrument.recorder",
    "Run": "workbench.instrument.run",
    "RunWriter": "workbench.instrument.run_writer",
    "Sampling": "workbench.engine",
    "show": "workbench.display",
    "sweep_view": "workbench.display.sweep_view",
    "Trace": "workbench.instrument.trace",
    "UserError": "workbench.errors",
}
__all__ = [
    "AdapterConfig",
    "Chat",
    "Comparison",
    "compare",
    "compare_live",
    "Completion",
    "console",
    "Engine",
    "EngineConfig",
    "exact",
    "Explore",
    "explore",
    "figures",
    "Handle",
    "list_runs",
    "LoRAConfig",
    "LoRAManager",
    "LoRAModel",
    "LoRAOperation",
    "LoRARequest",
    "LoRAResponse",
    "LoRAStatus",
    "LoRATargetModule",
    "LoRAType",
    "Mixture",
    "lagged",
    "non_granular",
    "open_run",
    "open_runs",
    "Ordering",
    "periodic",
    "Recorded",
    "Recorder",
    "Run",
    "RunWriter",
    "Sampling",
    "show",
    "sweep_view",
    "Trace",
    "UserError",
]

if TYPE_CHECKING:
    from workbench.adapters import (
        AdapterConfig,
        LoRAConfig,
        LoRAManager,
        LoRAModel,
        LoRAOperation,
        LoRARequest,
        LoRAResponse,
        LoRAStatus,
        LoRATargetModule,
        LoRAType,
    )
    from workbench.config import EngineConfig
    from workbench.display import Explore, explore, figures, show
    from workbench.display.sweep_view import sweep_view
    from workbench.engine import Chat, Completion, Engine, Handle, Sampling
    from workbench.errors import UserError
    from workbench.instrument.comparison import Comparison
    from workbench.instrument.recorded import Recorded
    from workbench.instrument.recorder import Recorder
    from workbench.instrument.run import Run, open_run
    from workbench.instrument.run_list import list_runs, open_runs
    from workbench.instrument.run_writer import RunWriter
    from workbench.instrument.trace import Trace
    from workbench.live.compare import compare
    from workbench.live.compare_live import compare_live
    from workbench.live.console import console
    from workbench.ordering import Ordering
    from workbench.xlora import Mixture, exact, lagged, non_granular, periodic


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from workbench.errors import nearest

        raise AttributeError(f"module 'workbench' has no attribute {name!r}{nearest(name, _HOME)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
