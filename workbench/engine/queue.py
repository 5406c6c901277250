"""FairQueue: the requests that wait, and in which order a step may start them.

Start-time fair queueing over keys (a key is what a request runs on: an adapter, a mixture, or None for the base). With
virtual time `v`, a key's oldest request has the tag `start = max(v on arrival, finish of the key's last started)`;
the smallest tag goes first; starting it sets `v = max(v, start)` and `finish = v + cost / weight`.

Contract: a step touches as many entries as it offers, however many wait; who left the queue leaves nothing behind.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from workbench.errors import UserError

T = TypeVar("T")
Key = str | None
Place = tuple[int, bool, float, int, Key]  # priority, has never run, start tag, arrival: smaller goes first

_MIN_SWEEP = 16  # looking for leftovers waits until that many may have come together


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    item: T | None  # None once it started: an entry keeps nobody alive who does not wait
    key: Key
    cost: float
    priority: int
    deadline_s: float | None
    arrival: int
    arrived: float = 0.0
    is_new: bool = True


@dataclass(eq=False, slots=True)
class _Level:
    """Virtual time of one priority, kept while anything waits there."""

    now: float = 0.0
    num_waiting: int = 0
    finish: dict[Key, float] = field(default_factory=dict)
    until_sweep: int = _MIN_SWEEP  # starts until the finish tags are looked through


@dataclass(eq=False, slots=True)
class _Line(Generic[T]):
    """What waits for one key: requests that ran before, then new ones by priority and arrival."""

    preempted: list[tuple[int, int]] = field(default_factory=list)
    new: dict[int, OrderedDict[int, None]] = field(default_factory=dict)
    priorities: list[int] = field(default_factory=list)
    place: Place | None = None

    def add(self, entry: _Entry[T]) -> None:
        if not entry.is_new:
            insort(self.preempted, (entry.priority, entry.arrival))
            return
        if entry.priority not in self.new:
            self.new[entry.priority] = OrderedDict()
            insort(self.priorities, entry.priority)
        self.new[entry.priority][entry.arrival] = None

    def discard(self, entry: _Entry[T]) -> None:
        if not entry.is_new:
            del self.preempted[bisect_left(self.preempted, (entry.priority, entry.arrival))]
            return
        waiting = self.new[entry.priority]
        del waiting[entry.arrival]
        if not waiting:
            del self.new[entry.priority]
            del self.priorities[bisect_left(self.priorities, entry.priority)]

    def head(self) -> int | None:
        """Return the arrival number of the one that goes first."""
        if self.preempted and (not self.priorities or self.preempted[0][0] <= self.priorities[0]):
            return self.preempted[0][1]
        return next(iter(self.new[self.priorities[0]])) if self.priorities else None


class FairQueue(Generic[T]):
    """Waiting requests: strict between priorities, fair between keys, first come first served within a key.

    * Smaller priority numbers go first, as elsewhere in the field. While anything of a smaller number can start,
      larger ones wait: only within one priority is it certain that everyone gets a turn.
    * Within a priority, keys with requests waiting are served in proportion to `weights`, measured in `cost`. Whatever
      one key has queued delays another's first request by one request at most.
    * A key with nothing waiting saves up nothing, and neither does one that was passed over because it could not start.

    Not thread-safe. Items are told apart by identity or hash, and must take weak references.

    Args:
        weights: share of each key; 1 for those not named.

    Raises:
        UserError: a weight that is not a positive number.
    """

    def __init__(self, weights: Mapping[str | None, float] | None = None):
        for key, weight in (weights or {}).items():
            _require_positive(f"the weight of {key!r}", weight)
        self._weights = dict(weights or {})
        self._entries: dict[T, _Entry[T]] = {}
        self._by_arrival: dict[int, _Entry[T]] = {}
        self._lines: dict[Key, _Line[T]] = {}
        self._levels: dict[int, _Level] = {}
        self._order: list[Place] = []  # one place per key that waits
        self._resume: Place | None = None
        self._deadlines: list[tuple[float, int]] = []  # a heap, with arrivals that have left by another way
        self._num_deadlines = 0
        # who started may be preempted and come back; the queue keeps nobody alive for it
        self._started: WeakKeyDictionary[T, _Entry[T]] = WeakKeyDictionary()
        self._num_arrivals = 0

    def push(self, item: T, key: Key, cost: float, priority: int = 0, deadline_s: float | None = None) -> None:
        """Queue a new item.

        Args:
            item: what waits.
            key: what it runs on; None is the base model.
            cost: what it takes, in any unit that is the same for all, such as tokens.
            priority: smaller goes first.
            deadline_s: when `expired` drops it, on the clock of the `now_s` given there; None is never.

        Raises:
            UserError: a cost, priority or deadline that is no such number.
        """
        assert item not in self._entries, f"{item!r} is queued already"
        _require_positive("the cost of a request", cost)
        check_priority(priority)
        check_deadline(deadline_s)
        self._num_arrivals += 1
        self._add(_Entry(item, key, cost, priority, deadline_s, self._num_arrivals))

    def push_front(self, item: T) -> None:
        """Queue an item again that was taken and has to make room: before all of its priority that never ran.

        It keeps its key, priority and deadline, and is not charged a second time; of several, the one that came first
        goes first.
        """
        entry = self._started.pop(item)
        entry.item, entry.is_new = item, False
        self._add(entry)

    def heads(self, limit: int) -> Iterator[T]:
        """Yield at most `limit` items, in the order in which they may start: each its key's first.

        The caller takes an item (`take`) before it asks for the next; then its key's next one may follow. An item it
        does not take blocks its key for the rest of this call: nothing behind it is offered.

        Once half of the looks met items that are not taken, the others go on where such looks ended in the call
        before, so that a key behind many blocked ones is not overlooked for ever.

        Args:
            limit: how many to look at, blocked ones included; at least 2, and some times as many as may start.
        """
        last: Place | None = None
        blocked: set[Key] = set()
        is_far = False
        for _ in range(limit):
            if not is_far and 2 * len(blocked) >= limit:
                is_far = True
                last = max(last, self._resume or last)
            place = self._next(last, blocked)
            if place is None:
                self._resume = None
                return
            if is_far:
                self._resume = place
            item, last = self._by_arrival[place[3]].item, place
            yield item
            if item in self._entries:
                blocked.add(place[4])

    def take(self, item: T) -> None:
        """Take out an item that starts, and charge its key."""
        entry = self._entries[item]
        if entry.is_new:
            level = self._levels[entry.priority]
            level.now = max(level.now, self._start(entry))
            level.finish[entry.key] = level.now + entry.cost / self._weights.get(entry.key, 1.0)
            level.until_sweep -= 1
        self._drop(entry)
        entry.item = None
        self._started[item] = entry

    def remove(self, item: T) -> bool:
        """Take out an item that will not start, and charge nobody; False if it does not wait here."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        self._drop(entry)
        return True

    def expired(self, now_s: float) -> list[T]:
        """Take out and return the items whose deadline is not after `now_s`, earliest deadline first."""
        late: list[T] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = self._by_arrival.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                late.append(entry.item)
                self._drop(entry)
        return late

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        """Items by priority and arrival, preempted ones first: for inspection, in time that grows with the queue."""
        waiting = [*self._entries.values()]
        waiting.sort(key=lambda entry: (entry.priority, entry.is_new, entry.arrival))
        return iter([entry.item for entry in waiting])

    def _next(self, last: Place | None, blocked: set[Key]) -> Place | None:
        """Return the first place after `last` whose key is not blocked."""
        index = 0 if last is None else bisect_right(self._order, last)
        # a blocked key lies further back only if its items changed between two looks
        while index < len(self._order) and self._order[index][4] in blocked:
            index += 1
        return self._order[index] if index < len(self._order) else None

    def _start(self, entry: _Entry[T]) -> float:
        return max(entry.arrived, self._levels[entry.priority].finish.get(entry.key, 0.0))

    def _add(self, entry: _Entry[T]) -> None:
        level = self._levels.setdefault(entry.priority, _Level())
        level.num_waiting += 1
        entry.arrived = level.now
        self._entries[entry.item] = self._by_arrival[entry.arrival] = entry
        line = self._lines.setdefault(entry.key, _Line())
        line.add(entry)
        self._place(entry.key, line)
        if entry.deadline_s is not None:
            self._num_deadlines += 1
            heapq.heappush(self._deadlines, (entry.deadline_s, entry.arrival))

    def _drop(self, entry: _Entry[T]) -> None:
        del self._entries[entry.item], self._by_arrival[entry.arrival]
        line, level = self._lines[entry.key], self._levels[entry.priority]
        line.discard(entry)
        self._place(entry.key, line)
        level.num_waiting -= 1
        if not level.num_waiting:
            del self._levels[entry.priority]
        elif level.until_sweep <= 0:
            self._sweep(entry.priority, level)
        if entry.deadline_s is not None:
            self._num_deadlines -= 1
            if len(self._deadlines) > max(_MIN_SWEEP, 2 * self._num_deadlines):
                self._deadlines = [pair for pair in self._deadlines if pair[1] in self._by_arrival]
                heapq.heapify(self._deadlines)

    def _place(self, key: Key, line: _Line[T]) -> None:
        """Put a key where its head belongs."""
        head = line.head()
        place = None
        if head is not None:
            entry = self._by_arrival[head]
            # preempted ones go by arrival: the oldest is never pushed back for ever
            place = (entry.priority, entry.is_new, self._start(entry) if entry.is_new else 0.0, head, key)
        if place != line.place:
            if line.place is not None:
                del self._order[bisect_left(self._order, line.place)]
            if place is not None:
                insort(self._order, place)
            line.place = place
        if place is None:
            del self._lines[key]

    def _sweep(self, priority: int, level: _Level) -> None:
        """Forget finish tags that decide nothing any more: past ones, of keys with nothing waiting at this priority."""
        level.finish = {
            key: finish for key, finish in level.finish.items()
            if finish > level.now or (key in self._lines and priority in self._lines[key].new)
        }  # fmt: skip
        level.until_sweep = max(_MIN_SWEEP, len(level.finish))


def check_priority(priority: int) -> None:
    """Raise a UserError unless `priority` is a whole number."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise UserError(f"priority must be a whole number (smaller goes first), not {priority!r}")


def check_deadline(deadline_s: float | None) -> None:
    """Raise a UserError unless `deadline_s` is None or a finite number."""
    if deadline_s is not None and not _is_finite(deadline_s):
        raise UserError(f"a deadline must be a number of seconds, or None for never, not {deadline_s!r}")


def _require_positive(what: str, value: float) -> None:
    if not _is_finite(value) or value <= 0:
        raise UserError(f"{what} must be a positive number, not {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
