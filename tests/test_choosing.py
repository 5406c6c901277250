"""All rows of a step at once: each as alone, errors in their places: `pytest tests/test_choosing.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import EOS, INF, VOCAB, ask, cases, random_logits, widths
from torch.overrides import TorchFunctionMode

from workbench import Sampling, UserError
from workbench.engine import ranking
from workbench.engine.choosing import Choice, choose_batch, logprobs_of


def same(one, other) -> bool:
    return str(one) == str(other) if isinstance(one, Exception) else one == other


@settings(max_examples=60, deadline=None)
@given(st.lists(cases(dry=True), min_size=1, max_size=9), st.integers(0, 999), st.sampled_from([0.0, 0.5]))
def test_a_row_in_any_batch_gets_the_bits_it_gets_alone(asked, seed, step):
    """Whatever the neighbours' settings are, and however many of the likeliest tokens are looked at first."""
    logits, asked = random_logits(seed, len(asked), step=step), [question for question, _, _ in asked]
    with widths(6, 20):
        together = choose_batch(logits, asked)
        alone = [choose_batch(logits[row : row + 1], [question])[0] for row, question in enumerate(asked)]
        backwards = choose_batch(logits.flip(0), asked[::-1])[::-1]
    for few in ((), (1, 2)):
        with widths(*few):
            assert all(map(same, together, choose_batch(logits, asked)))
    assert all(map(same, together, alone)) and all(map(same, together, backwards))


def test_rows_of_a_real_vocabulary_get_the_bits_they_get_alone():
    vocab = 49_153  # not a multiple of anything
    logits = random_logits(3, 7, vocab) * torch.tensor([[1.0], [0.1], [3.0], [1.0], [1.0], [0.5], [2.0]])
    asked = [
        ask(sampling, seed=row)
        for row, sampling in enumerate([
            Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9), Sampling(top_logprobs=4),
            Sampling(temperature=0.9, top_k=70, typical_p=0.8), Sampling(temperature=1.0, typical_p=0.9),
            Sampling(temperature=2.0, min_p=0.01),
        ])
    ]  # fmt: skip
    together = choose_batch(logits, asked)
    assert together == [choose_batch(logits[row : row + 1], [question])[0] for row, question in enumerate(asked)]
    with widths():
        assert together == choose_batch(logits, asked)


# one row's error is its own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_answer_are_errors_in_their_places(temperature):
    logits = random_logits(1, 8)
    logits[1, 3], logits[2, 0], logits[3] = math.nan, INF, -INF
    logits[4, 5] = -INF
    nothing = torch.zeros(VOCAB, dtype=torch.bool)
    settings = {"temperature": temperature, "top_logprobs": 2}
    filtered = {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    asked = [
        ask(Sampling(**settings)), ask(Sampling(**settings)), ask(Sampling(**settings, **filtered)),
        ask(Sampling(**settings, top_k=5)), ask(Sampling(**settings, **filtered)),
        ask(Sampling(**settings, top_k=3), mask=nothing),
        ask(Sampling(**settings, min_tokens=2), mask=nothing.index_fill(0, torch.tensor([5]), True), eos_ids=EOS),
        ask(Sampling(**settings, logit_bias=dict.fromkeys(range(VOCAB), -INF))),
    ]  # fmt: skip
    answers = choose_batch(logits, asked)
    assert [type(answer) for answer in answers] == [
        Choice, FloatingPointError, FloatingPointError, FloatingPointError, Choice, UserError, UserError, UserError
    ]  # fmt: skip
    assert all("NaN or infinite; the weights or the compute dtype" in str(answers[row]) for row in (1, 2, 3))
    assert str(answers[5]).startswith("no token is left to choose: all that the model allows is ruled out by the gramm")
    assert str(answers[6]).endswith("ruled out by the grammar and min_tokens (2)")
    assert str(answers[7]).endswith("ruled out by logit_bias")
    for row in (0, 4):
        assert answers[row] == choose_batch(logits[row : row + 1], asked[row : row + 1])[0]
    assert choose_batch(logits[:0], []) == []


def test_extreme_settings_choose_a_token():
    """No overflow, underflow or division by nothing turns scores into no numbers."""
    huge, tiny = 1e300, 1e-300
    for warm in ({"temperature": 0.0}, {"temperature": huge}, {"temperature": 1.0, "top_p": tiny, "min_p": 1 - 1e-12}):
        for extreme in (
            {"repetition_penalty": huge}, {"repetition_penalty": tiny}, {"presence_penalty": huge},
            {"presence_penalty": -huge, "frequency_penalty": huge}, {"frequency_penalty": -huge},
            {"dry_multiplier": huge, "dry_base": huge}, {"logit_bias": {1: huge, 2: -huge, 3: -INF}},
        ):  # fmt: skip
            question = ask(Sampling(**warm, **extreme), [1, 2, 1, 2], [1, 2, 1, 1, 3], mask=torch.arange(VOCAB) % 3 > 0)
            (answer,) = choose_batch(random_logits(0), [question])
            assert isinstance(answer, Choice) and answer.token % 3
    assert choose_batch(random_logits(0), [ask(Sampling(logit_bias={1: huge}))])[0].token == 1
    lifted = torch.tensor([[-50.0, 1.0, 5.0, 9.0]])  # divided by nearly nothing, the 5 and the 9 overflow
    for filters in ({}, {"top_k": 3}):
        sampling = Sampling(temperature=1.0, repetition_penalty=tiny, **filters)
        answers = choose_batch(lifted.expand(20, -1), [ask(sampling, [0, 2, 3], seed=seed) for seed in range(20)])
        assert {answer.token for answer in answers} == {2, 3}


# what else a question may say


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_comes_before_min_tokens(temperature):
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 5, 7]] = 50.0
    sampling = Sampling(temperature=temperature, min_tokens=2, stop_token_ids=[7])

    def chosen(sampling, output, **more):
        return choose_batch(logits, [ask(sampling, output=output, eos_ids=EOS, **more)])[0].token

    assert chosen(sampling, []) not in (0, 5, 7) and chosen(sampling, [1]) not in (0, 5, 7)
    assert chosen(sampling, [1, 1]) in (0, 5, 7) and chosen(sampling, [1], extra=[1]) in (0, 5, 7)
    # a token that would not end the request is not barred
    assert chosen(replace(sampling, ignore_eos=True), []) in (0, 5)


