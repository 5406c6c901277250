"""Settings of a request as the engine applies them: ends, biases, alternatives, scores: `pytest
tests/test_request_options.py`."""

from __future__ import annotations

import sys

import pytest
import torch
from byte_engine import MODEL, TOLERANCE, assert_idle, engine, engine_on, finish, shelf  # noqa: F401 - fixtures
from models import Probe, byte_ids

from workbench import UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
WHO = [{}, {"adapter": "a"}, {"mixture": "mix"}, {"mixture": "mix", "tgt_non_granular_index": 1}]


def test_nothing_ends_a_request_before_min_tokens(engine):
    # every step would choose the end: until the third token it cannot
    done = engine.generate("x", max_tokens=6, min_tokens=3, logit_bias={1: 100.0})
    assert len(done.token_ids) == 4 and done.token_ids[-1] == 1 and 1 not in done.token_ids[:3]
    Probe(engine, forced={"mine": byte_ids("abSTOPcSTOPd")})
    request = engine.enqueue("x", request_id="mine", max_tokens=12, min_tokens=8, stop=["STOP"], ignore_eos=True)
    finish(engine, request)
    assert request.output.text == "abSTOPc" and request.finish_reason == "stop"


def test_a_stop_token_ends_a_request_and_is_kept(engine):
    Probe(engine, forced={"mine": byte_ids("abcd")})
    request = engine.enqueue("x", request_id="mine", max_tokens=4, stop_token_ids=byte_ids("c"), ignore_eos=True)
    finish(engine, request)
    assert request.generated == byte_ids("abc") and request.finish_reason == "stop"


def test_settings_that_leave_no_token_fail_their_request_alone(engine):
    all_but_the_end = {token: float("-inf") for token in range(259) if token != 1}
    bad = engine.enqueue("x", max_tokens=3, min_tokens=2, logit_bias=all_but_the_end)
    good = engine.enqueue("y", max_tokens=3, ignore_eos=True)
    finish(engine, bad, good)
    assert "no token is left to choose" in bad.error and "min_tokens (2)" in bad.error
    assert good.finish_reason == "length"


@pytest.mark.parametrize("who", WHO, ids=str)
def test_alternatives_and_prompt_scores_are_the_models(engine, who):
    engine.memory.prefix_cache = False
    probe = Probe(engine)
    done = engine.generate("hello you", max_tokens=4, ignore_eos=True, top_logprobs=3, prompt_logprobs=True, **who)
    rows = torch.log_softmax(probe.decoded(done.request_id, 0, 12), -1)
    assert done.prompt_logprobs == pytest.approx(
        [rows[i, token].item() for i, token in enumerate(byte_ids("hello you")[1:])], abs=TOLERANCE
    )
    for row, top in zip(rows[8:], done.top_logprobs, strict=True):
        values, ids = row.topk(3)
        assert [token for token, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=TOLERANCE)
    assert engine.generate("hello you", max_tokens=4, ignore_eos=True, **who).token_ids == done.token_ids


@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("max_rows", [5, 512])
def test_scores_of_a_batch_are_those_of_each_alone_with_distributions(shelf, who, max_rows):
    engine = engine_on(shelf, max_rows_per_step=max_rows)
    prompts, given = ["one", "another prompt", "x"], [" and more", byte_ids("z"), "yes"]
    many = engine.score(prompts, given, distributions=True, top_logprobs=2, **who)
    for prompt, continuation, done in zip(prompts, given, many, strict=True):
        alone = engine.score(prompt, continuation, distributions=True, top_logprobs=2, **who)
        assert done.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
        assert done.distributions.shape == (len(done.token_ids), 259)
        assert abs(done.distributions - alone.distributions).max() < TOLERANCE
        picked = done.distributions[range(len(done.token_ids)), list(done.token_ids)]
        assert done.logprobs == pytest.approx(picked.tolist(), abs=1e-6)
        assert [top[0][0] for top in done.top_logprobs] == done.distributions.argmax(1).tolist()
    assert engine.score(prompts, given, **who)[0].distributions is None
    assert_idle(engine)


def test_scores_of_a_mixture_use_the_policy(engine):
    exact, lagged = engine.score(["hello"] * 2, [" world"] * 2, mixture="mix", tgt_non_granular_index=[None, 0])
    assert exact.logprobs != lagged.logprobs and (lagged.scalings_computed, lagged.scalings_reused) == (5, 5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.score(["a", "b"], "c"), "2 prompts need a list of as many continuations"),
        (lambda e: e.score(["a", "b"], ["c"]), "continuation has 1 entries for 2 prompts"),
        (lambda e: e.score("a", ""), "continuation is empty"),
        (lambda e: e.score("a", [3, 999]), "not 999"),
        (lambda e: e.generate("a", logit_bias={999: 1.0}), "token 999"),
        (lambda e: e.generate("a", stop_token_ids=[999]), "999"),
        (lambda e: e.generate("a", max_tokens=0), "max_tokens must be"),
        (lambda e: e.generate("a", max_tokens=3, min_tokens=4), "min_tokens"),
        (lambda e: e.generate("a", temperature=float("nan")), "temperature must be"),
        (lambda e: e.generate("a", n=2, best_of=1), "best_of"),
        (lambda e: e.score("a", "b", response_format={"type": "json_object"}), "scored as it is"),
        (lambda e: e.generate("a", max_tokens=3, response_format={"type": "regex", "regex": "a"}, ignore_eos=True),
         "contradict each other"),
    ],
    # a lambda's name is its address: another in each worker
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_settings_are_refused(engine, call, says):
    with pytest.raises(UserError, match=says):
        call(engine)
    assert_idle(engine)


def test_the_work_of_a_step_does_not_grow_with_the_queue(engine):
    engine.scheduler.max_requests = 4
    calls = []
    for queued in (10, 10_000):
        requests = [
            engine.enqueue([5], max_tokens=100, ignore_eos=True, adapter="a" if i % 2 else None) for i in range(queued)
        ]
        for _ in range(3):
            engine.step()
        count = [0]
        sys.setprofile(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        calls.append(count[0])
        for request in requests:
            engine.cancel(request)
    assert calls[1] < 1.2 * calls[0], calls
    assert_idle(engine)


def test_the_table_of_counters_says_what_they_mean(engine):
    engine.generate(["hello", "x"], mixture=["mix", None], max_tokens=3, ignore_eos=True)
    table = engine.stats()
    assert list(table.columns) == ["value", "unit", "meaning"] and table.meaning.str.len().min() > 5
    assert table.value.to_dict() == engine.counters()
    assert table.value["generated_tokens"] == 6 and table.value["requests_ended"] == 2
    assert table.value["scalings_computed"] == 7 and table.value["kv_bytes"] == 0
