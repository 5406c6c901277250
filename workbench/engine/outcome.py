"""What a forward means for its requests: scalings of scaling rows, answers of the rows that have logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.engine.batch import ADAPTED, SCALING, RowSpan, StepBatch
from workbench.engine.choosing import Answer, Choice, Question, choose_batch, logprobs_of
from workbench.engine.request import Request
from workbench.errors import UserError

Answers = dict[tuple[Request, str], list[Answer]]


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
        made = classify_rows(spans[0].plan.request, rows, batch.row_padding)
        parts = made.split([span.stop - span.start for span in spans])
        found.update({span.plan.request: part for span, part in zip(spans, parts, strict=True)})
    return found


def classify_rows(request: Request, rows: Tensor, row_padding: int = 0) -> Tensor:
    """Return the scalings of hidden rows by a request's mixture; padded, in products of that many rows each."""
    classifier, count = request.mixture.classifier, len(rows)
    if not row_padding:
        return classifier(rows).cpu()
    whole = F.pad(rows, (0, 0, 0, -count % row_padding)).split(row_padding)
    return torch.cat([classifier(part) for part in whole])[:count].cpu()


def choose_tokens(logits: Tensor, batch: StepBatch) -> Answers:
    """Return (request, stream kind) -> what each of its rows with logits says about the token after it.

    A token that is known (of a prompt or a given continuation) is scored, any other is chosen.

    Args:
        logits: float32 `[row, vocab]`, in the order of `batch.logit_rows`.
        batch: the step's.
    """
    rows = list(_logit_positions(batch.logit_spans))
    known = [(i, token) for i, (_, _, token) in enumerate(rows) if token is not None]
    asked = [i for i, (_, _, token) in enumerate(rows) if token is None]
    answers: list[Answer | None] = [None] * len(rows)
    if known:
        _score_known(logits, rows, known, answers)
    if asked:
        _choose_asked(logits, rows, asked, answers)
    found: Answers = {}
    for (span, _, _), answer in zip(rows, answers, strict=True):
        if answer is not None:
            found.setdefault((span.plan.request, span.plan.kind), []).append(answer)
    return found


def _logit_positions(spans: Iterable[RowSpan]) -> Iterable[tuple[RowSpan, int, int | None]]:
    """Yield each logit row's span, position, and the token after it if that is given."""
    for span in spans:
        plan = span.plan
        for position in range(plan.stop - plan.num_logits, plan.stop):
            yield span, position, plan.request.known_after(position) if plan.kind == ADAPTED else None


def _score_known(logits: Tensor, rows: list, known: list[tuple[int, int]], answers: list) -> None:
    requests = [rows[i][0].plan.request for i, _ in known]
    mine = logits if len(known) == len(rows) else logits[[i for i, _ in known]]
    scored = logprobs_of(mine, [token for _, token in known], max(r.sampling.top_logprobs for r in requests))
    for (i, _), request, row, choice in zip(known, requests, mine, scored, strict=True):
        if not isinstance(choice, Choice):
            answers[i] = Answer(error=str(choice))
            continue
        choice = choice._replace(top=choice.top[: request.sampling.top_logprobs])
        scores_it = request.distributions and rows[i][1] >= len(request.prompt_ids) - 1
        answers[i] = Answer(choice, torch.log_softmax(row, dim=-1).cpu() if scores_it else None)


def _choose_asked(logits: Tensor, rows: list, asked: list[int], answers: list) -> None:
    usable = []
    for i in asked:
        try:
            question = _question(rows[i][0])
        except UserError as error:  # the grammar leaves nothing
            answers[i] = Answer(error=str(error))
        else:
            usable += [(i, question)] if question is not None else []
    if not usable:
        return
    mine = logits if len(usable) == len(rows) else logits[[i for i, _ in usable]]
    for (i, _), choice in zip(usable, choose_batch(mine, [q for _, q in usable]), strict=True):
        if isinstance(choice, Choice):
            answers[i] = Answer(choice)
        elif rows[i][0].plan.kind == ADAPTED:
            # a draft that cannot be made is no failure: the adapted row decides
            answers[i] = Answer(error=str(choice))


def _question(span: RowSpan) -> Question | None:
    request, plan = span.plan.request, span.plan
    extra = plan.token_ids[-1:] if plan.drafted else ()
    mask = None
    if request.matcher is not None:
        mask = request.matcher.mask(extra)
        if mask is None:  # the draft breaks the grammar: nothing follows it
            return None
    eos = frozenset() if request.sampling.ignore_eos else request.eos_ids
    return Question(request.sampling, request.history, request.seed, extra, mask, eos)
