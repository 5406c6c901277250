"""Attention on paged KV against attention by definition in float64: `pytest tests/test_attention.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, tiny_model
from torch import Tensor
from transformers import AttentionInterface

from lora_kernels.triton_support import interpreting
from workbench.engine import attention_plan as planning
from workbench.engine import decode
from workbench.engine.attention_plan import ShapeProbe, attention_plan
from workbench.engine.blocks import BlockPool, KVShape
from workbench.engine.paged import PagedStream
from workbench.engine.paged_attention import packed_attention

HEADS, KV_HEADS, KEY, VALUE = 6, 2, 8, 5
SCALE = 0.3
MOST = 330  # tokens of the longest sequence
# sequences that are copied and, from 192 on, sequences that are not
FIRSTS = [0, 5, 15, 16, 64, 130, 191, 192, 250]
SHARED = [0, 32, 192]


@dataclass(frozen=True)
class Part:
    """A span to run: how many tokens precede it, its rows, how many tokens begin like everyone else's, whose it is."""

    first: int
    num_rows: int
    shared: int = 0
    owner: int = 0


def by_definition(query: Tensor, keys: Tensor, values: Tensor, first: int, window, softcap) -> Tensor:
    """Return `[row, head, value]` in float64, one row and head at a time."""
    out = torch.zeros(query.shape[1], HEADS, VALUE, dtype=torch.float64)
    for row in range(query.shape[1]):
        stop = first + row + 1
        start = 0 if window is None else max(0, stop - window)
        for head in range(HEADS):
            mine = head // (HEADS // KV_HEADS)
            scores = keys[mine, start:stop].double() @ query[head, row].double() * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = torch.softmax(scores, 0) @ values[mine, start:stop].double()
    return out


def scattered_pool(seed: int | None, dtype: torch.dtype = torch.float32) -> BlockPool:
    """Return a pool whose free blocks lie in pieces, or in one piece for None; every number in it is NaN."""
    pool = BlockPool(KVShape({0: (KV_HEADS, KEY, VALUE)}, 4, dtype), 200, "cpu")
    for side in (pool.keys[0], pool.values[0], pool.hidden):
        side.fill_(float("nan"))
    pool.take()  # so that slot 0, the likeliest to be read by mistake, is never written
    if seed is not None:
        blocks = [pool.take() for _ in range(100)]
        random.Random(seed).shuffle(blocks)
        for block in blocks[:70]:
            pool.release(block)
    return pool


