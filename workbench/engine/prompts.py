"""Prompts: text, chat messages or token ids -> checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from workbench.adapters.config import read_object
from workbench.engine.hf import first_line
from workbench.errors import UserError


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any | None:
    """Return the folder's tokenizer, or None when it holds none (token ids still work)."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizer libraries raise bare Exceptions for malformed files
        raise UserError(f"the tokenizer in {folder} does not load: {first_line(error)}") from None


def eos_ids(folder: Path, config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Return the tokens that end a sequence: the generation config's (else the config's) and the tokenizer's."""
    named, file = config.eos_token_id, folder / "generation_config.json"
    if file.is_file():
        own = read_object(file, "generation config").get("eos_token_id")
        named = named if own is None else own
    listed = [i for i in (named if isinstance(named, (list, tuple)) else [named]) if i is not None]
    if wrong := [i for i in listed if isinstance(i, bool) or not isinstance(i, int)]:
        raise UserError(f"{folder}: eos_token_id must be token ids, whole numbers, not {wrong[0]!r}")
    return frozenset([*listed, *(i for i in [getattr(tokenizer, "eos_token_id", None)] if i is not None)])


class Prompts:
    """Turns what a user calls a prompt into token ids.

    Args:
        tokenizer: or None.
        vocab_size: ids are below it.
        max_len: tokens a sequence may have.
        base: the base's name, for errors.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, max_len: int, base: str):
        self.tokenizer, self.vocab_size, self.max_len, self.base = tokenizer, vocab_size, max_len, base

    def is_batch(self, prompts: Any) -> bool:
        """Whether `prompts` is a list of prompts, rather than one text, id list or chat."""
        return isinstance(prompts, (list, tuple)) and bool(prompts) and not isinstance(prompts[0], (Integral, Mapping))

    def encode(self, prompt: Any, max_tokens: int) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            UserError: empty, ids outside the vocabulary, no tokenizer for text, or too long for the context.
        """
        ids = self._ids(prompt)
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < self.vocab_size]
        if wrong:
            raise UserError(
                f"token ids must be whole numbers from 0 to {self.vocab_size - 1} (the vocabulary of base "
                f"{self.base!r}), not {wrong[0]!r}"
            )
        if len(ids) + max_tokens > self.max_len:
            raise UserError(
                f"the prompt has {len(ids)} tokens and max_tokens is {max_tokens}: {len(ids) + max_tokens} in all, but "
                f"base {self.base!r} has room for {self.max_len}; shorten the prompt or lower max_tokens"
            )
        return [int(i) for i in ids]

    def continuation(self, given: Any) -> list[int]:
        """Return the token ids of a continuation to score: text without special tokens, or ids, checked alike."""
        if isinstance(given, str):
            tokenizer = self._need_tokenizer("text")
            given = tokenizer(given, add_special_tokens=False)["input_ids"]
            if not given:
                raise UserError("the continuation is empty; give at least one token to score")
        return self.encode(given, 0)

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                return []
            if not prompt.isprintable() and any("\ud800" <= char <= "\udfff" for char in prompt):
                raise UserError("the prompt holds half a character (a lone surrogate): it was no UTF-8 text")
            return list(self._need_tokenizer("text")(prompt)["input_ids"])
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self._chat(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return list(prompt)
        if hasattr(prompt, "tolist"):
            return self._ids(prompt.tolist())
        raise UserError(f"a prompt is text, token ids or a list of chat messages, not {type(prompt).__name__}")

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer("chat messages")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise UserError(f"a chat message needs role and content: {message!r}")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"base {self.base!r} has no chat template; give the prompt as text")
        try:
            made = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # jinja raises whatever the template raises, for roles it does not know
            raise UserError(f"the chat template of base {self.base!r} refuses these messages: {error}") from None
        return list(made["input_ids"])

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise UserError(f"base {self.base!r} has no tokenizer, so {what} cannot be encoded; give token ids")
        return self.tokenizer
