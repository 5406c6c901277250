"""What reading an adapter costs beside reading its file: `python load_cost.py`; JSON on the last line.

An adapter of 10 MB in float32 (rank 16 on q and v of 22 blocks, hidden size 2048). Interleaved, medians. "cold" asks
the kernel to drop the file from its cache first, so that the disk is read; "warm" reads from the page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save_file

from workbench.adapters import LoRAModel, LoRATargetModule

BLOCKS, HIDDEN, KV, RANK = 22, 2048, 512, 16
WEIGHTS = "adapter_model.safetensors"


def write(folder: Path) -> dict[str, LoRATargetModule]:
    """Write the adapter and return its base's sites."""
    targets, tensors = {}, {}
    for block in range(BLOCKS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", KV)):
            site = f"model.layers.{block}.self_attn.{name}"
            targets[site] = LoRATargetModule(site, HIDDEN, width)
            tensors[f"base_model.model.{site}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            tensors[f"base_model.model.{site}.lora_B.weight"] = torch.randn(width, RANK)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return targets


def forget(path: Path) -> None:
    """Ask the kernel to drop a file from its page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def check(folder: Path, targets: dict[str, LoRATargetModule]) -> None:
    """Exit unless the adapter read is the one written."""
    model, tensors = LoRAModel.read(folder).fit(targets, "base"), load_file(folder / WEIGHTS)
    for site in targets:
        down, up = (tensors[f"base_model.model.{site}.lora_{half}.weight"] for half in "AB")
        if not (torch.equal(model.a[site], down) and torch.equal(model.b[site], (up * 2).T)):
            sys.exit(f"wrong factors at {site}: no figures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--folder", type=Path, help="where to write the adapter (default: a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        folder = Path(root) / "adapter"
        targets = write(folder)
        check(folder, targets)
        path = folder / WEIGHTS
        content = path.read_bytes()
        actions: dict[str, Callable[[], object]] = {
            "read_file": path.read_bytes,
            "read_file_and_parse": lambda: load(path.read_bytes()),
            "load_adapter": lambda: LoRAModel.read(folder).fit(targets, "base"),
        }
        times: dict[str, list[float]] = {f"{kind}_{name}": [] for kind in ("warm", "cold") for name in actions}
        times["sha256_alone"] = []
        for _ in range(arguments.repeats):
            for name, action in actions.items():
                times[f"warm_{name}"].append(seconds(action))
                forget(path)
                times[f"cold_{name}"].append(seconds(action))
            times["sha256_alone"].append(seconds(lambda: hashlib.sha256(content)))
    medians = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in times.items()}
    print(json.dumps({
        "file_bytes": len(content), "repeats": arguments.repeats, **medians,
        "cold_ratio_to_file": medians["cold_load_adapter_ms"] / medians["cold_read_file_ms"],
        "cold_ratio_to_parse": medians["cold_load_adapter_ms"] / medians["cold_read_file_and_parse_ms"],
        "warm_ratio_to_parse": medians["warm_load_adapter_ms"] / medians["warm_read_file_and_parse_ms"],
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }))


if __name__ == "__main__":
    main()
