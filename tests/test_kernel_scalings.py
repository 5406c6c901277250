"""The fused head in Triton's interpreter, against float64: `pytest tests/test_kernel_scalings.py`.

`torch.empty` is full of NaN here, so a scaling that the kernel forgot to write shows. `scalings` itself, which the
head's torch path uses, is tested in test_kernels.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lora_kernels.checks import DTYPES
from lora_kernels.problems import error_ratio, make_problem
from lora_kernels.scalings import MAX_FUSED_ADAPTERS, cost, head_scalings, head_scalings_reference, scalings
from lora_kernels.triton_support import interpreting
from workbench.xlora import Classifier, XLoRAConfig

pytestmark = [
    pytest.mark.interpret,
    # numpy, which interprets, warns of infinities that a GPU takes silently
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 40},
    {"temperature": 0.3, "top_k": 3, "softmax_topk": True},
    {"softmax_topk": True},
    {"softmax": False},
    {"softmax": False, "top_k": 2, "softmax_topk": True},
]
# rows, width, sites, adapters: pairs that differ in every axis; 65 rows take the large tiles
SHAPES = [
    (1, 64, 7, 1), (5, 100, 3, 2), (7, 33, 17, 3), (3, 129, 5, 4), (17, 16, 2, 9), (2, 300, 3, 33), (65, 40, 5, 9),
]  # fmt: skip


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every new uninitialised float tensor with NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def launched(hidden: Tensor, weight: Tensor, bias: Tensor | None, num_adapters: int, **settings) -> Tensor:
    with interpreting():
        return head_scalings(hidden, weight, bias, num_adapters, **settings)


def of(problem) -> tuple:
    return problem.hidden, problem.weight, problem.bias, problem.num_adapters


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_launch_equals_float64(shape, settings):
    dtype = torch.float16 if (sum(shape) + len(settings)) % 2 else torch.float32
    p = make_problem("scalings", *shape, dtype, bias=shape[0] != 3, **settings)
    found = launched(*of(p), **settings)
    assert found.dtype == torch.float32 and found.shape == p.exact().shape
    assert error_ratio(found, p.exact()) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 8, 9, 10, 64])
@pytest.mark.parametrize("softmax_topk", [False, True])
@pytest.mark.parametrize("num_adapters", [1, 2, 3, 4, 9, 33])
@pytest.mark.parametrize(("num_rows", "width", "num_sites"), [(1, 16, 1), (15, 33, 5), (70, 200, 3)])
def test_the_launch_equals_float64_in_every_combination(
    num_rows, width, num_sites, num_adapters, softmax_topk, top_k, dtype
):
    settings = {"top_k": top_k, "softmax_topk": softmax_topk, "temperature": 0.7}
    p = make_problem("scalings", num_rows, width, num_sites, num_adapters, dtype, **settings)
    assert error_ratio(launched(*of(p), **settings), p.exact()) < 2e-6


def test_as_many_adapters_as_a_launch_takes():
    p = make_problem("scalings", 2, 40, 1, MAX_FUSED_ADAPTERS, top_k=3)
    assert error_ratio(launched(*of(p), top_k=3), p.exact()) < 2e-6


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_torch_path_and_the_reference_equal_float64(settings):
    p = make_problem("scalings", 5, 100, 3, 4, **settings)
    assert error_ratio(head_scalings(*of(p), **settings), p.exact()) < 2e-6
    assert error_ratio(head_scalings_reference(*of(p), **settings), p.exact()) < 2e-6


def test_a_head_with_one_wrong_output_does_not_pass():
    """The twin of the tests above: one site's weights of one adapter are off by a tenth."""
    p = make_problem("scalings", 5, 100, 3, 4)
    exact = p.exact()
    p.weight[6] *= 1.1
    assert error_ratio(launched(*of(p)), exact) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_launch_is_no_worse_than_torch(dtype):
    p = make_problem("scalings", 16, 200, 5, 9, dtype)
    assert error_ratio(launched(*of(p)), p.exact()) <= error_ratio(head_scalings(*of(p)), p.exact())


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30, 1e-6, 1e6, 1e38, math.inf])
def test_extreme_temperatures_are_the_largest_alone_or_all_alike(temperature):
    p = make_problem("scalings", 3, 50, 4, 5)
    found = launched(*of(p), temperature=temperature)
    expected = F.one_hot(p.logits().argmax(-1), 5).double() if temperature < 1 else torch.full((3, 4, 5), 0.2)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("top_k", range(1, 7))
def test_of_equal_weights_the_lower_adapters_are_kept(top_k):
    hidden, weight = torch.ones(2, 16), torch.zeros(15, 16)
    weight[4] = -1  # site 0's adapter 4 is below the rest
    kept = launched(hidden, weight, None, 5, softmax=False, softmax_topk=True, top_k=top_k) > 0
    expected = (torch.arange(5) < top_k).expand(2, 3, 5).clone()
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_come_out_where_torch_has_them(value, settings):
    p = make_problem("scalings", 3, 20, 4, 5, **settings)
    p.bias[7] = value  # site 1, adapter 2
    found, expected = launched(*of(p), **settings), head_scalings_reference(*of(p), **settings)
    # among weights that are all NaN, which are kept is a tie
    assert torch.equal(found.isnan().sum(-1), expected.isnan().sum(-1))
    numbers = ~expected.isnan().any(-1)
    assert torch.allclose(found[numbers], expected[numbers], atol=1e-5)
    assert numbers.any() and torch.equal(numbers, ~found.isnan().any(-1))


