"""Settings as frozen dataclasses, made from keyword arguments, a mapping or a TOML file.

An unknown key, a wrong type or a value out of range is a UserError that names the key; nothing is silently ignored.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path

from workbench.errors import UserError, names, nearest

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("auto", "reference")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs: its base model, number format, device and limits.

    `max_rows_per_step` is the token budget of one forward; `row_padding` pads every forward to a multiple of that many
    rows (0 = off), for tests that compare bitwise; `max_len` is the longest sequence in tokens, None = the model's own;
    `drafting` runs the scaling row of the likely next token in advance, which saves forwards and changes no result.
    `kv_bytes` is the size of the KV pool in bytes (None = a quarter of the memory, at most 4 GiB on a CPU);
    `prefix_cache` lets requests share the KV of equal beginnings; `adapter_weights` gives adapters and mixtures, by
    name, a larger or smaller share than 1 while requests queue.
    """

    base: str = "demo"
    dtype: str = "float32"
    device: str | None = None
    max_rows_per_step: int = 512
    max_requests: int = 64
    max_len: int | None = None
    row_padding: int = 0
    attention: str = "auto"
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    offline: bool | None = None
    trust_remote_code: bool = False
    seed: int = 0
    drafting: bool = True
    kv_bytes: int | None = None
    prefix_cache: bool = True
    adapter_weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "engine")
        if not self.base.strip():
            raise UserError("engine: 'base' is empty, expected a folder, a Hub id 'org/name' or 'demo'")
        require_choice("engine", "dtype", self.dtype, DTYPES)
        require_choice("engine", "attention", self.attention, ATTENTION)
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            hint = nearest(self.device, ("cpu", "cuda"))
            raise UserError(f"engine: 'device' is {self.device!r}, expected 'cpu', 'cuda' or 'cuda:N'{hint}")
        require_range("engine", "max_rows_per_step", self.max_rows_per_step, 1)
        require_range("engine", "max_requests", self.max_requests, 1)
        require_range("engine", "row_padding", self.row_padding, 0)
        require_range("engine", "seed", self.seed, 0, 2**63 - 1)
        if self.max_len is not None:
            require_range("engine", "max_len", self.max_len, 1)
        if self.kv_bytes is not None:
            require_range("engine", "kv_bytes", self.kv_bytes, 1)
        for name, weight in self.adapter_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
                raise UserError(f"engine: 'adapter_weights' gives {name!r} {weight!r}, expected a number above 0")

    def change(self, **settings: typing.Any) -> EngineConfig:
        """Return a copy with some settings changed; an unknown one is a UserError."""
        current = {item.name: getattr(self, item.name) for item in fields(self)}
        return build(type(self), current | settings, "engine")

    @classmethod
    def from_mapping(cls, mapping: Mapping, where: str = "engine") -> EngineConfig:
        """Make the config from names and values."""
        return build(cls, mapping, where)

    @classmethod
    def from_toml(cls, path: str | Path, section: str = "engine") -> EngineConfig:
        """Make the config from the table `[section]` of a TOML file."""
        return build(cls, read_toml(path, section), f"[{section}] of {str(path)!r}")


def build(cls: type, mapping: object, where: str) -> typing.Any:
    """Make a frozen dataclass from `mapping`; `where` begins each error."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where} is {mapping!r}, expected a table of settings")
    known = [item.name for item in fields(cls)]
    for key in mapping:
        if key not in known:
            hint = nearest(key, known)
            raise UserError(f"{where} has an unknown key {key!r}{hint}; the keys are {names(known, len(known))}")
    lacking = [item.name for item in fields(cls) if item.name not in mapping and _is_required(item)]
    if lacking:
        raise UserError(f"{where} lacks {names(lacking)}")
    hints = typing.get_type_hints(cls)
    for key, value in mapping.items():
        _require_type(where, key, value, hints[key])
    return cls(**mapping)


def _is_required(item: Field) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def read_toml(path: str | Path, section: str) -> Mapping:
    """Return the table `section` of a TOML file."""
    data = _read(path)
    if section not in data:
        raise UserError(
            f"settings {str(path)!r} has no table [{section}]{nearest(section, data)}; it has {names(data)}"
        )
    return data[section]


def read_tables(path: str | Path, known: tuple[str, ...]) -> Mapping:
    """Return a TOML file's tables; one that is not among `known` is a UserError that names the nearest."""
    tables = _read(path)
    for name in tables:
        if name not in known:
            raise UserError(f"settings {str(path)!r} has an unknown table [{name}]{nearest(name, known)}; known: "
                            f"{names(known)}")
    return tables


def _read(path: str | Path) -> Mapping:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"settings {str(path)!r} is not UTF-8 text, expected TOML") from None
    except OSError as error:
        raise UserError(f"settings {str(path)!r} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"settings {str(path)!r} is not valid TOML: {error}") from None


def check_types(config: object, where: str) -> None:
    """Check every field of a dataclass instance against its annotation."""
    for key, hint in typing.get_type_hints(type(config)).items():
        _require_type(where, key, getattr(config, key), hint)


def require_choice(where: str, key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{where}: {key!r} is {value!r}, expected one of {names(choices)}{nearest(value, choices)}")


def require_range(where: str, key: str, value: float, low: float, high: float | None = None) -> None:
    """Raise unless low <= value, and value <= high where there is a `high`."""
    if not (low <= value and (high is None or value <= high)):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{where}: {key!r} is {value!r}, expected {bounds}")


def _require_type(where: str, key: str, value: object, hint: object) -> None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not any(_is_type(value, option) for option in options):
        expected = " or ".join(_WORDS.get(option, str(option)) for option in options)
        raise UserError(f"{where}: {key!r} is {value!r}, expected {expected}")


def _is_type(value: object, option: object) -> bool:
    # bool is an int to Python, but `max_requests = true` is a mistake
    if option in (int, float) and isinstance(value, bool):
        return False
    if option is float:
        return isinstance(value, int | float)
    plain = typing.get_origin(option) or option
    return isinstance(value, plain) if isinstance(plain, type) else True


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
