"""Structured output in the engine: with every kind of request, drafted, preempted, streamed, and failing alone.

Run: pytest tests/test_structured_output.py
"""

from __future__ import annotations

import json
import re
import threading

import byte_engine
import pytest
import torch
from byte_engine import TOLERANCE, assert_idle, engine_on, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import BITWISE
from models import Probe, byte_ids

from workbench import UserError
from workbench.engine import grammar as grammar_module

shelf = byte_engine.shelf
pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
LIST = 'start: "[" item (", " item){2} "]"\nitem: /[a-z]{1,3}/ | "(" item ")"'
FORMATS = {
    "schema": {"type": "json_schema", "schema": PERSON},
    "regex": {"type": "regex", "regex": "(ab|c[0-9]{1,3}-){1,6}x{4,9}y"},
    "lark": {"type": "lark", "lark": LIST},
}
WHO = {
    "base": {}, "adapter": {"adapter": "a"}, "mixture": {"mixture": "mix"},
    "cached": {"mixture": "mix", "tgt_non_granular_index": 3},
    "merged": {"merged_adapters": {"ids": ["a", "b"], "weights": [0.5, 0.7]}},
}  # fmt: skip


def check(kind: str, text: str) -> None:
    if kind == "schema":
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"] and len(person["name"]) <= 6 and 0 <= person["age"] <= 120
        assert len(person["tags"]) <= 2 and set(person["tags"]) <= {"a", "b"}
    elif kind == "regex":
        assert re.fullmatch("(ab|c[0-9]{1,3}-){1,6}x{4,9}y", text)
    else:
        item = r"\(*[a-z]{1,3}\)*"
        assert re.fullmatch(rf"\[{item}(, {item}){{2}}\]", text) and text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def bitwise(shelf):
    with engine_on(shelf, **BITWISE) as made:
        made.load_adapter(shelf / "mix" / "b")
        yield made


@pytest.fixture
def engine(shelf):
    with engine_on(shelf) as made:
        made.load_adapter(shelf / "mix" / "b")
        yield made


def run(engine, prompt: str, **options):
    """Step until a request has ended, and return it; nothing else steps this engine."""
    request = engine.enqueue(prompt, **options)
    finish(engine, request)
    return request


def options_of(case: tuple) -> dict:
    who, kind, temperature, seed = case
    wanted = {"response_format": FORMATS[kind]} if kind else {"ignore_eos": True}
    return {**WHO[who], **wanted, "temperature": temperature, "seed": seed, "max_tokens": 90 if kind else 20}


CASES = st.lists(
    st.tuples(st.sampled_from(sorted(WHO)), st.sampled_from([*FORMATS, None]), st.sampled_from([0.0, 1.0, 3.0]),
              st.integers(0, 999)), min_size=2, max_size=5,
)  # fmt: skip


@settings(max_examples=5)
@given(CASES)
def test_in_any_mixed_batch_each_text_fits_and_is_what_it_is_alone(bitwise, cases):
    prompts = [f"{who} {kind}: " for who, kind, *_ in cases]
    requests = [bitwise.enqueue(p, **options_of(case)) for p, case in zip(prompts, cases, strict=True)]
    finish(bitwise, *requests)
    for (who, kind, *_), request, prompt, case in zip(cases, requests, prompts, cases, strict=True):
        assert request.error is None, request.error
        if kind and request.finish_reason == "stop":
            check(kind, request.output.text)
        elif kind:
            assert request.finish_reason == "length" and len(request.generated) == 90, (who, kind)
        alone = run(bitwise, prompt, **options_of(case))
        assert (alone.generated, alone.finish_reason) == (request.generated, request.finish_reason)
    assert_idle(bitwise)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_drafting_changes_no_token_of_a_constrained_mixture(shelf, bitwise, kind, temperature):
    settings = {**options_of(("mixture", kind, temperature, 5))}
    with engine_on(shelf, drafting=False, **BITWISE) as plain:
        wanted = plain.generate("a draft: ", **settings)
    request = run(bitwise, "a draft: ", **settings)
    assert request.generated == list(wanted.token_ids) and wanted.finish_reason == request.finish_reason
    if wanted.finish_reason == "stop":
        check(kind, wanted.text)
    # forced bytes are drafted right, so drafts were made and taken under the grammar
    assert 1 in request.drafts


