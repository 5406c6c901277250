"""How tokens are chosen, against hand computation: `pytest tests/test_sampling.py`."""

import math

import pytest
import torch

from workbench import Sampling, UserError
from workbench.engine.sampling import choose, gumbel

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log() + 3.0  # a constant changes nothing
DRAWS = 3000


def frequencies(logits: torch.Tensor, prompt=(), output=(), **settings) -> torch.Tensor:
    sampling = Sampling(temperature=settings.pop("temperature", 1.0), **settings)
    counts = torch.zeros(len(logits))
    for seed in range(DRAWS):
        counts[choose(logits, sampling, prompt, output, seed)[0]] += 1
    return counts / DRAWS


def assert_distribution(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 4.5 standard deviations, and nothing where nothing may be."""
    assert not found[expected == 0].any()
    assert ((found - expected).abs() <= 4.5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9).all()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),  # the token that crosses p is kept
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.01}, [0, 1]),  # top_p counts within the three kept: .526, .842
        ({"top_k": 3, "top_p": 0.85}, [0, 1, 2]),
    ],
    ids=str,
)
def test_filters_keep_the_tokens_worked_out_by_hand(settings, kept):
    expected = torch.zeros(4)
    expected[kept] = PROBABILITIES[kept]
    assert_distribution(frequencies(LOGITS, **settings), expected / expected.sum())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_comes_before_the_filters(temperature):
    heated = torch.softmax(LOGITS / temperature, 0)
    assert_distribution(frequencies(LOGITS, temperature=temperature), heated)
    kept = torch.where(heated >= 0.25 * heated.max(), heated, 0)
    assert_distribution(frequencies(LOGITS, temperature=temperature, min_p=0.25), kept / kept.sum())


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-39, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([10.0, 30.0, 29.0, -4.0])
    assert {choose(logits, Sampling(temperature=temperature), [], [], seed)[0] for seed in range(50)} == {1}


def test_equal_logits_go_to_the_first_when_greedy():
    assert choose(torch.tensor([1.0, 2.0, 2.0]), Sampling(), [], [], 0)[0] == 1


@pytest.mark.parametrize(
    ("logits", "prompt", "output", "settings", "expected"),
    [
        ([2.0, 1.9, 0.0], [0], [], {"repetition_penalty": 1.5}, 1),  # 2 / 1.5 < 1.9
        ([2.0, 1.9, 0.0], [], [0], {"repetition_penalty": 1.5}, 1),
        ([2.0, 1.3, 0.0], [0], [], {"repetition_penalty": 1.5}, 0),  # 2 / 1.5 > 1.3
        ([2.0, 1.3, 0.0], [0, 0, 0], [0, 0], {"repetition_penalty": 1.5}, 0),  # once, however often it was seen
        ([-1.0, -1.4, -9.0], [0], [], {"repetition_penalty": 1.5}, 1),  # -1 * 1.5 < -1.4
        ([-1.0, -1.6, -9.0], [0], [], {"repetition_penalty": 1.5}, 0),
        ([1.9, 2.0, 0.0], [0], [], {"repetition_penalty": 0.5}, 0),  # below 1 it favours what was seen
        ([2.0, 1.9, 0.0], [0], [], {"presence_penalty": 0.5}, 0),  # the prompt does not count
        ([2.0, 1.9, 0.0], [], [0], {"presence_penalty": 0.5}, 1),
        ([2.0, 1.4, 0.0], [], [0, 0, 0], {"presence_penalty": 0.5}, 0),  # once: 1.5 > 1.4
        ([2.0, 1.4, 0.0], [], [0, 0, 0], {"frequency_penalty": 0.25}, 1),  # thrice: 1.25 < 1.4
        ([2.0, 1.4, 0.0], [], [0, 0, 1], {"frequency_penalty": 0.25}, 0),  # 1.5 > 1.15
        ([2.0, 1.9, 0.0], [], [1], {"presence_penalty": -0.5}, 1),
        ([2.0, 1.6, 1.5], [2], [0, 1], {"repetition_penalty": 2, "presence_penalty": 0.5, "frequency_penalty": 0.1}, 2),
    ],
)
def test_penalties_are_those_worked_out_by_hand(logits, prompt, output, settings, expected):
    token, logprob = choose(torch.tensor(logits), Sampling(**settings), prompt, output, 0)
    assert token == expected
    # the log-probability is the model's own, before penalties
    assert logprob == pytest.approx(torch.log_softmax(torch.tensor(logits), 0)[token].item())


def test_choosing_leaves_the_logits_and_the_global_generator_alone():
    logits, before = LOGITS.clone(), torch.get_rng_state()
    everything = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=1.0)
    choose(logits, everything, [1], [2], 5)
    assert torch.equal(logits, LOGITS) and torch.equal(torch.get_rng_state(), before)


def test_noise_is_standard_gumbel():
    """Mean 0.5772, variance pi**2 / 6, and the distribution function at some points."""
    noise = torch.cat([gumbel(500, seed, position) for seed in range(10) for position in range(10)])
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)
    for at in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < at).float().mean().item() == pytest.approx(math.exp(-math.exp(-at)), abs=0.01)
    assert noise.isfinite().all()


def test_noise_is_a_function_of_seed_and_position_and_of_nothing_else():
    first = gumbel(50, 3, 4)
    torch.manual_seed(99)
    gumbel(50, 3, 5)
    assert torch.equal(gumbel(50, 3, 4), first)
    # neighbours must not be related: seed + 1 at position - 1 is the pair a plain sum would confuse
    others = [gumbel(50, 3, 5), gumbel(50, 4, 4), gumbel(50, 4, 3), gumbel(50, 2**63 - 1, 4), gumbel(50, 0, 0)]
    for index, one in enumerate(others):
        assert abs(torch.corrcoef(torch.stack([first, one]))[0, 1]) < 0.5
        assert not any(torch.equal(one, other) for other in others[:index])


def test_a_choice_depends_on_the_position_not_on_where_the_prompt_ended():
    sampling = Sampling(temperature=1.0)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        whole = choose(logits, sampling, [1, 2, 3], [], seed)
        assert choose(logits, sampling, [1], [2, 3], seed) == whole
    assert len({choose(logits, sampling, [1] * length, [], 0)[0] for length in range(1, 20)}) > 10


def test_a_draft_from_close_logits_agrees_more_often_than_a_second_draw_would():
    """The same noise couples the two: agreement is near 1 - distance, independent draws agree at sum(p * q)."""
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(60, generator=generator)
    draft = target + 0.3 * torch.randn(60, generator=generator)
    p, q = torch.softmax(target, 0), torch.softmax(draft, 0)
    warm = Sampling(temperature=1.0)
    hits = sum(choose(target, warm, [0], [], seed)[0] == choose(draft, warm, [0], [], seed)[0] for seed in range(600))
    distance = (p - q).abs().sum().item() / 2
    assert hits / 600 > 1 - 2 * distance - 0.06  # Gumbel coupling: at least (1 - d) / (1 + d)
    assert hits / 600 > 3 * (p * q).sum()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_not_a_choice(bad):
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        choose(logits, Sampling(), [], [], 0)


def test_a_token_ruled_out_by_the_model_is_never_chosen():
    logits = torch.tensor([float("-inf"), 0.0, 0.0])
    assert_distribution(frequencies(logits), torch.tensor([0.0, 0.5, 0.5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": None}, "temperature must be"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, or None"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number"),
        ({"frequency_penalty": "x"}, "frequency_penalty must be"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\*\*63 - 1, or None"),
        ({"seed": 2**63}, "seed must be"),
        ({"stop": ("",)}, "stop must be non-empty strings"),
        ({"stop": (3,)}, "stop must be non-empty strings"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_one_stop_string_may_be_given_as_itself():
    assert Sampling(stop="end").stop == ("end",) and Sampling(stop=["a", "b"]).stop == ("a", "b")
