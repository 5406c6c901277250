"""Comparison: what differs between settings of one prompt, and what batch shape alone does.

Run: pytest tests/test_comparison.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_problem import HOSTILE, small_trace

from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.instrument.ranks import rank_correlation
from workbench.instrument.trace import Trace

SITES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")
ADAPTERS = ("german", "python", "law")


def trace_of(ids, seed: int = 0, prompt: int = 3, metadata: dict | None = None, **changes) -> Trace:
    """Return a trace of these tokens with random scalings that sum to 1; the last token is no input."""
    rng = np.random.default_rng(seed)
    count = len(ids)
    values = rng.dirichlet(np.ones(len(ADAPTERS)), (count, len(SITES))).astype(np.float32)
    positions = np.arange(count)
    source = positions.copy()
    values[-1], source[-1] = np.nan, -1
    fields = {
        "values": values, "adapters": ADAPTERS, "sites": SITES, "token_ids": np.asarray(ids),
        "tokens": tuple(f"t{i} " for i in ids), "positions": positions, "generated": positions >= prompt,
        "source": source, "draft": np.full(count, -1), "time_s": np.zeros(count),
        "metadata": {"base": "tiny", "mixture": "mix", "policy": "exact", "seed": 0, **(metadata or {})},
    }  # fmt: skip
    return Trace(**{**fields, **changes})


def moved(trace: Trace, amount: float, tokens=slice(None)) -> Trace:
    """Return the trace with one adapter's scalings moved by `amount` at every site, at these tokens."""
    values = trace.values.copy()
    values[tokens, :, 0] += np.float32(amount)
    return replace(trace, values=values)


ids = st.lists(st.integers(0, 50), min_size=4, max_size=12)


@given(ids, st.integers(0, 99))
def test_identical_traces_give_nothing_to_show(tokens, seed):
    trace = trace_of(tokens, seed)
    same = Comparison.of({"a": trace, "b": replace(trace)}, replace(trace))
    assert same.divergence("b") is None and same.floor.divergence is None and same.floor.level == 0
    assert np.isnan(same.shown_difference("b")).all() and np.isnan(same.shown_means("b")).all()
    assert (same.l1("b")[:-1] == 0).all() and np.isnan(same.l1("b")[-1])
    assert "no difference above the floor" in same.says("b") and "the same text" in same.says("b")


@given(ids, st.data())
def test_divergence_is_the_first_token_that_differs_and_ends_the_distances(tokens, data):
    at = data.draw(st.integers(3, len(tokens) - 1))
    others = [*tokens[:at], *data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))]
    others[at] = tokens[at] + 1
    found = Comparison.of({"a": trace_of(tokens, 1), "b": trace_of(others, 2)})
    assert found.divergence("b") == at
    assert np.isnan(found.l1("b")[at:]).all() and len(found.l1("b")) == max(len(tokens), len(others))
    stop = min(at, len(tokens) - 1, len(others) - 1)
    assert (found.l1("b")[:stop] > 0).all()


@given(ids, st.integers(0, 9), st.integers(10, 19))
def test_distances_do_not_depend_on_the_order_of_the_settings(tokens, one, other):
    first, second = trace_of(tokens, one), trace_of([*tokens[:-1], 77, 78], other)
    forth = Comparison.of({"a": first, "b": second})
    back = Comparison.of({"b": second, "a": first})
    assert np.array_equal(forth.l1("b"), back.l1("a"), equal_nan=True)
    assert forth.divergence("b") == back.divergence("a")
    assert np.allclose(forth.shown_means("b"), -back.shown_means("a"), equal_nan=True)


def test_the_distance_is_the_mean_over_sites_of_the_sum_over_adapters():
    one, other = trace_of(range(5), 1), trace_of(range(5), 2)
    by_hand = [
        sum(
            abs(float(one.values[t, s, a]) - float(other.values[t, s, a])) for s in range(3) for a in range(3)
        ) / 3
        for t in range(4)
    ]  # fmt: skip
    assert np.allclose(Comparison.of({"a": one, "b": other}).l1("b")[:4], by_hand, atol=1e-12)


@given(ids, st.floats(0, 0.5), st.floats(0, 0.5))
def test_what_the_null_pair_does_too_is_not_shown(tokens, noise, change):
    first = trace_of(tokens, 3)
    found = Comparison.of({"a": first, "b": moved(first, change)}, moved(first, noise))
    shown = found.shown_difference("b")
    assert not (shown <= found.floor.level).any()
    assert (found.l1("b")[np.isnan(shown)] <= found.floor.level).sum() == (np.isnan(shown[:-1])).sum()
    if change > noise + 1e-3:
        assert not np.isnan(shown[:-1]).any()
    if change <= noise:
        assert np.isnan(shown).all()


