"""Settings that are refused, and how tokens are chosen against hand computation: `pytest tests/test_sampling.py`."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from workbench import Sampling, UserError
from workbench.engine.choosing import Question, choose_batch
from workbench.engine.history import History
from workbench.engine.noise import exponential
from workbench.engine.sampling import DryBreakers, check_vocabulary

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log() + 3.0  # a constant changes nothing
DRAWS = 3000


def choose_all(logits: torch.Tensor, sampling: Sampling, prompt, output, seeds) -> list:
    """The choice of one and the same row for each seed."""
    history = History(sampling, prompt, logits.shape[-1])
    for token in output:
        history.push(token)
    return choose_batch(logits.expand(len(seeds), -1), [Question(sampling, history, seed) for seed in seeds])


def choose(logits: torch.Tensor, sampling: Sampling, prompt, output, seed) -> tuple[int, float]:
    (choice,) = choose_all(logits, sampling, prompt, output, [seed])
    return choice.token, choice.logprob


def frequencies(logits: torch.Tensor, prompt=(), output=(), **settings) -> torch.Tensor:
    sampling = Sampling(temperature=settings.pop("temperature", 1.0), **settings)
    tokens = [choice.token for choice in choose_all(logits, sampling, prompt, output, range(DRAWS))]
    return torch.tensor(tokens).bincount(minlength=len(logits)) / DRAWS


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
        # the entropy is 1.142; the surprises are .69, 1.20, 1.90, 3.00
        ({"typical_p": 0.3}, [1]),
        ({"typical_p": 0.31}, [0, 1]),
        ({"typical_p": 0.81}, [0, 1, 2]),
        ({"typical_p": 0.3, "top_p": 0.5}, [1]),
        ({"typical_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 2, "typical_p": 0.6}, [0]),  # among two the entropy is .662, the surprises .47 and .98
        ({"top_k": 2, "typical_p": 0.63}, [0, 1]),
        ({"logit_bias": {0: -math.inf, 1: math.log(0.5)}}, [1, 2, 3]),
        ({"logit_bias": {0: 50.0}, "top_p": 0.9}, [0]),
    ],
    ids=str,
)
def test_filters_keep_the_tokens_worked_out_by_hand(settings, kept):
    expected = torch.zeros(4)
    expected[kept] = PROBABILITIES[kept]
    expected[1] *= 0.5 if 1 in settings.get("logit_bias", {}) else 1
    assert_distribution(frequencies(LOGITS, **settings), expected / expected.sum())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_comes_before_the_filters(temperature):
    heated = torch.softmax(LOGITS / temperature, 0)
    assert_distribution(frequencies(LOGITS, temperature=temperature), heated)
    kept = torch.where(heated >= 0.25 * heated.max(), heated, 0)
    assert_distribution(frequencies(LOGITS, temperature=temperature, min_p=0.25), kept / kept.sum())


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-39, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature, filters):
    logits = torch.tensor([10.0, 30.0, 29.0, -4.0])
    if temperature == 0:
        filters = {name: value for name, value in filters.items() if name != "typical_p"}
    found = choose_all(logits, Sampling(temperature=temperature, **filters), [], [], range(50))
    assert {choice.token for choice in found} == {1}


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
        ([2.0, 1.9, 0.0], [], [], {"logit_bias": {0: -0.2}}, 1),
        ([2.0, 1.9, 0.0], [0], [], {"logit_bias": {1: 0.2}, "repetition_penalty": 1.1}, 1),  # 1.82, 2.1
        ([2.0, 1.9, 0.0], [1], [], {"logit_bias": {1: 0.29}, "repetition_penalty": 1.1}, 0),  # the bias first: 1.99
        # 1 2 then 0; 1 2 again: 0 would repeat three, so it loses .5 * 2 ** (2 - 2), and .5 * 2 at one more
        ([2.0, 1.6, 0.0], [1, 2, 0], [1, 2], {"dry_multiplier": 0.5, "dry_base": 2}, 1),
        ([2.0, 1.4, 0.0], [1, 2, 0], [1, 2], {"dry_multiplier": 0.5, "dry_base": 2}, 0),
        ([2.0, 1.1, 0.0], [2, 1, 2, 0], [2, 1, 2], {"dry_multiplier": 0.5, "dry_base": 2}, 1),
        ([2.0, 1.6, 0.0], [1, 2, 0], [1, 2], {"dry_multiplier": 0.5, "dry_allowed_length": 3}, 0),
        ([2.0, 1.6, 0.0], [1, 2, 0], [1, 2], {"dry_multiplier": 0.5, "dry_range": 4}, 0),  # sees one of the 1 2
    ],
)
def test_penalties_are_those_worked_out_by_hand(logits, prompt, output, settings, expected):
    token, logprob = choose(torch.tensor(logits), Sampling(**settings), prompt, output, 0)
    assert token == expected
    # the log-probability is the model's own, before penalties
    assert logprob == pytest.approx(torch.log_softmax(torch.tensor(logits), 0)[token].item())


def test_choosing_leaves_the_logits_and_the_global_generator_alone():
    logits, before = LOGITS.clone(), torch.get_rng_state()
    everything = Sampling(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.95, repetition_penalty=1.3, presence_penalty=1.0,
        dry_multiplier=1.0, logit_bias={0: -1.0}, top_logprobs=2,
    )
    choose(logits, everything, [1, 1], [2], 5)
    assert torch.equal(logits, LOGITS) and torch.equal(torch.get_rng_state(), before)


def noise(size: int, seed: int, position: int) -> torch.Tensor:
    return exponential(torch.arange(size), [(seed, position)])[0]


def test_noise_is_standard_exponential():
    """Mean and variance 1, and the distribution function at some points, far out in the tail too."""
    found = torch.cat([noise(20_000, seed, position) for seed in range(10) for position in range(10)])
    assert found.mean().item() == pytest.approx(1, abs=0.004)
    assert found.var().item() == pytest.approx(1, abs=0.012)
    for at in (1e-5, 1e-4, 1e-2, 0.3, 1.0, 3.0, 9.0):
        share = -math.expm1(-at)
        assert (found < at).sum().item() == pytest.approx(2e6 * share, abs=4.5 * math.sqrt(2e6 * share * (1 - share)))
    assert found.isfinite().all() and (found > 0).all() and (found < 23).all()


def test_noise_is_a_function_of_seed_position_and_token_and_of_nothing_else():
    first = noise(50, 3, 4)
    torch.manual_seed(99)
    noise(50, 3, 5)
    assert torch.equal(noise(50, 3, 4), first)
    assert torch.equal(noise(9000, 3, 4)[:50], first)
    keys, ids = [(7, 1), (3, 4), (0, 0)], torch.tensor([[49, 3], [2, 17], [0, 1]], dtype=torch.int32)
    assert torch.equal(exponential(ids, keys)[1], first[[2, 17]])
    # two keys whose first 32 bits of hash are the same
    assert not torch.equal(noise(50, 38384, 1), noise(50, 65317, 1))
    # neighbours must not be related: seed + 1 at position - 1 is the pair a plain sum would confuse
    others = [noise(50, 3, 5), noise(50, 4, 4), noise(50, 4, 3), noise(50, 2**63 - 1, 4), noise(50, 0, 0)]
    for index, one in enumerate(others):
        assert abs(torch.corrcoef(torch.stack([first, one]))[0, 1]) < 0.5
        assert not any(torch.equal(one, other) for other in [first, *others[:index]])


def test_noise_of_neighbouring_tokens_positions_and_seeds_is_unrelated():
    """Pairs fill the unit square evenly: chi-square of 256 cells, within 5 standard deviations."""
    keys = [(seed, position) for seed in range(20) for position in range(20)]
    uniform = exponential(torch.arange(1000), keys).double().neg().exp()
    pairs = [(uniform[:, :-gap], uniform[:, gap:]) for gap in (1, 2, 64)]
    pairs += [(uniform[:-gap], uniform[gap:]) for gap in (1, 19, 20, 21)]
    for one, other in pairs:
        cells = ((one * 16).long() * 16 + (other * 16).long()).flatten().bincount(minlength=256).double()
        expected = cells.sum() / 256
        assert ((cells - expected) ** 2 / expected).sum().item() < 255 + 5 * math.sqrt(2 * 255)


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
    both = [choose_all(logits, warm, [0], [], range(600)) for logits in (target, draft)]
    hits = sum(one.token == other.token for one, other in zip(*both, strict=True))
    distance = (p - q).abs().sum().item() / 2
    assert hits / 600 > 1 - 2 * distance - 0.06  # Gumbel coupling: at least (1 - d) / (1 + d)
    assert hits / 600 > 3 * (p * q).sum()


def test_a_token_ruled_out_by_the_model_is_never_chosen():
    logits = torch.tensor([float("-inf"), 0.0, 0.0])
    assert_distribution(frequencies(logits), torch.tensor([0.0, 0.5, 0.5]))


WHOLE = "a whole number of at least 1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, f"max_tokens must be {WHOLE}, not 0"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number of at least 1, not None"),
        ({"max_tokens": 10**400, "temperature": 10**400}, "max_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": None}, "temperature must be"),
        ({"temperature": torch.tensor(1.0)}, "temperature must be"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, or None"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, not nan"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1"),
        ({"typical_p": 0, "temperature": 1}, "typical_p must be above 0 and at most 1, or None, not 0"),
        ({"typical_p": False}, "typical_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number"),
        ({"frequency_penalty": "x"}, "frequency_penalty must be"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\*\*63 - 1, or None"),
        ({"seed": 2**63}, "seed must be"),
        ({"stop": ("",)}, "stop must be non-empty strings"),
        ({"stop": (3,)}, "stop must be non-empty strings"),
        ({"stop": 3}, r"stop must be non-empty strings, not \[3\]"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"prompt_logprobs": "no"}, "prompt_logprobs must be True or False, not 'no'"),
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0"),
        ({"dry_multiplier": -0.1}, "dry_multiplier must be a number of at least 0"),
        ({"dry_base": 0.9}, "dry_base must be a number of at least 1, not 0.9"),
        ({"dry_base": float("inf")}, "dry_base must be"),
        ({"dry_allowed_length": 0}, f"dry_allowed_length must be {WHOLE}"),
        ({"dry_range": 0}, f"dry_range must be {WHOLE}, or None"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers must be non-empty strings"),
        ({"logit_bias": [1, 2]}, "logit_bias must map token ids to numbers, not be a list"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must be keyed by token ids, whole numbers of at least 0, not '5'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be keyed by token ids.*not -1"),
        ({"logit_bias": {True: 1.0}}, "logit_bias must be keyed by token ids.*not True"),
        ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 must be a finite number, or -inf, not inf"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 must be a finite number, or -inf, not nan"),
        ({"logit_bias": {5: "x"}}, "logit_bias of token 5 must be a finite number"),
        ({"logit_bias": {5: True}}, "logit_bias of token 5 must be a finite number"),
        ({"stop_token_ids": [2, -1, "x"]}, "stop_token_ids must be token ids, .*, not -1, 'x'"),
        ({"stop_token_ids": 1.5}, "stop_token_ids must be token ids"),
        ({"top_logprobs": 21}, "top_logprobs must be a whole number from 0 to 20, not 21"),
        ({"top_logprobs": True}, "top_logprobs must be"),
        ({"n": 0}, f"n must be {WHOLE}"),
        ({"best_of": 0}, f"best_of must be {WHOLE}, or None"),
        ({"min_tokens": 4, "max_tokens": 3}, r"min_tokens \(4\) is above max_tokens \(3\)"),
        ({"typical_p": 0.9}, r"typical_p \(0.9\) may drop the most likely token, which temperature 0 always takes"),
        ({"n": 3, "best_of": 2, "temperature": 1}, r"best_of \(2\) is below n \(3\)"),
        ({"n": 2, "best_of": 3}, r"best_of \(3\) is above n \(2\) at temperature 0, where all answers are alike"),
    ],
    ids=str,
)
def test_settings_out_of_range_or_in_contradiction_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3},  # at temperature 0 all keep the token it takes
        {"typical_p": 1.0},
        {"n": 3, "best_of": 3},
        {"min_tokens": 128, "max_tokens": 128},
        {"dry_base": 2.0, "dry_range": 4},  # off, as said
        {"logit_bias": {3: -math.inf, 0: 5}, "stop_token_ids": 3},
    ],
    ids=str,
)
def test_settings_that_only_have_no_effect_together_are_allowed(settings):
    Sampling(**settings)


def test_settings_are_normal_values_that_compare_hash_and_serialise():
    given = Sampling(
        max_tokens=np.int64(5), temperature=np.float32(0.5), stop_token_ids=np.array([3, 4]), stop=None, n=2,
        logit_bias={np.int64(3): np.float32(0.5)},
    )
    same = Sampling(max_tokens=5, temperature=0.5, stop_token_ids=(3, 4), logit_bias={3: 0.5}, n=2)
    assert given == same and hash(given) == hash(same) and json.loads(json.dumps(asdict(given)))["max_tokens"] == 5
    assert given.num_answers == 2 and replace(given, best_of=4).num_answers == 4
    bias = {1: 1.0}
    kept = Sampling(logit_bias=bias)
    bias[1] = 9.0
    assert kept.logit_bias == {1: 1.0}


def test_one_stop_string_or_token_may_be_given_as_itself():
    assert Sampling(stop="end").stop == ("end",) and Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop_token_ids=7).stop_token_ids == (7,)


def test_token_ids_of_settings_must_be_in_the_vocabulary():
    check_vocabulary(Sampling(logit_bias={9: 1.0}, stop_token_ids=[9]), 10)
    with pytest.raises(UserError, match="logit_bias names token 10, but the vocabulary ends at 9"):
        check_vocabulary(Sampling(logit_bias={12: 1.0, 10: 1.0}), 10)
    with pytest.raises(UserError, match="stop_token_ids names token 10, but the vocabulary ends at 9"):
        check_vocabulary(Sampling(stop_token_ids=10), 10)
    with pytest.raises(UserError, match="logit_bias rules out all 2 tokens of the vocabulary"):
        check_vocabulary(Sampling(logit_bias={0: -math.inf, 1: -math.inf}), 2)
    check_vocabulary(Sampling(logit_bias={0: -math.inf, 1: -3.0}), 2)


class Words:
    """A tokenizer of three tokens that counts how often its texts are asked for."""

    texts, asked = ["a", ".\n", "\n"], 0

    def __len__(self):
        return len(self.texts)

    def batch_decode(self, ids):
        self.asked += 1
        return [self.texts[token] for (token,) in ids]


def test_dry_breakers_are_the_tokens_whose_text_holds_one_of_the_strings():
    words = Words()
    breakers = DryBreakers(words, 8)
    on = Sampling(dry_multiplier=1.0, dry_sequence_breakers="\n")
    assert breakers.ids(on) == {1, 2} and breakers.ids(replace(on, dry_sequence_breakers=["a", "."])) == {0, 1}
    assert breakers.ids(on) == {1, 2} and words.asked == 1
    assert breakers.ids(Sampling()) == breakers.ids(replace(on, dry_sequence_breakers=())) == frozenset()
    with pytest.raises(UserError, match="no token of the vocabulary holds 'a.', so it cannot break sequences"):
        breakers.ids(replace(on, dry_sequence_breakers=["a."]))
    with pytest.raises(UserError, match="without a tokenizer .* dry_sequence_breakers cannot be found"):
        DryBreakers(None, 8).ids(on)
    assert DryBreakers(None, 8).ids(Sampling()) == frozenset()
