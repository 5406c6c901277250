"""Who starts next: fair between keys, first come first served within one: `pytest tests/test_queue.py`."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.engine import queue as module
from workbench.engine.queue import FairQueue
from workbench.errors import UserError


@dataclass(eq=False)
class Item:
    """What waits in these tests."""

    name: object
    key: str | None = None
    cost: float = 1.0
    priority: int = 0
    deadline_s: float | None = None

    def __repr__(self) -> str:
        return str(self.name)


def push(queue, item: Item) -> Item:
    queue.push(item, item.key, item.cost, item.priority, item.deadline_s)
    return item


def push_all(queue, key: str | None, costs, priority: int = 0) -> list[Item]:
    return [push(queue, Item(f"{key}{i}", key, cost, priority)) for i, cost in enumerate(costs)]


def drain(queue, count: int | None = None, blocked=()) -> list[Item]:
    """Start one item a step, as many as there are or `count`."""
    started = []
    while len(queue) and (count is None or len(started) < count):
        before = len(started)
        for item in queue.heads(100):
            if item.key not in blocked:
                queue.take(item)
                started.append(item)
                break
        if len(started) == before:
            break
    return started


class Naive:
    """The same rules, written down without any thought of speed."""

    def __init__(self, weights):
        self.weights, self.waiting, self.arrivals = weights, [], 0
        self.now, self.finish, self.facts = {}, {}, {}

    def push(self, item):
        self.arrivals += 1
        self.facts[item] = (self.arrivals, self.now.get(item.priority, 0.0), True)
        self.waiting.append(item)

    def push_front(self, item):
        self.facts[item] = (self.facts[item][0], 0.0, False)
        self.waiting.append(item)

    def place(self, item):
        arrival, arrived, is_new = self.facts[item]
        start = max(arrived, self.finish.get((item.priority, item.key), 0.0)) if is_new else 0.0
        return item.priority, is_new, start, arrival

    def head(self, key):
        def rank(item):
            arrival, _, is_new = self.facts[item]
            return item.priority, is_new, arrival

        return min((item for item in self.waiting if item.key == key), key=rank)

    def heads(self, limit):
        blocked = set()
        for _ in range(limit):
            keys = {item.key for item in self.waiting} - blocked
            if not keys:
                return
            item = min(map(self.head, keys), key=self.place)
            yield item
            if item in self.waiting:
                blocked.add(item.key)

    def take(self, item):
        priority, is_new, start, _ = self.place(item)
        if is_new:
            self.now[priority] = max(self.now.get(priority, 0.0), start)
            share = item.cost / self.weights.get(item.key, 1.0)
            self.finish[priority, item.key] = self.now[priority] + share
        self.remove(item)

    def remove(self, item):
        self.waiting.remove(item)
        if all(other.priority != item.priority for other in self.waiting):
            self.now.pop(item.priority, None)
            self.finish = {pair: tag for pair, tag in self.finish.items() if pair[0] != item.priority}

    def expired(self, now_s):
        late = [i for i in self.waiting if i.deadline_s is not None and i.deadline_s <= now_s]
        late.sort(key=lambda item: (item.deadline_s, self.facts[item][0]))
        for item in late:
            self.remove(item)
        return late


KEYS = [None, "a", "b", "c", "d"]
WEIGHTS = {"a": 2.0, "b": 0.5, None: 3.0}
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(KEYS), st.integers(1, 9), st.sampled_from([0, 0, 0, 1, -1]),
                  st.none() | st.integers(0, 20)),
        st.tuples(st.just("step"), st.sets(st.sampled_from(KEYS)), st.integers(0, 4)),
        st.tuples(st.just("remove"), st.integers(0, 99)),
        st.tuples(st.just("preempt"), st.integers(0, 99)),
        st.tuples(st.just("expired"), st.integers(0, 20)),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=150)
@given(operations)
def test_it_does_what_the_naive_queue_does(steps):
    queue, naive, started = FairQueue(WEIGHTS), Naive(WEIGHTS), []
    for number, (what, *how) in enumerate(steps):
        if what == "push":
            key, cost, priority, deadline_s = how
            item = Item(number, key, cost, priority, deadline_s)
            push(queue, item)
            naive.push(item)
        elif what == "step":
            blocked, most = how
            looks = []
            for each in (queue, naive):
                seen, taken = [], 0
                for item in each.heads(100):
                    seen.append(item)
                    if item.key not in blocked and taken < most:
                        each.take(item)
                        taken += 1
                looks.append(seen)
                started += [item for item in seen if each is queue and item not in queue]
            assert looks[0] == looks[1]
        elif what == "remove" and len(queue):
            item = naive.waiting[how[0] % len(naive.waiting)]
            naive.remove(item)
            assert queue.remove(item) and not queue.remove(item)
        elif what == "preempt" and started:
            item = started.pop(how[0] % len(started))
            queue.push_front(item)
            naive.push_front(item)
        elif what == "expired":
            assert queue.expired(how[0]) == naive.expired(how[0])
        assert len(queue) == len(naive.waiting) and set(queue) == set(naive.waiting)
        assert all(item in queue for item in naive.waiting) and not any(item in queue for item in started)


# fairness


def test_one_key_is_first_come_first_served():
    queue = FairQueue()
    items = push_all(queue, "a", [5, 1, 9, 2, 2])
    assert drain(queue) == items


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.integers(0, 39), st.integers(1, 50))
def test_a_flood_delays_another_keys_first_request_by_one_request_at_most(costs, served, cost):
    queue = FairQueue()
    push_all(queue, "flood", costs)
    drain(queue, min(served, len(costs) - 1))
    late = push(queue, Item("late", "other", cost))
    assert drain(queue).index(late) <= 1


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 20), min_size=1, max_size=30), min_size=2),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.25, 4)), st.randoms(use_true_random=False),
)  # fmt: skip
def test_backlogged_keys_get_their_shares_of_any_stretch(costs, weights, order):
    """Goyal's bound: service per weight of two keys, while both wait, differs by one request of each at most."""
    queue = FairQueue(weights)
    items = [(key, cost) for key, each in costs.items() for cost in each]
    order.shuffle(items)
    for number, (key, cost) in enumerate(items):
        push(queue, Item(number, key, cost))
    started = drain(queue)
    for one, other in [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]:
        if one not in costs or other not in costs:
            continue
        share = {key: weights.get(key, 1.0) for key in (one, other)}
        bound = max(costs[one]) / share[one] + max(costs[other]) / share[other] + 1e-9
        left = {key: len(costs[key]) for key in (one, other)}
        ahead = [0.0]
        for item in started:
            if item.key in left:
                sign = 1 if item.key == one else -1
                ahead.append(ahead[-1] + sign * item.cost / share[item.key])
                left[item.key] -= 1
                if not all(left.values()):
                    break
        assert max(ahead) - min(ahead) <= bound


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_weights_divide_the_service_while_both_wait(ratio):
    queue = FairQueue({"a": ratio})
    push_all(queue, "a", [3] * 300)
    push_all(queue, "b", [3] * 300)
    count = Counter(item.key for item in drain(queue, 60 * (ratio + 1) // 2))
    assert abs(count["a"] - ratio * count["b"]) <= ratio


def test_cost_counts_not_the_number_of_requests():
    queue = FairQueue()
    push_all(queue, "long", [30] * 100)
    push_all(queue, "short", [1] * 300)
    count = Counter(item.key for item in drain(queue, 62))
    assert count == {"long": 2, "short": 60}


def test_a_key_that_was_idle_gets_no_credit_for_the_past():
    queue = FairQueue()
    push(queue, Item("first", "idle"))
    push_all(queue, "busy", [1] * 100)
    drain(queue, 61)
    push_all(queue, "idle", [1] * 30)
    assert Counter(item.key for item in drain(queue, 20)) == {"idle": 10, "busy": 10}


def test_a_key_that_was_blocked_gets_no_credit_for_the_past():
    queue = FairQueue()
    push_all(queue, "blocked", [1] * 50)
    push_all(queue, "busy", [1] * 100)
    drain(queue, 60, blocked={"blocked"})
    late = push(queue, Item("late", "late"))
    started = drain(queue, 20)
    assert started[0].name == "blocked0" and late in started[:3]
    count = Counter(item.key for item in started)
    assert abs(count["blocked"] - count["busy"]) <= 1


def test_a_cancelled_request_costs_its_key_nothing():
    queue = FairQueue()
    dear = push_all(queue, "a", [1000] * 3)
    mine = push(queue, Item("mine", "a"))
    push_all(queue, "b", [1] * 5)
    for item in dear:
        queue.remove(item)
    assert mine in drain(queue, 2)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 9)), max_size=40), st.sampled_from(KEYS))