@pytest.mark.parametrize("who", WHO)
def test_each_token_is_the_likeliest_that_the_grammar_allows(engine, who):
    probe = Probe(engine)
    request = engine.enqueue("x: ", **options_of((who, "schema", 0.0, 0)))
    finish(engine, request)
    probe.close()
    rows = probe.decoded(request.id, len(request.prompt_ids) - 1, len(request.generated))
    matcher = request.grammar.result().matcher()
    for token, row, choice in zip(request.generated, rows, request.choices, strict=True):
        allowed = matcher.mask()
        best = row.masked_fill(~allowed, float("-inf")).max()
        assert allowed[token] and row[token] >= best - TOLERANCE
        # what is reported is the model's own log-probability, not that among the allowed tokens
        assert choice.logprob == pytest.approx(float(torch.log_softmax(row, -1)[token]), abs=TOLERANCE)
        if token != 1:
            matcher.accept(token)
    check("schema", request.output.text)


def test_a_finished_text_ends_its_request_whatever_min_tokens_says(engine):
    done = engine.generate("x", response_format={"type": "regex", "regex": "abc"}, min_tokens=40, max_tokens=50)
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("abc", "stop", 3)
    long = {"type": "regex", "regex": "[ab]*"}
    done = engine.generate("x", response_format=long, min_tokens=30, max_tokens=50, logit_bias={1: 100.0})
    assert len(done.token_ids) == 31 and re.fullmatch("[ab]{30}", done.text) and done.token_ids[-1] == 1


def test_max_tokens_cuts_a_text_and_says_so(engine):
    done = engine.generate("x", response_format=FORMATS["schema"], max_tokens=8)
    assert done.finish_reason == "length" and done.text == '{"name":' and done.error is None


def test_stop_strings_and_penalties_work_within_a_format(engine):
    done = engine.generate("x", response_format=FORMATS["schema"], max_tokens=80, stop=['"age'])
    assert done.finish_reason == "stop" and re.fullmatch(r'\{"name":"[^"]*",', done.text.replace('\\"', ""))
    done = engine.generate(
        "x", response_format=FORMATS["lark"], max_tokens=80, temperature=1.0, top_k=1, top_p=0.5, min_p=0.2, seed=3,
        repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={byte_ids("z")[0]: -5.0},
    )
    check("lark", done.text)
    # forbidding what the format needs leaves nothing to choose from: that request's error
    done = engine.generate(["x", "y"], response_format=[{"type": "regex", "regex": "abc"}, None], max_tokens=4,
                           logit_bias={byte_ids("b")[0]: float("-inf")})  # fmt: skip
    assert done[1].error is None and done[0].error


@pytest.mark.parametrize("who", ["base", "mixture"])
def test_what_streams_is_the_text(engine, who):
    pieces: list[str] = []
    handle = engine.submit("s: ", **options_of((who, "schema", 1.0, 7)), on_text=pieces.append)
    done = handle.result()
    assert "".join(handle.text()) == "".join(pieces) == done.text
    check("schema", done.text)


def test_answers_of_one_prompt_have_a_place_in_the_grammar_each(engine):
    done = engine.generate("x", n=3, best_of=4, temperature=3.0, seed=1, max_tokens=80, response_format=FORMATS["lark"])
    assert len(done.choices) == 3 and len({each.text for each in done.choices}) > 1
    for each in done.choices:
        check("lark", each.text)


def test_a_preempted_request_goes_on_in_its_grammar(bitwise):
    wanted = run(bitwise, "p: ", **options_of(("mixture", "schema", 1.0, 3)))
    for after in (1, 5, 17):
        request = bitwise.enqueue("p: ", **options_of(("mixture", "schema", 1.0, 3)))
        while len(request.generated) < after:
            bitwise.step()
        bitwise.scheduler.preempt(request)
        finish(bitwise, request)
        assert request.num_preemptions == 1 and request.generated == wanted.generated


BAD = {
    "compiles not": ({"type": "regex", "regex": "("}, "unclosed group"),
    "fits nothing": ({"type": "json_schema", "schema": False}, "schema is false"),
    "leads nowhere": ({"type": "lark", "lark": 'start: "a" dead\ndead: /[^\\s\\S]/'}, "allows nothing after"),
}


