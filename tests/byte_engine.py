"""A tiny engine whose tokens are bytes, with an adapter and a mixture: what several test files run on."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import Adapter, MixtureSpec, byte_tokenizer, save_base, tiny_model

from workbench import Engine

VOCAB = 259  # the byte tokenizer's
MODEL = tiny_model("llama", vocab_size=VOCAB)
SPEC = MixtureSpec(
    {"a": Adapter(("q_proj", "up_proj"), seed=1), "b": Adapter(("q_proj",), rank=2, seed=2)},
    {"layerwise_scalings": True},
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    byte_tokenizer(save_base(MODEL, folder / "tiny"))
    SPEC.write(folder / "mix", MODEL)
    return folder


def engine_on(shelf: Path, **options) -> Engine:
    engine = Engine(shelf / "tiny", **options)
    engine.load_adapter(shelf / "mix" / "a")
    engine.load_mixture(shelf / "mix", "mix")
    return engine


@pytest.fixture
def engine(shelf) -> Engine:
    return engine_on(shelf)


def finish(engine: Engine, *requests) -> None:
    while any(request.finish_reason is None for request in requests):
        engine.step()


def assert_idle(engine: Engine) -> None:
    assert not engine.scheduler.has_work() and engine.counters()["kv_bytes"] == 0
    assert engine.model.routing.rows is None and engine.step() == []
