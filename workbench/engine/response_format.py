"""ResponseFormat: what a request's text must look like, checked when it is given and compared by content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr
from typing import Any

from workbench.engine.json_schema import check_schema
from workbench.errors import UserError, names, nearest

JSON_SCHEMA, REGEX, LARK = "json_schema", "regex", "lark"
KINDS = {JSON_SCHEMA: "JSON schema", REGEX: "regular expression", LARK: "Lark grammar"}
ANY_OBJECT = {"type": "object"}
MAX_CHARS = 1 << 18  # a larger one is no hand-made format, and would hold up every other one's compilation
MAX_RULES = 1000  # the compiler recurses from rule to rule, and takes minutes to report an error 5,000 rules deep

_TYPES = ("text", "json_object", "json_schema", "regex", "lark", "grammar")
# per type, the keys that may carry its content; several are names for one thing
_CONTENT = {
    "text": (), "json_object": ("schema",), "json_schema": ("schema", "json_schema"), "regex": ("regex", "pattern"),
    "lark": ("lark", "grammar"), "grammar": ("grammar", "lark"),
}  # fmt: skip
_OPENAI_KEYS = ("name", "description", "schema", "strict")
_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# attributes of a Lark rule that are not the grammar's: `temperature` would be ignored, `stop` hides text that was
# generated, and `max_tokens` counts drafts that were taken back
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_FOREIGN = re.compile(r"^[ \t]*[?!]?[\w-]+[ \t]*\[[^:\n]*?\b(temperature|max_tokens|stop)[ \t]*=", re.MULTILINE)


@dataclass(frozen=True)
class ResponseFormat:
    """One format; equal and hashed by content, property order included (it is the order of the output).

    JSON has its properties in the schema's order, and at most 32 blanks in a row between its parts ("x-guidance" in a
    schema changes that, as llguidance documents). Regular expressions are those of Rust's regex crate, matched against
    the whole text, without look-around and back-references. The Lark dialect is llguidance's.

    Attributes:
        kind: "json_schema", "regex" or "lark".
        text: the schema as JSON, the regular expression, or the grammar.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, given: Any) -> ResponseFormat | None:
        """Return the format that a request asks for, or None where any text will do.

        Args:
            given: None or `{"type": "text"}`: any text. `{"type": "json_object"}`: any JSON object.
                `{"type": "json_schema", "schema": S}`, the same under "json_object", or OpenAI's
                `{"type": "json_schema", "json_schema": {"name": ..., "schema": S}}`: JSON that fits S, a JSON schema as
                dict, as JSON text or as pydantic model (None: any JSON object); `strict` or not, it is enforced.
                `{"type": "regex", "regex": R}` (or "pattern"): text that R matches as a whole.
                `{"type": "lark", "lark": G}` (or "grammar", as type too): text of a Lark grammar.
                A pydantic model by itself is its schema, and a ResponseFormat is itself.

        Raises:
            UserError: none of these, a key that does not belong, or a schema with a part that cannot be enforced.
        """
        if given is None or isinstance(given, cls):
            return given
        if _is_model(given):
            return cls._of_schema(given)
        if not isinstance(given, Mapping):
            raise UserError(
                f"response_format must be a dict such as {{'type': 'json_object'}}, a pydantic model or None, not "
                f"{repr(given)}"
            )
        kind, content = _content(given)
        if kind == "text":
            return None
        if kind in ("json_object", "json_schema"):
            return cls._of_schema(content, needs_object=kind == "json_object")
        return cls._of_text(REGEX if kind == "regex" else LARK, content)

    def to_dict(self) -> dict[str, Any]:
        """Return it as `of` takes it."""
        if self.kind == JSON_SCHEMA:
            return {"type": self.kind, "schema": json.loads(self.text)}
        return {"type": self.kind, self.kind: self.text}

    @classmethod
    def _of_schema(cls, given: Any, needs_object: bool = False) -> ResponseFormat:
        schema = _schema(given)
        check_schema(schema)
        if needs_object and isinstance(schema, Mapping) and "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if "object" not in types:
                raise UserError(
                    f"response_format of type 'json_object' has a schema of type {schema['type']!r}; use type "
                    "'json_schema'"
                )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"response_format: the JSON schema is no JSON: {error}") from None
        return cls(JSON_SCHEMA, _checked(JSON_SCHEMA, text))

    @classmethod
    def _of_text(cls, kind: str, given: Any) -> ResponseFormat:
        if not isinstance(given, str) or not given:
            raise UserError(f"response_format: a {KINDS[kind]} is non-empty text, not {repr(given)}")
        _checked(kind, given)
        if kind == LARK:
            if (count := len(_RULE.findall(given))) > MAX_RULES:
                raise UserError(f"response_format: the Lark grammar has {count} rules; at most {MAX_RULES} are read")
            if found := _FOREIGN.search(given):
                raise UserError(
                    f"response_format: the rule attribute {found[1]!r} of the Lark grammar is not supported; settings "
                    "of the request do this" + (", or 'suffix' and 'lazy'" if found[1] == "stop" else "")
                )
            _check_inline_schemas(given)
        return cls(kind, given)