@pytest.mark.parametrize("who", ["base", "adapter", "mixture"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_format_fails_its_request_alone(bitwise, who, bad):
    alone = run(bitwise, "good: ", **options_of((who, "schema", 1.0, 2)))
    wanted, said = BAD[bad]
    good = bitwise.enqueue("good: ", **options_of((who, "schema", 1.0, 2)))
    failing = bitwise.enqueue("bad: ", **WHO[who], response_format=wanted, max_tokens=9)
    finish(bitwise, good, failing)
    assert failing.finish_reason == "error" and said in failing.error and "\n" not in failing.error
    assert good.generated == alone.generated and good.finish_reason == "stop"
    assert_idle(bitwise)


def test_what_cannot_be_a_format_is_refused_before_anything_runs(engine):
    unknown = {"type": "json_schema", "schema": {"maxitems": 3}}
    with pytest.raises(UserError, match="did you mean 'maxItems'"):
        engine.submit("x", response_format=unknown, max_tokens=3)
    done = engine.generate(["x", "y"], response_format=[unknown, None], max_tokens=3)
    assert "did you mean 'maxItems'" in done[0].error and done[1].error is None
    assert_idle(engine)


def test_a_text_that_outgrows_its_limits_fails_alone(shelf, monkeypatch):
    monkeypatch.setattr(grammar_module, "_LIMITS", {**grammar_module._LIMITS, "max_lexer_states": 40})
    with engine_on(shelf) as engine:
        wild = {"type": "regex", "regex": "[ab]*a[ab]{40}"}
        done = engine.generate(["x", "y"], response_format=[wild, None], max_tokens=90, mixture=["mix", None],
                               temperature=5.0, seed=1)  # fmt: skip
    assert "the regular expression is too complex here" in done[0].error and done[1].error is None


@pytest.fixture
def held(shelf, monkeypatch):
    """An engine whose compiler waits for an event."""
    go_on, real = threading.Event(), grammar_module._source

    def slow(wanted):
        assert go_on.wait(60)
        return real(wanted)

    monkeypatch.setattr(grammar_module, "_source", slow)
    made = engine_on(shelf)
    yield made, go_on
    go_on.set()
    made.close()


def test_others_run_while_a_format_compiles(held):
    engine, go_on = held
    waiting = engine.submit("x", response_format=FORMATS["lark"], max_tokens=90)
    assert engine.generate("y", max_tokens=5, ignore_eos=True).finish_reason == "length"
    assert not waiting.done
    go_on.set()
    check("lark", waiting.result().text)


def test_a_request_can_end_while_its_format_compiles(held):
    engine, go_on = held
    cancelled = engine.submit("x", response_format=FORMATS["lark"], max_tokens=90)
    late = engine.submit("x", response_format=FORMATS["lark"], max_tokens=90, deadline_s=0.05)
    kept = engine.submit("x", response_format=FORMATS["lark"], max_tokens=90)
    cancelled.cancel()
    assert cancelled.result().finish_reason == "cancelled" and late.result().finish_reason == "deadline"
    go_on.set()
    check("lark", kept.result().text)
    assert engine.counters()["kv_bytes"] == 0


def test_closing_an_engine_ends_those_who_wait_for_a_format_and_its_threads(held):
    engine, go_on = held
    before = {thread for thread in threading.enumerate() if "grammar" in thread.name}
    handles = [engine.submit("x", response_format={"type": "regex", "regex": "a" * k}, max_tokens=5) for k in (1, 2, 3)]
    threading.Timer(0.1, go_on.set).start()
    engine.close()
    for handle in handles:
        assert handle.done and handle.result().finish_reason in ("cancelled", "error", "stop")
    assert not {t for t in threading.enumerate() if "grammar" in t.name} - before


def test_threads_with_formats_of_their_own_do_not_mix_them_up(engine):
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        wanted = {"type": "regex", "regex": f"{number}[a-d]{{5}}"}
        texts[number] = engine.generate("x", response_format=wanted, max_tokens=20, temperature=2.0).text

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert all(re.fullmatch(f"{number}[a-d]{{5}}", text) for number, text in texts.items()) and len(texts) == 8
