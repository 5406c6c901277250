"""Which rows run next, and for whom.

Continuous: every step takes what each running request can run now, within a budget of rows. Short wishes (decoding)
go first, so a long prompt never holds up tokens that are nearly there; prompts share what is left, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from workbench.engine.batch import SCALING, SpanPlan, StepBatch, build_batch
from workbench.engine.request import Request

_DECODE_ROWS = 2  # one adapted row and one scaling row


class Scheduler:
    """Holds the waiting and running requests of one engine.

    Args:
        max_rows: most rows in one forward (padding comes on top).
        max_requests: most requests running at once.
        device: where batches go.
        row_padding, reference_attention: passed to every batch.
    """

    def __init__(
        self, max_rows: int, max_requests: int, device: torch.device, row_padding: int = 0,
        reference_attention: bool = False,
    ):
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
        while self.waiting and len(self.running) < self.max_requests:
            self.running.append(self.waiting.popleft())
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
        chosen: dict[tuple[Request, str], tuple[int, float]],
        scalings: dict[Request, torch.Tensor],
    ) -> list[Request]:
        """Write a step's results into its requests and return those that finished.

        Args:
            batch: the step's.
            chosen: (request, stream kind) -> (token, log-probability) of each span that needed logits.
            scalings: request -> float32 `[row, site, n]` of its scaling span.
        """
        for span in sorted(batch.spans, key=lambda each: each.plan.kind != SCALING):
            plan = span.plan
            answer = chosen.get((plan.request, plan.kind))
            if plan.request.finish_reason is not None:
                continue  # failed or was cancelled while its rows ran
            if plan.kind == SCALING:
                plan.request.commit_scaling(plan, scalings[plan.request], answer and answer[0])
            else:
                plan.request.commit_adapted(plan, answer)
        return self.sweep()

    def sweep(self) -> list[Request]:
        """Drop finished requests and return them."""
        finished = [request for request in self.requests() if request.finish_reason is not None]
        if finished:
            self.running = [request for request in self.running if request.finish_reason is None]
            self.waiting = deque(request for request in self.waiting if request.finish_reason is None)
        return finished

    @staticmethod
    def _take(request: Request, budget: int, plans: list[SpanPlan]) -> int:
        mine = request.plans(budget)
        plans += mine
        return sum(len(plan.token_ids) for plan in mine)
