"""Recorded values of finished requests. Nothing here imports torch, so a saved run opens on a laptop."""

from workbench.instrument.trace import Trace

__all__ = ["Trace"]