class Sequence:
    """What a model would have computed: a function of its owner, its position, and nothing else."""

    def __init__(self, owner: int, shared: int, dtype: torch.dtype):
        def draw(seed: int, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

        self.query = draw(owner, HEADS, MOST, KEY)
        mine, everyones = (
            (draw(100 + seed, KV_HEADS, MOST, KEY), draw(200 + seed, KV_HEADS, MOST, VALUE)) for seed in (owner, 99)
        )
        self.keys, self.values = (
            torch.cat([common[:, :shared], own[:, shared:]], 1) for common, own in zip(everyones, mine, strict=True)
        )
        self.tokens = [99] * shared + [owner] * (MOST - shared)


class Problem:
    """Spans on a pool, everything before their rows written; owners are given by place unless the parts say."""

    def __init__(self, parts: list[Part], layout: int | None, padding: int = 0, dtype: torch.dtype = torch.float32):
        self.pool = scattered_pool(layout, dtype)
        self.sequences, self.spans = [], []
        # what is shared was computed before, and its owner is gone
        self._stream(Sequence(99, MOST, dtype), max(SHARED)).free()
        start = 0
        for place, part in enumerate(parts, 1):
            sequence = Sequence(part.owner or place, min(part.shared, part.first), dtype)
            plan = SimpleNamespace(first=part.first, stop=part.first + part.num_rows)
            plan.stream = self._stream(sequence, part.first)
            assert plan.stream.reserve(plan.stop)
            self.spans.append(SimpleNamespace(start=start, stop=start + part.num_rows, plan=plan))
            self.sequences.append(sequence)
            start += part.num_rows
        self.num_rows, self.padding = start, padding

    def rows(self, name: str) -> Tensor:
        """Return the rows' own queries, keys or values, padding included."""
        pieces = [
            getattr(sequence, name)[:, span.plan.first : span.plan.stop]
            for sequence, span in zip(self.sequences, self.spans, strict=True)
        ]
        return torch.cat([*pieces, torch.full_like(pieces[0][:, :1], 7.0).expand(-1, self.padding, -1)], 1)

    def attend(self, window=None, softcap=None, reference=False) -> Tensor:
        """Return `[row, head, value]`, padding included."""
        plan = attention_plan(self.spans, self.pool, reference)
        with torch.inference_mode():
            out, weights = packed_attention(
                SimpleNamespace(layer_idx=0), *(self.rows(name)[None] for name in ("query", "keys", "values")), None,
                step_batch=SimpleNamespace(attention=plan), scaling=SCALE, sliding_window=window, softcap=softcap,
            )  # fmt: skip
        assert weights is None
        return out[0]

    def expected(self, window=None, softcap=None) -> Tensor:
        """Return the definition's rows, without padding."""
        return torch.cat([
            by_definition(one.query[:, plan.first : plan.stop], one.keys, one.values, plan.first, window, softcap)
            for one, plan in zip(self.sequences, (span.plan for span in self.spans), strict=True)
        ])  # fmt: skip

    def _stream(self, sequence: Sequence, stop: int) -> PagedStream:
        stream = PagedStream(self.pool, b"base")
        found = stream.lookup(sequence.tokens, stop)
        assert stream.reserve(stop)
        rows = stream.rows(found, stop)
        for side, computed in ((self.pool.keys[0], sequence.keys), (self.pool.values[0], sequence.values)):
            side[:, rows] = computed[:, found:stop]
        stream.commit(stop)
        stream.publish(sequence.tokens, stop)
        return stream


parts = st.builds(Part, st.sampled_from(FIRSTS), st.sampled_from([1, 1, 1, 2, 3, 40]), st.sampled_from(SHARED))
windows = st.sampled_from([None, None, 1, 3, 40, 200, 1000])
softcaps = st.sampled_from([None, None, 2.0])


@settings(max_examples=60)
@given(st.lists(parts, min_size=1, max_size=5), windows, softcaps, st.integers(0, 3), st.none() | st.integers(0, 9),
       st.booleans())  # fmt: skip
def test_every_row_gets_attention_by_definition(parts, window, softcap, padding, layout, reference):
    problem = Problem(parts, layout, padding)
    out = problem.attend(window, softcap, reference)
    assert (out[: problem.num_rows] - problem.expected(window, softcap)).abs().max() < 1e-5
    assert (out[problem.num_rows :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_halves_are_no_worse_than_their_rounding(dtype, softcap):
    problem = Problem([Part(first, rows, 32) for first in (5, 130, 250) for rows in (1, 3)], 1, 0, dtype)
    error = (problem.attend(None, softcap) - problem.expected(None, softcap)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [None, 195, 220])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sequences_that_begin_alike_are_attended_to_as_if_alone(window, softcap):
    """The common range is read once for all rows; here with three levels of sharing, and two rows of one stream."""
    together = Problem([Part(250, 1, 192), Part(250, 2, 192), Part(200, 1, 192), Part(300, 1, 32), Part(210, 1)], 5)
    assert (together.attend(window, softcap) - together.expected(window, softcap)).abs().max() < 1e-5


@settings(max_examples=30)
@given(st.lists(parts, min_size=1, max_size=4), windows, softcaps, st.integers(0, 9))
def test_no_bit_of_the_reference_depends_on_where_the_blocks_lie(parts, window, softcap, layout):
    whole = Problem(parts, None).attend(window, softcap, reference=True)
    scattered = Problem(parts, layout).attend(window, softcap, reference=True)
    assert torch.equal(whole, scattered)


@pytest.mark.parametrize("first", [0, 64, 250])
def test_no_bit_of_the_reference_depends_on_neighbours_or_on_chunks(first):
    whole = Problem([Part(first, 7, owner=1), Part(130, 1), Part(17, 3)], 3, padding=2).attend(reference=True)[:7]
    pieces = [Problem([Part(at, n, owner=1)], 8) for at, n in ((first, 1), (first + 1, 2), (first + 3, 4))]
    assert torch.equal(torch.cat([piece.attend(reference=True) for piece in pieces]), whole)


def test_the_way_decoded_rows_go_is_the_one_meant(monkeypatch):
    """Both ways agree with the definition above; this says that both are gone."""
    used = []
    for name in ("PaddedRows", "ExtentRows"):
        kind = getattr(planning, name)
        monkeypatch.setattr(kind, "attend", lambda self, *_, name=name: used.append(name))
    Problem([Part(5, 1), Part(250, 1)], None).attend()
    assert used == ["PaddedRows", "ExtentRows"]
    used.clear()
    Problem([Part(250, 1)], None).attend(window=40)
    assert used == ["PaddedRows"], "a row that sees little is copied, however long its sequence"
    used.clear()
    Problem([Part(250, 1)], None, dtype=torch.bfloat16).attend()
    assert used == [], "products in halves would round the scores"


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_where_triton_runs_decoded_rows_go_through_the_kernel(monkeypatch, window, softcap):
    called = []
    kernel = decode.paged_attention
    monkeypatch.setattr(decode, "paged_attention", lambda *a, **kw: called.append(len(a[0])) or kernel(*a, **kw))
    problem = Problem([Part(250, 1, 32), Part(64, 3), Part(130, 2), Part(0, 1), Part(20, 40)], 3, padding=2)
    with interpreting():
        out = problem.attend(window, softcap)
    assert called == [4]
    assert (out[:47] - problem.expected(window, softcap)).abs().max() < 1e-5 and (out[47:] == 0).all()


def test_rows_that_are_not_committed_do_not_exist():
    """A failed step and a rejected draft leave the stream as it was: the same rows run again."""
    problem = Problem([Part(130, 2), Part(20, 3)], 2)
    lengths = [span.plan.stream.length for span in problem.spans]
    first = problem.attend()
    assert lengths == [span.plan.stream.length for span in problem.spans] == [130, 20]
    for sequence, span in zip(problem.sequences, problem.spans, strict=True):
        sequence.keys[:, span.plan.first :] += 1
        sequence.values[:, span.plan.first :] += 1
    assert (problem.attend() - problem.expected()).abs().max() < 1e-5
    assert not torch.equal(problem.attend(), first)


def test_a_shared_block_is_never_written():
    problem = Problem([Part(32, 1, 32)], None)
    span = problem.spans[0].plan
    span.first, problem.spans[0].stop = 31, 2
    with pytest.raises(AssertionError, match="position 31 is in a published block"):
        attention_plan(problem.spans, problem.pool)


def test_hidden_rows_are_kept_where_their_tokens_lie():
    problem = Problem([Part(5, 2), Part(30, 20)], 4, padding=3)
    hidden = torch.randn(25, 4)
    attention_plan(problem.spans, problem.pool).keep_hidden(hidden)
    assert torch.equal(problem.pool.hidden[problem.spans[0].plan.stream.rows(5, 7)], hidden[:2])
    assert torch.equal(problem.pool.hidden[problem.spans[1].plan.stream.rows(30, 50)], hidden[2:22])
    assert int(problem.pool.hidden.isfinite().all(1).sum()) == 22


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_forward_of_one_row_tells_every_architectures_shape(kind):
    model = tiny_model(kind)
    AttentionInterface.register("probed", packed_attention)
    model.set_attn_implementation("probed")
    probe = ShapeProbe()
    model.base_model(
        input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[0]]), use_cache=False,
        step_batch=SimpleNamespace(attention=probe),
    )  # fmt: skip
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = CONFIGS[kind].get("head_dim", config.hidden_size // config.num_attention_heads)
    shape = probe.shape(config.hidden_size, torch.float32)
    assert shape.layers == {0: (heads, width, width), 1: (heads, width, width)}
    assert probe.window == (6 if kind in ("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe") else None)


@pytest.mark.parametrize(("windows", "window"), [({}, None), ({0: 6, 1: None}, None), ({0: 6, 1: 9}, 9)])
def test_what_no_layer_sees_can_be_dropped(windows, window):
    probe = ShapeProbe()
    probe.windows = windows
    assert probe.window == window


def test_padding_is_bounded_where_everything_is_copied():
    """On a GPU without Triton sequences of any length are copied, those of like length together."""
    problem = Problem([Part(first, 1) for first in (0, 5, 64, 100, 250)], 6)
    rows = [decode.SeenRow(at, span.plan.stream, 0, span.plan.first) for at, span in enumerate(problem.spans)]
    copies = decode.PaddedRows.of_all(rows, torch.float32, problem.pool.device, free=32)
    assert [len(copy._rows) for copy in copies] == [2, 2, 1]
    out = torch.full((5, HEADS, VALUE), float("nan"))
    problem.attend()  # writes the rows' own keys and values
    for copy in copies:
        copy.attend(out, problem.rows("query"), problem.pool.keys[0], problem.pool.values[0], SCALE, None)
    assert (out - problem.expected()).abs().max() < 1e-5