def test_the_floor_is_the_null_pairs_largest_distance_at_any_token():
    first = trace_of(range(8), 1)
    null = moved(first, 0.3, slice(6, 7))  # one loud token
    found = Comparison.of({"a": first, "b": moved(first, 0.1), "c": moved(first, 0.4)}, null)
    assert found.floor.level == pytest.approx(0.3, abs=1e-6)
    assert np.isnan(found.shown_difference("b")).all()
    assert (found.shown_difference("c")[:7] > 0.3).all()


@given(st.integers(3, 8), st.integers(3, 8))
def test_nothing_from_the_null_pairs_divergence_on_is_attributed(null_at, setting_at):
    tokens = list(range(10))
    first = trace_of(tokens, 1)

    def parted(at, seed):
        return trace_of([*tokens[:at], *(90 + i for i in range(10 - at))], seed)

    null = replace(parted(null_at, 1), values=first.values)
    found = Comparison.of({"a": first, "b": parted(setting_at, 2), "c": trace_of(tokens, 3)}, null)
    assert found.floor.divergence == null_at and found.divergence("b") == setting_at
    assert np.isnan(found.shown_difference("c")[null_at:]).all()
    assert not np.isnan(found.shown_difference("c")[:null_at]).any()
    assert found.is_attributed("b") == (setting_at < null_at)
    assert f"parts at token {null_at}" in found.floor_says() and "nothing is attributed" in found.floor_says()
    assert ("not attributed" in found.says("b")) == (setting_at >= null_at)


@pytest.mark.parametrize(("other", "said"), [("", "(token id"), (" same", "(' same', token id")])
def test_tokens_that_look_alike_are_told_apart_by_their_ids(other, said):
    trace = small_trace(tokens=("Alpha", " beta", other, "."))
    ids = trace.token_ids.copy()
    ids[2] += 1000
    found = Comparison.of({"a": trace, "b": replace(trace, token_ids=ids)})
    assert said in found.says("b") and str(ids[2]) in found.says("b") and str(trace.token_ids[2]) in found.says("b")


def test_a_divergence_that_nothing_explains_says_so():
    tokens = list(range(8))
    first = trace_of(tokens, 1)
    other = replace(trace_of([*tokens[:5], 60, 61, 62], 1), values=first.values)
    assert "near tie" in Comparison.of({"a": first, "b": other}, first).says("b")
    reseeded = replace(other, metadata={**other.metadata, "seed": 4})
    assert "near tie" not in Comparison.of({"a": first, "b": reseeded}, first).says("b")


def test_without_a_null_pair_every_difference_is_shown_and_none_is_proven():
    first = trace_of(range(6), 1)
    found = Comparison.of({"a": first, "b": moved(first, 1e-6)})
    assert found.floor is None and (found.shown_difference("b")[:5] > 0).all()
    assert "none is proven" in found.floor_says()


def test_a_text_that_only_ends_earlier_has_not_diverged():
    found = Comparison.of({"a": trace_of(range(9), 1), "b": trace_of(range(6), 1)})
    assert found.divergence("b") is None and found.num_tokens == 9
    assert np.isnan(found.l1("b")[6:]).all() and "ends earlier" in found.says("b")


def test_a_single_adapter_stands_beside_a_mixture():
    mixture = trace_of(range(6), 1, metadata={"adapter_keys": ["k-german", "k-python", "k-law"]})
    ones = np.ones((6, 2, 1), np.float32)
    ones[5] = np.nan
    alone = trace_of(
        range(6), values=ones, adapters=("german-alone",), sites=SITES[1:],
        metadata={"mixture": None, "adapter": "german-alone", "adapter_keys": {"german-alone": "k-german"}},
    )  # fmt: skip
    found = Comparison.of({"mix": mixture, "alone": alone})
    assert found.adapters == ADAPTERS and found.sites == SITES
    values = found.values("alone")
    assert (values[:5, 1:, 0] == 1).all() and (values[:5, 0] == 0).all() and (values[:5, :, 1:] == 0).all()
    assert np.isnan(values[5]).all()
    # known by its name where contents are not known; a column of its own where they are others
    other = replace(alone, adapters=("german",), metadata={**alone.metadata, "adapter_keys": {"german": "k-other"}})
    assert Comparison.of({"mix": mixture, "x": other}).adapters == (*ADAPTERS, "german of x")
    unknown = replace(alone, adapters=("german",), metadata={"mixture": None})
    assert Comparison.of({"x": unknown, "mix": mixture}).adapters == ADAPTERS


