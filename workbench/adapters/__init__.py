"""One LoRA adapter: from its folder to the rows it changes."""

from workbench.adapters.config import AdapterConfig
from workbench.adapters.linear import LoRALinear
from workbench.adapters.model import LoRAModel, LoRATargetModule

__all__ = ["AdapterConfig", "LoRALinear", "LoRAModel", "LoRATargetModule"]
