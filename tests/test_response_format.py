"""A response format says one thing however it is written, and what cannot be enforced is refused with its name.

Run: pytest tests/test_response_format.py
"""

from __future__ import annotations

import json
import re

import grammar_cases
import pytest
from grammar_cases import TAGGED, compiled, lark_format, matcher, regex_format, schema_format

from workbench.engine.grammar import GrammarError
from workbench.engine.response_format import MAX_CHARS, ResponseFormat, check_endable
from workbench.errors import UserError

tokenizer, compiler = grammar_cases.tokenizer, grammar_cases.compiler


@pytest.mark.parametrize(("schema", "said"), [
    (False, "Unsatisfiable schema"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"type": "string", "format": "colour"}, "Unknown format: colour"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
    ({"$ref": "https://example.org/x.json"}, "https://example.org/x.json"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "the branches of a oneOf may overlap"),
    ({"oneOf": [{**branch, "required": []} for branch in TAGGED]}, "the branches of a oneOf may overlap"),
    ({"oneOf": [*TAGGED, TAGGED[0]]}, "the branches of a oneOf may overlap"),
    ({"oneOf": [{k: v for k, v in b.items() if k != "type"} for b in TAGGED]}, "the branches of a oneOf may overlap"),
    ({"minItems": -1}, "minItems"),
    ({"required": "a"}, "'required'"),
])  # fmt: skip
def test_a_schema_that_does_not_compile_says_why(compiler, schema, said):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        compiled(compiler, schema_format(schema))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 320


@pytest.mark.parametrize(("form", "said"), [
    (regex_format("("), "the regular expression cannot be compiled: unclosed group"),
    (regex_format("(?=a)b"), "look-ahead"),
    (regex_format(r"(a)\1"), "backreferences are not supported"),
    (regex_format(r"\bfoo"), "lookarounds not supported yet"),
    (lark_format("start: foo"), 'unknown name: "foo" (line 1, column 8)'),
    (lark_format('strt: "a"'), "no start rule found"),
    (lark_format('start: "a'), "lexer error"),
    (lark_format("start: <|im_end|>"), 'unknown special token: "<|im_end|>"'),
    (lark_format("start: " + "(" * 5000), "too deeply nested"),
    (lark_format('start: %json {"$ref": "#/x"}'), "/x"),
])  # fmt: skip
def test_a_regex_or_grammar_that_does_not_compile_says_why(compiler, form, said):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        compiled(compiler, form)
    assert "\n" not in str(raised.value) and "verbose" not in str(raised.value)


@pytest.mark.parametrize(("schema", "said"), [
    ({"not": {}}, "'not' of the JSON schema is not supported"),
    ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "'uniqueItems' at /properties/a/items"),
    ({"$defs": {"x": {"if": {}}}}, "'if' at /$defs/x"),
    ({"type": "string", "nullable": True}, '"null"'),
    ({"items": {"maxitems": 3}}, "'maxitems' at /items is no keyword of JSON schemas; did you mean 'maxItems'?"),
    ({"properties": {"a": {"x-guidance": {}}}}, "'x-guidance' at /properties/a"),
    ({"x-guidance": {"lenient": True}}, "'lenient'"),
    ({"items": 3}, "is an object, true or false, not 3 (at /items)"),
    ({"anyOf": {"type": "string"}}, "'anyOf' must be a list"),
    ({"properties": ["a"]}, "'properties' must be an object"),
    ({"type": "object", "minProperties": 2}, "'minProperties' is 2, but only 0 properties are required"),
    ({"multipleOf": 1_000_003}, "'multipleOf' is 1000003"),
    ({"properties": {1: {}}, "type": "object", 2: 3}, "must be text, not 2"),
    ({"const": float("nan")}, "is no JSON"),
    ({"enum": [{1, 2}]}, "is no JSON"),
    ({"$ref": "#/default", "default": {"maxitems": 1}}, "'$ref' of the JSON schema leads to '#/default', which is no"),
    ("{'type': 1}", "'schema' is text, but no JSON"),
    (3, "a JSON schema is an object, true or false, not 3"),
    ({"const": "\ud800"}, "half a character"),
    ({"description": "x" * MAX_CHARS}, "characters; at most"),
])  # fmt: skip
def test_a_schema_with_parts_that_would_not_be_enforced_is_refused(schema, said):
    with pytest.raises(UserError, match=re.escape(said)):
        schema_format(schema)


def test_keywords_are_looked_for_in_schemas_alone():
    schema_format({"properties": {"not": {"const": {"not": 1}}, "maxitems": {"enum": [{"if": 1}]}},
                   "examples": [{"contains": 1}], "default": {"then": 1}, "x-mine": {"not": {}}})  # fmt: skip


