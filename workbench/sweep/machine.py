"""The machine a figure comes from: what it is, how busy it is, and how much memory was used."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from workbench.instrument import run_meta

_PROC = Path("/proc/self")


def environment(device: torch.device | str) -> dict[str, Any]:
    """Return what a reader needs to judge a figure: machine, versions, threads, date."""
    device = torch.device(device)
    found = run_meta.environment(gpu_name(device), torch.get_num_threads())
    return {**found, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def gpu_name(device: torch.device) -> str | None:
    """Return the card's name, None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def load_average() -> float | None:
    """Return the mean number of runnable processes of the last minute; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def synchronize(device: torch.device) -> None:
    """Wait for everything a card still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> bool:
    """Begin a new measurement of peak memory; False where the host's peak can only be had since its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        # "5" resets the peak resident size, see proc(5)
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory in use since `reset_peak`: allocated on a card, or resident on the host.

    None where the system does not say (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
