"""The words in which adapters are asked for and answered: settings, requests, responses, states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from workbench.config import build, check_types, read_toml, require_range
from workbench.errors import UserError

SECTION = "lora_config"


class LoRAType(StrEnum):
    """The parts of an adapter's tensor names."""

    A = "lora_A"
    B = "lora_B"
    BIAS = "lora.bias"


class LoRAOperation(StrEnum):
    """What a `LoRARequest` asks for."""

    LOAD = "load"
    UNLOAD = "unload"


class LoRAStatus(StrEnum):
    """How a `LoRARequest` ended."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    UNSPECIFIED_ERROR = "unspecified_error"


@dataclass(frozen=True)
class LoRARequest:
    """Load or unload one adapter.

    Attributes:
        operation: which.
        lora_name: its name.
        lora_path: folder or Hub id, for a load.
    """

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None

    def __post_init__(self) -> None:
        if self.operation not in tuple(LoRAOperation):
            raise UserError(f"operation must be 'load' or 'unload', not {self.operation!r}")
        object.__setattr__(self, "operation", LoRAOperation(self.operation))
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise UserError(f"lora_name must be a name, not {self.lora_name!r}")
        if self.operation is LoRAOperation.LOAD and not self.lora_path:
            raise UserError(f"a request to load {self.lora_name!r} needs a lora_path: a folder or a Hub id")


@dataclass(frozen=True)
class LoRAResponse:
    """The answer to a `LoRARequest`.

    Attributes:
        status: how it ended.
        message: a sentence; for an error, what was sought where.
    """

    status: LoRAStatus
    message: str

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.status is LoRAStatus.SUCCESS

    def raise_for_status(self) -> LoRAResponse:
        """Return self, or raise the message as a UserError."""
        if not self.ok:
            raise UserError(self.message)
        return self


@dataclass(frozen=True)
class LoRAConfig:
    """How an engine holds adapters.

    Attributes:
        lora_paths: adapters to load at the start, each `name=path`, or a path or Hub id whose last part is the name.
        max_lora_rank: adapters of a larger rank are refused.
        max_num_loras: slots, the adapters that can run in one batch; any number may be registered.
        max_host_bytes: bytes of adapters kept in host memory beside those in slots, adapters on their way there
            included; past it, the least recently used are read from disk again when they are asked for. An adapter
            larger than all of it still runs: one at a time may pass through. None keeps all.
        num_workers: threads that read new adapters while the engine generates; as many again read those that requests
            wait for.
    """

    lora_paths: tuple[str, ...] = ()
    max_lora_rank: int = 256
    max_num_loras: int = 16
    max_host_bytes: int | None = None
    num_workers: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.lora_paths, (list, tuple)):
            object.__setattr__(self, "lora_paths", tuple(self.lora_paths))
        check_types(self, SECTION)
        self.sources()
        require_range(SECTION, "max_lora_rank", self.max_lora_rank, 1)
        require_range(SECTION, "max_num_loras", self.max_num_loras, 1)
        require_range(SECTION, "num_workers", self.num_workers, 1, 64)
        if self.max_host_bytes is not None:
            require_range(SECTION, "max_host_bytes", self.max_host_bytes, 0)

    def sources(self) -> dict[str, str]:
        """Return name -> source of `lora_paths`."""
        found: dict[str, str] = {}
        for spec in self.lora_paths:
            if not isinstance(spec, str):
                raise UserError(f"{SECTION}: 'lora_paths' holds {spec!r}, expected texts such as name=path")
            name, source = split_spec(spec)
            if found.get(name, source) != source:
                raise UserError(
                    f"{SECTION}: 'lora_paths' gives {name!r} two sources, {found[name]!r} and {source!r}; write "
                    "another-name=path for one of them"
                )
            found[name] = source
        return found

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = SECTION) -> LoRAConfig:
        """Make the settings from names and values; an unknown name is a UserError that says the nearest."""
        paths = mapping.get("lora_paths") if isinstance(mapping, Mapping) else None
        given = {**mapping, "lora_paths": tuple(paths)} if isinstance(paths, list) else mapping
        return build(cls, given, where)

    @classmethod
    def from_toml(cls, path: str | Path, section: str = SECTION) -> LoRAConfig:
        """Make the settings from the table `[lora_config]` of a TOML file."""
        return cls.from_mapping(read_toml(path, section), f"[{section}] of {str(path)!r}")


def split_spec(spec: str) -> tuple[str, str]:
    """Return (name, source) of `name=source`, or of a source alone, which is called by its last part.

    Only an `=` before the first path separator names an adapter: `/data/run=5/best` is a path. Write `best=/data/run=5`
    to name one.
    """
    name, equals, source = spec.partition("=")
    if equals and "/" not in name and "\\" not in name:
        if not name.strip() or not source.strip():
            raise UserError(f"{spec!r} is not of the form name=source; both sides are needed")
        return name.strip(), source.strip()
    if not spec.strip():
        raise UserError("an adapter's source is empty; give a folder, a Hub id, or name=source")
    last = Path(spec).name
    if last in ("", ".."):
        last = Path(spec).resolve().name
    if not last:
        raise UserError(f"{spec!r} has no last part to name an adapter by; write name={spec}")
    return last, spec
