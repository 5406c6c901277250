"""Choices against naive definitions and against transformers: `pytest tests/test_sampling_definitions.py`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import EOS, INF, VOCAB, ask, cases, history_of, random_logits, widths
from transformers.generation import logits_process as theirs

from workbench import Sampling, UserError
from workbench.engine import filters
from workbench.engine.choosing import Question, choose_batch
from workbench.engine.noise import exponential
from workbench.engine.penalties import penalise


def naive_scores(logits: list[float], question: Question, prompt, output) -> list[float]:
    """Scores after bias, mask, repetition, presence, frequency and `min_tokens`, token by token."""
    sampling, scores = question.sampling, list(logits)
    output = [*output, *question.extra]
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else question.eos_ids)}
    for token in range(len(scores)):
        scores[token] += sampling.logit_bias.get(token, 0)
        if question.mask is not None and not question.mask[token]:
            scores[token] = -INF
        if token in [*prompt, *output]:
            penalty = sampling.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        if token in output:
            scores[token] -= sampling.presence_penalty + output.count(token) * sampling.frequency_penalty
        if len(output) < sampling.min_tokens and token in ends:
            scores[token] = -INF
    return scores


def naive_probabilities(scores: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability of what temperature and filters leave."""
    peak = max(scores)
    weights = {i: math.exp((score - peak) / sampling.temperature) for i, score in enumerate(scores) if score > -INF}

    def normal(weights):
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    def until(ordered, mass):
        kept, total = {}, 0.0
        for token in ordered:
            if total >= mass:
                break
            kept[token] = shares[token]
            total += shares[token]
        return kept

    shares = normal(weights)
    if sampling.top_k is not None:
        least = sorted(shares.values())[-sampling.top_k :][0]
        shares = normal({token: share for token, share in shares.items() if share >= least})
    if sampling.typical_p is not None:
        entropy = -sum(share * math.log(share) for share in shares.values())
        shares = normal(until(sorted(shares, key=lambda i: abs(-math.log(shares[i]) - entropy)), sampling.typical_p))
    if sampling.top_p < 1:
        shares = normal(until(sorted(shares, key=lambda i: -shares[i]), sampling.top_p))
    most = max(shares.values())
    return normal({token: share for token, share in shares.items() if share >= sampling.min_p * most})


@settings(max_examples=150, deadline=None)
@given(cases(dry=False), st.integers(0, 9999))
def test_a_choice_is_the_one_of_the_naive_definition(case, seed):
    question, prompt, output = case
    logits = random_logits(seed)
    with widths(5, 17):
        (answer,) = choose_batch(logits, [question])
    scores = naive_scores(logits[0].tolist(), question, prompt, output)
    if max(scores) == -INF:
        assert isinstance(answer, UserError)
        return
    logprobs = logits[0].double().log_softmax(0)
    assert answer.logprob == pytest.approx(logprobs[answer.token].item(), abs=1e-5)
    assert [token for token, _ in answer.top] == logprobs.argsort(descending=True)[: len(answer.top)].tolist()
    assert [value for _, value in answer.top] == pytest.approx([logprobs[token].item() for token, _ in answer.top])
    assert len(answer.top) == question.sampling.top_logprobs
    if question.sampling.temperature == 0:
        assert scores[answer.token] == pytest.approx(max(scores), abs=1e-5)
        return
    shares = naive_probabilities(scores, question.sampling)
    position = len(prompt) + len(output) + len(question.extra)
    noise = exponential(torch.arange(VOCAB), [(question.seed, position)])[0].tolist()
    races = {token: share / noise[token] for token, share in shares.items()}
    assert answer.token in shares and races[answer.token] == pytest.approx(max(races.values()), rel=1e-4)


# the same settings elsewhere


