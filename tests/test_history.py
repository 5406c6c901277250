"""What penalties know of a request's tokens, against plain counting: `pytest tests/test_history.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import history_of

from workbench import Sampling, UserError
from workbench.engine.history import History

VOCAB = 6
BREAKERS = frozenset({5})
EVERYTHING = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
ids = st.integers(0, VOCAB - 1)
dry_settings = st.builds(
    Sampling, dry_multiplier=st.just(0.8), dry_base=st.sampled_from([1.0, 1.75]),
    dry_allowed_length=st.sampled_from([1, 2, 4]), dry_range=st.sampled_from([None, 1, 5, 12]),
    repetition_penalty=st.just(1.1), presence_penalty=st.just(0.5),
)  # fmt: skip
# two tokens that mostly alternate make long repetitions
repetitive = st.lists(st.sampled_from([1, 2, 1, 2, 3, 5]), max_size=40)


def naive_dry(tokens: list[int], sampling: Sampling, breakers=BREAKERS) -> dict[int, float]:
    """Token -> penalty: each length and each earlier place tried.

    A token extends a repetition of L when the last L tokens, none of them a breaker, stood right before it once.
    """
    window = tokens if sampling.dry_range is None else tokens[-sampling.dry_range :]
    found = {}
    for token in set(window) - breakers:
        longest = 0
        for length in range(1, len(window)):
            end = window[-length:]
            if breakers.intersection(end):
                break
            if any(window[at : at + length + 1] == [*end, token] for at in range(len(window) - length)):
                longest = length
        if longest >= sampling.dry_allowed_length:
            growth = min(longest, 50) - sampling.dry_allowed_length
            found[token] = sampling.dry_multiplier * sampling.dry_base**growth
    return found


def published_dry(tokens: list[int], multiplier: float, base: float, allowed: int, breakers) -> dict[int, float]:
    """Token -> penalty by the sampler's own account: from each earlier place of the last token, count backwards."""
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        if tokens[place] != tokens[-1] or tokens[-1] in breakers or tokens[place + 1] in breakers:
            continue
        length = 1
        while length < 50 and place >= length and tokens[place - length] == tokens[-1 - length] not in breakers:
            length += 1
        longest[tokens[place + 1]] = max(longest.get(tokens[place + 1], 0), length)
    return {token: multiplier * base ** (n - allowed) for token, n in longest.items() if n >= allowed}


def dry_of(history: History, extra=()) -> dict[int, float]:
    tokens, amounts = history.repetitions(extra)
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), amounts.tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(dry_settings, repetitive, repetitive, st.lists(ids, max_size=3))
def test_dry_penalises_what_the_definitions_say(sampling, prompt, output, extra):
    found = dry_of(history_of(sampling, prompt, output, VOCAB, BREAKERS), extra)
    tokens = [*prompt, *output, *extra]
    assert found == pytest.approx(naive_dry(tokens, sampling))
    window = tokens if sampling.dry_range is None else tokens[-sampling.dry_range :]
    published = published_dry(window, 0.8, sampling.dry_base, sampling.dry_allowed_length, BREAKERS) if window else {}
    assert found == pytest.approx(published)


def test_the_longest_repetition_counts_not_the_latest():
    sampling = Sampling(dry_multiplier=0.8, dry_base=2.0)
    tokens = [3, 1, 2, 4, 0, 1, 2, 4, 3, 1, 2]  # 4 followed 3 1 2 once, and 1 2 later
    assert dry_of(history_of(sampling, tokens, [], VOCAB)) == {4: 1.6}
    assert dry_of(history_of(sampling, tokens[:1], tokens[1:], VOCAB)) == {4: 1.6}


def test_a_long_loop_is_penalised_up_to_a_length_of_50():
    sampling = Sampling(dry_multiplier=0.5, dry_base=2.0)
    looping = history_of(sampling, [1, 2, 3] * 40, [1, 2, 3] * 40, VOCAB)
    assert dry_of(looping) == {1: 0.5 * 2.0**48} == naive_dry([1, 2, 3] * 80, sampling)
    # a longer allowed length is reached all the same
    patient = Sampling(dry_multiplier=0.5, dry_allowed_length=100)
    assert dry_of(history_of(patient, [1, 2, 3] * 40, [], VOCAB)) == {1: 0.5}
    assert dry_of(history_of(patient, [1, 2, 3] * 34, [1], VOCAB)) == {2: 0.5}
    assert dry_of(history_of(patient, [1, 2, 3] * 34, [], VOCAB)) == {}


@settings(max_examples=150, deadline=None)
@given(dry_settings, st.lists(ids, max_size=90), st.lists(ids, max_size=90), st.lists(ids, max_size=4))
def test_tokens_asked_about_count_as_if_they_were_pushed_and_leave_no_trace(sampling, prompt, output, extra):
    def everything(history, extra=()):
        said = dict(zip(*(values.tolist() for values in history.said(extra)), strict=True))
        return set(history.seen(extra).tolist()), said, dry_of(history, extra), history.num_tokens

    asked = history_of(sampling, prompt, output, VOCAB, BREAKERS)
    pushed = history_of(sampling, prompt, [*output, *extra], VOCAB, BREAKERS)
    before = everything(asked)
    seen, said, dry, _ = everything(asked, extra)
    assert (seen, said, dry) == everything(pushed)[:3]
    assert seen == {*prompt, *output, *extra} and len(asked.seen(extra)) == len(seen)
    assert said == {token: [*output, *extra].count(token) for token in {*output, *extra}}
    assert everything(asked) == before
    for token in extra:
        asked.push(token)
    assert everything(asked) == everything(pushed)


def test_a_setting_that_is_off_keeps_nothing():
    history = history_of(Sampling(temperature=1.0, logit_bias={1: 1.0}), [1] * 1000, [2] * 1000, VOCAB)
    assert [part for part in vars(history).values() if not isinstance(part, int)] == [None, None, None]
    assert (history.num_prompt, history.num_output, history.num_tokens) == (1000, 1000, 2000)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"dry_multiplier": 1.0}], ids=str)
def test_a_prompt_outside_the_vocabulary_is_refused(settings):
    with pytest.raises(UserError, match="prompt tokens must be from 0 to 5, not 6"):
        History(Sampling(**settings), [1, 6], VOCAB)


def test_ids_come_as_the_indices_torch_takes():
    history = history_of(Sampling(**EVERYTHING, dry_multiplier=1.0), [1, 1], [1], VOCAB)
    for found in (history.seen(), history.seen([2]), *history.said([2, 1]), history.repetitions()[0]):
        assert found.dtype == np.int64
    assert history.said([2, 1, 2])[1].tolist() == [2, 2]
