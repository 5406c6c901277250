"""HostTier: which adapters' factors lie in host memory beside the slots, within a limit of bytes."""

from __future__ import annotations

from workbench.adapters.entry import Entry


class HostTier:
    """Adapters on the host, or being read into it; counted from when a read begins until they leave.

    Whoever calls holds the manager's lock.

    Args:
        limit: bytes, or None for any number. One adapter that is on its way to a slot may be there whatever its size.
    """

    def __init__(self, limit: int | None):
        self.limit = limit
        self.num_bytes = 0
        self._entries: set[Entry] = set()

    def add(self, entry: Entry) -> None:
        """Count an adapter's bytes."""
        if entry not in self._entries:
            self._entries.add(entry)
            self.num_bytes += entry.num_bytes

    def discard(self, entry: Entry) -> None:
        """Count an adapter's bytes no longer; no error if they were not counted."""
        if entry in self._entries:
            self._entries.remove(entry)
            self.num_bytes -= entry.num_bytes

    def has_room(self, entry: Entry, later_than: int) -> bool:
        """Whether an adapter may be read, once those that may go for it have gone (see `_drop`)."""
        if self.limit is None:
            return True
        self._drop(self.limit - entry.num_bytes, later_than)
        return self.num_bytes + entry.num_bytes <= self.limit or not self._entries

    def trim(self) -> None:
        """Come back within the limit; what the request that waits longest needs stays, so that it gets to run.

        Only where a read under way leaves no room beside it does that go too, to be read again.
        """
        if self.limit is None or self.num_bytes <= self.limit:
            return
        self._drop(self.limit, min(entry.asked for entry in self._entries))
        if len(self._entries) > 1:
            self._drop(self.limit, -1)

    def _drop(self, limit: int, later_than: int) -> None:
        """Drop factors until `limit` bytes are left or nothing more may go.

        First go those nobody waits for, least recently used first, then those whose first request came after
        `later_than`, the last of them first. What is being read stays.
        """
        if self.num_bytes <= limit:
            return
        held = [entry for entry in self._entries if entry.model is not None]
        idle = sorted((entry for entry in held if not entry.waiting), key=lambda entry: entry.used)
        wanted = [entry for entry in held if entry.waiting and entry.asked > later_than]
        for entry in [*idle, *sorted(wanted, key=lambda entry: -entry.asked)]:
            if self.num_bytes <= limit:
                break
            entry.model = None
            self.discard(entry)
