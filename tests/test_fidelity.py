"""Fidelity: what differs is computed by hand, attributed to the right tokens, and nothing where nothing was reused.

Run: pytest tests/test_fidelity.py
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from models import Adapter, MixtureSpec
from sweep_problem import BITWISE, MODEL, fidelity, prepared_on, write_shelf

from workbench import UserError
from workbench.instrument.run import open_run
from workbench.sweep import fidelity as module
from workbench.sweep.checking import CheckFailed
from workbench.sweep.fidelity import (
    COMPARED,
    differences,
    divergence,
    free_running,
    measure_fidelity,
    rank_correlation,
    reference_of,
    same_tokens,
    sources_of,
    summary,
)
from workbench.sweep.passages import passages_of

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


def logs(*rows):
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float64))


def test_divergence_of_known_distributions():
    p, q = logs([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]), logs([0.25, 0.25, 0.5], [0.2, 0.3, 0.5])
    assert divergence(p, q) == pytest.approx([math.log(2), 0.0], abs=1e-15)
    # what p never says does not count; what q never says counts endlessly
    assert divergence(logs([0.5, 0.5, 0.0]), logs([0.5, 0.5, 0.0])) == pytest.approx([0.0])
    assert divergence(logs([0.5, 0.5]), logs([1.0, 0.0]))[0] == math.inf


@given(arrays.arrays(np.float64, (2, 3, 7), elements=st.floats(-6, 6)))
def test_divergence_is_never_negative_and_survives_rounding(values):
    p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in values)
    expected = (np.exp(p) * (p - q)).sum(-1)
    np.testing.assert_allclose(divergence(p, q), expected, atol=1e-12)
    rounded = divergence(p.astype(np.float32).astype(np.float64), p)
    assert (rounded >= 0).all() and rounded.max() < 1e-11
    assert (divergence(p, p) == 0).all()


def by_hand(one, other):
    """Spearman's correlation of two short lists: Pearson's of their ranks, equal values sharing theirs."""
    def ranks(values):
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    a, b = ranks(one), ranks(other)
    mean = (len(a) - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    bottom = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return top / bottom if bottom else math.nan


def test_rank_correlation_of_known_weights():
    one = np.array([[[1.0, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]]])
    assert rank_correlation(one, one).tolist() == [1.0]
    assert rank_correlation(one, one[..., ::-1]).tolist() == [-1.0]
    assert rank_correlation(one, np.stack([one[:, 0], one[:, 1, ::-1]], 1)).tolist() == [0.0]
    # 1 - 6 sum d² / (n (n² - 1)) without ties: d = 1, 1, 0, 0
    assert rank_correlation(one, one[..., [1, 0, 2, 3]]) == pytest.approx([1 - 6 * 2 / (4 * 15)])


@given(arrays.arrays(np.float64, (2, 2, 3, 4), elements=st.sampled_from([0.0, 0.1, 0.2, 0.5])))
def test_rank_correlation_is_spearmans_with_ties(values):
    found = rank_correlation(*values)
    for token in range(2):
        each = [by_hand(values[0, token, site].tolist(), values[1, token, site].tolist()) for site in range(3)]
        held = [one for one in each if not math.isnan(one)]
        expected = sum(held) / len(held) if held else math.nan
        assert found[token] == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_one_adapter_alone_has_no_ranks():
    assert np.isnan(rank_correlation(np.ones((2, 3, 1)), np.ones((2, 3, 1)))).all()


def scored_by(distributions, logprobs, values, prompt_tokens):
    trace = SimpleNamespace(values=np.array(values, np.float32), prompt_tokens=prompt_tokens, num_tokens=len(values))
    return SimpleNamespace(distributions=distributions.astype(np.float32), logprobs=logprobs), trace


def test_differences_are_those_of_the_row_that_said_the_token():
    # two prompt tokens, two scored ones: rows 1 and 2 said them; rows 0 and 3 did not
    weights = [[[0.9, 0.1]], [[0.6, 0.4]], [[0.7, 0.3]], [[np.nan, np.nan]]]
    others = [[[0.1, 0.9]], [[0.6, 0.4]], [[0.2, 0.8]], [[np.nan, np.nan]]]
    p, q = logs([0.5, 0.5], [0.9, 0.1]), logs([0.5, 0.5], [0.1, 0.9])
    found = differences(scored_by(p, (-0.5, -0.1), weights, 2), scored_by(q, (-0.5, -2.0), others, 2))
    assert found["kl"] == pytest.approx([0, 0.8 * math.log(9)], abs=1e-6)
    assert found["top1"].tolist() == [1, 0] and found["loss"].tolist() == [0.5, 2.0]
    assert found["scalings_l1"] == pytest.approx([0, 1.0]) and found["scalings_rank"] == pytest.approx([1, -1])


def test_same_tokens_end_where_two_texts_part():
    assert [same_tokens((1, 2, 3), other) for other in ((1, 2, 3), (1, 2, 4), (9, 2, 3), (1, 2))] == [3, 2, 0, 2]


def test_a_summary_is_the_mean_over_passages():
    rows = pd.DataFrame({key: [1.0, 2.0, 6.0] for key in COMPARED} | {"domain": ["a", "b", "a"]})
    rows["scalings_rank"] = [math.nan, 0.5, 0.5]
    found = summary(rows)
    assert found["kl"] == 3.0 and found["kl_low"] < 3 < found["kl_high"] and found["num_passages"] == 3
    assert found["perplexity"] == pytest.approx(math.exp(3)) and found["scalings_rank"] == 0.5
    assert found["kl:a"] == 3.5 and found["perplexity:b"] == pytest.approx(math.exp(2))
    # equal passages have an interval of no width; a figure that none has is left out
    same = summary(rows.assign(kl=4.0, scalings_rank=math.nan, domain="a"))
    assert (same["kl_low"], same["kl_high"]) == (4.0, 4.0) and "scalings_rank" not in same and "kl:a" not in same


def test_a_summary_resamples_texts_and_counts_them():
    rows = pd.DataFrame({key: [0.0, 0.1, 8.0, 8.1] for key in COMPARED} | {"domain": "a", "text": ["x", "x", "y", "y"]})
    found, alone = summary(rows), summary(rows.drop(columns="text"))
    assert (found["num_texts"], alone["num_texts"], found["num_passages"]) == (2, 4, 4)
    assert sources_of(rows) == [("x",), ("x",), ("y",), ("y",)]
    switched = rows.assign(other_text=["y", None, "x", "z"])
    assert sources_of(switched) == [("x", "y"), ("x",), ("y", "x"), ("y", "z")]
    assert summary(switched)["num_texts"] == 3
    # six texts of three like passages each know less than eighteen texts would
    values = np.repeat([0.0, 1, 2, 5, 6, 9], 3)
    many = pd.DataFrame(dict.fromkeys(COMPARED, values) | {"domain": "a", "text": np.repeat(list("abcdef"), 3)})
    few, more = summary(many), summary(many.drop(columns="text"))
    assert few["kl_high"] - few["kl_low"] > 1.3 * (more["kl_high"] - more["kl_low"]) and few["kl"] == more["kl"]


def test_passages_say_their_texts(bitwise, tmp_path):
    found, _, folder = measured(bitwise, tmp_path, "exact", passages=5)
    rows = pd.read_parquet(folder / "passages.parquet")
    assert found["num_texts"] == len({*rows.text, *rows.other_text}) > 4
    assert [f"{one}@0>{other}" for one, other in zip(rows.text, rows.other_text, strict=True)] == rows.passage.tolist()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def bitwise(shelf):
    return prepared_on(shelf, **BITWISE)


def measured(prepared, folder, policy, **settings):
    point = fidelity(policy=policy, **{"texts": "switching", **settings})
    folder = folder / point.id
    folder.mkdir()
    return measure_fidelity(point, 0, prepared, folder), pd.read_parquet(folder / "tokens.parquet"), folder


@pytest.mark.parametrize("policy", ["exact", "periodic(1)", "non_granular(18)", "non_granular(500)"])
def test_where_nothing_is_reused_nothing_differs(bitwise, tmp_path, policy):
    found, tokens, folder = measured(bitwise, tmp_path, policy)
    assert found["kl"] == found["kl_high"] == 0 and found["scalings_l1"] == 0 and found["top1"] == 1
    assert found["loss"] == found["loss_exact"] and found["scalings_rank"] == 1 and found["same_tokens"] == 18
    assert (tokens.kl == 0).all() and len(tokens) == 4 * 18 and set(tokens.switch_at) == {6}
    assert open_run(folder / "run").meta["point"]["policy"] == policy
    assert len(pd.read_parquet(folder / "passages.parquet")) == 4


def test_a_difference_belongs_to_the_tokens_after_the_reuse(bitwise, tmp_path):
    for policy, first in (("non_granular(0)", 1), ("non_granular(3)", 4), ("lagged(1)", 1), ("periodic(3)", 1)):
        found, tokens, _ = measured(bitwise, tmp_path, policy)
        # the prompt's last token says the first one, the k-th generated token the k-th after that
        before, after = tokens[tokens.place < first], tokens[tokens.place >= first]
        assert (before.kl == 0).all() and (before.scalings_l1 == 0).all(), policy
        assert (after.groupby("place").kl.max() > 0).all() and found["kl"] > 0
        if policy == "periodic(3)":
            own = after[after.place % 3 == 0]
            # every third token uses scalings of its own; the KV before it is another by then
            assert own.scalings_l1.mean() < 0.5 * after[after.place % 3 != 0].scalings_l1.mean() and own.kl.max() > 0


def test_costs_are_those_of_running_freely(bitwise):
    passages = passages_of(fidelity(texts="single"), bitwise.engine)
    costs = {policy: free_running(bitwise.engine, "mix", policy, passages)[0]
             for policy in ("exact", "non_granular(0)", "lagged(1)", "periodic(2)")}
    inputs = 4 * (6 + 18 - 1)
    for policy, cost in costs.items():
        assert cost["scalings_computed"] + cost["scalings_reused"] == inputs and cost["tok_s"] > 0, policy
    assert costs["non_granular(0)"]["scaling_rows"] == costs["non_granular(0)"]["scalings_computed"] == 4 * 6
    assert costs["exact"]["scalings_reused"] == 0
    # four prompts of six tokens are two forwards of 32 rows here; then one, or up to two, for every token
    assert 1 <= costs["non_granular(0)"]["forwards_per_token"] <= 1.2
    assert costs["lagged(1)"]["forwards_per_token"] <= 1.2 < costs["periodic(2)"]["forwards_per_token"] <= 1.7


def test_more_passages_than_run_at_once_wait_outside(shelf):
    engine = prepared_on(shelf, max_requests=2).engine
    passages = passages_of(fidelity(texts="single"), engine)
    cost, generated = free_running(engine, "mix", "non_granular(0)", passages)
    # a prompt is a scaling pass and an adapted one
    assert cost["forwards_per_token"] == 19 / 18 and [len(each) for each in generated] == [18] * 4


def test_the_reference_is_made_once_for_the_policies_of_one_text(bitwise, monkeypatch):
    module._references.pop(bitwise.engine, None)
    runs, inner = [], module.scored
    monkeypatch.setattr(module, "scored", lambda *given: runs.append(len(given[3])) or inner(*given))
    one, other = (passages_of(fidelity(texts=texts), bitwise.engine) for texts in ("single", "switching"))
    kept = reference_of(bitwise.engine, "mix", one)
    assert reference_of(bitwise.engine, "mix", one) is kept and runs == [3, 1]
    reference_of(bitwise.engine, "mix", other)
    assert reference_of(bitwise.engine, "mix", one) is not kept and len(runs) == 6


def test_a_mixture_of_one_adapter_has_no_ranks_and_loses_nothing(tmp_path):
    shelf = write_shelf(tmp_path / "shelf")
    MixtureSpec({"a": Adapter(("q_proj",), seed=1)}).write(shelf / "mix", MODEL)
    found, *_ = measured(prepared_on(shelf, **BITWISE), tmp_path, "non_granular(0)", texts="single")
    assert found["kl"] == 0 and "scalings_rank" not in found


def test_a_request_that_fails_is_a_failed_check(bitwise, tmp_path, monkeypatch):
    def fails(*given, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bitwise.engine.model, "hidden", fails)
    module._references.pop(bitwise.engine, None)
    with pytest.raises(CheckFailed, match="a passage was not scored: .*out of memory"):
        measured(bitwise, tmp_path, "exact")


def test_distributions_that_would_fill_the_memory_are_refused(bitwise, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "memory_bytes", lambda: 100_000)
    with pytest.raises(UserError, match="4 passages have 72 tokens, .* lower passages or passage_tokens"):
        measured(bitwise, tmp_path, "exact")