def test_a_short_mask_allows_none_of_the_rest():
    logits = torch.arange(8.0)[None]
    for mask, expected in (([True] * 8, 7), ([True, True, False], 1), ([True] * 9, 7)):
        assert choose_batch(logits, [ask(Sampling(), (1,), mask=torch.tensor(mask))])[0].token == expected


def test_alternatives_are_the_likeliest_tokens_equal_ones_by_rising_id():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    first, second = choose_batch(logits, [ask(Sampling(top_logprobs=3), (1,)), ask(Sampling(top_logprobs=20), (1,))])
    assert [token for token, _ in first.top] == [1, 3, 2] and first.top[0] == (first.token, first.logprob)
    assert second.top == tuple((token, pytest.approx(-math.log(5))) for token in range(5))
    alike = torch.zeros(1, 200).index_fill(1, torch.arange(50, 90), 1.0)
    many = choose_batch(alike, [ask(Sampling(top_logprobs=20), (1,))])[0].top
    assert [token for token, _ in many] == list(range(50, 70))
    forced = choose_batch(logits[:1], [ask(Sampling(top_logprobs=1, logit_bias={4: 99.0}), (1,))])[0]
    assert forced.token == 4 and forced.top == (first.top[0],)
    assert forced.logprob == pytest.approx(first.logprob - 3)


def test_given_tokens_get_the_log_probabilities_they_would_have_when_chosen():
    logits = random_logits(2, 4)
    logits[2] = math.nan
    asked = [ask(Sampling(top_logprobs=2), output=[9], seed=seed) for seed in range(4)]
    chosen = choose_batch(logits, asked)
    scored = logprobs_of(logits, [getattr(answer, "token", 0) for answer in chosen], 2)
    assert all(map(same, scored, chosen)) and isinstance(scored[2], FloatingPointError)
    assert [answer.top for answer in logprobs_of(logits[:2], [3, 4])] == [(), ()]


@pytest.mark.parametrize("size", [1, 300, 2047, 2048, 2049, 2303, 4096, 5000])
def test_the_first_largest_is_that_of_argmax(size):
    for seed in range(10):
        scores = random_logits(seed, 4, size, step=2.0)
        scores[0], scores[1, -1], scores[2, size // 2] = -INF, 99.0, 99.0
        peaks, places = ranking.first_largest(scores)
        assert torch.equal(places, scores.argmax(-1)) and torch.equal(peaks, scores.amax(-1))


class Calls(TorchFunctionMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_function__(self, function, kinds, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    "setting", [{}, {"top_logprobs": 3}, {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "dry_multiplier": 1.0},
                {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.5, "top_k": 3, "min_p": 0.1}], ids=str,
)  # fmt: skip
def test_more_rows_are_no_more_operations(setting):
    counts = []
    for rows in (2, 64):
        asked = [ask(Sampling(**setting), [1, 2, 1], [2], seed=row) for row in range(rows)]
        logits = random_logits(0).expand(rows, -1).contiguous()
        with Calls() as calls:
            choose_batch(logits, asked)
        counts.append(calls.count)
    assert counts[0] == counts[1]
    if not setting:
        assert counts[0] < 24
