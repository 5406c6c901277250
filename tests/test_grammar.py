"""What a grammar lets through always fits its format; drafts look ahead and change nothing.

Run: pytest tests/test_grammar.py
"""

from __future__ import annotations

import json
import re

import grammar_cases
import jsonschema
import numpy as np
import pytest
from grammar_cases import (
    ARITHMETIC,
    EOS,
    REGEXES,
    SCHEMAS,
    VOCAB,
    allowed,
    bytes_after,
    compiled,
    lark_format,
    matcher,
    regex_format,
    schema_format,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import byte_ids
from transformers import AutoTokenizer

from workbench.engine.grammar import Grammar, GrammarCompiler, GrammarError
from workbench.engine.response_format import ResponseFormat
from workbench.errors import UserError

tokenizer, compiler = grammar_cases.tokenizer, grammar_cases.compiler


def walk(grammar: Grammar, seed: int, closing: list[int], eos: set[int], soft: int = 40, hard: int = 4000) -> list[int]:
    """Choose uniformly among the allowed tokens; after `soft` of them prefer what brings the text to its end."""
    rng, made, ids = np.random.default_rng(seed), grammar.matcher(), []
    while not made.is_finished:
        options = allowed(made)
        if len(ids) > soft:
            options = [i for i in options if i in eos] or [next((i for i in closing if i in options), options[0])]
        token = int(rng.choice(options))
        made.accept(token)
        if token in eos:
            break
        ids.append(token)
        assert len(ids) < hard, "the text finds no end"
    assert made.is_accepting and made.is_finished
    return ids


def byte_walk(grammar: Grammar, tokenizer, seed: int) -> str:
    # digits for dates and numbers, bytes that complete a character, what closes a text, a quote before all
    closing = byte_ids('")}]:,e123450a \\n') + byte_ids(bytes([0x80, 0x90, 0xA0]))
    return tokenizer.decode(walk(grammar, seed, closing, EOS))


def check_json(schema, text: str) -> None:
    value = json.loads(text.replace('"0000-', '"0004-'))  # the year 0 has no place in Python's calendar
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)


@settings(max_examples=120)
@given(st.integers(0, 10**6), st.sampled_from(SCHEMAS))
def test_what_a_schema_lets_through_is_json_that_fits_it(compiler, tokenizer, seed, schema):
    check_json(schema, byte_walk(compiled(compiler, schema_format(schema)), tokenizer, seed))


@given(st.integers(0, 10**6), st.sampled_from(REGEXES))
def test_what_a_regex_lets_through_it_matches_as_a_whole(compiler, tokenizer, seed, regex):
    assert re.fullmatch(regex, byte_walk(compiled(compiler, regex_format(regex)), tokenizer, seed))


@given(st.integers(0, 10**6))
def test_what_a_lark_grammar_lets_through_it_parses(compiler, tokenizer, seed):
    text = byte_walk(compiled(compiler, lark_format(ARITHMETIC)), tokenizer, seed)
    assert set(text) <= set("0123456789+-*() ") and isinstance(eval(text.strip()), int)


def test_the_same_holds_with_a_real_tokenizer(demo_tokenizer):
    eos = {0, 2}
    with_real = GrammarCompiler(demo_tokenizer, len(demo_tokenizer) + 128, eos)
    pieces = [demo_tokenizer.encode(text) for text in ('"', "}", "]", '"}', "e", ":", ",", "1", "2", "0")]
    closing = [ids[0] for ids in pieces if len(ids) == 1]
    wanted = [(schema_format(schema), lambda text, s=schema: check_json(s, text)) for schema in SCHEMAS]
    wanted += [(regex_format(regex), lambda text, r=regex: re.fullmatch(r, text)[0]) for regex in REGEXES]
    for form, check in wanted:
        grammar = compiled(with_real, form)
        for seed in range(2):
            check(demo_tokenizer.decode(walk(grammar, seed, closing, eos)))
    free = compiled(with_real, schema_format({"type": "object"})).matcher()
    assert not free.mask()[len(demo_tokenizer) :].any()
    with_real.close()


@pytest.fixture(scope="module", params=[pytest.param(None, marks=pytest.mark.demo)])
def demo_tokenizer():
    from workbench.demo_base import demo_base_folder

    return AutoTokenizer.from_pretrained(demo_base_folder(progress=False))