def support(logits: torch.Tensor, sampling: Sampling) -> list[bool]:
    """Which tokens can be drawn: each is given, in a row of its own, noise that makes it win if it is there."""
    def wins_if_kept(token_ids, keys):
        wanted = torch.tensor([[seed] for seed, _ in keys])
        return torch.where(token_ids == wanted, 1e-25, 1.0)

    vocab = logits.shape[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "exponential", wins_if_kept)
        answers = choose_batch(logits.expand(vocab, -1), [ask(sampling, (1,), seed=token) for token in range(vocab)])
    return [answer.token == token for token, answer in enumerate(answers)]


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "many equal"])
@pytest.mark.parametrize(
    ("settings", "their"),
    [
        ({"top_k": 1}, theirs.TopKLogitsWarper(1)),
        ({"top_k": 9}, theirs.TopKLogitsWarper(9)),
        ({"top_k": 47}, theirs.TopKLogitsWarper(47)),
        ({"top_p": 0.313}, theirs.TopPLogitsWarper(0.313)),
        ({"top_p": 0.977}, theirs.TopPLogitsWarper(0.977)),
        ({"min_p": 0.013}, theirs.MinPLogitsWarper(0.013)),
        ({"min_p": 0.41}, theirs.MinPLogitsWarper(0.41)),
        ({"typical_p": 0.213}, theirs.TypicalLogitsWarper(0.213)),
        ({"typical_p": 0.957}, theirs.TypicalLogitsWarper(0.957)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_filter_keeps_the_tokens_that_transformers_keeps(settings, their, step):
    for seed in range(6):
        logits = random_logits(seed, step=step)
        expected = their(None, logits.clone())[0] > -INF
        with widths(4, 16):
            found = torch.tensor(support(logits[0], Sampling(temperature=1.0, **settings)))
        if step and "top_p" in settings:
            # which of equal tokens stay is theirs to choose, how many is not
            assert found.sum() == expected.sum() and logits[0][found].sum() == logits[0][expected].sum()
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("filter", [{"top_k": 7}, {"top_p": 0.61}, {"typical_p": 0.61}, {"min_p": 0.09}], ids=str)
def test_a_filter_keeps_the_same_tokens_however_many_are_looked_at(filter):
    """Where a cut falls among equal tokens, those of the lowest ids stay."""
    sampling = Sampling(temperature=1.0, **filter)
    for seed in range(12):
        logits = random_logits(seed, step=2.0)[0]
        with widths():
            of_all = support(logits, sampling)
        for few in ((1, 3), (5,), (8, 9, 10), (30,)):
            with widths(*few):
                assert support(logits, sampling) == of_all


@pytest.mark.parametrize(
    ("settings", "their"),
    [
        ({"repetition_penalty": 1.3}, theirs.RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.6}, theirs.RepetitionPenaltyLogitsProcessor(0.6)),
        ({"min_tokens": 4, "stop_token_ids": [7]}, theirs.MinNewTokensLengthLogitsProcessor(3, 4, [0, 5, 7])),
        ({"min_tokens": 2, "stop_token_ids": [7]}, theirs.MinNewTokensLengthLogitsProcessor(3, 2, [0, 5, 7])),
        ({"logit_bias": {3: -1.5, 9: 2.0}}, theirs.SequenceBiasLogitsProcessor([[[3], -1.5], [[9], 2.0]])),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_penalty_changes_logits_as_transformers_does(settings, their):
    prompt, output = [4, 4, 9], [12, 9]
    logits = random_logits(8)
    scores = logits.clone()
    sampling = Sampling(**settings)
    penalise(scores, [Question(sampling, history_of(sampling, prompt, output), 0, eos_ids=EOS)])
    expected = their(torch.tensor([[*prompt, *output]]), logits.clone())
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_draws_follow_the_filtered_distribution():
    """Chi-square over 6,000 draws, within 4.5 standard deviations of its mean."""
    logits = random_logits(5, vocab=300)[0]
    sampling = Sampling(temperature=1.1, typical_p=0.97, top_p=0.95, min_p=0.001)
    shares = naive_probabilities(logits.tolist(), sampling)
    assert len(shares) > 20
    draws = 6_000
    history = history_of(sampling, [1], vocab=300)
    counts = torch.zeros(300)
    with widths(16, 128):
        answers = choose_batch(logits.expand(draws, -1), [Question(sampling, history, seed) for seed in range(draws)])
    for answer in answers:
        counts[answer.token] += 1
    assert {answer.token for answer in answers} <= set(shares)
    expected = torch.tensor(list(shares.values())) * draws
    distance = ((counts[list(shares)] - expected) ** 2 / expected).sum().item()
    assert distance < len(shares) + 4.5 * math.sqrt(2 * len(shares))
