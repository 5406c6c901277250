"""Synthetic traces with a known shape and known quirks, shared by the tests of the trace and of the display."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from workbench.instrument.trace import Trace

SEGMENTS = (
    ("python", "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\n"),
    ("german", "Wer zuletzt lacht, lacht am besten; und der Apfel fällt nicht weit vom Stamm. "),
    ("spanish", "Más vale pájaro en mano que ciento volando, y a quien madruga Dios le ayuda. "),
    ("scripture", "And it came to pass in those days, that there went out a decree from Caesar; "),
)
CONTINUATION = (
    "and the people went every one into his own city, and they were sore afraid. And the angel said unto them, "
    "Fear not: for, behold, I bring you good tidings of great joy, which shall be to all people. Selah, und so weiter"
)
HOSTILE = (
    *("<script>alert(1)</script>", "</script>", " \x1b[31mred", "$\\frac{$", "שלום"),
    *("\u202eevil", "漢字👩\u200d👧", "\t\n", "", "&amp;"),
)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")


def split(text: str) -> list[str]:
    """Cut text into pieces about as a BPE tokenizer does: a space goes with the word after it."""
    return re.findall(r" ?\w{1,6}|\n|[ ]+(?=\n|[ ])| ?[^\w\s]+|\s+", text)


def sites_of(layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{name}" for layer in range(layers) for name in PROJECTIONS)


def make_trace(layers: int = 30, reuse_after: int | None = 24, seed: int = 0, dtype: str = "float32") -> Trace:
    """Return four adapters over a text of four domains; scalings are reused after `reuse_after` generated tokens."""
    rng = np.random.default_rng(seed)
    prompt = [(piece, domain) for domain, (_, text) in enumerate(SEGMENTS) for piece in split(text)]
    continuation = [(piece, 3) for piece in split(CONTINUATION)][:60]
    pieces = prompt + continuation
    sites = sites_of(layers)
    depth = np.linspace(-1, 1, len(sites))[None, :, None]
    logits = rng.normal(0, 0.7, (len(pieces), len(sites), 4)) + rng.normal(0, 0.8, (1, len(sites), 4))
    momentum = np.zeros(4)
    for token, (_, domain) in enumerate(pieces):
        momentum = 0.7 * momentum + 0.3 * np.eye(4)[domain]
        logits[token] += 4.6 * momentum + rng.normal(0, 0.5, 4)
    logits *= 0.65 + 0.45 * np.cos(2.2 * depth)
    values = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    positions = np.arange(len(pieces))
    source = positions.copy()
    if reuse_after is not None:
        frozen = len(prompt) + reuse_after - 1
        source = np.minimum(source, frozen)
        values = values[source]
    source[-1], values[-1] = -1, np.nan
    return Trace(
        values=values.astype(dtype),
        adapters=tuple(name for name, _ in SEGMENTS),
        sites=sites,
        token_ids=rng.integers(0, 49152, len(pieces)),
        tokens=tuple(piece for piece, _ in pieces),
        positions=positions,
        generated=positions >= len(prompt),
        source=source,
        draft=np.full(len(pieces), -1),
        time_s=np.maximum(0, positions - len(prompt) + 1) * 0.05,
        metadata={
            "request_id": "req-1",
            "base": "SmolLM2-135M-Instruct",
            "mixture": "demo",
            "policy": "exact" if reuse_after is None else f"non_granular({reuse_after})",
            "dtype": "float32",
        },
    )


def small_trace(tokens: tuple[str, ...] = ("Hi", " there", "\n", "!"), adapters: int = 2, layers: int = 2) -> Trace:
    """Return a trace of a few tokens whose values count up, for tests that compare numbers."""
    sites = sites_of(layers)
    shape = (len(tokens), len(sites), adapters)
    values = np.linspace(0, 1, int(np.prod(shape)), endpoint=False, dtype=np.float32).reshape(shape)
    positions = np.arange(len(tokens))
    return Trace(
        values=values,
        adapters=tuple(f"adapter_{i}" for i in range(adapters)),
        sites=sites,
        token_ids=positions,
        tokens=tokens,
        positions=positions,
        generated=positions >= (len(tokens) + 1) // 2,
        source=positions,
        draft=np.full(len(tokens), -1),
        time_s=np.zeros(len(tokens)),
    )


def with_outliers(trace: Trace) -> Trace:
    """Return the trace with token 3 above 1 everywhere, and one value of token 4 below 0."""
    values = trace.values.copy()
    values[3], values[4, 2, 1] = 1.5, -0.25
    return replace(trace, values=values)
