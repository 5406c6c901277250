"""What a forward means for its requests: scalings of scaling rows, tokens of the rows that ask for one."""

from __future__ import annotations

from collections.abc import Sequence

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


def choose_tokens(logits: Tensor, batch: StepBatch) -> dict[tuple[Request, str], list[tuple[int, float]]]:
    """Return (request, stream kind) -> (token, log-probability) pairs of each span that needs logits.

    One pair, the next token; or, for a request that scores a given continuation, one for each of its tokens here.

    A request whose logits mean nothing fails, alone.

    Args:
        logits: float32 `[row, vocab]`, in the order of `batch.logit_rows`.
        batch: the step's.
    """
    chosen = {}
    parts = logits.split([span.plan.num_logits for span in batch.logit_spans])
    for rows, span in zip(parts, batch.logit_spans, strict=True):
        plan, request = span.plan, span.plan.request
        if request.continuation:
            chosen[request, plan.kind] = _scored(rows, request.continuation_after(plan.stop - plan.num_logits))
            continue
        output = [*request.tokens, *(plan.token_ids[-1:] if plan.drafted else ())][len(request.prompt_ids) :]
        try:
            chosen[request, plan.kind] = [choose(rows[0], request.sampling, request.prompt_ids, output, request.seed)]
        except FloatingPointError as error:
            # a draft that cannot be made is no failure: the adapted row decides
            if plan.kind == ADAPTED:
                request.finish("error", str(error))
    return chosen


def _scored(logits: Tensor, following: Sequence[int]) -> list[tuple[int, float]]:
    tokens = list(following[: len(logits)])
    logprobs = torch.log_softmax(logits, dim=-1)[range(len(tokens)), tokens]
    return list(zip(tokens, logprobs.tolist(), strict=True))
