"""Patterns of sites, such as "*.q_proj": what is one, and what it matches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from workbench.errors import UserError, names, nearest


def patterns_of(given: Any, does: str, where: str = "") -> tuple[str, ...] | None:
    """Return a pattern or several as a tuple, each once; None for every site.

    Args:
        given: what the user gave.
        does: what an empty list does to nothing: "changes".
        where: begins the error.

    Raises:
        UserError: not patterns, or none.
    """
    if given is None:
        return None
    listed = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(each, str) for each in listed):
        raise UserError(f"{where}sites must be a pattern such as '*.q_proj', or a list of them, not {given!r}")
    if not listed:
        raise UserError(f"{where}sites=[] {does} nothing; leave sites out for all of them")
    return tuple(dict.fromkeys(listed))


def is_matched(site: str, patterns: Iterable[str] | None) -> bool:
    """Whether a site matches any of the patterns; every site matches None."""
    return patterns is None or any(fnmatchcase(site, pattern) for pattern in patterns)


def matching(sites: Sequence[str], patterns: Iterable[str] | None, no_site: str) -> list[int]:
    """Return the indices, in order, of the sites that match any of the patterns; None is all of them.

    Args:
        sites: where to look.
        patterns: each must match some.
        no_site: begins the error: "no site of this trace".

    Raises:
        UserError: a pattern matches nothing.
    """
    if patterns is None:
        return list(range(len(sites)))
    chosen: set[int] = set()
    for pattern in patterns:
        hits = [index for index, site in enumerate(sites) if fnmatchcase(site, pattern)]
        if not hits:
            endings = list(dict.fromkeys(f"*.{site.rpartition('.')[2]}" for site in sites))
            hint = nearest(pattern, [*endings, *sites])
            raise UserError(f"{no_site} matches {pattern!r}{hint}; they end in {names(endings)}")
        chosen.update(hits)
    return sorted(chosen)