def test_any_object_holds_arrays_nesting_and_every_character(compiler):
    value = {"a": [1, [2.5e-3, {"b": None}], "é\n\u0001\\\"/\u2028😀"], "": {}}
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=4, ensure_ascii=False)):
        made = matcher(compiler, ResponseFormat.of({"type": "json_object"}), text)
        assert made.is_accepting and made.is_finished
    with pytest.raises(GrammarError):
        matcher(compiler, ResponseFormat.of({"type": "json_object"}), "[")


def test_properties_come_in_the_order_of_the_schema(compiler):
    names = ["z", "a", "m"]
    schema = {"properties": {n: {"const": 1} for n in names}, "required": names, "type": "object"}
    made = matcher(compiler, schema_format(schema), '{"')
    assert bytes_after(made) == "z"
    matcher(compiler, schema_format(schema), '{"z":1,"a":1,"m":1')
    assert schema_format(schema) != schema_format({**schema, "properties": {n: {"const": 1} for n in sorted(names)}})


def test_blanks_between_parts_are_bounded_unless_the_schema_says_otherwise(compiler):
    schema = {"type": "array", "items": {"const": 1}, "minItems": 1}
    assert " " in bytes_after(matcher(compiler, schema_format(schema), "[" + 31 * " "))
    assert bytes_after(matcher(compiler, schema_format(schema), "[" + 32 * " ")) == "1"
    tight = {**schema, "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
    assert bytes_after(matcher(compiler, schema_format(tight), "[")) == "1"


def test_the_end_is_allowed_exactly_where_the_text_may_end(compiler):
    for text, may_end, is_finished in (("", False, False), ("a", True, False), ("ab", False, False),
                                       ("abc", True, True)):  # fmt: skip
        made = matcher(compiler, regex_format("a|abc"), text)
        mask = made.mask()
        assert mask.shape == (VOCAB,) and str(mask.dtype) == "torch.bool"
        assert {int(i) for i in EOS if mask[i]} == (EOS if may_end else set())
        assert (made.is_accepting, made.is_finished) == (may_end, is_finished)
        if may_end:
            made.accept(265)
            assert made.is_finished and made.is_accepting and set(allowed(made)) == EOS
            for token in (1, byte_ids("b")[0]):
                with pytest.raises(GrammarError):
                    made.accept(token)


def test_a_text_that_may_be_empty_may_end_at_once(compiler):
    made = matcher(compiler, regex_format("x{0}"))
    assert made.is_accepting and made.is_finished and set(allowed(made)) == EOS
    made = matcher(compiler, regex_format("x*"))
    assert made.is_accepting and not made.is_finished


def test_ids_that_the_tokenizer_lacks_are_never_allowed(compiler):
    assert allowed(matcher(compiler, lark_format('start: "a" <[270]> | "a" "b"'), "a")) == byte_ids("b")
    everything = set(allowed(matcher(compiler, lark_format("start: <[*]>+"))))
    assert everything <= {*range(259)}
    text = set(allowed(matcher(compiler, regex_format("(?s:.*)"))))
    assert not text & {0, *range(259, 265), *range(266, VOCAB)}


def test_a_grammar_may_name_special_tokens_and_its_own_end(compiler):
    assert allowed(matcher(compiler, lark_format('start: "a" <s> "b"'), "a")) == [0]
    made = matcher(compiler, lark_format('start: "a" </s>'), "a")
    assert allowed(made) == [1] and not made.is_accepting and made.is_finished
    made.accept(1)
    assert made.is_accepting
    # a request ends at this token: the rest of the grammar could never follow
    with pytest.raises(GrammarError, match="allows nothing after"):
        matcher(compiler, lark_format('start: "a" </s> "b"'), "a").mask()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([*map(schema_format, SCHEMAS), *map(regex_format, REGEXES),
    lark_format(ARITHMETIC), lark_format('start: head "c"\nhead[lazy]: /a+b/'),
    lark_format('start: head "c"\nhead[suffix="b"]: /[ab]+/'), lark_format('start: "a" dead | "b"\ndead: /[^\\s\\S]/'),
]))  # fmt: skip
def test_masks_of_drafts_are_those_of_accepted_tokens_and_change_nothing(compiler, seed, form):
    rng, grammar = np.random.default_rng(seed), compiled(compiler, form)
    made, path = grammar.matcher(), []
    for _ in range(12):
        if made.is_finished:
            break
        draft = _draft(grammar, path, rng)
        before, given_mask = allowed(made), made.mask(draft)
        made._now = None  # what it kept of this place must not hide a change
        assert allowed(made) == before
        after = grammar.matcher()
        try:
            for token in [*path, *draft]:
                after.accept(token)
            wanted = after.mask().tolist()
            assert given_mask is not None and given_mask.tolist() == wanted
        except GrammarError:
            assert given_mask is None
        path.append(int(rng.choice([i for i in before if i not in EOS])))
        made.accept(path[-1])
        if not made._vocabulary.allowed(made._inner).any():
            break