def test_a_nan_row_leaves_the_others_alone():
    p = make_problem("scalings", 5, 20, 4, 5, top_k=2)
    clean = launched(*of(p), top_k=2)
    p.hidden[2] = math.nan
    found = launched(*of(p), top_k=2)
    assert found[2].isnan().any(-1).all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_a_row_has_the_same_scalings_alone_and_among_others():
    p = make_problem("scalings", 33, 70, 3, 4)
    together = launched(*of(p))
    alone = torch.cat([launched(p.hidden[row : row + 1], *of(p)[1:]) for row in range(0, 33, 8)])
    assert torch.allclose(together[::8], alone, rtol=1e-5, atol=0)


def test_views_with_strides_are_read_as_they_are():
    p = make_problem("scalings", 5, 40, 3, 4)
    wide = torch.full((5, 80), math.nan)
    wide[:, ::2] = p.hidden
    weight = p.weight.T.contiguous().T
    assert torch.equal(launched(wide[:, ::2], weight, *of(p)[2:]), launched(*of(p)))


@pytest.mark.parametrize(("num_rows", "num_sites"), [(0, 3), (3, 0)])
def test_nothing_to_compute_is_an_empty_result(num_rows, num_sites):
    operands = torch.zeros(num_rows, 16), torch.zeros(num_sites * 2, 16), None, 2
    assert launched(*operands).shape == head_scalings(*operands).shape == (num_rows, num_sites, 2)


WRONG = [
    ({"hidden": torch.zeros(3)}, "hidden must have 2 dimensions"),
    ({"weight": torch.zeros(6, 4)}, "weight reads 4 features, but hidden has 5"),
    ({"weight": torch.zeros(7, 5)}, "weight has 7 outputs, which are no whole sites of 2"),
    ({"weight": torch.zeros(6, 5).half()}, "weight is torch.float16 on cpu, but hidden is torch.float32"),
    ({"bias": torch.zeros(5)}, "bias has 5 outputs, but weight has 6"),
    ({"bias": torch.zeros(6, device="meta")}, "bias is torch.float32 on meta"),
    ({"bias": torch.zeros(6, 1)}, "bias must have 1 dimensions"),
    ({"num_adapters": 0}, "no whole sites of 0"),
    ({"top_k": 0}, "top_k must be at least 1, not 0"),
    ({"temperature": 0.0}, "temperature must be above 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_operands_that_do_not_fit_are_refused(change, message):
    good = {"hidden": torch.zeros(3, 5), "weight": torch.zeros(6, 5), "bias": torch.zeros(6), "num_adapters": 2}
    with pytest.raises(ValueError, match=f"^scalings: .*{message}"):
        head_scalings(**(good | change))


def test_integers_are_refused():
    with pytest.raises(ValueError, match="hidden must have a float dtype, not torch.int64"):
        head_scalings(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(6, 5, dtype=torch.int64), None, 2)


def test_cost_counts_the_weights_once_and_every_row():
    assert cost(1, 100, 3, 4, 2).num_bytes == (12 * 101 + 100) * 2 + 12 * 4
    assert cost(7, 100, 3, 4, 2).flops == 7 * 2 * 12 * 100


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_on_a_cpu_the_classifier_is_its_layers_one_after_the_other_bitwise(depth, layerwise):
    config = XLoRAConfig(
        hidden_size=16, xlora_depth=depth, xlora_size=8, layerwise_scalings=layerwise, softmax_temperature=0.7,
        top_k_lora=2,
    )  # fmt: skip
    outputs = 4 * 3 if layerwise else 3
    widths = [16] + [8] * (depth - 1) + [outputs]
    generator = torch.Generator().manual_seed(0)
    layers = [
        (torch.randn(wide, narrow, generator=generator), torch.randn(wide, generator=generator))
        for narrow, wide in zip(widths[:-1], widths[1:], strict=True)
    ]
    hidden = torch.randn(5, 16, generator=generator)
    expected = hidden
    for number, layer in enumerate(layers):
        expected = F.linear(F.relu(expected) if number else expected, *layer)
    expected = expected.view(5, 4, 3) if layerwise else expected[:, None].expand(-1, 4, -1)
    made = Classifier(config, layers, 4, 3)(hidden)
    assert torch.equal(made, scalings(expected, temperature=0.7, top_k=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_on_a_gpu_the_head_equals_float64(num_rows, dtype):
    p = make_problem("scalings", num_rows, 4096, 224, 9, dtype, "cuda", softmax=True, top_k=3)
    assert error_ratio(head_scalings(*of(p), top_k=3), p.exact()) < 1e-4
