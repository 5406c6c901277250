"""What a forward means for its requests: scalings of scaling rows, tokens of the rows that ask for one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.engine.batch import ADAPTED, SCALING, StepBatch
from workbench.engine.request import Request
from workbench.engine.sampling import choose


def classify(hidden: Tensor, batch: StepBatch) -> dict[Request, Tensor]:
    """Return request -> scalings, float32 `[row, site, adapter]` on the host, of its scaling rows.

    Args:
        hidden: `[row, hidden]` of the whole forward.
        batch: the step's.
    """
    by_mixture: dict[int, list] = {}
    for span in batch.spans_of(SCALING):
        by_mixture.setdefault(id(span.plan.request.mixture), []).append(span)
    found: dict[Request, Tensor] = {}
    for spans in by_mixture.values():
        rows = torch.cat([hidden[span.start : span.stop] for span in spans])
        count = len(rows)
        if batch.row_padding:
            rows = F.pad(rows, (0, 0, 0, -count % batch.row_padding))
        made = spans[0].plan.request.mixture.classifier(rows)[:count].cpu()
        parts = made.split([span.stop - span.start for span in spans])
        found.update({span.plan.request: part for span, part in zip(spans, parts, strict=True)})
    return found


def choose_tokens(logits: Tensor, batch: StepBatch) -> dict[tuple[Request, str], tuple[int, float]]:
    """Return (request, stream kind) -> (token, log-probability) of each span that needs logits.

    A request whose logits mean nothing fails, alone.

    Args:
        logits: float32 `[span, vocab]`, in the order of `batch.logit_spans`.
        batch: the step's.
    """
    chosen = {}
    for row, span in zip(logits, batch.logit_spans, strict=True):
        plan, request = span.plan, span.plan.request
        output = [*request.tokens, *(plan.token_ids[-1:] if plan.drafted else ())][len(request.prompt_ids) :]
        try:
            chosen[request, plan.kind] = choose(row, request.sampling, request.prompt_ids, output, request.seed)
        except FloatingPointError as error:
            # a draft that cannot be made is no failure: the adapted row decides
            if plan.kind == ADAPTED:
                request.finish("error", str(error))
    return chosen
