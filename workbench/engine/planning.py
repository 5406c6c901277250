"""What a request wants from the next forward.

The rows of its adapted stream whose scalings are known, and the rows of its scaling stream: those that later inputs
need, then, while the last adapted row is chosen, the row of the likely next token.
"""

from __future__ import annotations

from workbench.engine.batch import ADAPTED, SCALING, SpanPlan
from workbench.engine.request import Request


def plans_of(request: Request, budget: int) -> list[SpanPlan]:
    """Return what a request can run now, at most `budget` rows: adapted rows first, then scaling rows."""
    if request.finish_reason is not None:
        return []
    plans = []
    adapted = _adapted_plan(request, budget)
    if adapted is not None:
        plans.append(adapted)
        budget -= len(adapted.token_ids)
    if budget > 0 and request.needs_scaling_rows:
        chooses = adapted is not None and adapted.stop == len(request.tokens) and not request.continuation
        scaling = _scaling_plan(request, budget, chooses)
        if scaling is not None:
            plans.append(scaling)
    return plans


def _adapted_plan(request: Request, budget: int) -> SpanPlan | None:
    first, stop = request.streams[ADAPTED].length, len(request.tokens)
    stop = min(stop, first + budget)
    if request.mixture is not None:
        ready = first
        while ready < stop and request.source(ready) < request.num_scaled:
            ready += 1
        stop = ready
    if stop <= first:
        return None
    num_logits = max(0, stop - max(first, request.first_unanswered))
    return SpanPlan(request, ADAPTED, first, tuple(request.tokens[first:stop]), num_logits=num_logits)


def _scaling_plan(request: Request, budget: int, chooses: bool) -> SpanPlan | None:
    first, known = request.streams[SCALING].length, len(request.tokens)
    # what the next input will need of the tokens known by now, too: policies that lag then wait for no scaling row
    stop = min(request.source(known) + 1, known, first + budget)
    if first < stop:
        drafts = stop == known and _drafts_after(request, stop)
        return SpanPlan(request, SCALING, first, tuple(request.tokens[first:stop]), num_logits=int(drafts))
    if chooses and request.draft is not None and first == known and _drafts_after(request, known):
        more = _drafts_after(request, known + 1)
        return SpanPlan(request, SCALING, known, (request.draft,), drafted=True, num_logits=int(more))
    return None


def _drafts_after(request: Request, position: int) -> bool:
    # the token at `position` is worth drafting if it will be an input that needs scalings of its own
    return request.drafting and position < request.max_length - 1 and request.source(position) == position