def test_the_base_model_has_no_weights_at_any_site():
    base = trace_of(
        range(6), values=np.zeros((6, 0, 0), np.float32), adapters=(), sites=(), source=np.full(6, -1),
        metadata={"mixture": None},
    )  # fmt: skip
    found = Comparison.of({"base": base, "mix": trace_of(range(6), 1)})
    assert (found.values("base")[:5] == 0).all() and np.isnan(found.values("base")[5]).all()
    assert np.allclose(found.l1("mix")[:5], 1)
    nobody = Comparison.of({"a": base, "b": base}, base)
    assert "no token with scalings" in nobody.says("b") and nobody.shares("a") == {}
    assert len(nobody.to_frame()) == 18 and nobody.summary().shape[0] == 3


def test_another_order_of_the_adapters_is_no_difference():
    one = trace_of(range(5), 1)
    turned = replace(one, values=one.values[:, ::-1, ::-1], adapters=ADAPTERS[::-1], sites=SITES[::-1])
    assert (Comparison.of({"a": one, "b": turned}).l1("b")[:4] == 0).all()


PLAIN = trace_of(range(6), 1)


@pytest.mark.parametrize(
    "other, said",
    [
        ({"metadata": {"base": "other"}}, "base 'tiny', 'b' on 'other'"),
        ({"prompt": 4}, "a prompt of 3 tokens, 'b' one of 4"),
        ({"ids": [0, 9, 2, 3, 4, 5]}, "token 1 is 't1 ' in one and 't9 ' in the other"),
        ({"adapters": ("german", "python", "laws")}, "did you mean 'law'?"),
        ({"adapters": ("german",), "sliced": (slice(None), slice(None), slice(1))}, "lacks 'python', 'law'"),
        ({"sites": (*SITES[:2], "model.layers.1.mlp.up_prj")}, "lacks 'model.layers.1.mlp.up_proj'"),
        ({"positions": np.arange(6) + 1, "source": np.full(6, -1), "empty": True}, "different positions"),
        ({"metadata": {"adapter_keys": ["x", "y", "z"]}, "first_keys": ["x", "y", "q"]}, "'law' has other weights"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(other, said):
    changes = dict(other)
    first = PLAIN
    if "first_keys" in changes:
        first = trace_of(range(6), 1, metadata={"adapter_keys": changes.pop("first_keys")})
    if changes.pop("empty", False):
        changes["values"] = np.full((6, 3, 3), np.nan, np.float32)
    if "sliced" in changes:
        changes["values"] = PLAIN.values[changes.pop("sliced")]
    with pytest.raises(UserError, match="(?s).*") as caught:
        Comparison.of({"a": first, "b": trace_of(changes.pop("ids", range(6)), 1, **changes)})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "given, said",
    [
        ([PLAIN, PLAIN], "a dict of label -> Trace"),
        ({"a": PLAIN}, "2 to 8 settings, not 1"),
        ({str(i): PLAIN for i in range(9)}, "not 9"),
        ({"a": PLAIN, "b": "file.safetensors"}, "Trace.load"),
        ({"a": PLAIN, 3: PLAIN}, "must be text"),
        ({"a": PLAIN, " ": PLAIN}, "must be text"),
    ],
)
def test_what_is_no_set_of_traces_is_a_sentence(given, said):
    with pytest.raises(UserError, match="(?s).*") as caught:
        Comparison.of(given)
    assert said in str(caught.value)


def test_a_null_pair_of_another_setting_is_refused():
    reusing = replace(PLAIN, metadata={**PLAIN.metadata, "policy": "non_granular(1)"})
    for wrong in (reusing, PLAIN.select(adapters="law")):
        with pytest.raises(UserError, match="null pair must be 'a' once more"):
            Comparison.of({"a": PLAIN, "b": PLAIN}, wrong)


def test_unknown_names_give_the_nearest():
    found = Comparison.of({"exact": PLAIN, "k=1": PLAIN}, failed={"k=2": "no room"})
    with pytest.raises(UserError, match="did you mean 'exact'"):
        found.l1("exakt")
    with pytest.raises(UserError, match="'k=2' failed: no room"):
        found.trace("k=2")
    with pytest.raises(UserError, match="did you mean 'prompt'"):
        found.shares("exact", "promt")
    assert "k=2: failed: no room" in repr(found)


def test_tables_say_what_the_methods_say():
    first = trace_of(range(8), 1)
    other = trace_of([0, 1, 2, 3, 4, 50, 51], 2, source=np.array([0, 1, 2, 2, 2, 2, -1]))
    found = Comparison.of({"a": first, "b": other}, moved(first, 1e-6))
    frame = found.to_frame()
    assert len(frame) == 8 + 7 + 8 and frame.is_null.sum() == 8
    mine = frame[(frame.setting == "b") & ~frame.is_null]
    assert np.array_equal(mine["l1"], found.l1("b")[:7], equal_nan=True)
    assert np.array_equal(mine["shown"], found.shown_difference("b")[:7], equal_nan=True)
    assert mine["diverged"].tolist() == [False] * 5 + [True] * 2 and mine["reused"].sum() == 3
    assert np.allclose(mine["mean:law"], other.token_means()[:, 2], equal_nan=True)
    lines = found.summary().set_index(["setting", "is_null"])
    assert lines.loc[("b", False), "divergence"] == 5 and lines.loc[("b", False), "reused"] == 3
    assert lines.loc[("a", True), "l1_max"] == pytest.approx(1e-6, rel=0.1)
    assert lines.loc[("a", False), "share:law"] == pytest.approx(first.share()["law"])


@pytest.mark.parametrize("lazy", [False, True])
def test_a_saved_comparison_comes_back(tmp_path, lazy):
    first = trace_of(range(8), 1)
    found = Comparison.of({"<b>": first, "🐍 k=1\n": trace_of(range(7), 2)}, moved(first, 1e-6), {"x": "broke"})
    Comparison.of({"a": first, "b": first}).save(tmp_path / "kept")
    path = found.save(tmp_path / "kept")  # over the older one
    back = Comparison.load(path, lazy)
    assert back.labels == found.labels and dict(back.failed) == {"x": "broke"}
    assert back.floor.level == found.floor.level and repr(back) == repr(found)
    assert np.array_equal(back.l1("🐍 k=1\n"), found.l1("🐍 k=1\n"), equal_nan=True)
    assert Trace.load(path / "setting-1.safetensors").num_tokens == 7
    assert {entry.name for entry in tmp_path.iterdir()} == {"kept"}
    assert {entry.suffix for entry in path.iterdir()} == {".safetensors"}


def test_damaged_and_foreign_folders_are_sentences(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        Comparison.load(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="is no comparison"):
        Comparison.load(tmp_path / "other")
    found = Comparison.of({"a": PLAIN, "b": PLAIN}, PLAIN)
    with pytest.raises(UserError, match="something else is there"):
        found.save(tmp_path / "other")
    assert (tmp_path / "other" / "mine.txt").read_text() == "kept"
    with pytest.raises(UserError, match="does not exist"):
        found.save(tmp_path / "no" / "where")
    path = found.save(tmp_path / "kept")
    (path / "setting-1.safetensors").unlink()
    with pytest.raises(UserError, match="lacks 'setting-1.safetensors'"):
        Comparison.load(path)
    index = path / "comparison.safetensors"
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(UserError, match="truncated"):
        Comparison.load(path)
    PLAIN.save(index)
    with pytest.raises(UserError, match="not the index"):
        Comparison.load(path)


def test_any_text_is_a_token():
    trace = small_trace(HOSTILE)
    other = replace(trace, token_ids=np.where(trace.generated, 9, trace.token_ids))
    found = Comparison.of({"<script>": trace, "b": other})
    assert found.divergence("b") == trace.prompt_tokens and "another text" in repr(found)


def test_rank_correlation_is_spearmans():
    import pandas as pd

    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 4, (9, 2, 5)).astype(float), rng.integers(0, 4, (9, 2, 5)).astype(float)
    pairs = zip(one.reshape(-1, 5), other.reshape(-1, 5), strict=True)
    expected = [pd.Series(mine).rank().corr(pd.Series(theirs).rank()) for mine, theirs in pairs]
    assert np.allclose(rank_correlation(one, other), np.reshape(expected, (9, 2)).mean(1))


def test_rank_correlation_of_orders_and_of_nothing():
    values = np.array([[[0.1, 0.2, 0.7]], [[0.3, 0.3, 0.4]], [[1 / 3] * 3], [[np.nan] * 3]])
    assert np.allclose(rank_correlation(values, values), [1, 1, np.nan, np.nan], equal_nan=True)
    assert np.allclose(rank_correlation(values[:1], values[:1, :, ::-1]), [-1])
    first = trace_of(range(5), 1)
    found = Comparison.of({"a": first, "b": trace_of([0, 1, 2, 9, 9], 1)})
    assert np.allclose(found.rank_correlation("b"), [1, 1, 1, np.nan, np.nan], equal_nan=True)
