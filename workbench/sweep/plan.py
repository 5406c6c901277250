"""What one bench is asked for, checked before anything heavy is imported. Nothing given is ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import UserError, names, nearest

MODES = ("base", "lora", "merged", "xlora")
SYNTHETIC = "synthetic"
_ADAPTERS, _RANK, _POPULARITY = 4, 8, "uniform"


@dataclass(frozen=True)
class Plan:
    """Settings of one bench; None is "not given".

    Attributes:
        modes: one or more of `MODES`; the same one twice shows what repeats alone differ by.
        concurrency, tokens, prompt_tokens, seed, tgt_non_granular_index: of each `Workload`.
        adapters, rank: of the synthetic adapters.
        popularity: one, or several to measure lora with each.
        sources: given adapters, instead of synthetic ones.
        mixture: "demo", "synthetic", folder or Hub id, for xlora; None is the demo's on the demo base, else synthetic.
        slots: adapters that can run at once; None is as many as the requests ask for.
        drafting: as in `EngineConfig`.
        repeats: rounds.
        baseline: the point others are compared with; None is the first.

    Raises:
        UserError: a value or combination that means nothing.
    """

    modes: tuple[str, ...]
    concurrency: int = 16
    tokens: int = 32
    prompt_tokens: int = 32
    adapters: int | None = None
    rank: int | None = None
    popularity: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    mixture: str | None = None
    tgt_non_granular_index: int | None = None
    slots: int | None = None
    drafting: bool | None = None
    repeats: int = 5
    baseline: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.modes:
            raise UserError(f"--mode names no mode; modes are {names(MODES)}")
        for mode in self.modes:
            require_mode(mode)
        leasts = {"concurrency": 1, "tokens": 2, "prompt_tokens": 1, "repeats": 1, "adapters": 1, "rank": 1, "slots": 1,
                  "tgt_non_granular_index": 0, "seed": 0}
        for key, least in leasts.items():
            if getattr(self, key) is not None:
                require_at_least(f"--{key.replace('_', '-')}", getattr(self, key), least)
        self._require_uses()
        if self.slots and "merged" in self.modes and self.slots < self.num_adapters:
            raise UserError(f"mode 'merged' runs {self.num_adapters} adapters at once, more than --slots {self.slots}")
        if self.baseline is not None:
            require_baseline(self.baseline, self.names())

    def names(self) -> list[str]:
        """Return the names of the points, in order: modes, with a popularity where there are several."""
        found, seen = [], Counter()
        for mode, popularity in self.pairs():
            name = f"{mode}/{popularity}" if mode == "lora" and len(self.popularity) > 1 else mode
            seen[name] += 1
            found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return found

    def pairs(self) -> list[tuple[str, str]]:
        """Return (mode, popularity) of each point."""
        several = self.popularity or (_POPULARITY,)
        return [(mode, each) for mode in self.modes for each in (several if mode == "lora" else several[:1])]

    @property
    def num_adapters(self) -> int:
        """Adapters that lora and merged requests choose from."""
        return len(self.sources) or self.adapters or _ADAPTERS

    @property
    def synthetic_rank(self) -> int:
        """Rank of synthetic adapters."""
        return self.rank or _RANK

    @property
    def has_adapters(self) -> bool:
        """Whether any mode runs on plain adapters."""
        return bool({"lora", "merged"} & set(self.modes))

    def num_slots(self, least: int) -> int:
        """Return the slots the engine gets: those asked for, or enough that no request waits, and at least `least`."""
        needed = self.num_adapters if "merged" in self.modes else min(self.num_adapters, self.concurrency)
        return self.slots or max(least, needed)

    def _require_uses(self) -> None:
        """Raise for a setting that no mode reads."""
        xlora, makes = "xlora" in self.modes, self.has_adapters and not self.sources
        has_synthetic = makes or (xlora and self.mixture in (None, SYNTHETIC))
        if self.sources and (self.adapters or self.rank):
            option = "--adapters" if self.adapters else "--rank"
            raise UserError(f"{option} is of synthetic adapters, and --adapter gives others; leave one of them out")
        uses = {
            "--adapters": (self.adapters, has_synthetic, "lora, merged, or xlora with a synthetic mixture"),
            "--rank": (self.rank, has_synthetic, "lora, merged, or xlora with a synthetic mixture"),
            "--adapter": (self.sources, self.has_adapters, "lora or merged"),
            "--slots": (self.slots, self.has_adapters, "lora or merged"),
            "--popularity": (self.popularity, "lora" in self.modes, "lora"),
            "--mixture": (self.mixture, xlora, "xlora"),
            "--tgt-non-granular-index": (self.tgt_non_granular_index, xlora, "xlora"),
            "--no-drafting": (self.drafting is False or None, xlora, "xlora"),
        }
        for option, (value, is_read, readers) in uses.items():
            if value not in (None, ()) and not is_read:
                raise UserError(f"{option} is read by {readers} only, but --mode is {','.join(self.modes)}")


def split(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts of an option that may be given several times, or once with commas."""
    return tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())


def require_mode(mode: str) -> None:
    """Raise unless `mode` is one of `MODES`."""
    if mode not in MODES:
        raise UserError(f"mode {mode!r} is not known{nearest(mode, MODES)}; modes are {names(MODES)}")


def require_at_least(key: str, value: object, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{key} must be a whole number of at least {least}, not {value!r}")


def require_baseline(baseline: str, known: Sequence[str]) -> None:
    """Raise unless a point has that name."""
    if baseline not in known:
        hint = nearest(baseline, known)
        raise UserError(f"baseline {baseline!r} is none of the measured points {names(known)}{hint}")