def test_nobody_starves_within_a_priority(pushes, mine):
    """However many new requests of other keys come with every step, a request starts within a known number of them."""
    queue = FairQueue()
    for number, (key, cost) in enumerate(pushes):
        push(queue, Item(number, key, cost))
    item = push(queue, Item("mine", mine, 9))
    # per key: at most what catches up with this key's own backlog, and one more request
    bound = sum(cost for key, cost in pushes if key == mine) * len(KEYS) + 10 * len(KEYS)
    for step in range(bound):
        if drain(queue, 1) == [item]:
            return
        for key in KEYS:
            if key != mine:
                push(queue, Item((step, key), key))
    raise AssertionError("it never started")


# priorities


def test_smaller_numbers_go_first_and_keys_share_within_each():
    queue = FairQueue()
    late = push_all(queue, "a", [1] * 4, priority=1)
    soon = push_all(queue, "a", [1] * 4) + push_all(queue, "b", [1] * 4)
    first = push_all(queue, "b", [1], priority=-3)
    started = drain(queue)
    assert started[:1] == first and set(started[1:9]) == set(soon) and started[9:] == late
    assert [item.key for item in started[1:9]] == ["a", "b"] * 4


def test_service_at_one_priority_is_no_debt_at_another():
    queue = FairQueue()
    push_all(queue, "a", [1000], priority=-1)
    push(queue, Item("rest", "c", priority=-1))
    drain(queue, 1)
    items = [push(queue, Item("a", "a")), push(queue, Item("b", "b"))]
    assert drain(queue)[1:] == items


