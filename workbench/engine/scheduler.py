"""Which rows run next, and for whom.

Continuous: every step takes what each running request can run now, within a budget of rows. Short wishes (decoding)
go first, so a long prompt never holds up tokens that are nearly there; prompts share what is left, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from workbench.engine.batch import SCALING, SpanPlan, StepBatch, build_batch
from workbench.engine.request import Request
from workbench.errors import UserError

_DECODE_ROWS = 2  # one adapted row and one scaling row
_PATIENCE = 64  # steps a request is passed over for want of a slot, before those behind it wait too
_LOOK_AHEAD = 8  # how far a step looks past requests that cannot run yet, in times `max_requests`


class Scheduler:
    """Holds the waiting and running requests of one engine.

    Args:
        max_rows: most rows in one forward (padding comes on top).
        max_requests: most requests running at once.
        device: where batches go.
        row_padding, reference_attention: passed to every batch.
        admit: called with a waiting request; False when it cannot run yet, a UserError when it never can. It counts in
            `times_passed` the steps the request waited for a slot.
    """

    def __init__(
        self, max_rows: int, max_requests: int, device: torch.device, row_padding: int = 0,
        reference_attention: bool = False, admit: Callable[[Request], bool] = lambda request: True,
    ):
        self._admit = admit
        self.max_rows, self.max_requests, self.device = max_rows, max_requests, device
        self.row_padding, self.reference_attention = row_padding, reference_attention
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def requests(self) -> Iterator[Request]:
        """Unfinished requests, running first."""
        yield from self.running
        yield from self.waiting

    def next_batch(self) -> StepBatch:
        """Admit what fits and build the next forward's batch."""
        self._admit_waiting()
        budget, plans = self.max_rows, []
        later = []
        for request in self.running:
            decoding = bool(request.token_times_s)
            if not decoding:
                later.append(request)
            elif budget > 0:
                budget -= self._take(request, min(budget, _DECODE_ROWS), plans)
        for request in later:
            if budget <= 0:
                break
            budget -= self._take(request, budget, plans)
        # whoever decoded last waits first next time, when the budget does not reach everyone
        if budget <= 0:
            self.running.append(self.running.pop(0))
        return build_batch(plans, self.device, self.row_padding, self.reference_attention)

    def commit(
        self,
        batch: StepBatch,
        chosen: dict[tuple[Request, str], list[tuple[int, float]]],
        scalings: dict[Request, torch.Tensor],
    ) -> list[Request]:
        """Write a step's results into its requests and return those that finished.

        Args:
            batch: the step's.
            chosen: (request, stream kind) -> (token, log-probability) pairs of each span that needed logits.
            scalings: request -> float32 `[row, site, n]` of its scaling span.
        """
        for span in sorted(batch.spans, key=lambda each: each.plan.kind != SCALING):
            plan = span.plan
            answer = chosen.get((plan.request, plan.kind))
            if plan.request.finish_reason is not None:
                continue  # failed or was cancelled while its rows ran
            if plan.kind == SCALING:
                plan.request.commit_scaling(plan, scalings[plan.request], answer and answer[0][0])
            else:
                plan.request.commit_adapted(plan, answer or [])
        return self.sweep()

    def sweep(self) -> list[Request]:
        """Drop finished requests and return them."""
        finished = [request for request in self.requests() if request.finish_reason is not None]
        if finished:
            self.running = [request for request in self.running if request.finish_reason is None]
            self.waiting = deque(request for request in self.waiting if request.finish_reason is None)
        return finished

    def _admit_waiting(self) -> None:
        """Start waiting requests, oldest first; one that cannot run yet is passed over, but not for ever."""
        passed: list[Request] = []
        not_ready: set[str] = set()
        starved = False
        try:
            # a bound, so that a step's work does not grow with the queue
            for _ in range(min(len(self.waiting), _LOOK_AHEAD * self.max_requests)):
                if len(self.running) >= self.max_requests:
                    break
                request = self.waiting.popleft()
                if request.names and (starved or not not_ready.isdisjoint(request.names)):
                    passed.append(request)
                elif self._admits(request):
                    self.running.append(request)
                else:
                    passed.append(request)
                    not_ready.update(request.names)
                    starved = request.times_passed > _PATIENCE
        finally:
            self.waiting.extendleft(reversed(passed))

    def _admits(self, request: Request) -> bool:
        try:
            return self._admit(request)
        except UserError as error:
            request.finish("error", str(error))
            return True  # the sweep takes it out
        except BaseException:
            self.waiting.appendleft(request)
            raise

    @staticmethod
    def _take(request: Request, budget: int, plans: list[SpanPlan]) -> int:
        mine = request.plans(budget)
        plans += mine
        return sum(len(plan.token_ids) for plan in mine)
