"""Editing: the edits that are open on an engine, and what they make of the rows that are about to run.

Contract: an edit changes a row once, before the row first runs; what it made is kept with the request, and a
recomputation uses it again. Rows that an edit changed are in no block of the prefix cache, and a request that an edit
may change finds no adapted blocks there. With no edit open this costs one look at an empty list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.edits import Edit, Tap
from workbench.edits.edit import chosen
from workbench.engine.batch import ADAPTED, SpanPlan
from workbench.engine.interrupts import let_interrupts
from workbench.engine.scheduler import reason_of
from workbench.errors import UserError, names, nearest
from workbench.instrument.sites import matching
from workbench.instrument.wanted import near_ids

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine.request import Request
    from workbench.xlora import Mixture

POINT = "scalings"
CLASSIFIER = "classifier"
_MOST_SEEN = 1024  # ids of requests, for an error to name the nearest
EditFunction = Callable[[Tensor, Tap], "Tensor | None"]


class Applied:
    """One key of `Engine.edit`: its edits, and how many rows they have changed.

    Attributes:
        key: "classifier:scalings", or "<site pattern>:scalings".
        fired: rows it gave scalings to so far, equal ones included: those that an edit is for, all that a function was
            asked about.
        unfired: of its edits, those that have changed no row; a function may be there to look.
        error: why a request failed in it, the last one's; None when none has.
    """

    def __init__(self, key: str, given: Any):
        self.key, self.fired, self.error = key, 0, None
        self.pattern = pattern_of(key)
        self.functions: tuple[EditFunction, ...] = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not self.functions:
            raise UserError(f"{key}: an empty list changes nothing; give an edit")
        self._counts = [0] * len(self.functions)
        for function in self.functions:
            if not callable(function):
                raise UserError(f"{key} takes an edit (ablate('german')), a function of (scalings, tap), or a list of "
                                f"them, not {function!r}")

    @property
    def unfired(self) -> tuple[EditFunction, ...]:
        """The edits that have changed no row."""
        counted = zip(self.functions, self._counts, strict=True)
        return tuple(function for function, count in counted if not count and isinstance(function, Edit))

    def check(self, mixture: Mixture) -> None:
        """Raise a UserError unless this fits a mixture."""
        sites = tuple(mixture.sites[i] for i in self.columns(mixture))
        for function in self.functions:
            if isinstance(function, Edit):
                function.check(mixture.adapter_names, sites, self.key)

    def columns(self, mixture: Mixture) -> list[int]:
        """Return the indices of the sites it may change."""
        patterns = None if self.pattern is None else (self.pattern,)
        return matching(mixture.sites, patterns, f"{self.key}: no site")

    def change(self, request: Request, first: int, used: Tensor) -> Tensor | None:
        """Return what rows from position `first` on use instead of `used`, or None for no change."""
        mixture, columns = request.mixture, self.columns(request.mixture)
        part = used[:, columns]
        tap = Tap(
            self.key, request.id, mixture.adapter_names, tuple(mixture.sites[i] for i in columns),
            torch.arange(first, first + len(used)), len(request.prompt_ids),
            lambda position: _unedited(request, position, first + len(used))[columns],
        )
        labels, changed, asked = [], [], range(first, first + len(used))
        for index, function in enumerate(self.functions):
            new = checked(self._asked(function, part, tap), part.shape, function, self.key)
            if new is not None:
                part = new
                labels.append(label_of(function))
                is_edit = isinstance(function, Edit)
                changed.append(chosen(function.positions, asked, tap.prompt_tokens) if is_edit else asked)
                self._counts[index] += len(changed[-1])
        if not labels:
            return None
        request.edits += [label for label in dict.fromkeys(labels) if label not in request.edits]
        self.fired += len(changed[0] if len(changed) == 1 else set().union(*changed))
        whole = used.clone()
        whole[:, columns] = part
        return whole

    def _asked(self, function: EditFunction, part: Tensor, tap: Tap) -> Any:
        """Return what a function gives; one of the user's own may take for ever, and is not trusted with `part`."""
        if isinstance(function, Edit):
            return function(part, tap)
        mine = part.clone()
        with let_interrupts():
            given = function(mine, tap)
        if given is None and not torch.allclose(mine, part, rtol=0, atol=0, equal_nan=True):
            raise UserError(f"{self.key}: {label_of(function)} changed what it was given and returned None, which is "
                            "no change; return the new scalings")
        return given


