"""What the queue of waiting requests offers, keeps and forgets: `pytest tests/test_queue.py`."""

from __future__ import annotations

import gc
import math
import random
import sys
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued import KEYS, Item, Naive, drain, push, push_all

from workbench.engine import queue as module
from workbench.engine.queue import FairQueue
from workbench.errors import UserError

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


def play(steps) -> None:
    """Do the same to both queues, and compare them all the way."""
    queue, naive, started = FairQueue(WEIGHTS), Naive(WEIGHTS), []
    for number, (what, *how) in enumerate(steps):
        if what == "push":
            naive.push(push(queue, Item(number, *how)))
        elif what == "step":
            ours, theirs = (one_step(each, *how) for each in (queue, naive))
            assert ours == theirs
            started += [item for item in ours if item not in queue]
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


def one_step(queue, blocked: set, most: int) -> list[Item]:
    """Start at most so many of those not blocked, and return all that were offered."""
    seen, taken = [], 0
    for item in queue.heads(100):
        seen.append(item)
        if item.key not in blocked and taken < most:
            queue.take(item)
            taken += 1
    return seen


@settings(max_examples=100)
@given(operations)
def test_it_does_what_the_naive_queue_does(steps):
    play(steps)


@pytest.mark.parametrize("seed", range(2))
def test_it_does_so_for_long(seed):
    """Long enough for old tags and old deadlines to be thrown away while some keys stay blocked."""
    chance = random.Random(seed)
    keys = [*KEYS, *(f"e{i}" for i in range(20))]

    def step():
        kind = chance.choices(["push", "step", "remove", "preempt", "expired"], [10, 8, 1, 1, 0.1])[0]
        if kind == "push":
            deadline_s = chance.choice([None, chance.randrange(1000)])
            return kind, chance.choice(keys), chance.randint(1, 9), chance.choice([0, 0, 0, 1]), deadline_s
        if kind == "step":
            return kind, set(chance.sample(keys[:5], chance.choice([0, 1, 1, 4]))), chance.randint(0, 2)
        return kind, chance.randrange(100)

    play(step() for _ in range(1200))


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


def look(queue) -> None:
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
    return [work_of(act) for act in (lambda: push(queue, new), lambda: queue.remove(old), lambda: look(queue))]


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
