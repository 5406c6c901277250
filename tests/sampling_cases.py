"""Rows to choose tokens for: settings, histories and logits that the tests of sampling share."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from workbench import Sampling
from workbench.engine import filters
from workbench.engine.choosing import Question
from workbench.engine.history import History

VOCAB = 48
EOS = frozenset({0, 5})
INF = math.inf


@contextmanager
def widths(*few: int):
    """How many of the likeliest tokens are looked at before all are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_WIDTHS", few)
        yield


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, step: float = 0.0) -> torch.Tensor:
    """Normal logits; with a step, rounded to multiples of it, so that many are equal."""
    logits = 2.5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (logits / step).round() * step if step else logits


def history_of(sampling: Sampling, prompt, output=(), vocab: int = VOCAB, breakers=frozenset()) -> History:
    history = History(sampling, prompt, vocab, breakers)
    for token in output:
        history.push(token)
    return history


def ask(sampling: Sampling, prompt=(1, 2, 3), output=(), seed: int = 0, **more) -> Question:
    return Question(sampling, history_of(sampling, prompt, output), seed, **more)


tokens_of_some = st.lists(st.integers(0, VOCAB - 1), max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, None, 1, 3, 11, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.111, 0.713, 0.905, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.27]),
    typical_p=st.sampled_from([None, None, 0.231, 0.907]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.45]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.35, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-INF, -2.25, 1.75]), max_size=5),
    min_tokens=st.sampled_from([0, 0, 4]),
    stop_token_ids=st.sampled_from([(), (7, 11)]),
    ignore_eos=st.booleans(),
    top_logprobs=st.sampled_from([0, 0, 3, 20]),
)
greedy = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-INF, 1.75]), max_size=3),
    top_logprobs=st.sampled_from([0, 2]),
)


@st.composite
def cases(draw, dry: bool) -> tuple[Question, list[int], list[int]]:
    """A question, and the prompt and output its history was made of."""
    sampling = draw(st.one_of(samplings, greedy))
    sampling = replace(sampling, dry_multiplier=0.9 if dry and draw(st.booleans()) else 0.0)
    mask = draw(st.none() | st.integers(0, 99))
    if mask is not None:
        mask = torch.rand(VOCAB, generator=torch.Generator().manual_seed(mask)) < 0.3
    prompt, output, extra = draw(tokens_of_some) or [3], draw(tokens_of_some), draw(tokens_of_some)[:2]
    history = history_of(sampling, prompt, output, breakers=frozenset({4}))
    return Question(sampling, history, draw(st.integers(0, 2**63 - 1)), extra, mask, EOS), prompt, output
