"""Time a call, and the copy rate of the machine that it is held against.

On CUDA calls are replayed from a graph over copies of the operands that together exceed the L2 cache, so that a time
is that of cold memory and holds no launch from the host; what launching costs is measured apart. On a CPU calls are
timed one by one with whatever its caches hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]
_MIN_S = 0.2
_MAX_COPIES = 256
LARGE_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: percentiles over repeats, and of one launched from the host without a graph (CUDA)."""

    p20_us: float
    p50_us: float
    p80_us: float
    repeats: int
    host_us: float | None = None


def num_copies(device: torch.device, num_bytes: int) -> int:
    """Return how many problems of `num_bytes` it takes to pass three times through the L2 cache; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MAX_COPIES, max(1, -(-3 * cache // max(1, num_bytes))))


def time_calls(calls: Sequence[Call], device: torch.device, repeats: int = 50) -> Times:
    """Time equal calls on operands of their own, in turn.

    Args:
        calls: at least one; on CUDA they are captured into one graph.
        device: where they run.
        repeats: samples; a sample is as many rounds over the calls as take about 1 ms.
    """
    return _time_on_cuda(calls, device, repeats) if device.type == "cuda" else _time_on_cpu(calls, repeats)


def _time_on_cpu(calls: Sequence[Call], repeats: int) -> Times:
    samples: list[float] = []
    start = time.perf_counter()
    for call in calls:
        call()
    # at least as many samples as asked for, and enough time to have seen the machine's moods
    while len(samples) < repeats or (time.perf_counter() - start < _MIN_S and len(samples) < 100 * repeats):
        for call in calls:
            before = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - before))
    return _percentiles(samples, None)


def _time_on_cuda(calls: Sequence[Call], device: torch.device, repeats: int) -> Times:
    with torch.cuda.device(device):
        host_us = _host_us(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()  # the first also uploads it
        rounds = max(1, round(1e3 / _replayed_us(graph, 3)))
        samples = [_replayed_us(graph, rounds) / len(calls) for _ in range(repeats)]
    return _percentiles(samples, host_us)


def _host_us(calls: Sequence[Call]) -> float:
    """Return the host's time per call, compilation excluded: it enqueues and does not wait."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / len(calls)


def _replayed_us(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(rounds):
        graph.replay()
    last.record()
    last.synchronize()
    return 1e3 * first.elapsed_time(last) / rounds


def _percentiles(samples: list[float], host_us: float | None) -> Times:
    p20, p50, p80 = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return Times(p20, p50, p80, len(samples), host_us)


def copy_rate(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Return bytes a second, read and written, of a copy that moves `num_bytes` in all (at least 4 KiB)."""
    half = max(num_bytes // 2, 2048)

    def copying() -> Call:
        source, target = torch.zeros(half, dtype=torch.uint8, device=device), _ones(half, device)
        return lambda: target.copy_(source)

    calls = [copying() for _ in range(num_copies(device, 2 * half))]
    # what the machine can, not what it does beside other work: the ops are held against the better copies
    return 2 * half / (1e-6 * time_calls(calls, device, repeats).p20_us)


def _ones(size: int, device: torch.device) -> Tensor:
    # written once, so that the pages are there
    return torch.ones(size, dtype=torch.uint8, device=device)
