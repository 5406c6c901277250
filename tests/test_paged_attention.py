"""paged_attention in Triton's interpreter and by torch, against float64: `pytest tests/test_paged_attention.py`.

`torch.empty` is full of NaN here, and so is every slot that no row may see.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lora_kernels.attention_problem import AttentionProblem, attention_problem
from lora_kernels.checks import DTYPES
from lora_kernels.paged_attention import CHUNK, cost, paged_attention, paged_attention_reference
from lora_kernels.problems import row_error
from lora_kernels.triton_support import interpreting

pytestmark = [
    pytest.mark.interpret,
    # numpy, which interprets, warns of infinities that a GPU takes silently
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

LIMITS = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# lengths; heads, KV heads, key and value widths: one chunk and several, chunks that end where a sequence does, rows
# without anything, one head a group, three, and more than one program takes
CASES = [
    ([1, 16, 33], (3, 3, 16, 16)),
    ([CHUNK, CHUNK + 1, 7], (6, 2, 8, 5)),
    ([3 * CHUNK, 0, 40], (2, 1, 20, 33)),
    ([70], (20, 1, 12, 12)),
    ([0, 0], (2, 2, 8, 8)),
]
WINDOWS = [None, 1, 40, CHUNK, CHUNK + 2]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every new uninitialised float tensor with NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))


def launched(p: AttentionProblem) -> torch.Tensor:
    with interpreting():
        return paged_attention(*p.args, **p.settings)


def problem_of(case, dtype: torch.dtype, window: int | None, softcap: float | None) -> AttentionProblem:
    lengths, (num_heads, num_kv_heads, key, value) = case
    settings = {"value_dim": value, "window": window, "softcap": softcap}
    return attention_problem("paged_attention", lengths, num_heads, num_kv_heads, key, dtype, **settings)


def dtype_of(number: int) -> torch.dtype:
    return torch.float16 if number % 2 else torch.float32


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_launches_equal_float64(case, window, softcap):
    dtype = dtype_of(len(case[0]) + (window or 0))
    p = problem_of(case, dtype, window, softcap)
    found = launched(p)
    assert found.dtype == dtype and found.shape == p.exact().shape
    assert row_error(found, p.exact()) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_and_the_reference_equal_float64(case, window, dtype):
    for softcap in (None, 1.5):
        p = problem_of(case, dtype, window, softcap)
        assert row_error(paged_attention(*p.args, **p.settings), p.exact()) < LIMITS[dtype]
        assert row_error(paged_attention_reference(*p.args, **p.settings), p.exact()) < 2e-6


@pytest.mark.parametrize("run", [launched, lambda p: paged_attention(*p.args, **p.settings)], ids=["launch", "torch"])
def test_a_wrong_value_is_seen(run):
    p = attention_problem("paged_attention", [40, 300], 4, 2, 16)
    assert row_error(run(p.corrupted()), p.exact()) > 1e-2


@pytest.mark.parametrize("window", [None, 40, CHUNK + 2])
def test_a_row_is_the_same_bitwise_in_any_company(window):
    """A short row alone is one launch that makes the mean itself; beside a long one its chunk is merged."""
    p = attention_problem("paged_attention", [90, 2 * CHUNK + 30, 17, CHUNK], 4, 2, 16, value_dim=24, window=window)
    together = launched(p)
    for row in range(4):
        assert torch.equal(launched(p.rows([row]))[0], together[row])
    assert torch.equal(launched(p.rows([2, 0])), together[[2, 0]])


def test_the_result_does_not_depend_on_what_the_host_knows_of_the_lengths():
    p = attention_problem("paged_attention", [90, 200], 4, 2, 16, value_dim=24)
    wider = torch.nn.functional.pad(p.blocks, (0, 40), value=-5)
    with interpreting():
        roomy = paged_attention(p.x, p.keys, p.values, wider, p.lengths_there, 3 * CHUNK, **p.settings)
    assert torch.equal(roomy, launched(p))


def test_rows_share_blocks_and_strides_are_respected():
    p = attention_problem("paged_attention", [64, 64, 50], 4, 2, 16)
    shared = replace(p, blocks=torch.cat([p.blocks[:1], p.blocks[:1], p.blocks[:1]]))
    by_token = [side.transpose(0, 1).contiguous().transpose(0, 1) for side in (p.keys, p.values)]
    by_head = p.x.transpose(0, 1).contiguous().transpose(0, 1)
    spread = replace(shared, keys=by_token[0], values=by_token[1], x=by_head)
    assert spread.x.stride() != p.x.stride() and spread.keys.stride() != p.keys.stride()
    assert torch.equal(launched(spread), launched(shared))
    assert row_error(launched(spread), shared.exact()) < 2e-6


def test_no_rows_are_no_work():
    p = attention_problem("paged_attention", [], 4, 2, 8, value_dim=6)
    assert launched(p).shape == paged_attention(*p.args, **p.settings).shape == (0, 4, 6)


def test_a_softcap_of_large_scores_bounds_them():
    p = attention_problem("paged_attention", [40], 2, 1, 8, softcap=3.0)
    loud = replace(p, x=p.x * 1e4)
    assert row_error(launched(loud), loud.exact()) < 2e-6


GOOD = {
    "query": torch.zeros(2, 4, 8), "keys": torch.zeros(2, 64, 8), "values": torch.zeros(2, 64, 5),
    "blocks": torch.zeros(2, 3, dtype=torch.int32), "lengths": torch.ones(2, dtype=torch.int32), "longest": 48,
    "scale": 1.0,
}  # fmt: skip
WRONG = [
    ({"query": torch.zeros(2, 8)}, "query must have 3 dimensions, not shape .2, 8."),
    ({"keys": torch.zeros(2, 64, 8).half()}, "keys must be float32, float16 or bfloat16, and of query's dtype"),
    ({"query": torch.zeros(2, 4, 8).double()}, "query must be float32, float16 or bfloat16"),
    ({"blocks": torch.zeros(2, 3, dtype=torch.int64)}, "blocks must be int32, not torch.int64"),
    ({"lengths": torch.ones(2, device="meta", dtype=torch.int32)}, "lengths is on meta, but query is on cpu"),
    ({"keys": torch.zeros(2, 8, 64).mT}, "the last axis of keys must be contiguous"),
    ({"values": torch.zeros(1, 64, 5)}, r"keys are .2, 64, 8., but values .1, 64, 5."),
    ({"query": torch.zeros(2, 3, 8)}, "query has 3 heads of 8, which do not share 2 KV heads of 8"),
    ({"query": torch.zeros(2, 4, 9)}, "query has 4 heads of 9, which do not share 2 KV heads of 8"),
    ({"keys": torch.zeros(2, 60, 8), "values": torch.zeros(2, 60, 5)}, "60 slots, which are no whole blocks of 16"),
    ({"lengths": torch.ones(3, dtype=torch.int32)}, "query has 2 rows, but blocks has 2 and lengths 3"),
    ({"longest": 49}, "longest is 49, but 3 blocks a row hold 48 positions"),
    ({"window": 0}, "window must be at least 1, or None, not 0"),
    ({"softcap": -1.0}, "softcap must be above 0, or None, not -1.0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_operands_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^paged_attention: .*{message}"):
        paged_attention(**(GOOD | change))


def test_a_gradient_that_would_be_lost_is_refused():
    query = GOOD["query"].clone().requires_grad_()
    with interpreting(), pytest.raises(ValueError, match="paged_attention: kernels have no gradient"):
        paged_attention(**(GOOD | {"query": query}))


def test_cost_counts_what_each_row_sees_once():
    assert cost([100, 7], 4, 2, 8, 6, 2).num_bytes == (107 * 2 * 14 + 2 * 4 * 14) * 2
    assert cost([100, 7], 4, 2, 8, 6, 2, window=10).flops == 2 * 17 * 4 * 14


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 4, 256), (40, 2, 80)])
def test_on_a_gpu_the_launches_equal_float64(heads, window, dtype):
    p = attention_problem("paged_attention", [1, 255, 300, 2000], *heads, dtype, "cuda", window=window, softcap=30.0)
    assert row_error(paged_attention(*p.args, **p.settings), p.exact()) < LIMITS[dtype]