# a step's looks


def test_nothing_behind_a_blocked_head_of_its_key_is_offered_in_a_step():
    queue = FairQueue()
    push_all(queue, "a", [1] * 3)
    push_all(queue, "a", [1] * 3, priority=2)
    push_all(queue, "b", [1] * 2, priority=1)
    seen = []
    for item in queue.heads(100):
        seen.append(item.name)
        if item.key == "b":
            queue.take(item)
    assert seen == ["a0", "b0", "b1"]
    assert [item.name for item in queue.heads(100)] == ["a0"]


def test_an_item_removed_while_it_is_offered_does_not_block_its_key():
    queue = FairQueue()
    items = push_all(queue, "a", [1] * 3)
    seen = []
    for item in queue.heads(100):
        seen.append(item)
        if item is items[0]:
            queue.remove(item)
    assert seen == items[:2]


def test_a_step_offers_at_most_its_limit():
    queue = FairQueue()
    push_all(queue, "a", [1] * 10)
    seen = []
    for item in queue.heads(4):
        queue.take(item)
        seen.append(item.name)
    assert seen == ["a0", "a1", "a2", "a3"] and len(queue) == 6
    assert list(queue.heads(0)) == []


@given(st.integers(2, 9), st.integers(1, 40), st.booleans())
def test_a_key_behind_many_blocked_ones_is_not_overlooked_for_ever(limit, num_blocked, more_arrive):
    queue = FairQueue()
    for key in range(num_blocked):
        push(queue, Item(key, f"blocked{key}"))
    mine = push(queue, Item("mine", "free"))
    for step in range(2 * num_blocked + 4):
        for item in queue.heads(limit):
            if item is mine:
                return
        if more_arrive:
            push(queue, Item(step, f"later{step}"))
    raise AssertionError("it was never looked at")


def test_a_step_given_up_early_changes_nothing():
    queue = FairQueue()
    push_all(queue, "a", [1] * 2)
    push_all(queue, "b", [1] * 2)
    for item in queue.heads(100):
        assert item.name == "a0"
        break
    assert [item.name for item in drain(queue)] == ["a0", "b0", "a1", "b1"]


# preempted ones


def test_a_preempted_item_goes_before_all_of_its_priority_and_is_not_charged_again():
    queue = FairQueue()
    a, b = push_all(queue, "a", [5] * 3), push_all(queue, "b", [5] * 3)
    urgent = push(queue, Item("urgent", "c", priority=-1))
    assert drain(queue, 3) == [urgent, a[0], b[0]]
    queue.push_front(b[0])
    queue.push_front(a[0])
    assert a[0] in queue and len(queue) == 6
    another = push(queue, Item("another", "c", priority=-1))
    assert drain(queue) == [another, a[0], b[0], a[1], b[1], a[2], b[2]]


def test_preempted_items_keep_their_order_whoever_comes_back_first():
    queue = FairQueue()
    items = [push(queue, Item(i, key)) for i, key in enumerate("abab")]
    drain(queue)
    for index in (2, 0, 3, 1):
        queue.push_front(items[index])
    assert drain(queue) == items


# deadlines


