"""PointSettings: everything that decides one point of a sweep, checked, with an id that is its content.

Contract: equal settings have equal ids, on every machine; a setting that its task would not read is an error, not
ignored. No model and no adapter is looked at: a grid is checked before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from workbench.config import ATTENTION, DTYPES, require_choice
from workbench.errors import UserError, names, nearest
from workbench.sweep.plan import MODES
from workbench.sweep.synthetic import popularity_named
from workbench.xlora.policy import exact, non_granular, policy_named

TASKS = ("throughput", "fidelity")
ARRIVALS = ("closed", "poisson", "gamma", "trace")
ENGINE = ("base", "dtype", "device", "drafting", "attention", "max_rows_per_step", "max_requests", "kv_bytes",
          "prefix_cache")
ADAPTED = ("lora", "merged")
SCHEMA = 1
_NONE = "none"


@dataclass(frozen=True)
class PointSettings:
    """One point; None is "not said", and then not read.

    Attributes:
        task: "throughput": run requests and time them; "fidelity": compare a reuse policy with exact scalings.
        base, dtype, device, drafting, attention, max_rows_per_step, max_requests, kv_bytes, prefix_cache: of the
            engine; see `EngineConfig`.
            A base that nobody names is the demo's; for a mixture of one's own, the one it was made for.
        mode: base, lora (an adapter each), merged (all adapters in equal parts) or xlora.
        adapters: how many synthetic adapters there are, for lora and merged.
        rank: theirs; a list is dealt out in turn, so that one batch holds several ranks.
        popularity: which adapter each request uses; see `synthetic.draw_adapters`.
        slots: adapters that can run at once.
        mixture: "demo", "synthetic", a folder or a Hub id, for xlora.
        policy: its reuse policy by name, "exact" or "non_granular(4)".
        concurrency: requests at once, for closed arrivals.
        requests: how many requests in all.
        prompt_tokens, tokens: of each request; `[low, high]` is uniform between them.
        arrivals: "closed" (the next request comes when one ends), "poisson", "gamma", or "trace".
        rate: requests per second, for poisson and gamma.
        cv: coefficient of variation of the times between arrivals, for gamma.
        trace: JSONL file of arrivals, for "trace".
        slo_ttft_ms, slo_time_per_token_ms: what a request must keep to count for goodput.
        texts: a set of texts that comes with the demo, or a file, for fidelity.
        passages, passage_tokens, prefix_tokens: how many texts, how long, and how much of each is the prompt.
        seed: of adapters and, with the repeat, of prompts, popularity and arrivals.
        folder: where the point was said: files are named from there. No setting: it decides nothing.
    """

    task: str = "throughput"
    base: str | None = None
    dtype: str = "float32"
    device: str | None = None
    drafting: bool = True
    attention: str = "auto"
    max_rows_per_step: int | None = None
    max_requests: int | None = None
    kv_bytes: int | None = None
    prefix_cache: bool = False
    mode: str = "base"
    adapters: int | None = None
    rank: int | tuple[int, ...] | None = None
    popularity: str | None = None
    slots: int | None = None
    mixture: str | None = None
    policy: str | None = None
    concurrency: int | None = None
    requests: int | None = None
    prompt_tokens: int | tuple[int, int] | None = None
    tokens: int | tuple[int, int] | None = None
    arrivals: str | None = None
    rate: float | None = None
    cv: float | None = None
    trace: str | None = None
    slo_ttft_ms: float | None = None
    slo_time_per_token_ms: float | None = None
    texts: str | None = None
    passages: int | None = None
    passage_tokens: int | None = None
    prefix_tokens: int | None = None
    seed: int = 0
    folder: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, folder: Path | None = None) -> PointSettings:
        """Return the point of some settings, defaults filled in.

        Args:
            given: settings by name; `tgt_non_granular_index` (a number, or "none") is short for a policy.
            where: begins each error.
            folder: where the point is said; None is the working directory.

        Raises:
            UserError: an unknown setting, a value that means nothing, or settings that contradict each other.
        """
        values = dict(given)
        for key in values:
            if key not in SETTINGS and key != "tgt_non_granular_index":
                raise UserError(f"{where}: unknown setting {key!r}{nearest(key, SETTINGS)}; the settings are "
                                f"{names(SETTINGS, len(SETTINGS))}")
        if "tgt_non_granular_index" in values:
            k = values.pop("tgt_non_granular_index")
            if "policy" in values:
                raise UserError(f"{where}: give tgt_non_granular_index ({k!r}) or policy ({values['policy']!r}), not "
                                "both")
            values["policy"] = exact().name if k == _NONE else _named(where, lambda: non_granular(k).name)
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else value
        point = cls(**values, folder=None if folder is None else str(folder.absolute()))
        point._check(where)
        return point._filled()

    @property
    def settings(self) -> dict[str, Any]:
        """What was said or is read by default, JSON-able."""
        found = {key: getattr(self, key) for key in SETTINGS}
        return {key: list(value) if isinstance(value, tuple) else value
                for key, value in found.items() if value is not None}

    @property
    def id(self) -> str:
        """Its name for ever: the content's hash."""
        text = json.dumps([SCHEMA, self.settings], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def engine(self) -> dict[str, Any]:
        """The settings that the engine reads."""
        return {key: value for key, value in self.settings.items() if key in ENGINE}

    def file(self, key: str) -> Path:
        """Return the path of a setting that names a file."""
        return Path(self.folder or ".") / getattr(self, key)

    def label(self, keys: Sequence[str]) -> str:
        """Return what distinguishes it among points that differ in `keys`."""
        said = {key: int(value) if isinstance(value, float) and value.is_integer() else value
                for key, value in self.settings.items()}
        return " ".join(f"{key}={said[key]}" for key in keys if key in said) or self.mode

    def _check(self, where: str) -> None:
        for key in ("task", "mode", "dtype", "attention"):
            _require(where, key, getattr(self, key), lambda value: isinstance(value, str), "a text")
        require_choice(where, "task", self.task, TASKS)
        require_choice(where, "mode", self.mode, MODES)
        require_choice(where, "dtype", self.dtype, DTYPES)
        require_choice(where, "attention", self.attention, ATTENTION)
        for key in ("base", "device", "popularity", "mixture", "policy", "trace", "texts"):
            _require(where, key, getattr(self, key), lambda value: isinstance(value, str) and value.strip(), "a text")
        for key in ("drafting", "prefix_cache"):
            _require(where, key, getattr(self, key), lambda value: isinstance(value, bool), "true or false")
        for key, least in (("adapters", 1), ("slots", 1), ("concurrency", 1), ("requests", 1), ("passages", 1),
                           ("passage_tokens", 2), ("prefix_tokens", 1), ("max_rows_per_step", 1), ("max_requests", 1),
                           ("kv_bytes", 1), ("seed", 0)):  # fmt: skip
            _require(where, key, getattr(self, key), lambda value, least=least: _is_whole(value, least),
                     f"a whole number of at least {least}")
        for key in _FLOATS:
            _require(where, key, getattr(self, key), _is_positive, "a number above 0")
        _require(where, "rank", self.rank, lambda value: all(_is_whole(one, 1) for one in _listed(value)),
                 "a rank of at least 1, or a list of them")
        for key, least in (("prompt_tokens", 1), ("tokens", 2)):
            _require(where, key, getattr(self, key), lambda value, least=least: _is_range(value, least),
                     f"a whole number of at least {least}, or [low, high]")
        if self.policy is not None:
            _named(where, lambda: policy_named(self.policy).name)
        self._check_who(where)
        if self.task == "fidelity":
            self._check_fidelity(where)
        else:
            self._check_throughput(where)

    def _check_who(self, where: str) -> None:
        if self.mode != "xlora":
            self._refuse(where, f"mode {self.mode!r} has no mixture", "mixture", "policy")
        if self.mode not in ADAPTED:
            self._refuse(where, f"mode {self.mode!r} reads no adapters of its own", "popularity", "slots")
            if self.mode == "base" or self.mixture != "synthetic":
                self._refuse(where, f"mode {self.mode!r} makes no adapters", "adapters", "rank")
        if self.mixture == "synthetic" and isinstance(self.rank, tuple):
            raise UserError(f"{where}: the synthetic mixture's adapters have one rank, not {list(self.rank)}")
        if self.mode == "merged":
            self._refuse(where, "mode 'merged' uses all adapters alike", "popularity")
        if self.mode == "merged" and self.slots and self.slots < (self.adapters or _ADAPTED_DEFAULTS["adapters"]):
            raise UserError(f"{where}: mode 'merged' runs all adapters at once, more than {self.slots} slots")
        if self.mode == "lora" and self.slots and self.adapters and self.slots > self.adapters:
            raise UserError(f"{where}: {self.slots} slots for {self.adapters} adapters; slots beyond them stay empty")

    def _check_fidelity(self, where: str) -> None:
        if self.mode != "xlora":
            raise UserError(f"{where}: task 'fidelity' compares a mixture's reuse policies; mode must be 'xlora', not "
                            f"{self.mode!r}")
        self._refuse(where, "task 'fidelity' scores texts", "concurrency", "requests", "prompt_tokens", "tokens",
                     "arrivals", "rate", "cv", "trace", "slo_ttft_ms", "slo_time_per_token_ms")
        total, prefix = self.passage_tokens or _DEFAULTS["fidelity"]["passage_tokens"], self.prefix_tokens
        if prefix is not None and prefix >= total:
            raise UserError(f"{where}: prefix_tokens is {prefix}, but a passage has {total} tokens")
        prefix = prefix or _DEFAULTS["fidelity"]["prefix_tokens"]
        if self.texts == "switching" and prefix >= total // 2:
            raise UserError(f"{where}: prefix_tokens is {prefix}, but 'switching' texts of {total} tokens change their "
                            f"topic at token {total // 2}: that must come after the prefix")

    def _check_throughput(self, where: str) -> None:
        self._refuse(where, "task 'throughput' makes its own prompts", "texts", "passages", "passage_tokens",
                     "prefix_tokens")
        arrivals = self.arrivals or "closed"
        require_choice(where, "arrivals", arrivals, ARRIVALS)
        reads = {"closed": ("concurrency",), "poisson": ("rate",), "gamma": ("rate", "cv"), "trace": ("trace",)}
        for key in ("concurrency", "rate", "cv", "trace"):
            if key not in reads[arrivals]:
                self._refuse(where, f"{arrivals!r} arrivals do not read it", key)
            elif getattr(self, key) is None and key != "concurrency":
                raise UserError(f"{where}: {arrivals!r} arrivals need {key!r}")
        if self.concurrency and self.max_requests and self.concurrency > self.max_requests:
            raise UserError(f"{where}: concurrency is {self.concurrency}, but max_requests lets only "
                            f"{self.max_requests} run at once; raise it, or leave it out")
        if self.popularity is not None:
            _named(where, lambda: popularity_named(self.popularity))
        if arrivals == "trace":
            self._refuse(where, "the trace says it", "requests", "prompt_tokens", "tokens", "popularity")

    def _refuse(self, where: str, why: str, *keys: str) -> None:
        if given := [key for key in keys if getattr(self, key) is not None]:
            raise UserError(f"{where}: {names(given)} would be ignored: {why}")

    def _filled(self) -> PointSettings:
        """Return the point with every default that its task reads."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        wanted = dict(_DEFAULTS[self.task])
        if self.mode != "xlora" or self.mixture in (None, "demo", "synthetic"):
            wanted["base"] = "demo"
        if self.mode in ADAPTED or self.mixture == "synthetic":
            wanted |= _ADAPTED_DEFAULTS
        if self.mode == "lora" and self.arrivals != "trace":
            wanted["popularity"] = "uniform"
        if self.mode == "xlora":
            wanted |= {"mixture": "demo", "policy": exact().name}
        if self.task == "throughput":
            if (self.arrivals or "closed") == "closed":
                wanted["concurrency"] = min(8, self.max_requests or 8)
            if self.arrivals == "trace":
                wanted = {key: wanted[key] for key in wanted if key not in ("requests", "prompt_tokens", "tokens")}
            elif self.requests is None and self.concurrency is not None:
                wanted["requests"] = self.concurrency
        for key, value in wanted.items():
            values[key] = value if values[key] is None else values[key]
        return PointSettings(**{key: _canonical(key, value) for key, value in values.items()})


SETTINGS = tuple(item.name for item in fields(PointSettings) if item.compare)
_ADAPTED_DEFAULTS = {"adapters": 4, "rank": 8}
_FLOATS = ("rate", "cv", "slo_ttft_ms", "slo_time_per_token_ms")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "throughput": {"arrivals": "closed", "requests": 8, "prompt_tokens": 32, "tokens": 32},
    "fidelity": {"texts": "single", "passages": 8, "passage_tokens": 128, "prefix_tokens": 32},
}


def _named(where: str, make: Any) -> str:
    try:
        return make()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _canonical(key: str, value: Any) -> Any:
    """Return a checked value as ids have it, however it was written: 1 and 1.0, 8 and [8, 8], names with spaces."""
    if key == "policy" and value is not None:
        return policy_named(value).name
    if key == "popularity" and value is not None:
        return popularity_named(value)
    if isinstance(value, tuple):
        plain = tuple(int(one) for one in value)
        return plain[0] if len(set(plain)) == 1 else plain
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value) if key in _FLOATS else int(value)
    return value


def _require(where: str, key: str, value: Any, fits: Any, expected: str) -> None:
    if value is not None and not fits(value):
        shown = list(value) if isinstance(value, tuple) else value
        raise UserError(f"{where}: {key!r} is {shown!r}, expected {expected}")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_range(value: Any, least: int) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(_is_whole(one, least) for one in value) and value[0] <= value[1]
    return _is_whole(value, least)


def _listed(value: Any) -> tuple:
    return value if isinstance(value, tuple) and value else (value,)
