"""Others: how many cores other programs used while something ran here.

A load average counts the threads that are measured too. This is what the whole machine's processors did, without what
this process and its ended children had of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# of the line "cpu": user, nice, system, irq and softirq; guests are in user and nice, idle and stolen time is no work
_BUSY = (0, 1, 2, 5, 6)


class Watch:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._machine_s, self._own_s, self._started = machine_cpu_s(), own_cpu_s(), time.perf_counter()

    def others_cores(self) -> float | None:
        """Return the cores that others used on average; None where the system does not say.

        Children that still run count as others. The machine's clock ticks a hundred times a second, and so less than
        nothing, in something short, is nothing.
        """
        machine_s, wall_s = machine_cpu_s(), time.perf_counter() - self._started
        if machine_s is None or self._machine_s is None or wall_s <= 0:
            return None
        return max(0.0, machine_s - self._machine_s - (own_cpu_s() - self._own_s)) / wall_s


def machine_cpu_s() -> float | None:
    """Return the seconds that all processors together have worked since the machine started; None if nothing says."""
    try:
        first, *fields = _STAT.read_text().split("\n", 1)[0].split()
        ticks = sum(int(fields[place]) for place in _BUSY)
    except (OSError, ValueError, IndexError):
        return None
    # some sandboxes have the file and no numbers in it
    return ticks / os.sysconf("SC_CLK_TCK") if first == "cpu" and ticks else None


def own_cpu_s() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