def _draft(grammar: Grammar, path: list[int], rng) -> list[int]:
    """Return one to three tokens that follow `path`, the last at times one that does not."""
    ahead, draft = grammar.matcher(), []
    for token in path:
        ahead.accept(token)
    for _ in range(rng.integers(1, 4)):
        mask = ahead._vocabulary.allowed(ahead._inner)
        options = [i for i in np.flatnonzero(mask).tolist() if i not in EOS]
        if not options or rng.random() < 0.1:
            break
        draft.append(int(rng.choice(options)))
        ahead.accept(draft[-1])
    return draft or [int(rng.integers(3, 259))]


def test_a_draft_that_breaks_off_is_none(compiler):
    made = matcher(compiler, regex_format("abc|ad"), "a")
    assert made.mask([101, 102]).nonzero().flatten().tolist() == sorted(EOS)
    for draft in ([105], [101, 103], [101, 102, 1], [1], [-1], [VOCAB], [270], [101, 102, 101]):
        assert made.mask(draft) is None
    assert bytes_after(made) == "bd"
    made.accept(byte_ids("d")[0])
    assert made.mask([101]) is None and made.is_finished
    # into a dead end and back, as often as one likes; through an id that the tokenizer lacks, never
    made = matcher(compiler, lark_format('start: "a" dead | "b" | <[270]> "c"\ndead: /[^\\s\\S]/'))
    for _ in range(2):
        assert made.mask(byte_ids("a")) is None and made.mask([270]) is None
        assert made.mask(byte_ids("b")).nonzero().flatten().tolist() == sorted(EOS)


def test_a_token_that_does_not_follow_raises_and_moves_nothing(compiler):
    made = matcher(compiler, regex_format("abc"), "a")
    for token in (*byte_ids("ac"), 1, 0, 270, -1, VOCAB, 10**9):
        with pytest.raises(GrammarError, match=f"token {token} does not follow"):
            made.accept(token)
    assert bytes_after(made) == "b"


def test_dates_are_those_of_the_calendar(compiler):
    for form in ("date", "date-time"):
        schema = {"type": ["string", "null"], "format": form, "allOf": [{"pattern": "-0[24]-"}]}
        assert bytes_after(matcher(compiler, schema_format(schema), '"2023-0')) == "24"
        for year in ("2023", "2024", "1900", "2000", "0004", "0100"):
            made = matcher(compiler, schema_format(schema), f'"{year}-02-2')
            leap = int(year) % 4 == 0 and (int(year) % 100 != 0 or int(year) % 400 == 0)
            assert ("9" in bytes_after(made)) == leap
        assert bytes_after(matcher(compiler, schema_format(schema), '"2023-04-3')) == "0"
        assert matcher(compiler, schema_format(schema), "null").is_finished


def test_a_dead_end_is_refused_at_once_or_ends_the_request(compiler):
    for form in (lark_format('start: start "a"'), regex_format(r"[^\s\S]"), schema_format({"$ref": "#"})):
        with pytest.raises(UserError, match="cannot be met: no text fits it"):
            compiled(compiler, form)
    made = matcher(compiler, lark_format('start: "a" dead\ndead: /[^\\s\\S]/'), "a")
    with pytest.raises(GrammarError, match="allows nothing after the text so far"):
        made.mask()
    assert not made.is_accepting and not made.is_finished


def test_requests_of_one_format_do_not_share_a_place(compiler):
    grammar = compiled(compiler, regex_format("abc"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(byte_ids("a")[0])
    assert (bytes_after(first), bytes_after(second)) == ("b", "a")
