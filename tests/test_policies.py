"""Reuse policies: whose scalings each input uses, that they are those, and what they cost in forwards.

Run: pytest tests/test_policies.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine_on, write_shelf
from models import random_ids

from workbench import UserError, exact, non_granular
from workbench.edits import replay
from workbench.xlora import lagged, periodic, policy_named

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}
POLICIES = [exact(), non_granular(0), non_granular(3), periodic(1), periodic(2), periodic(5), lagged(), lagged(3)]
PROMPT, NEW = random_ids(7, 2), 12


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"), "llama")


@given(st.sampled_from(POLICIES), st.integers(1, 40), st.integers(0, 80))
def test_a_source_is_never_later_and_never_goes_back(policy, prompt_tokens, position):
    source = policy.source(position, prompt_tokens)
    assert 0 <= source <= position and source <= policy.source(position + 1, prompt_tokens)
    if position < prompt_tokens:
        assert source == position
    last = policy.last_own(prompt_tokens)
    assert last is None or source <= last


def test_sources_by_hand():
    for policy, expected in (
        (periodic(3), [0, 1, 2, 3, 3, 3, 6, 6, 6, 9]), (lagged(1), [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]),
        (lagged(3), [0, 1, 2, 3, 3, 3, 3, 4, 5, 6]), (non_granular(2), [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]),
        (periodic(1), list(range(10))),
    ):  # fmt: skip
        assert [policy.source(position, 4) for position in range(10)] == expected


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("rows", [32, 5])
def test_every_input_uses_the_scalings_of_its_source(shelf, drafting, rows):
    """Against exact scalings of the very text, and against a replay of them."""
    engine = engine_on(shelf, drafting=drafting, prefix_cache=False, **{**BITWISE, "max_rows_per_step": rows})
    options = {"mixture": "mix", "max_tokens": NEW, "ignore_eos": True}
    texts = set()
    for policy in POLICIES:
        with engine.record() as recorder:
            done = engine.generate(PROMPT, policy=policy, **options)
            own = engine.score(PROMPT, list(done.token_ids), mixture="mix")
        trace, computed = recorder.trace(done.request_id), recorder.trace(own.request_id)
        inputs = trace.num_tokens - 1
        assert trace.source[:inputs].tolist() == [policy.source(p, len(PROMPT)) for p in range(inputs)]
        np.testing.assert_allclose(trace.values[:inputs], computed.values[trace.source[:inputs]], rtol=1e-5, atol=1e-7)
        with engine.edit(replay(trace)):
            again = engine.generate(PROMPT, **options)
        assert (again.token_ids, again.logprobs) == (done.token_ids, done.logprobs)
        assert done.scalings_computed == int(trace.computed.sum())
        texts.add(done.logprobs)
    # periodic(1) is exact
    assert len(texts) == len(POLICIES) - 1, "some policies gave equal results: the test shows little"


def test_a_lagged_policy_runs_one_forward_a_token_and_a_periodic_one_few_more(shelf):
    engine = engine_on(shelf, drafting=False, prefix_cache=False)
    count = {}
    for policy in POLICIES:
        before = engine.counters()["forwards"]
        engine.generate(PROMPT, policy=policy, mixture="mix", max_tokens=NEW, ignore_eos=True)
        count[policy.name] = engine.counters()["forwards"] - before
    # the prompt's scaling rows come first; then its adapted rows give the first token
    prompt, later = 2, NEW - 1
    assert count["exact"] == count["periodic(1)"] == prompt + 2 * later
    assert count["lagged(1)"] == count["lagged(3)"] == count["non_granular(0)"] == prompt + later
    assert count["non_granular(3)"] == prompt + later + 3
    assert count["periodic(2)"] == prompt + later + later // 2 and count["periodic(5)"] == prompt + later + later // 5


def test_a_name_says_the_policy():
    for policy in POLICIES:
        assert policy_named(policy.name) == policy
    assert policy_named(" lagged( 1 ) ") == lagged(1)


@pytest.mark.parametrize(
    ("name", "said"),
    [("exakt", "did you mean 'exact'"), ("periodic", "needs its number"), ("exact(3)", "needs no number"),
     ("lagged(0)", "at least 1"), ("non_granular(-1)", "is written"), (4, "is written"), ("periodic(x)", "is written")],
)  # fmt: skip
def test_a_name_that_says_none_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        policy_named(name)


def test_requests_take_a_policy_by_name(shelf):
    engine = engine_on(shelf)
    done = engine.generate(PROMPT, mixture="mix", policy="non_granular(0)", max_tokens=6, ignore_eos=True)
    assert (done.scalings_computed, done.scalings_reused) == (len(PROMPT), 5)
    with pytest.raises(UserError, match="did you mean"):
        engine.generate(PROMPT, mixture="mix", policy="laged(1)")
