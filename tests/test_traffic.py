"""Traffic: equal points see equal requests, times between arrivals have their mean and variation, traces are checked.

Run: pytest tests/test_traffic.py
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_problem import point_of, prepared_on, write_shelf

from workbench import UserError
from workbench.sweep.traffic import Arrival, arrival_times, read_lines, serve, traffic

NAMES = [f"adapter-{number}" for number in range(3)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def engine(shelf):
    return prepared_on(shelf).engine


@pytest.mark.parametrize(
    ("arrivals", "cv"), [({"arrivals": "poisson"}, 1.0), ({"arrivals": "gamma", "cv": 0.3}, 0.3),
                         ({"arrivals": "gamma", "cv": 3.0}, 3.0)],
)  # fmt: skip
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_times_between_arrivals_have_the_rate_and_the_variation(arrivals, cv, rate):
    point = point_of(rate=rate, requests=40_000, **arrivals)
    times = np.array(arrival_times(point, np.random.default_rng(3)))
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all() and len(times) == 40_000
    # three standard errors of the mean; the variation's own error grows with it
    assert gaps.mean() == pytest.approx(1 / rate, rel=3 * cv / 200)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02 + 0.04 * cv)


def test_poisson_counts_vary_as_much_as_their_mean():
    times = np.array(arrival_times(point_of(arrivals="poisson", rate=5.0, requests=50_000), np.random.default_rng(0)))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.03) and counts.var() == pytest.approx(5, rel=0.08)


@given(seed=st.integers(0, 2**31), requests=st.integers(1, 12))
def test_equal_points_see_equal_requests(engine, seed, requests):
    settings = {"mode": "lora", "adapters": 3, "requests": requests, "concurrency": 2, "seed": seed,
                "popularity": "skewed", "prompt_tokens": [2, 9], "tokens": [2, 5]}  # fmt: skip
    one, again = (traffic(point_of(**settings), engine, NAMES, None) for _ in range(2))
    assert one == again and len(one) == requests
    assert all(2 <= len(each.prompt) <= 9 and 2 <= each.tokens <= 5 for each in one)
    # points that differ in how requests arrive, or in what they run on, see the same prompts too
    timed = traffic(point_of(**{**settings, "concurrency": None, "arrivals": "poisson", "rate": 9.0}), engine, NAMES,
                    None)
    assert [(each.prompt, each.tokens, each.options) for each in timed] == [
        (each.prompt, each.tokens, each.options) for each in one
    ]


ADAPTED = {"mode": "lora", "requests": 40, "adapters": 12, "prompt_tokens": [2, 9], "tokens": [2, 5]}
MANY = [f"adapter-{number}" for number in range(12)]


def chosen(engine, names=MANY, repeat=0, **settings):
    point = point_of(**{**ADAPTED, "adapters": len(names), **settings})
    return [each.options.get("adapter") for each in traffic(point, engine, names, None, repeat)]


def runs(order) -> int:
    """Return how many times the next one differs, and one."""
    return 1 + sum(one != other for one, other in zip(order, order[1:], strict=False))


@given(seed=st.integers(0, 2**31), repeat=st.integers(0, 9))
def test_no_popularity_sorts_its_arrivals(engine, seed, repeat):
    for popularity in ("skewed", "uniform", "distinct", "zipf:1.5", "half_base"):
        order = chosen(engine, seed=seed, repeat=repeat, popularity=popularity)
        # grouped, they have a run for each adapter: here at least one more, for 40 requests many more
        assert runs(order) > len(set(order)) + 2, popularity
    assert len(set(chosen(engine, seed=seed, popularity="identical"))) == 1


@given(seed=st.integers(0, 2**31), repeat=st.integers(0, 9), count=st.integers(1, 30), requests=st.integers(1, 60))
def test_distinct_is_as_different_as_possible_at_any_moment(engine, seed, repeat, count, requests):
    names = [f"adapter-{number}" for number in range(count)]
    order = chosen(engine, names, repeat, seed=seed, requests=requests, popularity="distinct")
    for start in range(requests):
        window = order[start : start + count]
        assert len(set(window)) == len(window)


def test_uniform_draws_each_request_s_adapter_from_all_of_them(engine):
    names = [f"adapter-{number}" for number in range(50)]
    drawn = [chosen(engine, names, repeat, popularity="uniform") for repeat in range(60)]
    counts = np.array([sum(order.count(name) for order in drawn) for name in names])
    # 2400 draws, 48 of each, standard deviation 6.9: chi square has 49 degrees of freedom, standard deviation 9.9
    assert counts.min() > 0 and 49 - 45 < ((counts - 48) ** 2 / 48).sum() < 49 + 45
    # independent: of 40 draws from 50 some meet again, which dealing evenly never does
    assert np.mean([len(set(order)) for order in drawn]) == pytest.approx(50 * (1 - (1 - 1 / 50) ** 40), abs=1.5)
    assert len({tuple(order) for order in drawn}) == 60
    assert chosen(engine, names, popularity="uniform") != chosen(engine, names, popularity="distinct")


@given(seed=st.integers(0, 2**31), repeat=st.integers(0, 5))
def test_repeats_draw_anew_and_points_that_share_settings_share_draws(engine, seed, repeat):
    def of(repeat=repeat, **settings):
        point = point_of(**{**ADAPTED, "arrivals": "poisson", "rate": 2.0, "seed": seed, **settings})
        return traffic(point, engine, MANY, "mix", repeat)

    def parts(found, *keys):
        return [[getattr(each, key) for each in found] for key in keys]

    one, other = of(), of(repeat + 1)
    for key in ("at_s", "prompt", "tokens", "options"):
        assert parts(one, key) != parts(other, key), key
    assert of() == one
    base = of(mode="base", adapters=None)
    assert parts(base, "at_s", "prompt", "tokens") == parts(one, "at_s", "prompt", "tokens")
    # twice the rate is the same arrivals in half the time; other lengths are no reason for other times or adapters
    assert parts(of(rate=4.0), "at_s")[0] == pytest.approx([each.at_s / 2 for each in one])
    assert parts(of(prompt_tokens=5, tokens=3), "at_s", "options") == parts(one, "at_s", "options")
    assert parts(of(popularity="zipf:1.5"), "at_s", "prompt", "tokens") == parts(one, "at_s", "prompt", "tokens")


def test_each_mode_says_what_its_requests_run_on(engine):
    def options(**settings):
        return [each.options for each in traffic(point_of(requests=4, **settings), engine, NAMES, "mix")]

    assert options(mode="base") == [{}] * 4
    assert {each["adapter"] for each in options(mode="lora", adapters=3, popularity="distinct")} == set(NAMES)
    assert options(mode="xlora", policy="lagged(1)") == [{"mixture": "mix", "policy": "lagged(1)"}] * 4
    merged = options(mode="merged", adapters=3)[0]["merged_adapters"]
    assert merged["ids"] == NAMES and sum(merged["weights"]) == pytest.approx(1)


@pytest.mark.parametrize("concurrency", [1, 3, None])
def test_closed_arrivals_never_exceed_their_concurrency(engine, concurrency, monkeypatch):
    most, step = [], engine.step
    monkeypatch.setattr(engine, "step", lambda: most.append(len(list(engine.scheduler.requests()))) or step())
    arrivals = [Arrival(None, [5, 6], tokens) for tokens in (2, 5, 3, 2, 4)]
    served = serve(engine, arrivals, concurrency)
    assert max(most) == (concurrency or 5)
    assert sorted(map(id, arrivals)) == sorted(id(each.arrival) for each in served)
    assert all(len(each.request.generated) == each.arrival.tokens and not each.late_s for each in served)
    # alone, or beside others: a forward for each token
    assert all(each.forwards == each.arrival.tokens for each in served)


def test_requests_come_when_they_are_due_and_late_ones_say_by_how_much(engine):
    arrivals = [Arrival(at_s, [5, 6], 3) for at_s in (0.0, 0.0, 0.05)]
    served = serve(engine, arrivals)
    assert all(each.late_s >= 0 and each.ended_s >= each.arrival.at_s for each in served) and len(served) == 3


def test_a_request_that_is_refused_leaves_none_behind(engine):
    with pytest.raises(UserError, match="room for 256"):
        serve(engine, [Arrival(None, [5], 50), Arrival(None, [5] * 300, 2)])
    assert not engine.scheduler.has_work() and engine.counters()["kv_bytes"] == 0


def trace_file(folder, *lines) -> str:
    path = folder / "t.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_a_trace_says_its_requests_in_the_order_of_their_arrival(engine, tmp_path):
    lines = [{"at_s": 1.5, "prompt_tokens": 4, "tokens": 2, "adapter": 1}, "", {"at_s": 0, "prompt_tokens": 7,
                                                                               "tokens": 1}]  # fmt: skip
    path = trace_file(tmp_path, *lines)
    for point in (point_of(mode="lora", adapters=3, arrivals="trace", trace=path),):
        found = traffic(point, engine, NAMES, None)
        assert [(each.at_s, len(each.prompt), each.tokens, each.options) for each in found] == [
            (0, 7, 1, {}), (1.5, 4, 2, {"adapter": "adapter-1"}),
        ]  # fmt: skip
    plain = trace_file(tmp_path, {"at_s": 0, "prompt_tokens": 7, "tokens": 1})
    found = traffic(point_of(mode="xlora", arrivals="trace", trace=plain), engine, (), "mix")
    assert found[0].options == {"mixture": "mix", "policy": "exact"}


GOOD = {"at_s": 0, "prompt_tokens": 4, "tokens": 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 is not valid JSON"), ("[1]", r"line 3 is \[1\], expected an object"),
        ({**GOOD, "token": 2}, "line 3: unknown key 'token'; did you mean 'tokens'"),
        ({"prompt_tokens": 4, "tokens": 2}, "line 3: 'at_s' is None"), ({**GOOD, "at_s": -1}, "'at_s' is -1"),
        ({**GOOD, "at_s": True}, "'at_s' is True"), ('{"at_s": NaN, "prompt_tokens": 4, "tokens": 2}', "'at_s' is nan"),
        ({**GOOD, "tokens": 0}, "'tokens' is 0, expected a whole number of at least 1"),
        ({**GOOD, "prompt_tokens": 1.5}, "'prompt_tokens' is 1.5"), ({**GOOD, "adapter": -1}, "'adapter' is -1"),
        ('{"at_s": 0, "at_s": 1, "prompt_tokens": 4, "tokens": 2}', "line 3 gives the same key twice"),
    ],
)  # fmt: skip
def test_a_bad_line_of_a_trace_is_named(tmp_path, line, said):
    path = trace_file(tmp_path, GOOD, "", line)
    with pytest.raises(UserError, match=said):
        read_lines(point_of(arrivals="trace", trace=path).file("trace"))


def test_traces_that_cannot_be_run_are_named(engine, tmp_path):
    wanted = trace_file(tmp_path, "", {**GOOD, "adapter": 3})
    with pytest.raises(UserError, match="line 2: 'adapter' is 3, but there are 3, numbered from 0"):
        traffic(point_of(mode="lora", adapters=3, arrivals="trace", trace=wanted), engine, NAMES, None)
    with pytest.raises(UserError, match="mode 'base' lets no request choose"):
        traffic(point_of(arrivals="trace", trace=wanted), engine, (), None)
    with pytest.raises(UserError, match="holds no request"):
        traffic(point_of(arrivals="trace", trace=trace_file(tmp_path, "", " ")), engine, (), None)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        traffic(point_of(arrivals="trace", trace=str(tmp_path / "none")), engine, (), None)
