"""Texts for fidelity: passages of the texts that come with the demo, or of a user's own.

A set of texts is "single" (pieces of one domain each), "single:german" (of that domain), "switching" (the first half of
one domain, the second of another, every ordered pair), or a file: plain text, or JSONL with an object per line: `text`,
and, if you like, `name` and `domain`. "long" is "single" under another name, for points with long passages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest
from workbench.jsonfile import parse_json, read_json
from workbench.sweep.point import PointSettings

if TYPE_CHECKING:
    from workbench.engine import Engine

SWITCHING = "switching"
SETS = ("single", SWITCHING, "long")
_FILE, _BREAK = "texts.json", "\n\n"
_LINE_KEYS = ("text", "name", "domain")


@dataclass(frozen=True)
class Text:
    """A text and where it is from; `source` is its name, or one that no other text of its set has."""

    name: str
    domain: str
    text: str
    source: str = ""


@dataclass(frozen=True)
class Passage:
    """A text as tokens, cut into what is given and what is scored.

    Attributes:
        name, domain: of the text.
        prompt: token ids that are given; the tokenizer's beginning, if it has one, and the text's.
        continuation: token ids that are scored.
        sources: names, told apart, of the text that it is of, or of the two.
    """

    name: str
    domain: str
    prompt: list[int]
    continuation: list[int]
    sources: tuple[str, ...] = ()


def passages_of(point: PointSettings, engine: Engine) -> list[Passage]:
    """Return a point's passages: the domains by turns, and of each domain the texts by turns.

    Raises:
        UserError: as `pieces_of`, or too few.
    """
    pieces = pieces_of(point, engine)
    if len(pieces) < point.passages:
        raise UserError(f"texts {point.texts!r} make {len(pieces)} passages of {point.passage_tokens} tokens, fewer "
                        f"than the {point.passages} asked for; lower passages or passage_tokens")
    return spread(pieces, point.passages)


def pieces_of(point: PointSettings, engine: Engine) -> list[Passage]:
    """Return all passages that a point's texts make, however many it asks for.

    Raises:
        UserError: no such texts, none long enough, one that the base has no room for, or a base without a tokenizer.
    """
    if engine.tokenizer is None:
        raise UserError(f"base {engine.base_id!r} has no tokenizer: texts cannot be scored on it")
    wanted, cut = point.passage_tokens, _Cut(_beginning(engine), point.prefix_tokens)
    if wanted + len(cut.beginning) > engine.model.max_len:
        raise UserError(f"passage_tokens is {wanted}, but base {engine.base_id!r} has room for {engine.model.max_len}")
    encoded = [(text, _encode(engine, text.text)) for text in _told_apart(texts_of(point))]
    if point.texts == SWITCHING:
        pieces = _switching(encoded, wanted, _encode(engine, _BREAK), cut)
    else:
        starts = range(0, max(len(ids) for _, ids in encoded), wanted)
        pieces = [
            cut(f"{text.name}@{start}", text.domain, ids[start : start + wanted], (text.source,))
            for start in starts for text, ids in encoded if start + wanted <= len(ids)
        ]  # fmt: skip
    if not pieces:
        longest = max((text.name, len(ids)) for text, ids in encoded)
        raise UserError(f"texts {point.texts!r}: none has {wanted} tokens (the longest, {longest[0]!r}, has "
                        f"{longest[1]}); lower passage_tokens, or give longer texts")
    return pieces


def _told_apart(texts: Sequence[Text]) -> list[Text]:
    """Return texts with a source each: equal texts share theirs, others of one name do not."""
    first: dict[str, int] = {}
    held = [first.setdefault(text.text, number) for number, text in enumerate(texts)]
    by_name: dict[str, list[int]] = {}
    for number in sorted(set(held)):
        by_name.setdefault(texts[number].name, []).append(number)
    said = {number: f"{name} ({place})" if place > 1 else name
            for name, numbers in by_name.items() for place, number in enumerate(numbers, 1)}
    return [replace(text, source=said[number]) for text, number in zip(texts, held, strict=True)]


def switch_place(point: PointSettings) -> int | None:
    """Return the place after the prompt at which the topic changes; None for texts that keep to theirs."""
    return point.passage_tokens // 2 - point.prefix_tokens if point.texts == SWITCHING else None


def _switching(
    encoded: Sequence[tuple[Text, list[int]]], wanted: int, between: list[int], cut: _Cut
) -> list[Passage]:
    """Return passages that begin in one domain and go on in another: every ordered pair, again with other texts of the
    two, then the next pieces of all. One pair's two texts differ from another's, so that few passages use many texts.
    """
    first, second = wanted // 2 - len(between), wanted - wanted // 2
    if first < 1:
        raise UserError(f"'switching' texts of {wanted} tokens have no room for two topics; raise passage_tokens")
    by_domain: dict[str, list[tuple[Text, list[int]]]] = {}
    for text, ids in encoded:
        by_domain.setdefault(text.domain, []).append((text, ids))
    found, own = [], list(by_domain.values())
    starts, turns = range(0, max(len(ids) for _, ids in encoded), second), range(max(map(len, own)))
    for start, turn, (a, b) in itertools.product(starts, turns, itertools.permutations(range(len(own)), 2)):
        # b and a + 1: in one turn, no two pairs begin with the same text, or end with it
        (one, begin), (other, rest) = own[a][(turn + b) % len(own[a])], own[b][(turn + a + 1) % len(own[b])]
        if start + second <= min(len(begin), len(rest)):
            ids = begin[start : start + first] + between + rest[start : start + second]
            name, domain = f"{one.name}@{start}>{other.name}", f"{one.domain}>{other.domain}"
            found.append(cut(name, domain, ids, (one.source, other.source)))
    return found


@dataclass(frozen=True)
class _Cut:
    """Cuts token ids after `prefix` of them; what every text of the model begins with comes before."""

    beginning: list[int]
    prefix: int

    def __call__(self, name: str, domain: str, ids: list[int], sources: tuple[str, ...]) -> Passage:
        return Passage(name, domain, self.beginning + ids[: self.prefix], ids[self.prefix :], sources)


def _beginning(engine: Engine) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text; some models are lost without."""
    text = "a"
    ids, plain = list(engine.tokenizer(text)["input_ids"]), _encode(engine, text)
    places = range(len(ids) - len(plain) + 1)
    return ids[: next((place for place in places if ids[place : place + len(plain)] == plain), 0)]


