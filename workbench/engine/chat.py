"""Chat: a conversation that remembers its turns, and goes on from the very tokens that were generated.

Contract: the history changes only when a turn is complete; one that is refused, fails, is cancelled or comes too late
leaves it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.engine.result import Completion
from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

Message = dict[str, str]

_WHO = ("adapter", "mixture", "merged_adapters")
_REUSE = ("tgt_non_granular_index", "policy")


@dataclass(frozen=True)
class _Turn:
    """A complete turn: what was asked and answered, and where the conversation then stands.

    Attributes:
        user, assistant: the two messages' text.
        prompt_text: the chat template's text up to the answer.
        ids: tokens of prompt and answer.
    """

    user: str
    assistant: str
    prompt_text: str
    ids: tuple[int, ...]


class Chat:
    """A conversation with one engine; each turn's prompt is everything said before.

    The prompt of a turn begins with the tokens of the turn before, as they were generated, wherever the chat template
    continues that text unchanged (white space around an answer aside); so the prefix cache holds all of it. Where the
    template rewrites what was said, the whole conversation is encoded anew.

    Args:
        engine: runs it.
        system: the system message, if any.
        **options: of `Engine.submit`, for every turn: `mixture="demo"`, `max_tokens=100`, `temperature=0.7`, ...

    Raises:
        UserError: `system` is no text.
    """

    def __init__(self, engine: Engine, system: str | None = None, **options: Any):
        self.engine, self.system, self.options = engine, None if system is None else _text(system), options
        self._turns: list[_Turn] = []
        self._one_at_a_time = threading.Lock()

    @property
    def messages(self) -> list[Message]:
        """What was said: a new list of messages, each with its role and content."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self._turns:
            said += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        return said

    def say(self, text: str, **override: Any) -> Completion:
        """Say something and return the answer.

        An answer whose `finish_reason` is "error", "cancelled" or "deadline" leaves the history as it was; one cut off
        by `max_tokens` is part of it. With `n`, the likeliest answer is the one that is remembered.

        Args:
            text: the user's next message.
            **override: options for this turn alone; who answers (`adapter`, `mixture`, `merged_adapters`) replaces
                whoever does by default.

        Raises:
            UserError: the turn cannot run, as for `Engine.submit`; or this chat is in the middle of another.
        """
        with self._turn():
            prompt_text, ids = self._prompt(text)
            done = self.engine.generate(ids, **self._options(override))
            self._keep(text, prompt_text, ids, done)
        return done

    def stream(self, text: str, **override: Any) -> Iterator[str]:
        """Say something and yield the answer in pieces; the generator returns the `Completion`.

        Leaving the loop early cancels the turn; then, as when it fails, the history stays as it was. Takes the
        arguments of `say`.
        """
        with self._turn():
            prompt_text, ids = self._prompt(text)
            done = yield from self.engine.stream(ids, **self._options(override))
            self._keep(text, prompt_text, ids, done)
        return done

    def undo(self) -> None:
        """Forget the last turn.

        Raises:
            UserError: there is none.
        """
        with self._turn():
            if not self._turns:
                raise UserError("this chat has no turn to undo")
            self._turns.pop()

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        with self._turn():
            self._turns.clear()

    def __repr__(self) -> str:
        who = [f"{key}={value!r}" for key, value in self.options.items() if key in _WHO]
        return f"Chat({', '.join([f'{len(self._turns)} turns', *who])})"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._one_at_a_time.acquire(blocking=False):
            raise UserError("this chat is in the middle of a turn; read its stream to the end, or close it")
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _prompt(self, text: str) -> tuple[str, list[int]]:
        """Return the next prompt, as the template's text and as tokens."""
        messages = [*self.messages, {"role": "user", "content": _text(text)}]
        whole = self.engine.prompts.encode(messages, 0)
        tokenizer = self.engine.tokenizer
        prompt_text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        kept = continued(tokenizer, self._turns[-1], prompt_text, whole) if self._turns else None
        return prompt_text, whole if kept is None else kept

    def _keep(self, text: str, prompt_text: str, ids: list[int], done: Completion) -> None:
        if done.finish_reason in ("stop", "length"):
            self._turns.append(_Turn(text, done.text, prompt_text, (*ids, *done.token_ids)))

    def _options(self, override: Mapping[str, Any]) -> dict[str, Any]:
        dropped: tuple[str, ...] = ()
        if any(key in override for key in _WHO):
            dropped = _WHO if "mixture" in override else (*_WHO, *_REUSE)
        elif any(key in override for key in _REUSE):
            dropped = _REUSE
        return {**{key: value for key, value in self.options.items() if key not in dropped}, **override}


def continued(tokenizer: Any, turn: _Turn, prompt_text: str, whole: Sequence[int]) -> list[int] | None:
    """Return the tokens of a prompt that goes on from those of a turn, or None where it does not.

    Args:
        tokenizer: the engine's.
        turn: the last one.
        prompt_text: the template's text of the new prompt.
        whole: its tokens, encoded at once: what the answer must say, and how the new part must be cut into tokens.
    """
    said, ids = turn.assistant, list(turn.ids)
    starts = [turn.prompt_text + text for text in (said, said.rstrip(), said.lstrip(), said.strip())]
    start = next((text for text in starts if prompt_text.startswith(text)), None)
    if start is None:
        return None
    new = list(tokenizer(prompt_text[len(start) :], add_special_tokens=False)["input_ids"])
    if list(whole[len(whole) - len(new) :]) != new:
        return None
    wanted = _spoken(tokenizer, whole)
    # the token that ended an answer is no part of its text: the template writes it, or another in its place
    for kept in (ids, ids[:-1]):
        if _spoken(tokenizer, kept + new) == wanted:
            return kept + new
    return None


def _spoken(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones too, without white space."""
    return "".join(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).split())


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise UserError(f"a chat message is text, not {given!r}")
    return given
