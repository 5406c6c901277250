"""Tokens to text while they arrive, and stop strings: `pytest tests/test_text.py`."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import byte_ids, byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from workbench.engine.text import Detokenizer, StopText, token_texts


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@cache
def metaspace():
    """Return a tokenizer as Llama 2's: words begin with U+2581, unknown characters are byte tokens."""
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "\u2581the", "\u2581", "cat", "\u2581sat", ",", "s"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def decode(tokenizer, ids, skip: bool) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def test_a_character_of_several_tokens_is_one_piece(byte_level):
    detokenizer = Detokenizer(byte_level, skip_special=True)
    pieces = [detokenizer.push(token) for token in byte_ids("aé€😀b")]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def test_an_unfinished_character_shows_when_the_text_ends(byte_level):
    detokenizer = Detokenizer(byte_level, skip_special=True)
    assert [detokenizer.push(token) for token in byte_ids("a" + "€")[:3]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert token_texts(byte_level, byte_ids("a€")[:3]) == ("a", "", "\ufffd")


def test_special_tokens_are_left_out_of_text_and_shown_in_traces(byte_level):
    ids = [0, *byte_ids("hi"), 1]
    assert "".join(Detokenizer(byte_level, skip_special=True).push(token) for token in byte_ids("hi")) == "hi"
    assert token_texts(byte_level, ids) == ("<s>", "h", "i", "</s>")


@given(st.lists(st.integers(0, 258), max_size=30), st.booleans())
def test_pieces_of_any_tokens_join_to_the_decoded_text(byte_level, ids, skip):
    detokenizer = Detokenizer(byte_level, skip_special=skip)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == decode(byte_level, ids, skip)
    assert not any("\ufffd" in piece[-1:] for piece in pieces)
    assert "".join(token_texts(byte_level, ids)) == decode(byte_level, ids, False)


@given(st.text(max_size=12))
def test_no_piece_of_valid_text_has_a_replacement_character(byte_level, text):
    detokenizer = Detokenizer(byte_level, skip_special=True)
    pieces = [detokenizer.push(token) for token in byte_ids(text.replace("\ufffd", ""))]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text.replace("\ufffd", "")


@given(st.lists(st.integers(2, 7) | st.integers(8 + 0x20, 8 + 0x7E), max_size=20))
def test_pieces_join_for_a_tokenizer_whose_first_space_is_dropped(ids):
    detokenizer = Detokenizer(metaspace(), skip_special=True)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == decode(metaspace(), ids, True)


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(None, skip_special=True)
    assert detokenizer.push(3) == detokenizer.flush() == ""


# stop strings


def feed(stop: tuple[str, ...], pieces: list[str]) -> tuple[StopText, list[str]]:
    """Push pieces until a stop string is met; finish otherwise."""
    text, shown = StopText(stop), []
    for piece in pieces:
        shown.append(text.push(piece))
        if text.stopped:
            return text, shown
    shown.append(text.finish())
    return text, shown


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        (("STOP",), ["go ", "ST", "OP", " on"], ["go ", "", ""]),
        (("STOP",), ["go ST", "AY"], ["go ", "STAY", ""]),  # held back, then let go
        (("STOP",), ["go S"], ["go ", "S"]),  # what is held at the end is text
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("abab",), ["abaabab"], ["aba"]),
        (("x", "yz"), ["a", "y", "z", "x"], ["a", "", ""]),
        (("yz", "z"), ["ayz"], ["a"]),  # the first place where one begins
        (("\n\n",), ["a\n", "\nb"], ["a", ""]),
        ((), ["a", "b"], ["a", "b", ""]),
    ],
)
def test_nothing_of_a_stop_string_is_ever_shown(stop, pieces, shown):
    text, found = feed(stop, pieces)
    assert found == shown
    assert text.text == "".join(shown)
    assert text.stopped == any(s in "".join(pieces) for s in stop)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.text("ab", min_size=1, max_size=4))
def test_the_text_ends_before_the_stop_string_however_it_is_cut(pieces, stop):
    text, shown = feed((stop,), pieces)
    whole = "".join(pieces)
    assert text.text == "".join(shown) == (whole[: whole.index(stop)] if stop in whole else whole)


@given(st.lists(st.text("abc", max_size=3), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_with_several_stop_strings_none_is_in_the_text_and_nothing_else_is_lost(pieces, stop):
    text, shown = feed(tuple(stop), pieces)
    whole = "".join(pieces)
    assert not any(s in text.text for s in stop)
    assert "".join(shown) == text.text and whole.startswith(text.text)
    if not text.stopped:
        assert text.text == whole
