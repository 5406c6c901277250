"""A tiny base with a byte tokenizer and a mixture, points on it, and requests that were served as a test says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from models import Adapter, MixtureSpec, byte_tokenizer, save_base, tiny_model

from workbench import Engine
from workbench.engine.result import Completion, Usage
from workbench.sweep.point import PointSettings
from workbench.sweep.traffic import Arrival, Served

MODEL = tiny_model("llama", vocab_size=259, max_position_embeddings=256)
SPEC = MixtureSpec(
    {"a": Adapter(("q_proj", "up_proj"), seed=1), "b": Adapter(("q_proj",), rank=2, seed=2)},
    {"layerwise_scalings": True},
)
# whatever runs beside a request, its rows are computed alike
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}


def write_shelf(folder: Path) -> Path:
    """Write a base ("tiny") and a mixture ("mix") and return the folder."""
    byte_tokenizer(save_base(MODEL, folder / "tiny"))
    SPEC.write(folder / "mix", MODEL)
    return folder


def prepared_on(shelf: Path, **options: Any) -> SimpleNamespace:
    """Return an engine with the mixture, as a sweep's tasks want it."""
    engine = Engine(shelf / "tiny", **{"prefix_cache": False, **options})
    engine.load_mixture(shelf / "mix", "mix")
    return SimpleNamespace(engine=engine, mixture="mix", adapters=())


def point_of(**settings: Any) -> PointSettings:
    """Return a point, its settings checked."""
    return PointSettings.of(settings, "test")


def fidelity(**settings: Any) -> PointSettings:
    """Return a point of task "fidelity", small by default."""
    small = {"passages": 4, "passage_tokens": 24, "prefix_tokens": 6}
    return point_of(task="fidelity", mode="xlora", **{**small, **settings})


def ended(
    key: str | None = None, tokens: int = 4, ttft_s: float = 0.1, total_s: float = 0.4, late_s: float = 0.0,
    forwards: int = 4, request: dict[str, Any] | None = None,
) -> tuple[Served, Completion]:
    """Return a request that was served like this, and its result."""
    made = SimpleNamespace(
        **{"id": "r", "key": key, "names": (key,) if key else (), "adapter": key, "mixture": None, "policy": None,
           "error": None, "finish_reason": "length", "generated": [5] * tokens, **(request or {})},
    )  # fmt: skip
    usage = Usage(3, tokens, 3 + tokens, ttft_s, total_s - ttft_s, total_s, 0.0, 0.0)
    done = Completion("r", "", tuple([5] * tokens), (), "length", usage, scalings_computed=6, scalings_reused=2)
    return Served(made, Arrival(None, [1, 2, 3], tokens), late_s, total_s, forwards), done
