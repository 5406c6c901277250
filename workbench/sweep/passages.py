"""Texts for fidelity: passages that come with the demo, or a user's own.

A set of texts is named "single" (one domain each), "single:german", "switching" (the domain changes in the middle),
"long", or is a file: plain text, or JSONL with an object per line: `text`, and, if you like, `name` and `domain`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import read_json
from workbench.sweep.point import PointSettings

if TYPE_CHECKING:
    from workbench.engine import Engine

SETS = ("single", "switching", "long")
_FILE = "texts.json"
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
    pieces: list[Passage] = []
    for text in texts_of(point.texts):
        ids = list(engine.tokenizer(text.text, add_special_tokens=False)["input_ids"])
        # a switch in the middle of the text must stay in the middle of the passage
        starts = [(len(ids) - wanted) // 2] if text.domain.count(">") else range(0, len(ids) - wanted + 1, wanted)
        for start in starts:
            if start >= 0:
                part = ids[start : start + wanted]
                pieces.append(Passage(f"{text.name}@{start}", text.domain, part[:prefix], part[prefix:]))
    if not pieces:
        raise UserError(f"texts {point.texts!r}: none has {wanted} tokens; lower passage_tokens, or give longer texts")
    if len(pieces) < point.passages:
        raise UserError(f"texts {point.texts!r} make {len(pieces)} passages of {wanted} tokens, fewer than the "
                        f"{point.passages} asked for; lower passages or passage_tokens")
    return spread(pieces, point.passages)


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

        found = [Text(**each) for each in read_json(hub.resolve_mixture(hub.DEMO) / _FILE, "the demo's texts")[kind]]
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
