"""JSON schemas as response formats: every keyword is enforced or refused by name, wherever it stands.

The grammar compiler skips keywords it does not know, so what it must not skip is refused here. Where it is stricter
than it needs to be, `compilable` says the same in words it takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from reprlib import repr
from typing import Any
from urllib.parse import unquote

from workbench.errors import UserError, nearest

_ONE_SCHEMA = ("items", "additionalItems", "additionalProperties")
_SCHEMA_LISTS = ("items", "prefixItems", "anyOf", "allOf", "oneOf")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = (
    "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
# they say something about a value, never which values fit
_NOTES = (
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "title", "description", "default",
    "examples", "example", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding",
    "contentSchema", "discriminator", "xml", "externalDocs",
)  # fmt: skip
_REFUSED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef", "$recursiveAnchor", "nullable",
)  # fmt: skip
_TAKEN = frozenset([*_ONE_SCHEMA, *_SCHEMA_LISTS, *_SCHEMA_MAPS, *_VALUES, *_NOTES])
# keywords that ask for nothing with this value
_IDLE = {"uniqueItems": False, "nullable": False}
_OPTIONS = "x-guidance"
# the compiler's own dates have a 29th of February every year
_REAL_DATE = (
    "^(?:[0-9]{4}-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))|"
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_MAX_DEPTH = 60  # the compiler reads 127 levels of JSON, of which a property takes two
_MAX_PARTS = 100_000
_MAX_REFERENCES = 1000  # the compiler recurses from one into the next
_MAX_MULTIPLE = 100_000  # its automaton has a state per remainder: a million take eight seconds to build


def check_schema(schema: Any) -> None:
    """Raise unless every part of a JSON schema is enforced when text is generated.

    Raises:
        UserError: a keyword that is unknown or not supported, with its place and the nearest known one.
    """
    nodes = list(_nodes(schema))
    places, references = {id(node) for _, node in nodes}, set()
    for where, node in nodes:
        references.add(reference := str(node.get("$ref")))
        if len(references) > _MAX_REFERENCES:
            raise UserError(f"response_format: the JSON schema refers to more than {_MAX_REFERENCES} of its parts")
        target = _pointed(schema, reference)
        if isinstance(target, Mapping) and id(target) not in places:
            raise UserError(
                f"response_format: '$ref'{_at(where)} of the JSON schema leads to {reference!r}, which is no place of "
                "a schema; put it under '$defs'"
            )
        for key, value in node.items():
            if not isinstance(key, str):
                raise UserError(f"response_format: a key of the JSON schema{where} must be text, not {key!r}")
            _check_keyword(where, key, value)
        _check_counts(where, node)
        _check_multiple(where, node.get("multipleOf"))


def compilable(text: str) -> str:
    """Return a checked schema as JSON that the grammar compiler takes.

    `oneOf` is written as `anyOf` where at most one branch can fit anyway, and dates are those that exist.
    """
    schema = json.loads(text)
    for _, node in list(_nodes(schema)):
        parts = [(key, value) for key, value in node.items() if not _is_idle(key, value)]
        if "oneOf" in node and "anyOf" not in node and _told_apart(schema, node["oneOf"]):
            parts = [("anyOf" if key == "oneOf" else key, value) for key, value in parts]
        if node.get("format") in ("date", "date-time"):
            parts = [*((key, value) for key, value in parts if key != "allOf"),
                     ("allOf", [*node.get("allOf", ()), {"pattern": _REAL_DATE}])]  # fmt: skip
        node.clear()
        node.update(parts)
    return json.dumps(schema, ensure_ascii=False)


def _nodes(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of every schema within `schema`, itself first."""
    waiting, count = [("", schema, 0)], 0
    while waiting:
        where, node, depth = waiting.pop()
        count += 1
        if count > _MAX_PARTS:
            raise UserError(f"response_format: the JSON schema has more than {_MAX_PARTS} parts")
        if depth > _MAX_DEPTH:
            raise UserError(f"response_format: the JSON schema is nested more than {_MAX_DEPTH} deep")
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise UserError(
                f"response_format: a JSON schema is an object, true or false, not {repr(node)}"
                + (f" (at{where})" if where else "")
            )
        yield where, node
        # what is read last is popped first: places come in the order of the text
        waiting += reversed([(f"{where or ' '}/{name}", part, depth + 1) for name, part in _parts(node, where)])


