"""Texts for fidelity: passages of the texts that come with the demo, or of a user's own.

A set of texts is "single" (pieces of one domain each), "single:german" (of that domain), "switching" (the first half of
one domain, the second of another, every ordered pair), or a file: plain text, or JSONL with an object per line: `text`,
and, if you like, `name` and `domain`. "long" is "single" under another name, for points with long passages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import read_json
from workbench.sweep.point import PointSettings

if TYPE_CHECKING:
    from workbench.engine import Engine

SWITCHING = "switching"
SETS = ("single", SWITCHING, "long")
_FILE, _BREAK = "texts.json", "\n\n"
_LINE_KEYS = ("text", "name", "domain")


@dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True)
class Passage:
    """A text as tokens, cut into what is given and what is scored.

    Attributes:
        name, domain: of the text.
        prompt: token ids that are given.
        continuation: token ids that are scored.
    """

    name: str
    domain: str
    prompt: list[int]
    continuation: list[int]


def passages_of(point: PointSettings, engine: Engine) -> list[Passage]:
    """Return a point's passages.

    Raises:
        UserError: no such texts, none long enough, or a base without a tokenizer.
    """
    if engine.tokenizer is None:
        raise UserError(f"base {engine.base_id!r} has no tokenizer: texts cannot be scored on it")
    wanted, prefix = point.passage_tokens, point.prefix_tokens
    encoded = [(text, _encode(engine, text.text)) for text in texts_of(point.texts)]
    if point.texts == SWITCHING:
        pieces = list(_switching(encoded, wanted, _encode(engine, _BREAK), prefix))
    else:
        pieces = [
            _cut(f"{text.name}@{start}", text.domain, ids[start : start + wanted], prefix)
            for text, ids in encoded for start in range(0, len(ids) - wanted + 1, wanted)
        ]
    if not pieces:
        raise UserError(f"texts {point.texts!r}: none has {wanted} tokens; lower passage_tokens, or give longer texts")
    if len(pieces) < point.passages:
        raise UserError(f"texts {point.texts!r} make {len(pieces)} passages of {wanted} tokens, fewer than the "
                        f"{point.passages} asked for; lower passages or passage_tokens")
    return spread(pieces, point.passages)


def _switching(
    encoded: Sequence[tuple[Text, list[int]]], wanted: int, between: list[int], prefix: int
) -> Iterator[Passage]:
    """Yield passages that begin in one domain and go on in another, every ordered pair, then the next pieces."""
    first = wanted // 2 - len(between)
    second = wanted - wanted // 2
    for number in itertools.count():
        made = False
        for (one, head), (other, tail) in itertools.permutations(encoded, 2):
            start = number * second
            if one.domain == other.domain or start + second > min(len(head), len(tail)):
                continue
            ids = head[start : start + first] + between + tail[start : start + second]
            yield _cut(f"{one.name}@{start}>{other.name}@{start}", f"{one.domain}>{other.domain}", ids, prefix)
            made = True
        if not made:
            return


def _cut(name: str, domain: str, ids: list[int], prefix: int) -> Passage:
    return Passage(name, domain, ids[:prefix], ids[prefix:])


def _encode(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def spread(pieces: Sequence[Passage], count: int) -> list[Passage]:
    """Return `count` of the passages, the domains by turns, in the order of the texts."""
    by_domain: dict[str, list[Passage]] = {}
    for piece in pieces:
        by_domain.setdefault(piece.domain, []).append(piece)
    chosen: list[Passage] = []
    while len(chosen) < count:
        for own in by_domain.values():
            if own and len(chosen) < count:
                chosen.append(own.pop(0))
    return chosen


def texts_of(name: str) -> list[Text]:
    """Return a set of the demo's texts, or those of a file.

    Raises:
        UserError: neither.
    """
    kind, _, domain = name.partition(":")
    if kind in SETS:
        from workbench import hub

        data = read_json(hub.resolve_mixture(hub.DEMO) / _FILE, "the demo's texts")
        found = [Text(**each) for each in data["texts"]]
        if domain:
            domains = list(dict.fromkeys(text.domain for text in found))
            if domain not in domains:
                raise UserError(f"texts {name!r}: no domain {domain!r}{nearest(domain, domains)}; there are "
                                f"{names(domains)}")
            found = [text for text in found if text.domain == domain]
        return found
    path = Path(name)
    if not path.is_file():
        raise UserError(f"texts {name!r}: there is no such file, and no such set{nearest(kind, SETS)}; sets are "
                        f"{names(SETS)}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"texts {name!r} cannot be read: {why}") from None
    if path.suffix != ".jsonl":
        if not content.strip():
            raise UserError(f"texts {name!r} is empty")
        return [Text(path.stem, path.stem, content)]
    return [_of_line(line, number, path) for number, line in enumerate(content.splitlines(), 1) if line.strip()]


def _of_line(line: str, number: int, path: Path) -> Text:
    where = f"texts {str(path)!r}, line {number}"
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is no JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("text"), str) or not data["text"]:
        raise UserError(f"{where}: expected an object with a 'text'")
    for key, value in data.items():
        if key not in _LINE_KEYS:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, _LINE_KEYS)}; the keys are {names(_LINE_KEYS)}")
        if not isinstance(value, str):
            raise UserError(f"{where}: {key!r} is {value!r}, expected text")
    return Text(data.get("name", f"line {number}"), data.get("domain", path.stem), data["text"])
