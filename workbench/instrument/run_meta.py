"""What a run says about itself: the machine, the versions, the engine's settings. Never a secret.

Nothing here imports torch or an engine: versions are read from the installed packages' metadata, and an engine is only
asked for its attributes.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import UserError

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")
HIDDEN = "(not stored)"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# `max_tokens` and `prompt_tokens` are no secrets; `token` and `hf_token` are
_SECRET_KEY = re.compile(
    r"(^|[_.-])(token|password|passwd|secret|credentials?|authorization|private_?key|api_?key|access_?key(_?id)?"
    r"|secret_?key)$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b|\bAKIA[A-Z0-9]{16}\b|(?<=://)[^/@\s]+(?=@)")


def environment(gpu: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Return what a reader needs to judge a run: versions, system, processor, threads; None where nothing says.

    Args:
        gpu: the card's name.
        threads: threads of one operation; by default what torch uses, if it is loaded.
    """
    return {
        "python": platform.python_version(), "versions": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(), "cpu": cpu_name(), "cores": os.cpu_count(),
        "threads": threads or _threads(), "gpu": gpu,
    }  # fmt: skip


def cpu_name() -> str:
    """Return the processor's name, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def meta_of(engine: Any) -> dict[str, Any]:
    """Return what a run should keep of an engine.

    Keys: base, dtype, device, seed, config and lora (every setting, secrets out), mixtures (name -> content key),
    mixture_settings, adapters (name -> content hash), environment (the parts that only the engine knows).
    """
    settings, device, mixtures = _settings(engine.config), str(engine.device), dict(engine.mixtures)
    return {
        "base": str(engine.base_id), "dtype": settings.get("dtype"), "device": device, "seed": settings.get("seed"),
        "config": without_secrets(settings), "lora": without_secrets(_settings(engine.adapters.config)),
        "mixtures": {name: mixture.content_key for name, mixture in mixtures.items()},
        "mixture_settings": {name: without_secrets(_settings(mixture.config)) for name, mixture in mixtures.items()},
        "adapters": {entry.name: entry.content_hash for entry in engine.adapters.entries()},
        "environment": {"gpu": _gpu_name(device)},
    }  # fmt: skip


def without_secrets(value: Any) -> Any:
    """Return a copy of JSON-able data in which whatever is, or is called, a secret is replaced."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(key, str) and _SECRET_KEY.search(key) and each else without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(each) for each in value]
    return _SECRET_TEXT.sub(HIDDEN, value) if isinstance(value, str) else value


def jsonable(value: Any, what: str) -> Any:
    """Return a value as JSON would give it back (a path becomes text, a tuple a list, a numpy number a number).

    Raises:
        UserError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} cannot be stored as JSON: {error}") from None


def _settings(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(vars(config))


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    said = [os.environ[name] for name in _THREADS if os.environ.get(name, "").isdecimal()]
    return int(said[0]) if said else None


def _gpu_name(device: str) -> str | None:
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name(device) if torch is not None and device.startswith("cuda") else None
