"""A conversation goes on from the tokens it has: `pytest tests/test_chat.py`."""

from __future__ import annotations

from types import SimpleNamespace

import byte_engine
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import byte_ids
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from workbench.engine.chat import Chat
from workbench.engine.prompts import Prompts
from workbench.engine.result import Completion, Usage
from workbench.errors import UserError

engine, shelf = byte_engine.engine, byte_engine.shelf

NOTHING = Usage(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
START, END, OTHER_END = 0, 1, 2
CHATML = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content.strip()")
# as models that think do: what an earlier answer thought is left out later
FORGETS = CHATML.replace("m.content", "m.content.split('!')[-1]")
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
# a new line before the end of an answer, none after it; the end is a token that the model does not say
OTHER = CHATML.replace("<end>\n", "\n<other>")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """ASCII letters, "ll" and "lll" as tokens of their own: the same text has several encodings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<start>": START, "<end>": END, "<other>": OTHER_END}
    for token in [*alphabet, "ll", "lll", ";u"]:
        vocab[token] = len(vocab)
    made = Tokenizer(token_models.BPE(vocab=vocab, merges=[("l", "l"), ("ll", "l"), (";", "u")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>",
                                   additional_special_tokens=["<start>", "<other>"])  # fmt: skip
    fast.chat_template = template
    return fast


class Scripted:
    """Stands for an engine: it answers what it is told to, and keeps the prompts it got."""

    def __init__(self, template: str):
        self.tokenizer = tokenizer(template)
        self.prompts = Prompts(self.tokenizer, len(self.tokenizer), 10_000, "tiny")
        self.answers, self.asked, self.options = [], [], []

    def generate(self, ids, **options) -> Completion:
        self.asked.append(list(ids))
        self.options.append(options)
        return self.answers.pop(0)

    def stream(self, ids, **options):
        done = self.generate(ids, **options)
        yield from done.text
        return done

    def answer(self, *ids, text: str | None = None, reason: str | None = None) -> None:
        """Add an answer of these tokens (or texts of one token each)."""
        ids = tuple(self.tokenizer.convert_tokens_to_ids(i) if isinstance(i, str) else i for i in ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True) if text is None else text
        reason = reason or ("stop" if END in ids[-1:] else "length")
        self.answers.append(Completion("r", text, ids, (0.0,) * len(ids), reason, NOTHING))

    def whole(self, messages) -> list[int]:
        return self.prompts.encode(messages, 0)


def two_turns(template: str, *ids, **how) -> tuple[Scripted, Chat, list[int]]:
    """Return engine, chat, and the tokens of the first turn, after two of which the first was answered with `ids`."""
    engine = Scripted(template)
    engine.answer(*ids, **how)
    engine.answer("x", END)
    chat = Chat(engine, "be terse")
    first = chat.say("hello")
    chat.say("and then?")
    return engine, chat, [*engine.asked[0], *first.token_ids]


# from the tokens that were generated


@pytest.mark.parametrize("end", [(END,), ()], ids=["ended", "cut off"])
@pytest.mark.parametrize("cut", [("lll",), ("l", "l", "l"), ("l", "ll"), ("ll", "l")], ids=str)
def test_a_turn_begins_with_the_tokens_of_the_one_before_however_they_were_cut(cut, end):
    engine, chat, first = two_turns(CHATML, "h", *cut, *end)
    assert engine.asked[1][: len(first)] == first
    assert engine.tokenizer.decode(engine.asked[1]) == engine.tokenizer.decode(engine.whole(chat.messages[:-1]))
    assert (engine.asked[1] == engine.whole(chat.messages[:-1])) == (cut == ("lll",))


@pytest.mark.parametrize("how, left", [("strip", "hi"), ("lstrip", "hi\n\n"), ("rstrip", " hi")])
def test_white_space_that_the_template_trims_stays_as_it_was_generated(how, left):
    engine, chat, first = two_turns(CHATML.replace("m.content", f"m.content.{how}()"), "Ġ", "h", "i", "Ċ", "Ċ", END)
    whole = engine.whole(chat.messages[:-1])
    assert f"\n{left}<end>" in engine.tokenizer.decode(whole) and chat.messages[2]["content"] == " hi\n\n"
    assert engine.asked[1][: len(first)] == first
    assert engine.asked[1][len(first) :] == whole[len(first) - 5 + len(left) :]


def test_a_template_that_rewrites_what_was_said_is_encoded_anew():
    engine, chat, first = two_turns(FORGETS, "h", "m", "!", "y", "l", "l", END)
    assert engine.asked[1] == engine.whole(chat.messages[:-1]) != first
    assert chat.messages[2]["content"] == "hm!yll"


def test_an_answer_cut_by_a_stop_string_goes_on_from_what_was_shown():
    engine, chat, _ = two_turns(CHATML, "l", "l", "S", "T", text="ll", reason="stop")
    assert engine.asked[1] == engine.whole(chat.messages[:-1])


def test_an_end_that_the_template_writes_otherwise_is_no_part_of_the_history():
    engine, chat, first = two_turns(OTHER, "l", "l", END)
    assert engine.asked[1][: len(first) - 1] == first[:-1] and END not in engine.asked[1]
    assert engine.tokenizer.decode(engine.asked[1]) == engine.tokenizer.decode(engine.whole(chat.messages[:-1]))


def test_special_tokens_within_an_answer_are_not_repeated():
    engine, chat, _ = two_turns(CHATML, "l", START, "l", END)
    assert engine.asked[1] == engine.whole(chat.messages[:-1])


def test_a_template_whose_text_runs_into_the_answer_is_encoded_anew():
    """There ";" and "u" are one token across the border, so the new part alone would be cut otherwise."""
    engine, chat, _ = two_turns(PLAIN.replace(";{%", "{%"), "l", "l", ";")
    assert engine.asked[1] == engine.whole(chat.messages[:-1])


def test_an_empty_answer_is_a_turn_too():
    engine, chat, first = two_turns(CHATML, END)
    assert engine.asked[1][: len(first)] == first and chat.messages[2] == {"role": "assistant", "content": ""}


PIECES = ["l", "ll", "lll", "h", ";u", ";", "Ġ", "Ċ", "<start>", "<other>", "Ã", "©", "!"]


@given(st.sampled_from([CHATML, TRIMS, FORGETS, PLAIN, OTHER]), st.lists(
    st.tuples(st.lists(st.sampled_from(PIECES), max_size=6), st.booleans()), min_size=1, max_size=4,
))  # fmt: skip
def test_every_prompt_says_what_the_template_says(template, answers):
    engine = Scripted(template)
    chat = Chat(engine)
    for ids, ended in answers:
        engine.answer(*ids, *([END] if ended else []))
        before = chat.messages
        chat.say("ull u")
        whole = engine.whole([*before, {"role": "user", "content": "ull u"}])
        said, wanted = (engine.tokenizer.decode(ids) for ids in (engine.asked[-1], whole))
        assert "".join(said.split()) == "".join(wanted.split())
        assert template == TRIMS or said == wanted


# the history


def test_messages_undo_and_reset():
    engine = Scripted(CHATML)
    for letter in "abc":
        engine.answer(letter, END)
    chat = Chat(engine, "be terse", max_tokens=3)
    assert chat.messages == [{"role": "system", "content": "be terse"}]
    chat.say("one")
    chat.say("two")
    said = [m["content"] for m in chat.messages]
    assert said == ["be terse", "one", "a", "two", "b"] and engine.options == [{"max_tokens": 3}] * 2
    chat.messages.clear()
    chat.undo()
    assert [m["content"] for m in chat.messages] == said[:3]
    chat.say("two")
    assert engine.asked[2] == engine.asked[1] and len(chat.messages) == 5
    chat.reset()
    assert len(chat.messages) == 1
    with pytest.raises(UserError, match="this chat has no turn to undo"):
        chat.undo()


@pytest.mark.parametrize("reason", ["error", "cancelled", "deadline"])
def test_a_turn_that_fails_leaves_the_history_as_it_was(reason):
    engine = Scripted(CHATML)
    engine.answer("a", END)
    engine.answer("b", reason=reason)
    engine.answer("c", END)
    chat = Chat(engine)
    chat.say("one")
    before = chat.messages
    assert chat.say("two").finish_reason == reason and chat.messages == before
    chat.say("two")
    assert engine.asked[2] == engine.asked[1] and len(chat.messages) == 4


def test_a_turn_that_is_refused_leaves_the_history_as_it_was(engine):
    chat = Chat(engine, max_tokens=2)
    for bad in ({"adapter": "nobody"}, {"max_tokens": 1000}, {"temprature": 1.0}):
        with pytest.raises(UserError):
            chat.say("hello", **bad)
        with pytest.raises(UserError):
            list(chat.stream("hello", **bad))
    assert chat.messages == [] and chat.say("hello").error is None


def test_a_stream_left_early_leaves_the_history_as_it_was(engine):
    chat = Chat(engine, max_tokens=30, ignore_eos=True)
    stream = chat.stream("hello")
    next(stream)
    for act in (lambda: chat.say("more"), chat.undo, chat.reset, lambda: next(chat.stream("more"))):
        with pytest.raises(UserError, match="this chat is in the middle of a turn; read its stream to the end, or clo"):
            act()
    stream.close()
    assert chat.messages == [] and not engine.scheduler.has_work()
    assert chat.say("hello", max_tokens=3).finish_reason == "length" and len(chat.messages) == 2


def test_a_stream_says_what_say_says(engine):
    said, streamed = Chat(engine, max_tokens=6), Chat(engine, max_tokens=6)
    for text in ("hello", "more"):
        wanted, pieces, stream = said.say(text), [], streamed.stream(text)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                done = end.value
                break
        assert "".join(pieces) == done.text == wanted.text and done.token_ids == wanted.token_ids
    assert streamed.messages == said.messages


# who answers


@pytest.mark.parametrize(
    "override, left",
    [
        ({}, {"mixture": "mix", "policy": 1, "max_tokens": 5}),
        ({"max_tokens": 2}, {"mixture": "mix", "policy": 1, "max_tokens": 2}),
        ({"adapter": "a"}, {"adapter": "a", "max_tokens": 5}),
        ({"adapter": None}, {"adapter": None, "max_tokens": 5}),
        ({"mixture": "other"}, {"mixture": "other", "policy": 1, "max_tokens": 5}),
        ({"tgt_non_granular_index": 2}, {"mixture": "mix", "tgt_non_granular_index": 2, "max_tokens": 5}),
    ],
    ids=str,
)
def test_a_turn_may_be_answered_by_someone_else(override, left):
    engine = Scripted(CHATML)
    engine.answer("a", END)
    chat = Chat(engine, mixture="mix", policy=1, max_tokens=5)
    chat.say("hello", **override)
    assert engine.options == [left] and chat.options == {"mixture": "mix", "policy": 1, "max_tokens": 5}


def test_whoever_answers_goes_on_from_the_same_tokens(engine, monkeypatch):
    chat, prompts, ids = Chat(engine, max_tokens=4, ignore_eos=True), [], []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda given, **how: prompts.append(given) or generate(given, **how))
    for who in ({"mixture": "mix"}, {}, {"adapter": "a"}, {"mixture": "mix"}):
        done = chat.say("hello", **who)
        assert prompts[-1][: len(ids)] == ids
        alone = generate(prompts[-1], max_tokens=4, ignore_eos=True, **who)
        assert alone.token_ids == done.token_ids
        ids = [*prompts[-1], *done.token_ids]


@pytest.mark.parametrize("who", [{}, {"adapter": "a"}, {"mixture": "mix"}], ids=str)
def test_the_prefix_cache_holds_the_turns_before(engine, who):
    # random weights say half characters, which no text keeps
    letters = dict.fromkeys(byte_ids("abcdefgh"), 100.0)
    chat, known = Chat(engine, max_tokens=12, ignore_eos=True, logit_bias=letters, **who), 0
    for text in ("hello", "and then?", "why?"):
        done = chat.say(text)
        # whole blocks of 16 tokens; the last token was never an input, and a mixture's last input is just a draft
        least = known - 1 - ("mixture" in who)
        assert max(0, least) // 16 <= done.cached_tokens // 16 <= max(0, known - 1) // 16
        known = done.usage.total_tokens
    assert known > 48


# what cannot be meant


@pytest.mark.parametrize("bad", ["", None, 3, ["hello"]])
def test_a_message_that_is_no_text_is_named(bad):
    chat = Chat(Scripted(CHATML))
    with pytest.raises(UserError, match="a chat message is text, not "):
        chat.say(bad)
    if bad is not None:
        with pytest.raises(UserError, match="a chat message is text, not "):
            Chat(chat.engine, bad)


def test_a_base_without_a_template_or_a_tokenizer_says_so():
    made = Scripted(CHATML)
    made.tokenizer.chat_template = None
    with pytest.raises(UserError, match="base 'tiny' has no chat template; give the prompt as text"):
        Chat(made).say("hello")
    bare = SimpleNamespace(tokenizer=None, prompts=Prompts(None, 9, 9, "tiny"))
    with pytest.raises(UserError, match="base 'tiny' has no tokenizer, so chat messages cannot be encoded"):
        Chat(bare).say("hello")