def test_expired_items_leave_and_others_stay():
    queue = FairQueue()
    soon, later, never = (push(queue, Item(str(at), "a", deadline_s=at)) for at in (5.0, 9.0, None))
    assert queue.expired(4.9) == [] and queue.expired(5.0) == [soon] and soon not in queue
    assert drain(queue, 1) == [later] and queue.expired(100.0) == []
    queue.push_front(later)
    assert queue.expired(100.0) == [later] and list(queue) == [never]


# work and memory


class Counted(int):
    """A priority that counts how often it is compared: every search among places begins with it."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def work_of(act) -> tuple[int, int]:
    """Return (comparisons, lines of the module executed) of a call."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != module.__file__:
            return None
        lines += event == "line"
        return trace

    before, tracer = Counted.compared, sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(tracer)
    return Counted.compared - before, lines


LOOKS = 6


def one_step(queue) -> None:
    for number, item in enumerate(queue.heads(LOOKS)):
        if number % 2 == 0:
            queue.take(item)


def work_at(count: int, num_keys: int) -> list[tuple[int, int]]:
    """Return the work of a step, of an arrival and of a cancellation with `count` items queued."""
    queue = FairQueue()
    for number in range(count):
        # a number of its own each: Python takes a thing to equal itself without asking
        push(queue, Item(number, f"k{number % num_keys}", 1.0, Counted(0), float(number) if number % 2 else None))
    new, old = Item("new", "k0", 1.0, Counted(0), 5e5), next(iter(queue))
    return [work_of(act) for act in (lambda: push(queue, new), lambda: queue.remove(old), lambda: one_step(queue))]


@pytest.mark.parametrize("spread", ["one key", "four keys", "a key each"])
def test_the_work_of_a_step_does_not_grow_with_the_queue(spread):
    num_keys = {"one key": (1, 1), "four keys": (4, 4), "a key each": (10, 10_000)}[spread]
    few, many = work_at(10, num_keys[0]), work_at(10_000, num_keys[1])
    # each look and each change of place is a search or two; comparing two places may compare their priorities twice
    more = 2 * 2 * (math.ceil(math.log2(num_keys[1] + 1)) - math.floor(math.log2(num_keys[0])))
    for (few_compared, few_lines), (compared, lines) in zip(few, many, strict=True):
        assert lines <= few_lines + 4
        assert 0 < compared <= few_compared + more * LOOKS * 2


def test_who_left_is_forgotten():
    queue = FairQueue()
    gone = []
    for number in range(3000):
        item = push(queue, Item(number, f"k{number % 700}", 1.0, number % 3, 1e9))
        gone.append(weakref.ref(item))
        (queue.remove if number % 2 else queue.take)(item)
    stays = push(queue, Item("stays", "k1"))
    for number in range(3000):
        item = push(queue, Item(number, f"k{number % 700}", 1.0, 0, 1e9))
        gone.append(weakref.ref(item))
        drain(queue, 1, blocked={"k1"}) if number % 2 else queue.remove(item)
    for item in [item for item in queue if item is not stays]:
        queue.remove(item)
    del item
    gc.collect()
    assert not any(ref() for ref in gone)
    assert len(queue._deadlines) <= 32 and len(queue._order) == len(queue._lines) == len(queue._levels) == 1
    assert len(queue._by_arrival) == len(queue._entries) == 1 and not queue._started
    push_all(queue, "k2", [10.0] * 500)
    drain(queue, 400, blocked={"k1"})
    assert len(queue._levels[0].finish) <= 40


# what cannot be meant


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "2", True, None])
def test_a_weight_that_is_no_positive_number_is_named(weight):
    with pytest.raises(UserError, match="the weight of 'law' must be a positive number, not "):
        FairQueue({"law": weight})


@pytest.mark.parametrize(
    "how, said",
    [
        ({"cost": 0}, "the cost of a request must be a positive number, not 0"),
        ({"cost": float("nan")}, "cost of a request must be a positive number, not nan"),
        ({"priority": 1.5}, "priority must be a whole number .smaller goes first., not 1.5"),
        ({"priority": True}, "priority must be a whole number"),
        ({"deadline_s": "soon"}, "a deadline must be a number of seconds, or None for never, not 'soon'"),
        ({"deadline_s": float("nan")}, "a deadline must be a number of seconds"),
    ],
    ids=str,
)
def test_a_push_that_makes_no_sense_is_refused_and_leaves_nothing(how, said):
    queue = FairQueue()
    with pytest.raises(UserError, match=said):
        push(queue, Item("x", "a", **how))
    assert len(queue) == 0 and list(queue.heads(10)) == [] and not queue._lines
