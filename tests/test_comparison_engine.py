"""compare(engine, prompt, settings): settings in one batch, an honest null pair, and who fails alone.

Run: pytest tests/test_comparison_engine.py
"""

from __future__ import annotations

import numpy as np
import pytest
from jobs import BITWISE, engine_on, write_shelf
from models import Probe, random_ids

from workbench.edits import ablate
from workbench.engine import Sampling
from workbench.errors import UserError
from workbench.live.compare import compare
from workbench.live.settings import labels_of, settings_of
from workbench.xlora import exact, non_granular

PROMPT = random_ids(20, 3)
PLAIN = {"mixture": "mix", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def engine(shelf):
    return engine_on(shelf, **BITWISE)


def test_the_floor_is_zero_where_batch_shape_changes_nothing(engine):
    found = compare(engine, PROMPT, tgt_non_granular_index=[None, 0, 2], **PLAIN)
    assert found.labels == ("exact", "k = 0", "k = 2")
    assert found.floor.level == 0 and found.floor.divergence is None
    assert np.array_equal(found.null.values, found.traces["exact"].values, equal_nan=True)


def test_k_0_changes_scalings_after_the_prompt_and_nowhere_else(engine):
    found = compare(engine, PROMPT, tgt_non_granular_index=[None, 0, 2], **PLAIN)
    for label, k in (("k = 0", 0), ("k = 2", 2)):
        shown = found.shown_difference(label)
        first = len(PROMPT) + k
        assert np.isnan(shown[:first]).all()
        stop = found.divergence(label) or found.num_tokens - 1
        assert not np.isnan(shown[first:stop]).any() and stop > first
        assert found.counts(label) == {"computed": first, "reused": 27 - first}


def test_all_settings_run_in_one_batch_and_the_null_pair_in_another_shape(shelf):
    engine = engine_on(shelf)
    probe = Probe(engine)
    found = compare(engine, PROMPT, tgt_non_granular_index=[None, 0, 1, 4], **PLAIN)
    probe.close()
    ids = [found.traces[label].metadata["request_id"] for label in found.labels]
    null = found.null.metadata["request_id"]
    together = [{request for request, *_ in batch} for batch in probe.batches]
    assert set(ids) in together and {null} in together
    assert not any(null in each and len(each) > 1 for each in together)

    def rows(request):
        """Rows of every forward in which the request's prompt and text ran."""
        return [sum(n for *_, n in batch) for batch in probe.batches if any(who == request for who, *_ in batch)]

    assert rows(ids[0])[0] > rows(null)[0] and set(rows(null)) != set(rows(ids[0]))


def test_the_null_pair_computes_its_prompt_though_it_is_cached(shelf):
    engine = engine_on(shelf)
    for _ in range(2):
        found = compare(engine, PROMPT, [{}, {"tgt_non_granular_index": 0}], **PLAIN)
    assert found.traces[found.first].metadata["cached_tokens"] > 0
    assert found.null.metadata["cached_tokens"] == 0
    off = compare(engine, PROMPT, [{}, {"tgt_non_granular_index": 0}], null=False, **PLAIN)
    assert off.null is None and off.floor is None


def test_adapters_merges_edits_seeds_and_the_base_model_stand_side_by_side(engine):
    settings = {
        "mixture": {},
        "edited": {"edits": ablate("german")},
        "alone": {"adapter": "german"},
        "merged": {"merged_adapters": {"ids": ["python", "law"], "weights": [0.5, 0.25]}},
        "base": {"mixture": None},
        "sampled": {"temperature": 1.0, "seed": 5},
    }
    found = compare(engine, PROMPT, settings, **PLAIN)
    assert found.labels == tuple(settings) and not found.failed
    assert found.traces["edited"].metadata["edits"] and "edits" not in found.traces["mixture"].metadata
    assert found.shares("edited")["german"] == 0 and found.shares("alone")["german"] > 0.3
    assert found.shares("merged")["law"] == pytest.approx(0.5 * found.shares("merged")["python"])
    assert all(share == 0 for share in found.shares("base").values())
    assert np.isnan(found.shown_difference("sampled")[:20]).all()
    assert not engine.editing.concerns(type("R", (), {"mixture": object(), "id": "x"})())


def test_settings_have_one_seed_unless_they_say_otherwise(engine):
    same = compare(engine, PROMPT, {"a": {}, "b": {}}, temperature=1.0, **PLAIN)
    assert same.divergence("b") is None and same.floor.divergence is None
    other = compare(engine, PROMPT, seed=[1, 2], temperature=1.5, **PLAIN)
    assert other.labels == ("seed = 1", "seed = 2")
    assert [trace.metadata["seed"] for trace in other.traces.values()] == [1, 2]
    kept = compare(engine, PROMPT, {"a": {"sampling": Sampling(seed=9)}, "b": {}}, mixture="mix", max_tokens=2)
    assert kept.traces["a"].metadata["seed"] == 9


def test_teacher_forced_texts_are_compared_to_their_end(engine):
    found = compare(engine, PROMPT, tgt_non_granular_index=[None, 0], mixture="mix", continuation=random_ids(9, 1))
    assert found.divergence("k = 0") is None and found.floor.level == 0
    assert np.isnan(found.shown_difference("k = 0")).sum() == 20 + 1


def test_one_failing_setting_does_not_lose_the_others(engine):
    def broken(scalings, tap):
        raise RuntimeError("no")

    settings = {
        "lost": {"adapter": "germann"}, "exact": {}, "broken": {"edits": broken}, "idle": {"edits": lambda *_: None},
        "k": {"tgt_non_granular_index": 0}, "forbidden": {"adapter": "german", "edits": ablate("german")},
    }  # fmt: skip
    found = compare(engine, PROMPT, settings, **PLAIN)
    assert found.labels == ("exact", "k") and set(found.failed) == {"lost", "broken", "idle", "forbidden"}
    assert "did you mean 'german'" in found.failed["lost"] and "no" in found.failed["broken"]
    assert "changed no row" in found.failed["idle"] and "changed no row" in found.failed["forbidden"]
    assert found.floor.level == 0
    with pytest.raises(UserError, match="1 of 2 settings ran.*germann"):
        compare(engine, PROMPT, {"lost": {"adapter": "germann"}, "exact": {}}, **PLAIN)
    assert not engine.scheduler.has_work()


def test_an_interrupt_leaves_the_engine_usable(shelf, monkeypatch):
    engine = engine_on(shelf)
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(engine, PROMPT, tgt_non_granular_index=[None, 0], **PLAIN)
    assert not engine.scheduler.has_work()
    assert engine.generate(PROMPT, **PLAIN).finish_reason == "length"


def test_what_cannot_be_compared_is_refused_before_it_runs(engine):
    before = engine.counters()["steps"]
    cases = [
        ({"a": {"mixture": "mix"}, "b": {"mixture": "lifted"}}, {}, "mixture 'mix' has adapters.*'lifted' has"),
        ([{}], {}, "2 to 8 settings"),
        ([{}] * 9, {}, "not 9"),
        ("exact", {}, "a dict of label -> options"),
        ([{}, {"tgt_nongranular_index": 1}], {}, "did you mean 'tgt_non_granular_index'"),
        ([{}, 3], {}, "setting 1 must be a dict"),
        ({"a": {}, " ": {}}, {}, "must be text"),
        ([{}, {"temperature": -1}], {}, "setting 1: temperature"),
        ([{}, {"n": 2}], {}, "one answer per setting"),
        ([{}, {}], {"seed": [1, 2]}, "seed is a list, and settings are given too"),
        (None, {}, "nothing to compare"),
        (None, {"seed": [1, 2], "adapter": ["german", "law"]}, "'seed', 'adapter' are lists"),
    ]
    for settings, common, said in cases:
        with pytest.raises(UserError, match=said):
            compare(engine, PROMPT, settings, **common)
    with pytest.raises(UserError, match="one prompt"):
        compare(engine, [PROMPT, PROMPT], [{}, {}], **PLAIN)
    assert engine.counters()["steps"] == before


def test_a_closed_engine_says_so(shelf):
    engine = engine_on(shelf)
    engine.close()
    with pytest.raises(UserError, match="closed"):
        compare(engine, PROMPT, [{}, {}], **PLAIN)


def test_labels_say_what_differs_from_the_first():
    def labels(*options):
        return labels_of(options)

    mix = {"mixture": "mix"}
    assert labels(mix, {**mix, "tgt_non_granular_index": 4}) == ["exact", "k = 4"]
    assert labels({**mix, "policy": exact()}, {**mix, "policy": non_granular(2)}) == ["exact", "non_granular(2)"]
    assert labels(mix, {"adapter": "a"}, {}) == ["mixture mix", "adapter a", "base model"]
    assert labels(mix, {**mix, "temperature": 0.5, "seed": 1}) == ["as given", "temperature = 0.5, seed = 1"]
    assert labels(mix, {**mix, "edits": ablate("a")}) == ["not edited", "ablate a"]
    assert labels(mix, mix, mix) == ["as given", "as given (2)", "as given (3)"]
    merged = {"merged_adapters": {"ids": ["a", "b"], "weights": [1, 1]}}
    assert labels(mix, merged)[1] == "merged a + b"


def test_a_settings_own_options_replace_the_common_ones():
    common = {"mixture": "mix", "tgt_non_granular_index": 4, "max_tokens": 3}
    found = settings_of({"a": {}, "b": {"adapter": "x"}, "c": {"policy": exact()}, "d": {"max_tokens": 9}}, common)
    assert found["b"] == {"adapter": "x", "max_tokens": 3}
    assert found["c"] == {"mixture": "mix", "policy": exact(), "max_tokens": 3}
    assert found["d"]["max_tokens"] == 9 and found["a"] == common
