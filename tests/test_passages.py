"""Passages: domains by turns, a topic that switches where it is said to, files of one's own, and every mistake.

Run: pytest tests/test_passages.py
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_problem import fidelity

from workbench import UserError
from workbench.sweep.passages import Passage, passages_of, spread, switch_place, texts_of

DEMO = {text.name: text.text for text in texts_of(fidelity(texts="single"))}
DOMAINS = list(dict.fromkeys(text.domain for text in texts_of(fidelity(texts="single"))))


class Bytes:
    """A tokenizer whose token i is byte i, after a beginning if it has one."""

    def __init__(self, beginning=()):
        self.beginning = list(beginning)

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": (self.beginning if add_special_tokens else []) + list(text.encode())}


def engine_with(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer, base_id="tiny", model=SimpleNamespace(max_len=500))


ENGINE = engine_with(Bytes())


def text_of(ids) -> str:
    return bytes(ids).decode(errors="replace")


def test_single_texts_deal_the_domains_by_turns():
    count = len(DEMO) + 2
    found = passages_of(fidelity(texts="single", passages=count, passage_tokens=40, prefix_tokens=10), ENGINE)
    assert [each.domain for each in found] == [DOMAINS[number % len(DOMAINS)] for number in range(count)]
    assert all(len(each.prompt) == 10 and len(each.continuation) == 30 for each in found)
    # every text has its turn before one goes on where it ended
    assert {each.name for each in found[:-2]} == {f"{name}@0" for name in DEMO}
    one, later = found[0], found[len(DEMO)]
    assert DEMO[one.sources[0]].encode().startswith(bytes(one.prompt + one.continuation + later.prompt))
    assert len({each.name for each in found}) == count


def test_a_domain_may_be_chosen():
    found = passages_of(fidelity(texts="single:german"), ENGINE)
    assert {each.domain for each in found} == {"german"}
    with pytest.raises(UserError, match="no domain 'germn'; did you mean 'german'"):
        passages_of(fidelity(texts="single:germn"), ENGINE)


@pytest.mark.parametrize("length", [24, 25, 64])
def test_switching_texts_change_their_domain_in_the_middle(length):
    all_pairs = len(DOMAINS) * (len(DOMAINS) - 1)
    per_start = all_pairs * len(DEMO) // len(DOMAINS)
    point = fidelity(texts="switching", passages=per_start + 2, passage_tokens=length)
    found = passages_of(point, ENGINE)
    pairs = [tuple(each.domain.split(">")) for each in found]
    assert len({each.name for each in found}) == len(found)
    # every ordered pair comes before any comes again, and within these no two begin with one text, or end with it
    for first in range(0, per_start, all_pairs):
        turn = slice(first, first + all_pairs)
        assert len(set(pairs[turn])) == all_pairs
        for side in (0, 1):
            assert len({each.sources[side] for each in found[turn]}) == all_pairs
    for number, each in enumerate(found):
        one, other = each.sources
        assert pairs[number][0] != pairs[number][1] and len(each.prompt + each.continuation) == length
        assert (one.split("-")[0], other.split("-")[0]) == pairs[number]
        first, second = each.continuation[: switch_place(point)], each.continuation[switch_place(point) :]
        assert first[-2:] == list(b"\n\n")
        start = number // per_start * len(second)
        whole = (each.prompt + first)[:-2]
        assert DEMO[one].encode()[start : start + len(whole)] == bytes(whole)
        assert DEMO[other].encode()[start : start + len(second)] == bytes(second)
    assert switch_place(fidelity(texts="single")) is None


def test_what_a_model_begins_every_text_with_is_given_too():
    point = fidelity(texts="single")
    begun = passages_of(point, engine_with(Bytes([1, 7])))
    assert [each.prompt for each in begun] == [[1, 7, *each.prompt] for each in passages_of(point, ENGINE)]
    assert [each.continuation for each in begun] == [each.continuation for each in passages_of(point, ENGINE)]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.data())
def test_spreading_takes_no_domain_twice_before_its_turn(domains, data):
    pieces = [Passage(str(number), domain, [], []) for number, domain in enumerate(domains)]
    count = data.draw(st.integers(1, len(pieces)))
    chosen = spread(pieces, count)
    assert len(chosen) == count == len({each.name for each in chosen})
    for domain in set(domains):
        own = [int(each.name) for each in chosen if each.domain == domain]
        assert own == [number for number, each in enumerate(domains) if each == domain][: len(own)]
        had = [sum(each.domain == domain for each in chosen[:stop]) for stop in range(count + 1)]
        others = max((sum(each.domain == other for each in chosen) for other in set(domains)), default=0)
        assert had[-1] in (domains.count(domain), others, others - 1)


def test_a_file_of_ones_own_is_cut_into_passages(tmp_path):
    plain = tmp_path / "mine.txt"
    plain.write_text("abcdefgh" * 20)
    found = passages_of(fidelity(texts=str(plain), passages=2, passage_tokens=16), ENGINE)
    assert [each.name for each in found] == ["mine@0", "mine@16"] and {each.domain for each in found} == {"mine"}
    lines = tmp_path / "many.jsonl"
    # a line separator inside a text is no new line of the file
    texts = [{"text": "x\u2028" * 9, "name": "one"}, {"text": "y" * 40, "domain": "letters"}, {"text": "z" * 40}]
    lines.write_text("\n\n".join(json.dumps(each, ensure_ascii=False) for each in texts) + "\r\n")
    found = passages_of(fidelity(texts=str(lines), passages=5, passage_tokens=16), ENGINE)
    # domains by turns; in each, the texts by turns
    assert [(each.name, each.domain) for each in found] == [
        ("one@0", "many"), ("line 3@0", "letters"), ("line 5@0", "many"), ("line 3@16", "letters"), ("one@16", "many"),
    ]  # fmt: skip


def test_passages_know_their_texts(tmp_path):
    found = passages_of(fidelity(texts="switching", passages=12), ENGINE)
    assert {each.sources for each in found} == {tuple(each.name.replace("@0", "").split(">")) for each in found}
    assert {source for each in found for source in each.sources} == set(DEMO)
    path = tmp_path / "t.jsonl"
    # one text twice is one text; two of one name are two
    texts = [("same", "x" * 40), ("same", "y" * 40), ("other", "x" * 40), ("third", "z" * 40)]
    path.write_text("\n".join(json.dumps({"name": name, "text": text}) for name, text in texts))
    found = passages_of(fidelity(texts=str(path), passages=8, passage_tokens=16), ENGINE)
    assert [each.sources for each in found[:4]] == [("same",), ("same (2)",), ("same",), ("third",)]
    assert len({each.sources for each in found}) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"), (" \n", "is empty"), ("{\n", "line 1 is not valid JSON"),
        ('{"text": "a"}\n[]', "line 2: exp"),
        ('{"text": ""}', "expected an object with a 'text'"), ('{"txt": "a", "text": "a"}', "did you mean 'text'"),
        ('{"text": "a", "name": 3}', "'name' is 3, expected text"), ('{"text": "a", "text": "b"}', "same key twice"),
        (b"\xff\xfe", "it is not UTF-8"), ('{"text": "short"}', r"none has 24 tokens \(the longest, 'line 1', has 5\)"),
        (json.dumps({"text": "a" * 50}), "make 2 passages of 24 tokens, fewer than the 4 asked for"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(tmp_path, content, said):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said):
        passages_of(fidelity(texts=str(path)), ENGINE)


def test_texts_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file, and no such set; did you mean 'switching'"):
        passages_of(fidelity(texts="swiching"), ENGINE)
    with pytest.raises(UserError, match="it takes no domain"):
        passages_of(fidelity(texts="switching:german"), ENGINE)
    with pytest.raises(UserError, match="is a folder"):
        passages_of(fidelity(texts=str(tmp_path)), ENGINE)
    with pytest.raises(UserError, match="'tiny' has no tokenizer"):
        passages_of(fidelity(texts="single"), engine_with(None))
    with pytest.raises(UserError, match="passage_tokens is 501, but base 'tiny' has room for 500"):
        passages_of(fidelity(texts="single", passage_tokens=501), ENGINE)
    with pytest.raises(UserError, match="no room for two topics"):
        passages_of(fidelity(texts="switching", passage_tokens=4, prefix_tokens=1), ENGINE)
    with pytest.raises(UserError, match="change their topic at token 12"):
        fidelity(texts="switching", passage_tokens=24, prefix_tokens=12)


def test_a_file_is_named_from_where_the_point_was_said(tmp_path, monkeypatch):
    from workbench.sweep.grid import Grid

    (tmp_path / "grids").mkdir()
    (tmp_path / "grids" / "mine.txt").write_text("abc" * 100)
    (tmp_path / "grids" / "g.toml").write_text(
        "fixed = { task = 'fidelity', mode = 'xlora', texts = 'mine.txt', passages = 1, passage_tokens = 16, "
        "prefix_tokens = 4 }"
    )
    (near,) = Grid.load(tmp_path / "grids" / "g.toml").points
    monkeypatch.chdir(tmp_path)
    (far,) = Grid.load("grids/g.toml").points
    assert near.id == far.id and near.settings["texts"] == "mine.txt"
    assert passages_of(near, ENGINE) == passages_of(far, ENGINE) != []
