"""Traces with other quantities beside the scalings, how traces compare, and requests to record; shared by tests."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from safetensors.numpy import load_file, save_file

from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace

ALL = ("scalings", "logits:top:3", "delta_norm", "hidden_norm", "entropy", "cache", "throughput")
WHO = {"mixture": ["mix", None, None, "mix"], "adapter": [None, "a", None, None]}
PROMPTS = ["hello there", "hello", "good morning", "a"]


def generate(engine, **options):
    return engine.generate(PROMPTS, max_tokens=6, ignore_eos=True, **WHO, **options)


def same_but_time(trace):
    return replace(trace, time_s=trace.time_s * 0, metadata={**trace.metadata, "created": "", "request_id": ""})


def with_extras(trace: Trace) -> Trace:
    """Return the trace with one recorded quantity on every sort of axis; their values count up."""
    tokens, (sites, adapters) = trace.num_tokens, (trace.sites[1:], trace.adapters)
    ids = np.arange(tokens * 2).reshape(tokens, 2)
    norms = np.linspace(0, 1, tokens * len(sites) * len(adapters)).reshape(tokens, len(sites), len(adapters))
    return replace(
        trace,
        extras={
            "entropy": Recorded(np.arange(tokens) / 2, ("token",), {}, "nats", "entropy of the next token"),
            "logits:top.ids": Recorded(ids, ("token", "rank"), {"rank": ("1", "2")}, "token id", "likeliest"),
            "delta_norm": Recorded(
                norms, ("token", "site", "adapter"), {"site": sites, "adapter": adapters}, "ratio", "delta by base"
            ),
        },
    )


def assert_same(one: Trace, other: Trace) -> None:
    for name in (field.name for field in fields(Trace)):
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, name
            np.testing.assert_array_equal(first, second, err_msg=name)
        elif name == "extras":
            assert list(first) == list(second)
            for key in first:
                assert first[key].facts() == second[key].facts()
                assert first[key].values.dtype == second[key].values.dtype, key
                np.testing.assert_array_equal(first[key].values, second[key].values, err_msg=key)
        else:
            assert first == second, name


def rewritten(path, header=(), tensors=(), drop=()):
    """Write the trace at `path` again with a changed header or changed tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() | dict(header)
    arrays = load_file(path) | dict(tensors)
    for name in drop:
        metadata.pop(name, None)
        arrays.pop(name, None)
    save_file(arrays, path, metadata=metadata)