def test_schemas_without_an_end_are_refused():
    endless: dict = {}
    endless["items"] = endless
    with pytest.raises(UserError, match="nested more than 60 deep"):
        schema_format(endless)
    doubled: dict = {}
    for _ in range(40):
        doubled = {"anyOf": [doubled, doubled]}
    with pytest.raises(UserError, match="more than 100000 parts"):
        schema_format(doubled)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="is no JSON"):
        schema_format({"const": deep})
    with pytest.raises(UserError, match="refers to more than 1000"):
        schema_format({"$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(1001)}})
    with pytest.raises(UserError, match="has 1002 rules"):
        lark_format("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1001)))


FORMS = {
    "json_object": ({"type": "json_object"}, {"type": "json_object", "schema": None},
                    {"type": "json_schema", "schema": None}, {"type": "json_schema", "schema": {"type": "object"}},
                    {"type": "json_schema", "json_schema": {"name": "x", "schema": None, "strict": True}},
                    {"type": "json_schema", "schema": None, "json_schema": {"name": "x", "schema": {"type": "object"}}},
                    {"type": "json_object", "schema": '{"type": "object"}'}),
    "regex": ({"type": "regex", "regex": "a+"}, {"type": "regex", "pattern": "a+"}, {"type": "regex", "regex": "a+",
              "pattern": None, "schema": None}),
    "lark": tuple({"type": t, key: 'start: "a"'} for t in ("lark", "grammar") for key in ("lark", "grammar")),
}  # fmt: skip


def test_ways_to_say_one_format_are_one_format():
    assert ResponseFormat.of(None) is None and ResponseFormat.of({"type": "text"}) is None
    assert ResponseFormat.of({"type": "text", "schema": None}) is None
    made = []
    for forms in FORMS.values():
        made.append({ResponseFormat.of(form) for form in forms})
        assert len(made[-1]) == 1
    for form in set.union(*made):
        assert ResponseFormat.of(form) is form and ResponseFormat.of(form.to_dict()) == form
        json.dumps(form.to_dict())
    assert len(set.union(*made)) == 3


def test_a_pydantic_model_is_its_schema(compiler):
    from typing import Literal

    from pydantic import BaseModel, Field

    class Cat(BaseModel):
        kind: Literal["cat"]

    class Dog(BaseModel):
        kind: Literal["dog"]
        age: int = Field(ge=0, le=9)

    class Pet(BaseModel):
        animal: Cat | Dog = Field(discriminator="kind")
        note: str | None = Field(max_length=2)

    form = ResponseFormat.of(Pet)
    assert form == ResponseFormat.of({"type": "json_object", "schema": Pet}) == schema_format(Pet.model_json_schema())
    made = matcher(compiler, form, '{"animal":{"kind":"dog","age":3},"note":null}')
    assert made.is_finished
    with pytest.raises(GrammarError):
        matcher(compiler, form, '{"animal":{"kind":"dog","age":10')

    class Odd(BaseModel):
        value: type

    Odd.model_json_schema = classmethod(lambda cls: 1 / 0)
    with pytest.raises(UserError, match="Odd has no JSON schema: division by zero"):
        ResponseFormat.of(Odd)


@pytest.mark.parametrize(("given_format", "said"), [
    ("json_object", "must be a dict such as"),
    ([], "must be a dict such as"),
    ({}, "it has no 'type'"),
    ({"type": "json_shema", "schema": {}}, "type 'json_shema' is not known; did you mean 'json_schema'?"),
    ({"type": ["json_schema"]}, "is not known"),
    ({"type": "object", "properties": {}}, "is a JSON schema itself; give {'type': 'json_schema'"),
    ({"properties": {}}, "is a JSON schema itself"),
    ({"type": "text", "schema": {}}, "of type 'text' allows any text, but has a schema; use type 'json_schema'"),
    ({"type": "text", "regex": "a"}, "of type 'text' has no 'regex'"),
    ({"type": "json_schema"}, "of type 'json_schema' needs 'schema'"),
    ({"type": "json_schema", "shema": {}}, "of type 'json_schema' has no 'shema'; did you mean 'schema'?"),
    ({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, "both 'schema' and 'json_schema'; give one"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "'json_schema' needs 'schema'"),
    ({"type": "json_schema", "json_schema": {"nam": "x", "schema": {}}}, "'nam'; did you mean 'name'?"),
    ({"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}, "'name' of 'json_schema' must be text, not 3"),
    ({"type": "json_schema", "json_schema": {"strict": "y", "schema": {}}}, "must be true or false, not 'y'"),
    ({"type": "json_schema", "json_schema": []}, "must be a dict with 'name' and 'schema'"),
    ({"type": "json_object", "schema": {"type": "array"}}, "has a schema of type 'array'; use type 'json_schema'"),
    ({"type": "json_object", "schema": {"type": 5}}, "has a schema of type 5"),
    ({"type": "regex"}, "of type 'regex' needs 'regex'"),
    ({"type": "regex", "regex": ""}, "a regular expression is non-empty text, not ''"),
    ({"type": "regex", "regex": 3}, "is non-empty text, not 3"),
    ({"type": "regex", "regex": "a", "pattern": "a"}, "both 'regex' and 'pattern'; give one"),
    ({"type": "lark", "lark": "start: x\nx[max_tokens=3]: /a/"}, "the rule attribute 'max_tokens'"),
    ({"type": "lark", "lark": 'start: x\nx[stop="b"]: /a/'}, "'suffix' and 'lazy'"),
    ({"type": "grammar", "lark": "start: x\nx[lazy, temperature=0.5]: /a/"}, "the rule attribute 'temperature'"),
    ({"type": "lark", "lark": 'start: %json {"maxitems": 3}'}, "did you mean 'maxItems'?"),
    ({"type": "lark", "lark": "start: \"" + "a" * MAX_CHARS + '"'}, "characters; at most"),
])  # fmt: skip
def test_a_format_that_is_none_is_refused_with_a_sentence(given_format, said):
    with pytest.raises(UserError, match=re.escape(said)):
        ResponseFormat.of(given_format)


def test_a_format_without_an_end_is_a_contradiction():
    check_endable(None, ignore_eos=True)
    check_endable(regex_format("a"), ignore_eos=False)
    with pytest.raises(UserError, match="contradict"):
        check_endable(regex_format("a"), ignore_eos=True)
