"""What changes logits before temperature: bias, grammar, penalties, `min_tokens`, for all rows that have them at once.

A setting touches the tokens it concerns, of the rows that have it: one gather and one scatter for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.engine.choosing import Question

_MAX = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny


def penalise(scores: Tensor, questions: Sequence[Question]) -> None:
    """Change float32 `scores` `[row, vocab]` in place as the rows' settings say, in the order of the functions here."""
    _bias(scores, questions)
    _keep_allowed(scores, questions)
    _repetition(scores, questions)
    _presence_and_frequency(scores, questions)
    _dry(scores, questions)
    _no_end_yet(scores, questions)


def _bias(scores: Tensor, questions: Sequence[Question]) -> None:
    rows = [(row, *q.sampling.bias) for row, q in enumerate(questions) if q.sampling.logit_bias]
    _change(scores, rows, lambda values, bias: values + bias)


def _keep_allowed(scores: Tensor, questions: Sequence[Question]) -> None:
    for row, question in enumerate(questions):
        if question.mask is not None:
            allowed = question.mask.to(scores.device)[: scores.shape[1]]
            scores[row, : len(allowed)] = scores[row, : len(allowed)].where(allowed, -math.inf)
            scores[row, len(allowed) :] = -math.inf


def _repetition(scores: Tensor, questions: Sequence[Question]) -> None:
    rows = [
        (row, q.history.seen(q.extra), q.sampling.repetition_penalty)
        for row, q in enumerate(questions) if q.sampling.repetition_penalty != 1
    ]

    def change(values: Tensor, penalty: Tensor) -> Tensor:
        penalty = penalty.clamp(min=_TINY)  # 0 times -inf would be no number
        return torch.where(values > 0, values / penalty, values * penalty)

    _change(scores, rows, change)


def _presence_and_frequency(scores: Tensor, questions: Sequence[Question]) -> None:
    rows = []
    for row, question in enumerate(questions):
        presence, frequency = question.sampling.presence_penalty, question.sampling.frequency_penalty
        if presence or frequency:
            tokens, counts = question.history.said(question.extra)
            with np.errstate(over="ignore"):
                penalty = _float32(presence) + _float32(frequency) * counts.astype(np.float32)
            # not infinite: a forbidden token's -inf less -inf would be no number
            rows.append((row, tokens, np.clip(penalty, -_MAX, _MAX)))
    _change(scores, rows, lambda values, penalty: values - penalty)


def _dry(scores: Tensor, questions: Sequence[Question]) -> None:
    rows = [
        (row, *q.history.repetitions(q.extra)) for row, q in enumerate(questions) if q.sampling.dry_multiplier
    ]
    _change(scores, rows, lambda values, penalty: values - penalty)


def _no_end_yet(scores: Tensor, questions: Sequence[Question]) -> None:
    rows = [
        (row, np.fromiter(ends, np.int64, len(ends)), -math.inf)
        for row, q in enumerate(questions) if (ends := q.barred_ends)
    ]
    _change(scores, rows, lambda values, minus_infinity: minus_infinity)


def _change(
    scores: Tensor,
    rows: Iterable[tuple[int, np.ndarray, np.ndarray | float]],
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace the scores of some tokens of some rows by `change(scores, amounts)`.

    Args:
        scores: float32 `[row, vocab]`, contiguous.
        rows: (row, distinct token ids, amounts for them or one for all).
        change: float32 `[n]`, float32 `[n]` -> float32 `[n]`.
    """
    rows = [each for each in rows if len(each[1])]
    if not rows:
        return
    vocab_size = scores.shape[1]
    places = np.concatenate([tokens + row * vocab_size for row, tokens, _ in rows])
    amounts = np.concatenate([np.broadcast_to(_float32(amount), tokens.shape) for _, tokens, amount in rows])
    at = torch.from_numpy(places).to(scores.device)
    flat = scores.view(-1)
    # +inf would turn into "no number" when the largest score is subtracted
    flat[at] = change(flat[at], torch.from_numpy(amounts).to(scores.device)).clamp(max=_MAX)


def _float32(amount: np.ndarray | float) -> np.ndarray:
    """As float32; what is finite stays finite."""
    amount = np.asarray(amount, np.float64)
    return np.where(amount == -math.inf, amount, np.clip(amount, -_MAX, _MAX)).astype(np.float32)
