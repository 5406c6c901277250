"""Formats, a compiler on the byte tokenizer, and ways to walk through a grammar: what several test files share."""

from __future__ import annotations

import pytest
from models import byte_ids, byte_tokenizer
from transformers import AutoTokenizer

from workbench.engine.grammar import Grammar, GrammarCompiler, Matcher
from workbench.engine.response_format import ResponseFormat

VOCAB = 272  # the byte tokenizer has 259 tokens; a padded embedding has more
EOS = {1, 2, 265}  # the last one is known to the model alone

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": "a"}, "v": {"type": "boolean"}}, "required": ["kind", "v"]},
    {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
]
SCHEMAS = [
    {"type": "object"},
    {},
    True,
    {"$ref": "#/$defs/person", "$defs": {"person": _PERSON}},
    {"type": "object", "required": ["z", "a"], "additionalProperties": {"enum": [1, None]}},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4, "uniqueItems": False},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["q"]}], "items": False},
    {"enum": ["a", 'é"\\\n', 1, None, True, {"k": [1, 2]}, [], "\u2028\u0001"]},
    {"const": {"deep": ["x/y", {"": -0.5}]}},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 120},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 3.25},
    {"type": "string", "pattern": "^[a-c]{2,4}(é|ß)?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 2, "maximum": 4},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "string", "maxLength": 2}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"a": {"minimum": 3, "maximum": 7}, "b": {"type": "null"}}, "required": ["b"]}]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
     "$defs": {"A": TAGGED[0], "B": TAGGED[1]}},
]  # fmt: skip
REGEXES = [
    "a+b?", "[a-z]{2,4}(-[0-9]+)*", "(?i)abc", "a/b\nc\"|d", "^abc$", "abc$|x", "a|ab|abc", "(a*)*b", "é+[^x]{1,3}",
    r"[\u4e00-\u4e10]{2}\.\$", "(?P<name>a.)b??", r"\x41\t\\",
]  # fmt: skip
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
%ignore / {1,3}/
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, VOCAB, EOS)
    yield made
    made.close()


@pytest.fixture
def fresh(tokenizer):
    """A compiler of the test's own."""
    made = GrammarCompiler(tokenizer, VOCAB, EOS)
    yield made
    made.close()


def schema_format(schema) -> ResponseFormat:
    return ResponseFormat.of({"type": "json_schema", "schema": schema})


def regex_format(regex: str) -> ResponseFormat:
    return ResponseFormat.of({"type": "regex", "regex": regex})


def lark_format(grammar: str) -> ResponseFormat:
    return ResponseFormat.of({"type": "lark", "lark": grammar})


def compiled(compiler: GrammarCompiler, wanted: ResponseFormat) -> Grammar:
    return compiler.compile(wanted).result(timeout=60)


def matcher(compiler: GrammarCompiler, wanted: ResponseFormat, text: str | bytes = "") -> Matcher:
    """Return a matcher that has gone on by a text of bytes."""
    made = compiled(compiler, wanted).matcher()
    for token in byte_ids(text):
        made.accept(token)
    return made


def allowed(made: Matcher) -> list[int]:
    return made.mask().nonzero().flatten().tolist()


def bytes_after(made: Matcher) -> str:
    """The bytes that may come next, sorted, without ends of the text."""
    return bytes(token - 3 for token in allowed(made) if token not in EOS).decode("latin-1")
