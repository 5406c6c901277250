"""LoRA adapters: from a folder to the rows they change, and which of them are where."""

from workbench.adapters.config import AdapterConfig
from workbench.adapters.linear import LoRALinear
from workbench.adapters.manager import LoRAManager
from workbench.adapters.model import CONFIG_FILE as ADAPTER_CONFIG_FILE
from workbench.adapters.model import LoRAModel, LoRATargetModule
from workbench.adapters.types import LoRAConfig, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, LoRAType

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "AdapterConfig",
    "LoRAConfig",
    "LoRALinear",
    "LoRAManager",
    "LoRAModel",
    "LoRAOperation",
    "LoRARequest",
    "LoRAResponse",
    "LoRAStatus",
    "LoRATargetModule",
    "LoRAType",
]