class Edits:
    """Edits that are open: a context manager; `edits[key].fired` says how many rows each was applied to.

    Args:
        given: key -> edit, function or list of them.
        requests: ids of the requests they are for; None is every request with a mixture that they fit.
        close: called with this when it ends.
    """

    def __init__(self, given: Mapping[str, Any], requests: Any, close: Callable[[Edits], None]):
        if not isinstance(given, Mapping) or not given:
            raise UserError(f"edit takes a dict such as {{'classifier:scalings': ablate('german')}}, not {given!r}")
        self.requests = request_ids(requests)
        self._applied = {key: Applied(key, edit) for key, edit in given.items()}
        self._close = close
        self._fitting: frozenset[str] = frozenset()
        self._seen: dict[str, None] = {}
        self._met: set[str] = set()

    def __getitem__(self, key: str) -> Applied:
        if key not in self._applied:
            raise UserError(f"no edit {key!r}{nearest(key, self._applied)}; there are {names(list(self._applied))}")
        return self._applied[key]

    def __enter__(self) -> Edits:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is not None:
            return
        for applied in self._applied.values():
            if not applied.fired:
                self._complain(applied, applied.functions, "no request with a mixture it fits ran here, or it returned "
                                                           "None for every row" + self._near())
            if applied.unfired:
                self._complain(applied, applied.unfired, "no row that it is for ran here")
        if missing := sorted((self.requests or frozenset()) - self._met):
            ran = f"; of those named there ran {names(sorted(self._met))}" if self._met else ""
            raise UserError(f"request {missing[0]!r} was to be edited, but never ran{self._near()}{ran}")

    def close(self) -> None:
        """End the edits: rows that run from now on are not changed. No error if they have ended."""
        self._close(self)

    def check(self, mixtures: Mapping[str, Mixture]) -> None:
        """Raise a UserError unless every key fits at least one mixture."""
        if not mixtures:
            raise UserError("edit changes the scalings of a mixture, and none is loaded; load_mixture comes first")
        for applied in self._applied.values():
            errors = [error for error in (_misfit(applied, mixture) for mixture in mixtures.values()) if error]
            if len(errors) == len(mixtures):
                raise errors[0]
        self._fitting = frozenset(mixture.content_key for mixture in mixtures.values() if self._fits(mixture))
        if not self._fitting:
            raise UserError(f"no mixture fits all of {names(list(self._applied))}; open edits of different mixtures "
                            "one by one")

    def concerns(self, request: Request) -> bool:
        """Whether these edits are for a request."""
        if self.requests is not None:
            if request.id in self.requests:
                self._met.add(request.id)
            elif len(self._seen) < _MOST_SEEN:
                self._seen[request.id] = None
        if request.mixture is None or (self.requests is not None and request.id not in self.requests):
            return False
        # named requests are edited or fail, and so do those of a mixture that an edit did fit and, moved, no longer
        # does; without names, mixtures that it never fitted are left alone
        mixture = request.mixture
        return self.requests is not None or mixture.content_key in self._fitting or self._fits(mixture)

    def change(self, request: Request, first: int, used: Tensor) -> Tensor | None:
        """Return what rows from position `first` on use instead of `used`, or None for no change."""
        changed = None
        for applied in self._applied.values():
            try:
                applied.check(request.mixture)
                new = applied.change(request, first, used if changed is None else changed)
            except Exception as error:
                applied.error = reason_of(error)
                raise
            changed = changed if new is None else new
        return changed

    def _complain(self, applied: Applied, functions: Iterable[EditFunction], why: str) -> None:
        whose = "any request" if self.requests is None else f"requests {names(sorted(self.requests))}"
        what = ", ".join(map(label_of, functions))
        raise UserError(f"edit {applied.key!r} ({what}) changed no row of {whose}: {applied.error or why}")

    def _near(self) -> str:
        """Return which of the requests that ran have ids near one that did not."""
        lacking = sorted((self.requests or frozenset()) - self._met)
        return near_ids(lacking[0], self._seen) if lacking else ""

    def _fits(self, mixture: Mixture) -> bool:
        return all(_misfit(applied, mixture) is None for applied in self._applied.values())


class Editing:
    """All edits that are open on one engine, in the order in which they were opened."""

    def __init__(self) -> None:
        self._open: list[Edits] = []
        self._changing = threading.Lock()

    def open(self, given: Any, requests: Any, mixtures: Mapping[str, Mixture]) -> Edits:
        """Check edits against the loaded mixtures and open them."""
        if callable(given):
            given = {f"{CLASSIFIER}:{POINT}": given}
        edits = Edits(given, requests, self._remove)
        edits.check(mixtures)
        with self._changing:
            self._open = [*self._open, edits]
        return edits

    def concerns(self, request: Request) -> bool:
        """Whether any open edit is for a request."""
        # all of them: each remembers which requests it met
        concerned = [edits.concerns(request) for edits in self._open]
        return any(concerned)

    def apply(self, plan: SpanPlan) -> None:
        """Change what a plan's rows use, those that run for the first time.

        Raises:
            UserError: an edit does not fit, or gave what no scalings can be.
        """
        request = plan.request
        if not self._open or plan.kind != ADAPTED or request.mixture is None:
            return
        first = max(plan.first, len(request.sources), request.num_edited)
        if first >= plan.stop:
            return
        before = after = None
        for edits in [edits for edits in self._open if edits.concerns(request)]:
            before = request.used(first, plan.stop) if before is None else before
            new = edits.change(request, first, before if after is None else after)
            after = after if new is None else new
        if after is not None:
            request.keep_edited({first + int(row): after[row] for row in _differing(after, before).nonzero()[:, 0]})

    def _remove(self, edits: Edits) -> None:
        with self._changing:
            self._open = [each for each in self._open if each is not edits]


