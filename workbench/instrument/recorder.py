"""Recorder: what was recorded of the requests and steps of an engine while it was open.

Contract: observing changes nothing; logits and tokens are bitwise those of an engine that nobody records. A recorder
that cannot go on (a full disk) stops, keeps what it has, and says so when it is closed; the engine does not notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest
from workbench.instrument.run_columns import REQUESTS, STEPS
from workbench.instrument.store import Lines, Store, Table
from workbench.instrument.trace import Trace
from workbench.instrument.wanted import Wanted, near_ids

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS, REQUEST_COLUMNS = tuple(STEPS), tuple(REQUESTS)
_MOST_PASSED = 1024  # ids of requests that are not recorded, for an error to name the nearest


class Recorder:
    """Traces by request id, and tables of steps and requests; a context manager, closed on exit.

    Args:
        wanted: what to record.
        memory_bytes: beyond it, buffers and finished traces go to a temporary folder.
        on_close: called with the recorder when it closes.
        size_of: mixture and adapter, of which at most one is named -> (sites, adapters, layers) of a request's values.
        writer: a run that gets everything too.
    """

    def __init__(
        self, wanted: Wanted, memory_bytes: int = 1 << 28,
        on_close: Callable[[Recorder], None] = lambda recorder: None,
        size_of: Callable[[str | None, str | None], tuple[int, int, int]] = lambda mixture, adapter: (0, 0, 0),
        writer: Any = None,
    ):
        self.wanted, self.writer = wanted, writer
        self.store = Store(memory_bytes)
        self.began_s = time.perf_counter()
        self.error: str | None = None
        self._on_close, self._size_of = on_close, size_of
        self._is_open, self._has_ended = True, False
        self._lock, self._ending = threading.RLock(), threading.RLock()
        self._untraced: dict[str, str] = {}
        self._seen: dict[str, None] = {}
        self._passed: dict[str, None] = {}
        self._steps, self._requests = Table(self.store, STEP_COLUMNS), Lines(self.store)

    def __repr__(self) -> str:
        state = "stopped" if self.error else "open" if self._is_open else "closed"
        return f"Recorder({', '.join(self.wanted.kinds)}; {len(self.traces)} traces, {state})"

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type | None = None, error: BaseException | None = None, trace: Any = None) -> None:
        self._end(kind, error, trace)
        if error is None:
            self._complain()

    def close(self) -> None:
        """Stop recording; what was recorded stays. No error if it is closed.

        Raises:
            UserError: recording had stopped on its own, or a request it was to record never ran.
        """
        if self._end(None, None, None):
            self._complain()

    @property
    def is_recording(self) -> bool:
        """Whether it is open and nothing has stopped it."""
        return self._is_open and self.error is None

    @property
    def has_steps(self) -> bool:
        """Whether steps are recorded: they were asked for, or go to a run."""
        return self.wanted.has_steps or self.writer is not None

    @property
    def traces(self) -> Mapping[str, Trace]:
        """The finished requests' traces by id; those in files are read when they are used."""
        return _Traces(self.store, self._lock)

    def trace(self, request_id: str | None = None) -> Trace:
        """Return one request's trace; without an id, the only one.

        Raises:
            UserError: no such trace, or no id where there are several.
        """
        traces = self.traces
        if request_id is None:
            if len(traces) != 1:
                reasons = "" if traces or len(self._untraced) != 1 else f": {next(iter(self._untraced.values()))}"
                name_one = "; name one" if traces else reasons
                raise UserError(f"{len(traces)} traces were recorded ({names(list(traces))}){name_one}")
            request_id = next(iter(traces))
        if request_id in traces:
            return traces[request_id]
        if request_id in self._untraced:
            raise UserError(self._untraced[request_id])
        if request_id in self._seen:
            raise UserError(f"request {request_id!r} has not ended while it was recorded: its trace is made at its end")
        if isinstance(request_id, str) and not self.wanted.includes(request_id):
            raise UserError(f"request {request_id!r} was not to be recorded, only {names(self.wanted.requests)}")
        stopped = f"; {self.error}" if self.error else ""
        raise UserError(
            f"no trace of request {request_id!r}{nearest(request_id, traces)}; recorded: {names(list(traces))}{stopped}"
        )

    def steps(self) -> pd.DataFrame:
        """Return one line per forward of the engine, whoever's rows it had.

        Columns: `STEP_COLUMNS`, each of this step alone; running, waiting, kv_bytes and kv_cached_bytes are as they
        were at its end, time_s is when it ended, in seconds since the recording began.

        Raises:
            UserError: steps were not recorded.
        """
        import pandas as pd

        if not self.has_steps:
            kinds = ", ".join(map(repr, self.wanted.kinds))
            raise UserError(f"steps were not recorded, only {kinds}; add 'throughput' or 'cache'")
        with self._lock:
            frame = pd.DataFrame(self._steps.values(), columns=list(STEP_COLUMNS))
        return frame.astype({name: "int64" for name in STEP_COLUMNS if not name.endswith(("_s", "_ms"))})

    def requests(self) -> pd.DataFrame:
        """Return one line per recorded request that has ended.

        Columns: `REQUEST_COLUMNS`; submitted_s counts from the beginning of the recording, ttft_s and total_s from
        submission, tok_s is tokens after the first per second between the first and the last.
        """
        import pandas as pd

        with self._lock:
            rows = [{**row, "edits": tuple(row["edits"])} for row in self._requests]
        return pd.DataFrame(rows, columns=list(REQUEST_COLUMNS))

    def declared_bytes(
        self, num_tokens: int, *, mixture: str | None = None, adapter: str | None = None, num_requests: int = 1
    ) -> int:
        """Return what recording requests takes, known before they run.

        Args:
            num_tokens: prompt and `max_tokens` of each.
            mixture: what they run with.
            adapter: what they run with; neither is the base model.
            num_requests: how many run at once, or are kept.
        """
        wanted = self.wanted
        sites, adapters, layers = self._size_of(mixture, adapter)
        measured = -(-num_tokens // wanted.every)
        of_each = {
            "scalings": num_tokens * sites * adapters * 4,
            "logits:top": measured * wanted.top * (4 + 8),
            "delta_norm": measured * sites * adapters * 4,
            "hidden_norm": measured * (layers + 1) * 4,
            "entropy": measured * 4,
        }
        return num_requests * sum(of_each.get(kind, 0) for kind in wanted.kinds)

    # what the engine tells it

    def saw(self, request_id: str) -> None:
        """A request that is to be recorded has rows in a step."""
        self._seen[request_id] = None

    def passed(self, request_id: str) -> None:
        """A request that is not to be recorded has rows in a step."""
        if len(self._passed) < _MOST_PASSED:
            self._passed[request_id] = None

    def add_step(self, row: dict[str, float]) -> None:
        """Take a step's numbers: every one of `STEP_COLUMNS` but step and time_s."""
        with self._lock, self._stopping("keep a step"):
            row = {"step": len(self._steps), "time_s": time.perf_counter() - self.began_s, **row}
            self._steps.add(row)
            if self.writer is not None:
                self.writer.step(row)

    def add_request(self, row: dict[str, Any]) -> None:
        """Take a request that has ended: `REQUEST_COLUMNS`."""
        with self._lock, self._stopping(f"keep request {row['request_id']!r}"):
            self._requests.add(row)
            if self.writer is not None:
                self.writer.request(row)

    def add_trace(self, request_id: str, num_bytes: int, make: Callable[[], Trace], is_lazy: bool = True) -> None:
        """Keep the trace that `make` makes, of about `num_bytes`; unless `is_lazy`, now."""
        with self._lock, self._stopping(f"keep the trace of {request_id!r}"):
            self._untraced.pop(request_id, None)
            if self.writer is None and is_lazy:
                self.store.keep(request_id, num_bytes, make)
                return
            trace = make()
            self.store.keep(request_id, num_bytes, lambda: trace)
            if self.writer is not None:
                self.writer.trace(trace)

    def add_untraced(self, request_id: str, why: str) -> None:
        """Remember why a request has no trace."""
        with self._lock:
            self.store.drop(request_id)
            self._untraced[request_id] = why

    def stop(self, what: str, error: BaseException) -> None:
        """Stop recording because of an error, which closing will tell."""
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.error = self.error or f"recording stopped, as it could not {what}: {reason}"

    @contextlib.contextmanager
    def _stopping(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever is wrong with a recording, the engine goes on
            self.stop(what, error)

    def _end(self, *raised: Any) -> bool:
        """Close once; whether this call did. Interrupted, it has not, and may be called again."""
        if self._has_ended:
            return False
        # waits for the step in progress, which is still recorded; outside the lock, as that step may close too
        self._on_close(self)
        with self._ending:
            if self._has_ended:
                return False
            self._is_open = False
            with self._lock:
                self._untraced |= self.store.settle()
            if self.writer is not None:
                if raised[0] is None and self.error:
                    raised = (UserError, UserError(self.error), None)
                with self._stopping("close the run"):
                    self.writer.__exit__(*raised)
            # what was recorded may outlive the engine, and does not keep it
            self._on_close = lambda recorder: None
            self._has_ended = True
        return True

    def _complain(self) -> None:
        """Raise what went wrong while it was open."""
        if self.error:
            raise UserError(f"{self.error}; what was recorded before is kept")
        ran = list(dict.fromkeys([*self._seen, *self.traces, *self._untraced]))
        missing = [wanted for wanted in self.wanted.requests or () if wanted not in ran]
        if missing:
            others = list(self._passed)
            rest = f"; recorded: {names(ran)}" if ran else f"; there ran: {names(others)}" if others else "; none ran"
            near = near_ids(missing[0], others)
            raise UserError(f"request {missing[0]!r} was to be recorded, but never ran{near}{rest}")


class _Traces(Mapping[str, Trace]):
    """The traces of a store by request id."""

    def __init__(self, store: Store, lock: threading.RLock):
        self._store, self._lock = store, lock

    def __getitem__(self, request_id: str) -> Trace:
        with self._lock:
            return self._store.trace(request_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._store

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys())

    def __len__(self) -> int:
        return len(self._store.keys())

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}}"
