"""Wanted: what a recorder was asked to record, checked; nothing that was asked for is ignored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import UserError, names, nearest
from workbench.instrument.sites import is_matched, matching, patterns_of

# kind -> what one value of it is
KINDS = {
    "scalings": "the adapter weights each token used",
    "logits:top": "the likeliest next tokens after each token",
    "delta_norm": "how far each adapter's delta moves the output of each site",
    "hidden_norm": "the length of the hidden state after each layer",
    "entropy": "the entropy of the next-token distribution after each token",
    "cache": "what each step found in the caches",
    "throughput": "what each step took",
}
OF_STEPS = ("cache", "throughput")
TOP = 8  # likeliest tokens that "logits:top" keeps


@dataclass(frozen=True)
class Wanted:
    """What to record, of whom.

    Attributes:
        kinds: of `KINDS`, each once, in their order.
        top: how many of the likeliest tokens to keep; 0 without "logits:top".
        requests: the ids to record; None is all.
        patterns: shell patterns of sites; None is all.
        every: measured values are kept at positions that this divides.
    """

    kinds: tuple[str, ...]
    top: int = 0
    requests: tuple[str, ...] | None = None
    patterns: tuple[str, ...] | None = None
    every: int = 1

    @classmethod
    def of(
        cls, what: Sequence[str], requests: Any = None, sites: Any = None, every: Any = 1, most_top: int | None = None
    ) -> Wanted:
        """Return what `Engine.record` was asked for.

        Args:
            what: kinds; none is "scalings".
            requests: id or ids, or handles.
            sites: pattern or patterns.
            every: a whole number of at least 1.
            most_top: the size of the vocabulary.

        Raises:
            UserError: an unknown kind, one given twice, or an argument of another sort.
        """
        found, top = [], 0
        for kind in what or ("scalings",):
            name, count = _parsed(kind, most_top)
            if name in found:
                raise UserError(f"record: {name!r} is given twice; say it once")
            found.append(name)
            top = max(top, count)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UserError(f"record: 'every' must be a whole number of at least 1, not {every!r}")
        kinds = tuple(kind for kind in KINDS if kind in found)
        made = cls(kinds, top, _request_ids(requests), patterns_of(sites, "records", "record: "), every)
        if every > 1 and not made.measures:
            raise UserError(f"record: 'every' thins out what is measured, and {names(kinds)} is whole in any case")
        if made.patterns and not {"scalings", "delta_norm"} & set(kinds):
            raise UserError(f"record: 'sites' is for 'scalings' and 'delta_norm'; {names(kinds)} is not of sites")
        return made

    @property
    def has_values(self) -> bool:
        """Whether anything is recorded per token."""
        return any(kind not in OF_STEPS for kind in self.kinds)

    @property
    def measures(self) -> bool:
        """Whether anything is taken from the forward itself."""
        return any(kind not in OF_STEPS and kind != "scalings" for kind in self.kinds)

    @property
    def has_steps(self) -> bool:
        """Whether steps are recorded."""
        return any(kind in OF_STEPS for kind in self.kinds)

    def includes(self, request_id: str) -> bool:
        """Whether a request is recorded."""
        return self.requests is None or request_id in self.requests

    def matches(self, site: str) -> bool:
        """Whether a site is recorded."""
        return is_matched(site, self.patterns)

    def require_sites(self, sites: Iterable[str], whose: str) -> None:
        """Raise unless every pattern matches one of the sites of `whose`."""
        matching(list(sites), self.patterns, f"record: no site of {whose}")


def near_ids(wanted: str, seen: Iterable[str]) -> str:
    """Return, for the end of an error, which of the requests that ran have ids near one that did not."""
    seen = list(seen)
    answers = [name for name in seen if name.rpartition("-")[0] == wanted and name.rpartition("-")[2].isdecimal()]
    if answers:
        return f"; {names(answers)} did: each answer of n > 1 has an id of its own"
    return nearest(wanted, seen)


def _parsed(kind: Any, most_top: int | None) -> tuple[str, int]:
    """Return the kind and, for "logits:top" and "logits:top:K", how many tokens."""
    if not isinstance(kind, str):
        raise UserError(f"cannot record {kind!r}; choose from {names(list(KINDS))}")
    base, _, count = kind.rpartition(":")
    if base == "logits:top":
        if not count.isdecimal() or not 0 < int(count) <= (most_top or int(count)):
            limit = f" and at most {most_top}, the vocabulary" if most_top else ""
            raise UserError(f"record: {kind!r} must end in a whole number of at least 1{limit}")
        return base, int(count)
    if kind not in KINDS:
        raise UserError(f"cannot record {kind!r}{nearest(kind, KINDS)}; choose from {names(list(KINDS))}")
    return kind, min(TOP, most_top or TOP) if kind == "logits:top" else 0


def _request_ids(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    listed = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    ids = [getattr(each, "id", each) for each in listed]
    if not all(isinstance(each, str) for each in ids):
        raise UserError(f"record: 'requests' must be text or a list of texts, not {ids!r}")
    if not ids:
        raise UserError("record: requests=[] records nothing; leave it out to record all of them")
    return tuple(dict.fromkeys(ids))
