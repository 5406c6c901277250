"""The engine: packed rows of many requests through one Hugging Face model."""

from workbench.engine.chat import Chat
from workbench.engine.engine import Engine
from workbench.engine.handle import Handle, Token
from workbench.engine.result import Completion, Usage
from workbench.engine.sampling import Sampling

__all__ = ["Chat", "Completion", "Engine", "Handle", "Sampling", "Token", "Usage"]
