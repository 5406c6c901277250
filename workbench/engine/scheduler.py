"""Which rows run next, and for whom.

Continuous: every step takes what each running request can run now, within a budget of rows. Short wishes (decoding)
go first, so a long prompt never holds up tokens that are nearly there; prompts share what is left, oldest first. When
the KV pool is full, the youngest request gives its blocks back and is recomputed later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from workbench.engine.batch import SCALING, SpanPlan, StepBatch, build_batch
from workbench.engine.choosing import Answer
from workbench.engine.memory import Memory
from workbench.engine.planning import plans_of
from workbench.engine.queue import FairQueue
from workbench.engine.request import Request
from workbench.errors import UserError

_DECODE_ROWS = 2  # one adapted row and one scaling row
_PATIENCE = 64  # steps a request is passed over for want of a slot, before those behind it wait too
_LOOK_AHEAD = 8  # how many requests a step looks at that cannot run yet, in times `max_requests`
_MAX_ISOLATIONS = 3  # a request that runs alone but never beside others fails in the end


def reason_of(error: BaseException) -> str:
    """Return an error as a request reports it: a sentence of ours as it is, any other with its kind."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


class Scheduler:
    """Holds the waiting and running requests of one engine.

    Args:
        memory: the KV pool.
        max_rows: most rows in one forward (padding comes on top).
        max_requests: most requests running at once.
        row_padding, reference_attention: passed to every batch.
        admit: called with a waiting request; False when it cannot run yet, a UserError when it never can. It counts in
            `times_passed` the steps the request waited for a slot.
        vacate: called with a request that loses its place: its leases end.
        edit: called with each plan that is about to run.
        weights: shares of adapters while requests queue.
    """

    def __init__(
        self, memory: Memory, max_rows: int, max_requests: int, row_padding: int = 0, reference_attention: bool = False,
        admit: Callable[[Request], bool] = lambda request: True,
        vacate: Callable[[Request], None] = lambda request: None,
        weights: Mapping[str, float] | None = None,
        edit: Callable[[SpanPlan], None] = lambda plan: None,
    ):
        self._admit, self._vacate, self._edit, self.memory = admit, vacate, edit, memory
        self.max_rows, self.max_requests = max_rows, max_requests
        self.row_padding, self.reference_attention = row_padding, reference_attention
        self.waiting = FairQueue(weights)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._inbox: list[Request] = []
        self._compiling: dict[Request, None] = {}
        self._inbox_lock = threading.RLock()
        self._suspects: list[Request] = []
        self._failed_together: tuple[Request, ...] = ()
        self._num_unfinished = 0
        self._ended: list[Request] = []

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, all before the next step; from any thread. Those whose grammar is made come when it is."""
        with self._inbox_lock:
            for request in requests:
                self._num_unfinished += 1
                if request.grammar is None or request.grammar.done():
                    self._inbox.append(request)
                else:
                    self._compiling[request] = None
                    # runs at once, on this thread, if it is done by now: the lock is re-entrant
                    request.grammar.add_done_callback(lambda _, request=request: self._compiled(request))

    def has_work(self) -> bool:
        """Whether any request is unfinished; from any thread."""
        return self._num_unfinished > 0

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a place in the batch."""
        return len(self.waiting) + len(self._inbox) + len(self._compiling)

    def requests(self) -> Iterator[Request]:
        """Unfinished requests, running first; between steps."""
        with self._inbox_lock:
            arrived = [*self._inbox, *self._compiling]
        yield from [*self.running, *self.waiting, *arrived]

    def next_batch(self) -> StepBatch:
        """Admit what fits and build the next forward's batch."""
        self._take_in()
        self._expire(time.perf_counter())
        self._admit_waiting()
        plans = self._plan_alone() if self._suspects else self._plan()
        edited = [plan for mine in plans.values() if self._edited(mine) for plan in mine]
        # an edit may have ended any request, its own too: what ended has no blocks any more
        placed = [plan for plan in edited if plan.request.finish_reason is None]
        return build_batch(placed, self.memory.pool, self.row_padding, self.reference_attention)

    def commit(
        self,
        batch: StepBatch,
        answers: Mapping[tuple[Request, str], Sequence[Answer]],
        scalings: Mapping[Request, Tensor],
    ) -> list[Request]:
        """Write a step's results into its requests and return those that finished.

        Args:
            batch: the step's.
            answers: (request, stream kind) -> what each row with logits says, for spans that have any.
            scalings: request -> float32 `[row, site, n]` of its scaling span.
        """
        for span in sorted(batch.spans, key=lambda each: each.plan.kind != SCALING):
            try:
                self._commit_span(span.plan, answers.get((span.plan.request, span.plan.kind), ()), scalings)
            except Exception as error:  # one request's failure is its own
                span.plan.request.finish("error", reason_of(error))
        self._suspects = [r for r in self._suspects if r.finish_reason is None and r not in batch.requests]
        if len(batch.requests) > 1:
            for request in batch.requests:  # runs beside others: what failed before was not its fault
                request.num_isolations = 0
        return self.sweep()

    def _commit_span(self, plan: SpanPlan, said: Sequence[Answer], scalings: Mapping[Request, Tensor]) -> None:
        request = plan.request
        if request.finish_reason is not None or not request.streams:
            return  # failed or was cancelled while its rows ran
        if plan.kind == SCALING:
            draft = said[0].choice if said else None
            request.commit_scaling(plan, scalings[request], draft and draft.token)
        else:
            request.commit_adapted(plan, said)
        # both streams: a draft that is taken completes the scaling stream's block
        for kind in request.streams:
            self.memory.committed(request, kind)

    def failed(self, batch: StepBatch, reason: str) -> list[Request]:
        """Take a step that raised: whose fault it was shows when each of its requests runs alone."""
        requests = batch.requests
        if len(requests) == 1:
            requests[0].finish("error", reason)
            # the culprit is found: the others were in bad company, no more
            for request in self._failed_together:
                request.num_isolations = 0
            return self.sweep()
        for request in requests:
            request.num_isolations += 1
            if request.num_isolations > _MAX_ISOLATIONS:
                request.finish("error", reason)
        self._failed_together = requests
        self._suspects = [r for r in dict.fromkeys((*self._suspects, *requests)) if r.finish_reason is None]
        return self.sweep()

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request that runs or waits, at once; no error if it has ended."""
        self._take_in()
        request.finish(reason, error)
        request.free()
        with self._inbox_lock:
            compiled = self._compiling.pop(request, self) is None
        if compiled or self.waiting.remove(request):
            self._ended.append(request)

    def sweep(self) -> list[Request]:
        """Drop finished requests and return them."""
        finished, self._ended = self._ended, []
        with self._inbox_lock:
            self._num_unfinished -= len(finished) + sum(r.finish_reason is not None for r in self.running)
        finished += [request for request in self.running if request.finish_reason is not None]
        self.running = [request for request in self.running if request.finish_reason is None]
        for request in finished:
            request.free()
        return finished

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and place; it waits before all others of its priority."""
        self.running.remove(request)
        request.preempt()
        self._vacate(request)
        self.num_preemptions += 1
        self.waiting.push_front(request)

    def _compiled(self, request: Request) -> None:
        with self._inbox_lock:
            if self._compiling.pop(request, self) is None:
                self._inbox.append(request)

    def _take_in(self) -> None:
        with self._inbox_lock:
            arrived, self._inbox = self._inbox, []
        for request in arrived:
            cost = request.max_length
            self.waiting.push(request, request.key, cost, request.priority, request.deadline_s)

    def _expire(self, now_s: float) -> None:
        for request in self.waiting.expired(now_s):
            request.finish("deadline")
            self._ended.append(request)
        for request in [*self.running, *self._compiling]:
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self.end(request, "deadline")

    def _admit_waiting(self) -> None:
        """Start waiting requests in the queue's order; one that cannot run yet is passed over, but not for ever."""
        starved = False
        # a bound, so that a step's work does not grow with the queue
        for request in self.waiting.heads(_LOOK_AHEAD * self.max_requests):
            if len(self.running) >= self.max_requests:
                break
            try:
                if not self.memory.admits(request, len(self.running)):
                    break
                if request.names and starved:
                    continue
                admitted = self._admit(request)
                if admitted:
                    self.memory.attach(request)
            except Exception as error:  # one request's failure is its own
                self.end(request, "error", reason_of(error))
                continue
            if not admitted:
                starved = request.times_passed > _PATIENCE
                continue
            self.waiting.take(request)
            self.running.append(request)

    def _plan_alone(self) -> dict[Request, list[SpanPlan]]:
        """Plan for one of the requests of a step that failed, and for nobody else."""
        for request in [r for r in self._suspects if r in self.running]:
            plans: dict[Request, list[SpanPlan]] = {}
            self._take(request, self.max_rows, plans)
            if plans:
                return plans
        self._suspects = []
        return self._plan()

    def _plan(self) -> dict[Request, list[SpanPlan]]:
        budget, plans = self.max_rows, {}
        order = [r for r in self.running if self._decodes(r) and r.finish_reason is None]
        for request in order:
            if budget > 0 and request in self.running:
                budget -= self._take(request, min(budget, _DECODE_ROWS), plans)
        for request in [r for r in self.running if not self._decodes(r)]:
            if budget <= 0:
                break
            if request in self.running:
                budget -= self._take(request, budget, plans)
        # whoever decoded last waits first next time, when the budget does not reach everyone
        if budget <= 0 and self.running:
            self.running.append(self.running.pop(0))
        return plans

    def _decodes(self, request: Request) -> bool:
        """Whether a request is decoding; one of which its reuse policy cannot say has ended."""
        try:
            return request.is_decoding
        except Exception as error:  # one request's failure is its own
            request.finish("error", reason_of(error))
            return False

    def _edited(self, plans: list[SpanPlan]) -> bool:
        """Apply the open edits to a request's plans; False when one cannot be, which ends the request."""
        try:
            for plan in plans:
                self._edit(plan)
        except Exception as error:  # the user's own function: its failure is this request's alone
            plans[0].request.finish("error", reason_of(error))
            return False
        return True

    def _take(self, request: Request, budget: int, plans: dict[Request, list[SpanPlan]]) -> int:
        mine = []
        try:
            wanted = plans_of(request, budget)
        except Exception as error:  # one request's failure is its own
            request.finish("error", reason_of(error))
            return 0
        for plan in wanted:
            if not self.memory.reserve(plan) and (plan.drafted or not self._make_room(plan, plans)):
                break
            mine.append(plan)
        if mine:
            plans[request] = mine
        return sum(len(plan.token_ids) for plan in mine)

    def _make_room(self, plan: SpanPlan, plans: dict[Request, list[SpanPlan]]) -> bool:
        """Preempt requests that are younger, or of less priority, until a plan has its blocks."""
        mine = (plan.request.priority, plan.request.number)
        while not self.memory.reserve(plan):
            later = [r for r in self.running if (r.priority, r.number) > mine and r.finish_reason is None and r.streams]
            if not later:
                return False
            victim = max(later, key=lambda r: (r.priority, r.number))
            plans.pop(victim, None)
            self.preempt(victim)
        return True
