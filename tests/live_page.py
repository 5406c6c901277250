"""A live widget's front end as tests see it, and engines slow and roomy enough for a stream to be watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byte_engine import SPEC, VOCAB, engine_on
from models import byte_tokenizer, save_base, tiny_model

LONG = {"max_tokens": 200, "ignore_eos": True}
SHORT = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_shelf(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("long"), tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=2048)
    byte_tokenizer(save_base(model, folder / "tiny"))
    SPEC.write(folder / "mix", model)
    return folder


@pytest.fixture
def long_engine(long_shelf):
    return engine_on(long_shelf)


def slowed(engine, seconds: float = 0.004):
    """Make every step take a little: the tiny model is faster than any front end."""
    step = engine._step
    engine._step = lambda: (time.sleep(seconds), step())[1]
    return engine


class Page:
    """Hears everything a widget sends from now on, and sends it messages.

    Attributes:
        messages: what was heard, in order; each with its buffers under "buffers" and when it came under "at_s".
    """

    def __init__(self, widget: Any, name: str = "page"):
        self.widget, self.name, self.messages, self._number = widget, name, [], 0
        widget.comm.publish_msg = self._published

    def send(self, kind: str, **content: Any) -> None:
        self._number += 1
        message = {"type": kind, "id": f"{self.name}.{self._number}", "page": self.name, **content}
        self.widget.comm.handle_msg({"content": {"data": {"method": "custom", "content": message}}, "buffers": []})

    def type(self, **traits: Any) -> None:
        state = {"method": "update", "state": traits, "buffer_paths": []}
        self.widget.comm.handle_msg({"content": {"data": state}, "buffers": []})

    def all(self, kind: str) -> list[dict]:
        return [message for message in self.messages if message["type"] == kind]

    def said(self) -> str:
        return self.all("say")[-1]["text"]

    def wait_for(self, kind: str, timeout_s: float = 20) -> dict:
        self.wait_until(lambda: self.all(kind), timeout_s)
        return self.all(kind)[-1]

    def wait_until(self, holds: Callable[[], Any], timeout_s: float = 20) -> None:
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, f"it did not come; {[message['type'] for message in self.messages]}"
            time.sleep(0.005)

    def story(self) -> tuple[list[str], np.ndarray, list[int]]:
        """Return the texts, means `[row, adapter]` and sources of a console's last run, from its increments alone."""
        start = self.all("start")[-1]
        texts, means, sources = [], [], []
        for message in self.messages[self.messages.index(start) :]:
            if message["type"] != "more":
                continue
            assert (message["first"], message["first_row"]) == (len(texts), len(sources)), "an increment is missing"
            texts += message["texts"]
            shape = message["num_rows"], len(start["voice"]["adapters"])
            rows = np.frombuffer(message["buffers"][0], "<f4").reshape(shape)
            means.append(rows)
            sources += np.frombuffer(message["buffers"][1], "<i4").tolist()
        return texts, np.concatenate(means), sources

    def _published(self, kind: str, data: Any = None, metadata: Any = None, buffers: Any = None, **more: Any) -> None:
        if data and data.get("method") == "custom":
            content = {**data["content"], "buffers": [bytes(one) for one in buffers or []], "at_s": time.monotonic()}
            self.messages.append(content)
