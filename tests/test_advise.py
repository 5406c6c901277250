"""Advice: the cheapest policy that keeps the limit, and every doubt about it in a sentence.

Run: pytest tests/test_advise.py
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import Adapter, MixtureSpec
from sweep_problem import BITWISE, MODEL, fidelity, prepared_on, write_shelf

from workbench import UserError
from workbench.cli import main
from workbench.cli.advise import _verdict
from workbench.sweep import fidelity as module
from workbench.sweep.advise import (
    POLICIES,
    Advice,
    Candidate,
    advise,
    candidates_of,
    cheapest,
    doubts,
    point_for,
    policies_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


def candidate(policy, kl, forwards, tok_s=10.0, spread=0.2) -> Candidate:
    return Candidate(policy, kl, kl * (1 - spread), kl * (1 + spread), 1.0, 9.0, 0.0, 5.0, forwards, tok_s)


EXACT = candidate("exact", 1e-9, 1.5, 8.0)


def test_the_cheapest_that_keeps_the_limit_with_its_interval():
    near, cheap = candidate("periodic(2)", 0.004, 1.3), candidate("non_granular(0)", 0.009, 1.0)
    some = (EXACT, near, cheap)
    assert cheapest(some, 0.011) is cheap
    # 0.009 keeps 0.01, but 0.0108 does not
    assert cheapest(some, 0.01) is near and cheapest(some, 0.001) is EXACT and cheapest(some, 1e-10) is None


def timed(policy, kl, forwards, low, tok_s, high) -> Candidate:
    return replace(candidate(policy, kl, forwards, tok_s), tok_s_low=low, tok_s_high=high)


def test_of_those_that_cost_alike_the_closest_unless_one_is_faster_beyond_both_intervals():
    slow, fast = candidate("lagged(1)", 0.001, 1.01, 10.0), candidate("lagged(4)", 0.002, 1.01, 20.0)
    # one run of each says nothing of how far speeds vary: twice as fast may be noise
    assert cheapest((EXACT, slow, fast), 0.1) is slow and cheapest((EXACT, fast, slow), 0.1) is slow
    near, far = timed("lagged(1)", 0.001, 1.01, 9.0, 10.0, 11.0), timed("lagged(4)", 0.002, 1.012, 10.9, 20.0, 21.0)
    assert cheapest((EXACT, near, far), 0.1) is near
    apart = replace(far, tok_s_low=11.1)
    assert cheapest((EXACT, near, apart), 0.1) is apart and cheapest((EXACT, near, apart), 0.0013) is near
    # of two that are both faster the closer one, unless the other is faster than that, too
    between = timed("lagged(2)", 0.0015, 1.01, 12.0, 13.0, 20.0)
    assert cheapest((EXACT, near, apart, between), 0.1) is between
    assert cheapest((EXACT, near, replace(apart, tok_s_low=20.5), between), 0.1).policy == "lagged(4)"
    assert cheapest((EXACT, fast, candidate("non_granular(0)", 0.05, 1.0, 1.0)), 0.1).policy == "non_granular(0)"


@given(st.lists(st.tuples(st.floats(1e-6, 0.1), st.floats(1, 2), st.floats(1, 50)), min_size=1, max_size=8),
       st.floats(1e-5, 0.2))
def test_whatever_is_advised_keeps_the_limit_and_nothing_that_does_is_cheaper(values, limit):
    some = [candidate(f"lagged({number + 1})", *each) for number, each in enumerate(values)]
    best = cheapest(some, limit)
    kept = [each for each in some if each.kl_high <= limit]
    assert (best is None) == (not kept)
    if best is not None:
        assert best in kept
        assert round(best.forwards_per_token, 2) == min(round(each.forwards_per_token, 2) for each in kept)


def test_a_sweeps_rows_are_candidates_too():
    some = (EXACT, candidate("lagged(1)", 0.001, 1.01, 10.0))
    frame = pd.DataFrame([{**asdict(each), "tok_s": each.tok_s + extra, "texts": "single"}
                          for extra in (0, -1, 5) for each in some])
    found = candidates_of(frame)
    assert found == tuple(replace(each, tok_s_low=each.tok_s - 1, tok_s_high=each.tok_s + 5) for each in some)
    # two runs, or one, are no interval
    assert candidates_of(frame[: 2 * len(some)])[0].tok_s_low is None and candidates_of(frame[:2]) == some
    with pytest.raises(UserError, match="'kl_high' are missing"):
        candidates_of(frame.drop(columns="kl_high"))


def test_doubts_are_said():
    maybe, best = candidate("lagged(1)", 0.0095, 1.0), candidate("periodic(2)", 0.002, 1.3)
    assert doubts((EXACT, best), best, 0.01, 20) == []
    assert doubts((EXACT, maybe, best), best, 0.01, 20) == [
        "lagged(1) is cheaper (1.00 forwards per token) and keeps the limit on average (0.0095), but its interval "
        "reaches 0.011: more passages may tell"
    ]
    assert doubts((EXACT, best), best, 0.01, 1)[0].startswith("1 passage: too few")
    assert doubts((EXACT, best), best, 0.01, 5)[0].startswith("5 passages: too few")
    said = doubts((EXACT, best), None, 1e-10, 20)
    assert len(said) == 1 and said[0].startswith("the limit lies below the null floor: ")
    # what costs no less is of no interest, however near it comes
    assert doubts((EXACT, best, candidate("periodic(4)", 0.0095, 1.4)), best, 0.01, 20) == []


def test_exact_is_always_among_the_candidates():
    assert policies_of(()) == POLICIES and policies_of(["lagged(1)"]) == ("exact", "lagged(1)")
    assert policies_of([" lagged( 2 )", "exact"]) == ("lagged(2)", "exact")
    with pytest.raises(UserError, match="no reuse policy 'laged'; did you mean 'lagged'"):
        policies_of(["laged(1)"])
    with pytest.raises(UserError, match=r"'lagged\(1\)' twice"):
        policies_of(["lagged(1)", "lagged( 1 )"])


def test_a_users_mixture_keeps_its_base():
    assert point_for({"mixture": "./mine", "base": None, "texts": "single"}).base is None
    assert point_for({"mixture": "demo", "texts": "single"}).base == "demo"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def prepared(shelf):
    return prepared_on(shelf)


SOME = ("exact", "non_granular(0)", "non_granular(8)", "periodic(2)")


def test_measured_advice_is_that_of_its_numbers(prepared):
    done = []
    point = fidelity(texts="single", passages=8)
    found = advise(prepared.engine, "mix", point, 1.0, SOME, progress=lambda *each: done.append(each))
    assert [each.policy for each in found.candidates] == list(SOME) and done == [(each, 4) for each in SOME]
    assert (found.passages, found.tokens, found.distinct_texts) == (8, 8 * 18, 8)
    assert found.notes == ()
    exact, never, some, _ = found.candidates
    assert found.floor is exact and exact.kl < 1e-12 and some.kl < never.kl and never.scalings_l1 > 0
    # everything loses less than a nat here: the cheapest is the one that never computes any
    assert found.chosen is never and never.forwards_per_token < exact.forwards_per_token
    tight = advise(prepared.engine, "mix", point, exact.kl_high + 1e-13, SOME)
    assert tight.chosen.policy == "exact" and tight.to_dict()["advice"] == "exact"
    assert list(found.to_frame().policy) == list(SOME) and json.loads(json.dumps(found.to_dict()))["is_sure"]
    assert set(found.to_frame().num_texts) == {8} and not found.to_dict()["policies"][0]["tok_s_low"]


def test_an_exact_of_another_mixture_is_not_what_one_is_compared_with(tmp_path):
    shelf = write_shelf(tmp_path)
    other = MixtureSpec({"a": Adapter(("q_proj", "up_proj"), seed=8), "b": Adapter(("q_proj",), rank=2, seed=9)},
                        {"layerwise_scalings": True})  # fmt: skip
    other.write(shelf / "other", MODEL)
    engine, point = prepared_on(shelf, **BITWISE).engine, fidelity(texts="single", passages=4)
    engine.load_mixture(shelf / "other", "two")
    assert advise(engine, "mix", point, 1.0, SOME[:2]).floor.kl == 0
    # of the same texts, and of the same name once something else is loaded under it
    assert advise(engine, "two", point, 1.0, SOME[:2]).floor.kl == 0
    engine.unload("two")
    engine.load_mixture(shelf / "mix", "two")
    assert advise(engine, "two", point, 1.0, SOME[:2]).floor.kl == 0


def test_passages_that_do_not_fit_into_memory_are_measured_block_by_block(prepared, monkeypatch):
    point, done = fidelity(texts="switching", passages=5), []
    whole = advise(prepared.engine, "mix", point, 1.0, SOME[:2])
    monkeypatch.setattr(module, "memory_bytes", lambda: 2 * 18 * 259 * 4 * 4)
    assert module.num_that_fit(prepared.engine, module.passages_of(point, prepared.engine)) == 2
    parts = advise(prepared.engine, "mix", point, 1.0, SOME[:2], progress=lambda *each: done.append(each))
    assert len(done) == 6 and done[0][1] == 6
    for one, other in zip(whole.candidates, parts.candidates, strict=True):
        assert other.kl == pytest.approx(one.kl, rel=1e-3, abs=1e-9) and other.same_tokens == one.same_tokens
        assert other.forwards_per_token == pytest.approx(one.forwards_per_token, abs=0.35)


def test_fewer_passages_than_usual_will_do_but_not_fewer_than_asked_for(prepared, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Wer zuletzt lacht, lacht am besten. " * 2)
    point = fidelity(texts=str(path), passages=20)
    found = advise(prepared.engine, "mix", point, 1.0, SOME[:2], at_most=True)
    assert found.passages == 3 and "too few for an interval" in found.notes[0]
    with pytest.raises(UserError, match="make 3 passages of 24 tokens, fewer than the 20 asked for"):
        advise(prepared.engine, "mix", point, 1.0, SOME[:2])


@pytest.fixture
def run(capsys, shelf):
    def call(*arguments) -> tuple[int, str, str]:
        given = ["advise", "--base", shelf / "tiny", "--mixture", shelf / "mix", "--passage-tokens", 24,
                 "--prefix-tokens", 6, "--policies", "non_granular(0),periodic(2)", *arguments]  # fmt: skip
        try:
            code = main([str(each) for each in given])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_the_command_says_what_to_do(run, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = run("--max-kl", 1, "--passages", 4, "--out", page)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("4 passages of 4 texts ('single'), 72 tokens scored; null floor")
    assert [line.split()[0] for line in lines[1:5]] == ["policy", "exact", "non_granular(0)", "periodic(2)"]
    assert lines[5].startswith("advice: non_granular(0) - KL ") and "fewer than exact scalings" in lines[5]
    assert lines[6].startswith("unsure: 4 passages: too few") and "3/3" in err
    text = page.read_text()
    assert "data:image/png;base64," in text and "workbench advise --mixture" in text and "&#x27;" not in text[:200]
    assert "--policies &#x27;non_granular(0),periodic(2)&#x27;" in text


def test_the_command_as_json(run, tmp_path):
    picture = tmp_path / "a.png"
    code, out, _ = run("--max-kl", 1, "--texts", "switching", "--passages", 2, "--json", "--out", picture)
    found = json.loads(out)
    assert code == 0 and found["advice"] == "non_granular(0)" and not found["is_sure"] and len(found["policies"]) == 3
    assert picture.read_bytes()[1:4] == b"PNG" and found["notes"][0].startswith("2 passages: too few")


def test_none_that_keeps_the_limit_is_said(run, monkeypatch):
    # exact against itself may differ by nothing at all
    monkeypatch.setattr("workbench.sweep.advise.cheapest", lambda candidates, max_kl: None)
    code, out, _ = run("--max-kl", 1e-14, "--texts", "switching", "--passages", 2)
    assert code == 1 and "none of these policies stays below KL 1e-14; the closest is exact, with up to" in out


def test_exact_is_advised_where_nothing_cheaper_will_do(run):
    code, out, _ = run("--max-kl", 1e-12, "--texts", "switching", "--passages", 2)
    assert code == 0 and "advice: exact - none that is cheaper stays below KL 1e-12\n" in out


def verdict_of(*candidates, limit=0.01) -> str:
    return _verdict(Advice(limit, "switching", 12, 99, candidates, cheapest(candidates, limit), ()))


def test_a_costlier_one_that_keeps_the_limit_makes_no_false_sentence():
    exact, costly = candidate("exact", 1e-9, 1.14), candidate("periodic(2)", 0.003, 1.5)
    said = verdict_of(exact, costly, candidate("non_granular(0)", 0.2, 1.0))
    assert said == "advice: exact - none that is cheaper stays below KL 0.01"
    near = candidate("lagged(1)", 0.005, 1.01)
    assert "1.01 forwards per token, 11% fewer than exact" in verdict_of(exact, costly, near)
    # a floor above the limit: what is left may cost more than exact scalings
    assert "1.50 forwards per token, 32% more than exact" in verdict_of(candidate("exact", 0.02, 1.14), costly)


def test_few_texts_are_a_doubt():
    best = candidate("periodic(2)", 0.002, 1.3)
    said = doubts((EXACT, best), best, 0.01, 20, 4)
    assert said == ["the 20 passages are of 4 distinct texts: too few to stand for others; give at least 8"]
    assert doubts((EXACT, best), best, 0.01, 20, 8) == []
    maybe = candidate("lagged(1)", 0.0095, 1.0)
    assert doubts((EXACT, maybe, best), best, 0.01, 20, 4)[1].endswith("more texts may tell")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-kl", "0"], "--max-kl must be a number of nats per token above 0, not 0.0"),
        (["--max-kl", "nan"], "--max-kl must be"), (["--max-kl", "1", "--policies", "exat"], "did you mean 'exact'"),
        (["--max-kl", "1", "--policies", "periodic(0)"], "periodic: n must be"),
        (["--max-kl", "1", "--texts", "swiching"], "did you mean 'switching'"),
        (["--max-kl", "1", "--passages", "0"], "'passages' is 0"),
        (["--max-kl", "1", "--passages", "9999"], "fewer than the 9999 asked for"),
        (["--max-kl", "1", "--out", "x.htm"], "did you mean '.html'"),
        (["--max-kl", "1", "--out", "/nowhere/x.png"], "the folder '/nowhere' does not exist"),
        (["--max-kl", "1", "--mixture", "/nowhere"], "/nowhere"),
        (["--max-kl", "1", "--dtype", "fp32"], "'dtype' is 'fp32'"),
        (["--max-kl", "1", "--passage-tokens", "600"], "has room for 256"), ([], "--max-kl"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(run, arguments, said):
    code, _, err = run(*arguments)
    errors = [line for line in err.splitlines() if "error: " in line]
    assert code == 2 and len(errors) == 1 and "Traceback" not in err and said in errors[0], err


def test_an_advice_without_exact_fails_loudly():
    with pytest.raises(StopIteration):
        _ = Advice(1.0, "single", 1, 1, (candidate("lagged(1)", 0.1, 1.0),), None, ()).floor
