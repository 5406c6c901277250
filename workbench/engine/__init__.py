"""The engine: packed rows of many requests through one Hugging Face model."""

from workbench.engine.engine import Engine
from workbench.engine.result import Completion, Usage
from workbench.engine.sampling import Sampling

__all__ = ["Completion", "Engine", "Sampling", "Usage"]
