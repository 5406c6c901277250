"""Our reader of safetensors files against the library's: `pytest tests/test_tensorfile.py`."""

import hashlib
import json
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import Adapter, tiny_model
from safetensors.torch import load, save

from workbench.adapters import LoRAModel
from workbench.adapters.tensorfile import parse, read_tensors
from workbench.errors import TransientError, UserError

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip
shapes = st.lists(st.integers(0, 3), max_size=3)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
FILE = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, {"format": "pt"})


def ours(content: bytes) -> dict[str, torch.Tensor] | None:
    try:
        return parse(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte())
    except ValueError:
        return None


def theirs(content: bytes) -> dict[str, torch.Tensor] | None:
    try:
        return load(content)
    except Exception:
        return None


def same(one: dict[str, torch.Tensor] | None, other: dict[str, torch.Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(facts(one[name]) == facts(other[name]) for name in one)


def facts(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, bytes(tensor.flatten().view(torch.uint8).numpy())


@given(st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=5))
def test_what_the_library_writes_is_read(given):
    tensors = {
        name: (torch.randn(shape) * 3).to(dtype) for name, (dtype, shape) in given.items()
    }
    content = save(tensors)
    assert same(ours(content), tensors) and list(ours(content)) == sorted(tensors)


@given(st.binary(max_size=40), st.integers(0, len(FILE)), st.integers(0, 40))
@example(b"", len(FILE), 0)
@example(b"", 0, len(FILE))
def test_damage_is_found_where_the_library_finds_it(put, at, cut):
    content = FILE[:at] + put + FILE[at + cut :]
    mine, library = ours(content), theirs(content)
    # ours may refuse more (a key given twice), never less
    assert mine is None or same(mine, library), content


@given(
    st.fixed_dictionaries({}, optional={
        "dtype": st.sampled_from(["F32", "BF16", "F99", "f32", 4, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2.0, "2", True, None, 1 << 70]), max_size=3) | st.none(),
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 12, 24, -4, 1.0, None, 1 << 70]), max_size=3) | st.just(8),
        "more": st.just(1),
    }),
    st.sampled_from([0, 4, 8, 12, 24]),
)  # fmt: skip
def test_odd_headers_are_refused_where_the_library_refuses_them(entry, size):
    text = json.dumps({"x": entry}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(size)
    mine = ours(content)
    assert mine is None or same(mine, theirs(content)), entry


@pytest.mark.parametrize("padding", range(8))
def test_a_header_of_any_length_is_read(padding):
    """Numbers need not begin where a view of their type could."""
    text = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b" " * padding
    content = struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1.5, -2.0)
    assert ours(content)["x"].tolist() == [1.5, -2.0]


def test_the_hash_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"x": torch.randn(700_000)}))
    digest = hashlib.sha256(b"before")
    read_tensors(path, "it", digest)
    assert digest.hexdigest() == hashlib.sha256(b"before" + path.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-1_500_000]])
def test_a_file_that_changes_while_it_is_read_may_be_asked_again(tmp_path, change):
    path = tmp_path / "x.safetensors"
    content = save({"x": torch.randn(700_000)})
    path.write_bytes(content)

    class Writer:
        def update(self, data):
            path.write_bytes(change(content))

    with pytest.raises(TransientError, match="it: .*x.safetensors changed while it was read; load it again"):
        read_tensors(path, "it", Writer())
    path.write_bytes(content)
    assert list(read_tensors(path, "it")) == ["x"]


def test_an_adapter_keeps_no_more_of_a_file_than_its_factors(tmp_path):
    """A file may hold copies of the base's weights beside them."""
    model = tiny_model("llama")
    adapter = Adapter(("q_proj",), rank=64)
    plain = LoRAModel.read(adapter.write(tmp_path / "plain", model))
    assert len({factor.untyped_storage().data_ptr() for side in (plain.a, plain.b) for factor in side.values()}) == 1

    folder = adapter.write(tmp_path / "large", model)
    copy = {"base_model.model.lm_head.base_layer.weight": model.lm_head.weight.repeat(9, 9)}
    (folder / "adapter_model.safetensors").write_bytes(save(adapter.factors(model) | copy))
    large = LoRAModel.read(folder)
    for site in plain.sites:
        assert torch.equal(plain.a[site], large.a[site]) and torch.equal(plain.b[site], large.b[site])
        assert large.a[site].untyped_storage().nbytes() == large.a[site].nbytes
        assert large.b[site].untyped_storage().nbytes() == large.b[site].nbytes


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="it: weights not found: .*x.safetensors"):
        read_tensors(tmp_path / "x.safetensors", "it")
