"""Formats compile once, apart from each other, within limits, and leave no thread.

Run: pytest tests/test_grammar_compiler.py
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import grammar_cases
import numpy as np
import pytest
from grammar_cases import (
    EOS,
    VOCAB,
    allowed,
    bytes_after,
    compiled,
    lark_format,
    matcher,
    regex_format,
    schema_format,
)
from models import byte_ids

from workbench.engine import grammar as grammar_module
from workbench.engine.grammar import Grammar, GrammarCompiler, GrammarError
from workbench.engine.response_format import ResponseFormat
from workbench.errors import UserError

tokenizer, compiler, fresh = grammar_cases.tokenizer, grammar_cases.compiler, grammar_cases.fresh


def test_rules_that_lead_into_rules_do_not_end_the_process(compiler):
    links = {f"r{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/r{i + 1}"}}, "required": ["a"]}
             for i in range(950)}  # fmt: skip
    made = matcher(compiler, schema_format({"$ref": "#/$defs/r0", "$defs": {**links, "r950": {"const": 1}}}),
                   '{"a":' * 950)  # fmt: skip
    assert "1" in bytes_after(made)
    grammar = "start: A0\n" + "\n".join(f'A{i}: A{i + 1} "b"' for i in range(950)) + '\nA950: "a"'
    assert bytes_after(matcher(compiler, lark_format(grammar), "a")) == "b"


@pytest.mark.parametrize("regex", ["a{1000000}", "(a{1000}){1000}", "b(a{1000}){1000}", "((a|b){500}){500}x"])
def test_explosive_regexes_meet_a_limit_and_not_the_machine(compiler, regex):
    try:
        made = matcher(compiler, regex_format(regex))
        for _ in range(40):
            made.accept(allowed(made)[0])
    except UserError as error:
        assert "response_format: the regular expression" in str(error)
        assert "too complex here" in str(error) or "cannot be compiled" in str(error)


def test_a_text_that_wears_out_the_shared_automaton_harms_no_other(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "_LIMITS", {**grammar_module._LIMITS, "max_lexer_states": 600})
    grammar, rng = compiled(fresh, regex_format("[ab]*a[ab]{40}")), np.random.default_rng(0)
    first = grammar._template
    texts = [(grammar.matcher(), []) for _ in range(6)]
    for made, text in texts * 3:
        for _ in range(60):
            text.append(int(rng.choice(byte_ids("ab"))))
            made.mask([text[-1], 100])
            made.accept(text[-1])
    assert grammar._template is not first, "nothing wore out: the test shows nothing"
    for made, text in texts:
        assert bytes_after(made) == "ab"
        assert made.is_accepting == bool(re.fullmatch("[ab]*a[ab]{40}", bytes(i - 3 for i in text).decode()))


def test_text_beyond_the_limits_ends_with_a_sentence(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "_LIMITS", {**grammar_module._LIMITS, "max_lexer_states": 150})
    made, rng = matcher(fresh, regex_format("[ab]*a[ab]{40}")), np.random.default_rng(0)
    with pytest.raises(GrammarError, match="the regular expression is too complex here: lexer error: too many states"):
        for _ in range(600):
            made.mask()
            made.accept(int(rng.choice(byte_ids("ab"))))
    assert not made.is_finished and made.mask(byte_ids("a")) is None
    with pytest.raises(GrammarError, match="too complex here"):
        made.mask()


def test_a_schema_of_too_many_choices_ends_its_request(compiler):
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}
    with pytest.raises(GrammarError, match="the JSON schema is too complex here: Parser Error: Current row has"):
        matcher(compiler, schema_format(wide), "{").mask()


def test_equal_formats_compile_once_and_the_oldest_are_forgotten(tokenizer):
    small = GrammarCompiler(tokenizer, VOCAB, EOS, max_cached=2)
    first = compiled(small, regex_format("a"))
    assert compiled(small, ResponseFormat.of({"type": "regex", "pattern": "a"})) is first
    compiled(small, regex_format("b"))
    assert compiled(small, regex_format("a")) is first
    compiled(small, regex_format("c"))
    assert compiled(small, regex_format("a")) is first
    second = compiled(small, regex_format("b"))
    compiled(small, regex_format("c"))
    assert compiled(small, regex_format("b")) is second
    assert compiled(small, regex_format("a")) is not first
    small.close()


def test_a_format_that_fails_fails_alone(fresh):
    futures = [fresh.compile(form) for form in (regex_format("("), regex_format("a"), regex_format("("))]
    errors = [future.exception(timeout=60) for future in futures]
    errors.append(fresh.compile(regex_format("(")).exception(timeout=60))
    assert errors[1] is None and all(isinstance(error, UserError) for error in (errors[0], *errors[2:]))
    # raised in another thread each, one exception would collect all their frames
    assert errors[3] is not errors[0]


def test_an_unexpected_failure_is_the_requests_alone(fresh, monkeypatch):
    def broken(wanted):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(grammar_module, "_source", broken)
    error = fresh.compile(regex_format("a")).exception(timeout=60)
    assert isinstance(error, UserError) and str(error).endswith("cannot be compiled: out of luck")
    monkeypatch.undo()
    assert isinstance(compiled(fresh, regex_format("b")), Grammar)


def test_a_hundred_compilations_at_once_leave_no_thread(tokenizer):
    before = set(threading.enumerate())
    busy = GrammarCompiler(tokenizer, VOCAB, EOS, num_threads=3)
    futures: list[list[Future]] = [[] for _ in range(4)]

    def ask(mine: list[Future]) -> None:
        mine += [busy.compile(schema_format({"const": i % 50})) for i in range(100)]

    askers = [threading.Thread(target=ask, args=(mine,)) for mine in futures]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for at in range(50):
        grammars = {id(future.result(timeout=60)) for mine in futures for future in mine[at::50]}
        assert len(grammars) == 1
    busy.close()
    busy.close()
    assert set(threading.enumerate()) <= before
    assert "was shut down" in str(busy.compile(schema_format({})).exception(timeout=60))


def test_closing_answers_those_who_still_wait(tokenizer, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    real = grammar_module._source

    def slow(wanted):
        started.set()
        assert go_on.wait(60)
        return real(wanted)

    monkeypatch.setattr(grammar_module, "_source", slow)
    made = GrammarCompiler(tokenizer, VOCAB, EOS)
    running, waiting = made.compile(regex_format("a")), made.compile(regex_format("b"))
    assert started.wait(60) and not waiting.cancel()
    closer = threading.Thread(target=made.close)
    closer.start()
    while not made._closed:
        pass
    go_on.set()
    closer.join(60)
    assert isinstance(running.result(timeout=60), Grammar)
    assert "before the response format was compiled" in str(waiting.exception(timeout=60))


def test_a_base_that_cannot_have_grammars_says_so(tokenizer):
    slow = type("SlowTokenizer", (), {"is_fast": False})()
    broken = SimpleNamespace(is_fast=True, get_vocab=dict)
    for given_tokenizer, eos, said in ((None, EOS, "this base has none"), (slow, EOS, "SlowTokenizer, a slow one"),
                                       (tokenizer, set(), "end-of-sequence"), (tokenizer, {265, 10**6}, "names none"),
                                       (broken, EOS, "names none")):  # fmt: skip
        made = GrammarCompiler(given_tokenizer, VOCAB, eos)
        for _ in range(2):
            error = made.compile(regex_format("a")).exception(timeout=60)
            assert isinstance(error, UserError) and said in str(error)
        made.close()


def test_a_model_with_fewer_ids_than_its_tokenizer_never_gets_the_others(tokenizer):
    made = GrammarCompiler(tokenizer, 200, {1})
    mask = compiled(made, regex_format("(?s:.*)")).matcher().mask()
    assert mask.shape == (200,) and mask[byte_ids("a")[0]]
    made.close()
