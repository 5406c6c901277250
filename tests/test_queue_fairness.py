"""Every key gets its share of the queue, and everyone a turn: `pytest tests/test_queue_fairness.py`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import KEYS, Item, drain, push, push_all

from workbench.engine.queue import FairQueue


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


def test_keys_that_come_back_go_in_the_order_in_which_they_come():
    queue = FairQueue()
    push_all(queue, "one", [5])
    push_all(queue, "other", [1])
    push_all(queue, "busy", [1] * 50)
    drain(queue, 20)
    items = [push(queue, Item("first", "one")), push(queue, Item("second", "other"))]
    assert [item for item in drain(queue) if item.key != "busy"] == items


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