def check_endable(wanted: ResponseFormat | None, ignore_eos: bool) -> None:
    """Raise where a format is to be met and the end of the text is to be ignored."""
    if wanted is not None and ignore_eos:
        raise UserError(
            "response_format and ignore_eos contradict each other: text that meets a format ends where the format does"
        )


def _content(given: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a given format's type and what it constrains to."""
    kind = given.get("type")
    if kind not in _TYPES:
        if kind in _SCHEMA_TYPES or "properties" in given or "$defs" in given:
            raise UserError(
                "response_format is a JSON schema itself; give {'type': 'json_schema', 'schema': <the schema>}"
            )
        said = f"type {kind!r} is not known{nearest(kind, _TYPES)}" if "type" in given else "it has no 'type'"
        raise UserError(f"response_format: {said}; the types are {names(_TYPES)}")
    # None is "not given", as clients send it, but a schema of None asks for any object
    has_own = kind in ("json_object", "json_schema") and given.get("json_schema") is None
    may_be_none = ("schema",) if has_own else ()
    keys = {key: value for key, value in given.items() if key != "type" and (value is not None or key in may_be_none)}
    if kind == "text" and "schema" in keys:
        raise UserError("response_format of type 'text' allows any text, but has a schema; use type 'json_schema'")
    allowed = _CONTENT[kind]
    _require_known(keys, allowed, f"of type {kind!r}")
    found = [key for key in allowed if key in keys]
    if len(found) > 1:
        raise UserError(f"response_format of type {kind!r} has both {found[0]!r} and {found[1]!r}; give one")
    if not found and kind not in ("text", "json_object"):
        raise UserError(f"response_format of type {kind!r} needs {allowed[0]!r}")
    content = keys[found[0]] if found else None
    return kind, _openai_schema(content) if found == ["json_schema"] else content


def _openai_schema(given: Any) -> Any:
    if not isinstance(given, Mapping):
        raise UserError(f"response_format: 'json_schema' must be a dict with 'name' and 'schema', not {repr(given)}")
    _require_known(given, _OPENAI_KEYS, "'json_schema'")
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(given.get(key), (kind, type(None))):
            said = "text" if kind is str else "true or false"
            raise UserError(f"response_format: {key!r} of 'json_schema' must be {said}, not {repr(given[key])}")
    if "schema" not in given:
        raise UserError("response_format: 'json_schema' needs 'schema'")
    return given["schema"]


def _schema(given: Any) -> Any:
    """Return the JSON schema that a dict, a JSON text, a pydantic model or None stands for."""
    if given is None:
        return ANY_OBJECT
    if _is_model(given):
        try:
            return given.model_json_schema()
        except Exception as error:  # pydantic raises errors of its own, and whatever a model's hooks raise
            first = str(error).partition("\n")[0]
            raise UserError(f"response_format: {given.__name__} has no JSON schema: {first}") from None
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UserError(f"response_format: 'schema' is text, but no JSON: {error}") from None
    return given


def _check_inline_schemas(grammar: str) -> None:
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # a comment, or an error that the compiler points at
        check_schema(schema)


def _checked(kind: str, text: str) -> str:
    if len(text) > MAX_CHARS:
        raise UserError(f"response_format: the {KINDS[kind]} has {len(text)} characters; at most {MAX_CHARS} are read")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UserError(f"response_format: the {KINDS[kind]} holds half a character (a lone surrogate)")
    return text


def _require_known(given: Mapping[Any, Any], known: tuple[str, ...], what: str) -> None:
    for key in given:
        if key not in known:
            raise UserError(
                f"response_format {what} has no {key!r}{nearest(key, known)}; its keys are {names(('type', *known))}"
                if what.startswith("of")
                else f"response_format: {what} has no {key!r}{nearest(key, known)}; its keys are {names(known)}"
            )


def _is_model(given: Any) -> bool:
    return isinstance(given, type) and callable(getattr(given, "model_json_schema", None))