def _encode(engine: Engine, text: str) -> list[int]:
    # a text longer than the model's context is cut into passages: no warning is due
    return list(engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def spread(pieces: Sequence[Passage], count: int) -> list[Passage]:
    """Return `count` of the passages, the domains by turns, each domain's in their order."""
    by_domain: dict[str, list[Passage]] = {}
    for piece in pieces:
        by_domain.setdefault(piece.domain, []).append(piece)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_domain.values()))
    return list(itertools.islice((piece for piece in turns if piece is not None), count))


def texts_of(point: PointSettings) -> list[Text]:
    """Return a set of the demo's texts, or those of a file.

    Raises:
        UserError: neither, or texts that are empty.
    """
    name, path = point.texts, point.file("texts")
    kind, _, domain = name.partition(":")
    if kind in SETS:
        from workbench import hub

        if domain and kind == SWITCHING:
            raise UserError(f"texts {name!r}: 'switching' goes from each domain to each other; it takes no domain")
        data = read_json(hub.resolve_mixture(hub.DEMO) / _FILE, "the demo's texts")
        found = [Text(**each) for each in data["texts"]]
        if domain:
            domains = list(dict.fromkeys(text.domain for text in found))
            if domain not in domains:
                raise UserError(f"texts {name!r}: no domain {domain!r}{nearest(domain, domains)}; there are "
                                f"{names(domains)}")
            found = [text for text in found if text.domain == domain]
        return found
    if path.is_dir():
        raise UserError(f"texts {name!r} is a folder, expected a file: plain text, or .jsonl")
    if not path.is_file():
        raise UserError(f"texts {name!r}: there is no such file, and no such set{nearest(kind, SETS)}; sets are "
                        f"{names(SETS)}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"texts {name!r} cannot be read: {why}") from None
    if not content.strip():
        raise UserError(f"texts {name!r} is empty")
    if path.suffix != ".jsonl":
        return [Text(path.stem, path.stem, content)]
    return [_of_line(line, number, path) for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def _of_line(line: str, number: int, path: Path) -> Text:
    where = f"texts {str(path)!r}, line {number}"
    data: Any = parse_json(line, where)
    if not isinstance(data, dict) or not isinstance(data.get("text"), str) or not data["text"].strip():
        raise UserError(f"{where}: expected an object with a 'text'")
    for key, value in data.items():
        if key not in _LINE_KEYS:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, _LINE_KEYS)}; the keys are {names(_LINE_KEYS)}")
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {key!r} is {value!r}, expected text")
    return Text(data.get("name", f"line {number}"), data.get("domain", path.stem), data["text"])