def pattern_of(key: Any) -> str | None:
    """Return the site pattern of a key, None for the whole classifier.

    Raises:
        UserError: not such a key.
    """
    expected = f"'{CLASSIFIER}:{POINT}' or a site pattern such as '*.q_proj:{POINT}'"
    if not isinstance(key, str):
        raise UserError(f"an edit's key is {expected}, not {key!r}")
    pattern, colon, point = key.rpartition(":")
    if not colon or not pattern:
        raise UserError(f"an edit's key is {expected}, not {key!r}{nearest(key, (f'{CLASSIFIER}:{POINT}',))}")
    if point != POINT:
        raise UserError(f"an edit's key is {expected}: {point!r} cannot be edited{nearest(point, (POINT,))}")
    return None if pattern == CLASSIFIER else pattern


def request_ids(requests: Any) -> frozenset[str] | None:
    """Return the ids of requests given as ids, handles, or a list of them; None for all."""
    if requests is None:
        return None
    listed = [requests] if isinstance(requests, str) or hasattr(requests, "id") else requests
    if not isinstance(listed, Iterable):
        raise UserError(f"requests must be request ids or handles, not {requests!r}")
    found = [each if isinstance(each, str) else getattr(each, "id", None) for each in listed]
    if not found or not all(isinstance(each, str) and each for each in found):
        raise UserError(f"requests must be request ids or handles, not {requests!r}; leave it out for every request")
    return frozenset(found)


def label_of(function: EditFunction) -> str:
    """Return what results say of an edit."""
    return function.label if isinstance(function, Edit) else getattr(function, "__name__", type(function).__name__)


def checked(new: Any, shape: Sequence[int], function: EditFunction, key: str) -> Tensor | None:
    """Return what an edit gave as float32 on the host, or None for no change.

    Raises:
        UserError: it is no tensor of the right shape, or not finite.
    """
    if new is None:
        return None
    name = label_of(function)
    if not isinstance(new, Tensor):
        raise UserError(f"{key}: {name} returned {type(new).__name__}; expected a tensor or None")
    if tuple(new.shape) != tuple(shape):
        raise UserError(f"{key}: {name} returned shape {list(new.shape)}; expected [row, site, adapter] {list(shape)}")
    new = new.detach().to("cpu", torch.float32)
    if not torch.isfinite(new).all():
        raise UserError(f"{key}: {name} returned NaN or infinite scalings")
    return new


def taps(mixtures: Mapping[str, Mixture]) -> pd.DataFrame:
    """Return what can be edited: one line for each mixture's classifier and each of its sites."""
    import pandas as pd

    rows = []
    for mixture in mixtures.values():
        adapters = ", ".join(mixture.adapter_names)
        rows.append((f"{CLASSIFIER}:{POINT}", mixture.name, f"[row, {len(mixture.sites)}, {len(mixture.adapters)}]",
                     adapters))
        rows += [(f"{site}:{POINT}", mixture.name, f"[row, 1, {len(mixture.adapters)}]", adapters)
                 for site in mixture.sites]
    return pd.DataFrame(rows, columns=["name", "mixture", "dims", "adapters"])


def _differing(one: Tensor, other: Tensor) -> Tensor:
    """Return bool `[row]`: whether the rows differ anywhere."""
    return (one != other).flatten(1).any(1)


def _unedited(request: Request, position: Any, stop: int) -> Tensor:
    """Return what an input uses unedited, `[site, adapter]`; those from `stop` on are not known yet."""
    if isinstance(position, bool) or not isinstance(position, Integral) or not 0 <= position < stop:
        raise UserError(f"scalings_at takes a position from 0 to {stop - 1}, the last one that runs, not {position!r}")
    return request.unedited(int(position), int(position) + 1)[0]


def _misfit(applied: Applied, mixture: Mixture) -> UserError | None:
    try:
        applied.check(mixture)
    except UserError as error:
        return error
    return None
