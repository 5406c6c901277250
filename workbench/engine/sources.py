"""From what a user calls a mixture, an ordering or a base to the thing itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench import hub
from workbench.adapters.model import LoRAModel, LoRATargetModule
from workbench.config import EngineConfig
from workbench.demo_base import BASE_ID as DEMO_BASE_ID
from workbench.engine.base import BaseInfo
from workbench.errors import UserError
from workbench.ordering import Ordering
from workbench.xlora import Mixture, find_mixture


def named_base(mixture: str | Path, ordering: Ordering | None, options: Mapping[str, Any]) -> str:
    """Return the base that an ordering, else a mixture's own config, names; a UserError when neither does."""
    if ordering is not None and ordering.base_model_id:
        named = ordering.base_model_id
    else:
        where = {key: options[key] for key in ("token", "offline") if key in options}
        named = find_mixture(hub.resolve_mixture(str(mixture), **where)).base_model_id
    if not named:
        raise UserError(f"neither an ordering nor mixture {str(mixture)!r} names a base model; give one")
    return hub.DEMO if named == DEMO_BASE_ID else named


def base_setting(base: str | Path | None) -> dict[str, str]:
    """Return the engine setting for a base that may have been left out."""
    return {} if base is None else {"base": str(base)}


def read_ordering(ordering: Ordering | str | Path | None) -> Ordering | None:
    """Return an ordering given as itself, as its file, or not at all."""
    return Ordering.read(ordering) if isinstance(ordering, (str, Path)) else ordering


def read_mixture(
    source: str | Path, name: str | None, targets: Mapping[str, LoRATargetModule], base: str, hidden_size: int,
    ordering: Ordering | None, settings: dict[str, Any] | None, where: dict[str, Any],
) -> Mixture:
    """Read a mixture against a base's sites: see `Mixture.read`; by default it is called like its folder."""
    files = find_mixture(hub.resolve_mixture(str(source), **where))
    name = name or Path(str(source)).name
    return Mixture.read(files, name, targets, base, hidden_size, ordering, **(settings or {}))


def prepare_mixture(
    source: str | Path, ordering: Ordering | str | Path | None, name: str | None, base: str | Path | None,
    settings: dict[str, Any] | None, info: BaseInfo | None, options: Mapping[str, Any],
) -> tuple[BaseInfo, Mixture, Ordering | None]:
    """Read a mixture against the base it is to run on, and check what it preloads; no weights of the base are read."""
    given = read_ordering(ordering)
    if info is None:
        base = named_base(source, given, options) if base is None else base
        info = BaseInfo.read(EngineConfig().change(base=str(base), **options))
    where = {"token": info.config.token, "offline": info.config.offline}
    targets = info.targets()
    read = read_mixture(source, name, targets, info.label, info.hf_config.hidden_size, given, settings, where)
    for entry in given.preload_adapters if given is not None else ():
        check_adapter(entry["adapter_model_id"], entry["name"], targets, info.label, where)
    return info, read, given


def check_adapter(
    source: str, name: str, targets: Mapping[str, LoRATargetModule], base: str, where: Mapping[str, Any]
) -> None:
    """Raise unless an adapter can be read and fits a base; nothing is kept."""
    LoRAModel.read(hub.resolve_adapter(source, **where), name).fit(targets, base)
