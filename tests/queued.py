"""Items to queue, and a queue by the same rules written down without any thought of speed."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = [None, "a", "b", "c", "d"]


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
