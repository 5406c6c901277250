"""Choosing the next tokens of all rows of a step at once, each row by its own settings.

A row's settings act in this order, each on what the earlier ones leave; one that is off costs nothing:

1. `logit_bias` is added; 2. tokens the grammar's mask forbids are ruled out; 3. `repetition_penalty`, then
`presence_penalty` and `frequency_penalty`; 4. DRY; 5. below `min_tokens`, tokens that would end the request are ruled
out; 6. temperature 0 takes the largest score, the lowest id among equals; else 7. scores are divided by the temperature
and filtered by `top_k`, `typical_p`, `top_p`, `min_p`; 8. a token is drawn from what is left.

Randomness is a function of (request seed, position) only: argmax(p / noise), with the noise of `noise.py`. So a token
does not depend on what else ran, and a draft made with the same noise from other logits agrees with the choice as often
as the two distributions allow. Log-probabilities are the model's own, natural, before all of this.

Contract: a row's answer has the same bits whatever rows are beside it; a row without an answer is an error in its
place, and the others have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engine.filters import draw
from workbench.engine.history import History
from workbench.engine.penalties import penalise
from workbench.engine.ranking import first_largest, likeliest, rows_of
from workbench.engine.sampling import MOST_ALTERNATIVES, Sampling
from workbench.errors import UserError


@dataclass(slots=True, eq=False)
class Question:
    """One row: whose next token is asked for.

    Attributes:
        sampling: the request's settings.
        history: its tokens.
        seed: of its noise.
        extra: tokens after the history, such as a drafted one.
        mask: bool `[vocab]`, the tokens a grammar allows; a shorter one allows none of the rest.
        eos_ids: the end-of-sequence tokens.
    """

    sampling: Sampling
    history: History
    seed: int
    extra: Sequence[int] = ()
    mask: Tensor | None = None
    eos_ids: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """The position of the token asked for."""
        return self.history.num_tokens + len(self.extra)

    @property
    def barred_ends(self) -> frozenset[int]:
        """Tokens that would end the request before `min_tokens`."""
        sampling = self.sampling
        if self.history.num_output + len(self.extra) >= sampling.min_tokens:
            return frozenset()
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_ids)

    @property
    def is_penalised(self) -> bool:
        """Whether scores differ from logits."""
        return self.sampling.has_penalties or self.mask is not None or bool(self.barred_ends)


class Choice(NamedTuple):
    """A token, its log-probability under the model, and the likeliest (token, log-probability) pairs, likeliest first.

    `top` has `Sampling.top_logprobs` pairs; the chosen token need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one row says about the token after it.

    Attributes:
        choice: the token, its log-probability, and the likeliest ones if they were asked for.
        distribution: float32 `[vocab]` on the host, all log-probabilities, if they were asked for.
        error: why there is no choice.
    """

    choice: Choice | None = None
    distribution: Tensor | None = None
    error: str | None = None


def choose_batch(logits: Tensor, questions: Sequence[Question]) -> list[Choice | FloatingPointError | UserError]:
    """Return the answer of each row.

    Args:
        logits: float32 `[row, vocab]`; left as they are.
        questions: one for each row.

    Returns:
        A Choice; or, in its place, a FloatingPointError where the logits are NaN or infinite, so no choice means
        anything, and a UserError where the settings leave no token to choose.
    """
    if not questions:
        return []
    answers = _read(logits, _chosen(logits, questions), [question.sampling.top_logprobs for question in questions])
    return [
        _nothing_left(question) if isinstance(answer, Choice) and answer.token < 0 else answer
        for answer, question in zip(answers, questions, strict=True)
    ]


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top_logprobs: int = 0) -> list[Choice | FloatingPointError]:
    """Return what the model says of given tokens: of a prompt, or of a continuation to score.

    Args:
        logits: float32 `[row, vocab]`.
        token_ids: the token that follows each row.
        top_logprobs: alternatives to report with each, at most 20.
    """
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return _read(logits, tokens, [top_logprobs] * len(tokens))


def _chosen(logits: Tensor, questions: Sequence[Question]) -> Tensor:
    """The token of each row, int64 `[row]`; -1 where none is left."""
    plain, others = [], []
    for row, question in enumerate(questions):
        (others if question.sampling.temperature or question.is_penalised else plain).append(row)
    if not others:
        return first_largest(logits)[1]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if plain:
        tokens[plain] = first_largest(rows_of(logits, plain))[1]
    asked = [questions[row] for row in others]
    scores = rows_of(logits, others)
    if any(question.is_penalised for question in asked):
        scores = scores.clone()
        penalise(scores, asked)
    peaks, chosen = first_largest(scores)
    warm = [row for row, question in enumerate(asked) if question.sampling.temperature]
    if warm:
        chosen[warm] = draw(rows_of(scores, warm), peaks[warm], [asked[row] for row in warm])
    tokens[others] = chosen.where(peaks > float("-inf"), -1)
    return tokens


def _read(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[Choice | FloatingPointError]:
    """The tokens with their log-probabilities and `tops` alternatives each; an error for rows that are no numbers."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    # one transfer: both are exact in float64
    ids, values = torch.stack([tokens.double(), own.double()]).tolist()
    alternatives = _alternatives(logprobs, tops) if any(tops) else [()] * len(ids)
    # one logit that is NaN or infinite, or all of them at -inf, make all log-probabilities of the row NaN
    return [
        Choice(int(token), value, top) if value == value else FloatingPointError(
            "the model's logits are NaN or infinite; the weights or the compute dtype do not hold this input"
        )
        for token, value, top in zip(ids, values, alternatives, strict=True)
    ]


def _alternatives(logprobs: Tensor, tops: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    rows = [row for row, top in enumerate(tops) if top]
    # more than are asked for, so that equal ones come by rising id
    values, ids = likeliest(rows_of(logprobs, rows), min(4 * MOST_ALTERNATIVES, logprobs.shape[1]))
    found: list[tuple[tuple[int, float], ...]] = [()] * len(tops)
    for row, its_ids, its_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
        found[row] = tuple(zip(its_ids[: tops[row]], its_values[: tops[row]], strict=True))
    return found


def _nothing_left(question: Question) -> UserError:
    sampling = question.sampling
    reasons = [
        name for name, is_on in (
            ("the grammar", question.mask is not None), ("logit_bias", sampling.logit_bias),
            (f"min_tokens ({sampling.min_tokens})", question.barred_ends),
        ) if is_on
    ]
    who = " and ".join(reasons) or "the penalties"
    return UserError(f"no token is left to choose: all that the model allows is ruled out by {who}")