def _parts(node: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key in _SCHEMA_LISTS and isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        elif key in _ONE_SCHEMA:
            yield key, value
        elif key in _SCHEMA_LISTS:
            raise UserError(f"response_format: {key!r}{_at(where)} must be a list of JSON schemas, not {repr(value)}")
        elif key in _SCHEMA_MAPS:
            if not isinstance(value, Mapping):
                raise UserError(f"response_format: {key!r}{_at(where)} must be an object, not {repr(value)}")
            yield from ((f"{key}/{name}", part) for name, part in value.items())


def _check_keyword(where: str, key: str, value: Any) -> None:
    if key in _TAKEN or _is_idle(key, value):
        return
    if key == _OPTIONS and not where:
        if isinstance(value, Mapping) and value.get("lenient"):
            raise UserError(f"response_format: {_OPTIONS!r} asks for 'lenient', which would skip what is not supported")
        return
    if key.startswith("x-") and key != _OPTIONS:
        return
    if key in _REFUSED:
        instead = '; write "type": [..., "null"] instead' if key == "nullable" else ""
        raise UserError(f"response_format: {key!r}{_at(where)} of the JSON schema is not supported{instead}")
    raise UserError(
        f"response_format: {key!r}{_at(where)} is no keyword of JSON schemas"
        f"{nearest(key, [*sorted(_TAKEN), *_REFUSED])} (names that begin with x- are notes of your own)"
    )


def _check_counts(where: str, node: Mapping[str, Any]) -> None:
    least, required = node.get("minProperties"), node.get("required")
    named = len(required) if isinstance(required, Sequence) else 0
    # of properties beyond the named ones nothing keeps a second from having the first one's name
    if isinstance(least, int) and least > named + 1:
        raise UserError(
            f"response_format: 'minProperties'{_at(where)} is {least}, but only {named} properties are required by "
            f"name; at most {named + 1} can be promised"
        )


def _check_multiple(where: str, step: Any) -> None:
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        digits = Decimal(str(step)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > _MAX_MULTIPLE:
            raise UserError(
                f"response_format: 'multipleOf'{_at(where)} is {step}; steps of more than {_MAX_MULTIPLE} (decimal "
                "point aside) are not supported"
            )


def _is_idle(key: str, value: Any) -> bool:
    return key in _IDLE and value is _IDLE[key]


def _told_apart(root: Any, branches: Sequence[Any]) -> bool:
    """Whether no value fits two branches, both of objects: a property that one requires has constants of its own."""
    objects = [_target(root, branch) for branch in branches]
    if not all(isinstance(branch, Mapping) and branch.get("type") == "object" for branch in objects):
        return False
    return all(_differ(one, other) for one, other in combinations(objects, 2))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    for name in [*one.get("required", ()), *other.get("required", ())]:
        ours, theirs = (_constants(branch.get("properties", {}).get(name)) for branch in (one, other))
        if ours and theirs and not ours & theirs:
            return True
    return False


def _constants(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return frozenset(values) if all(isinstance(value, str) for value in values) else frozenset()


def _target(root: Any, schema: Any) -> Any:
    """Return what a schema's `$ref` into the same document leads to, or the schema itself."""
    for _ in range(16):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _pointed(root, str(schema["$ref"]))
    return None


def _pointed(root: Any, pointer: str) -> Any:
    """Return what a JSON pointer within the document leads to, or None."""
    if not pointer.startswith("#/"):
        return root if pointer == "#" else None
    place = root
    for part in unquote(pointer[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(key)
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _at(where: str) -> str:
    return f" at{where}" if where else ""

