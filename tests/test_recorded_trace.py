"""A trace keeps what was recorded beside the scalings, and opens without being read whole.

Run: pytest tests/test_recorded_trace.py
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from recorded_problem import assert_same, rewritten, with_extras
from trace_problem import small_trace

from workbench.errors import UserError
from workbench.instrument import trace as trace_module
from workbench.instrument.trace import Trace, nan_mean
from workbench.instrument.trace_checks import is_mapped


def test_the_entropy_of_the_scalings_is_that_of_the_adapters_shares() -> None:
    trace = small_trace(adapters=3)
    values = np.zeros_like(trace.values)
    values[0] = [1, 0, 0]
    values[1] = [0.2, 0.2, 0.2]
    values[2] = [2, 2, 0]
    values[2, :5] = [3, -1, 0]
    values[3, 0], values[3, 1], values[3, 2:] = [0, 0, 0], [1, 1, np.nan], np.nan
    found = replace(trace, values=values).scaling_entropy()
    np.testing.assert_allclose(found, [0, np.log(3), np.log(2) / 2, np.nan], rtol=1e-12)
    assert found[0] == 0 and not np.signbit(found[0])


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_a_mean_over_blocks_is_the_mean(axis, monkeypatch) -> None:
    values = np.random.default_rng(0).normal(size=(23, 5, 3)).astype(np.float32)
    values[np.random.default_rng(1).random(values.shape) < 0.2] = np.nan
    values[3] = np.nan
    whole = nan_mean(values, axis)
    monkeypatch.setattr(trace_module, "_BLOCK_CELLS", 60)
    np.testing.assert_allclose(nan_mean(values, axis), whole, rtol=1e-12)
    expected = np.nansum(values, axis, np.float64) / np.maximum(1, (~np.isnan(values)).sum(axis))
    np.testing.assert_allclose(whole, np.where(np.isnan(values).all(axis), np.nan, expected), rtol=1e-12)


def test_a_request_without_scalings_has_a_trace_too(tmp_path) -> None:
    trace = with_extras(small_trace())
    bare = replace(trace, values=np.zeros((4, 0, 0), np.float32), sites=(), adapters=(), source=[-1] * 4)
    assert not bare.has_scalings and trace.has_scalings and "no scalings" in repr(bare)
    assert bare.leading().tolist() == [-1] * 4 and bare.share() == {} and bare.token_means().shape == (4, 0)
    assert np.isnan(bare.scaling_entropy()).all() and len(bare.to_frame()) == 0
    assert_same(bare, Trace.load(bare.save(tmp_path / "bare.safetensors")))
    part = bare.select(tokens=slice(1, 3), sites="*.q_proj", adapters="adapter_1")
    assert part.extra("delta_norm").values.shape == (2, 1, 1) and not part.has_scalings
    with pytest.raises(UserError, match="did you mean 'adapter_1'"):
        bare.select(adapters="adapter_2")


def test_what_else_was_recorded_is_selected_alike() -> None:
    trace = with_extras(small_trace(layers=2))
    part = trace.select(tokens=[0, 2], sites="*.mlp.*", adapters=["adapter_1", "adapter_0"])
    norm, whole = part.extra("delta_norm"), trace.extra("delta_norm")
    assert norm.labels == {"site": part.sites, "adapter": ("adapter_1", "adapter_0")}
    np.testing.assert_array_equal(norm.values, whole.values[[0, 2]][:, [3, 8]][:, :, [1, 0]])
    assert part.extra("entropy").values.tolist() == [0, 1]
    assert part.extra("logits:top.ids").values.tolist() == [[0, 1], [4, 5]]
    assert "delta_norm" not in trace.select(sites=trace.sites[0]).extras, "nothing is left of it"
    whole = trace.select()
    assert_same(trace, whole)


def test_what_was_not_recorded_is_said_with_how_to_record_it() -> None:
    with pytest.raises(UserError, match=r"no 'entropi'; did you mean 'entropy'.*it has 'entropy', 'logits:top.ids'"):
        with_extras(small_trace()).extra("entropi")
    with pytest.raises(UserError, match=r"it has none. Record it with engine.record\('scalings', 'logits:top'\)"):
        small_trace().extra("logits:top.ids")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"axes": ("site", "token")}, "begin with 'token'"),
        ({"axes": ("token",)}, "need 2 axes; 1 are named"),
        ({"axes": "token"}, "axes must be a sequence"),
        ({"labels": {}}, "must name the axes 'rank', one entry each; they name none"),
        ({"labels": {"rank": ("1",)}}, "has 1 names, but that axis has length 2"),
        ({"labels": {"rank": ("1", "1")}}, "differ"),
        ({"labels": {"rank": ("1", "\ud800")}}, "surrogate"),
        ({"values": np.zeros((4, 2), bool)}, "not bool"),
        ({"unit": None}, "unit must be text"),
    ],
)
def test_a_wrong_recorded_quantity_is_refused_by_name(changed, said) -> None:
    with pytest.raises(UserError, match=said):
        replace(with_extras(small_trace()).extra("logits:top.ids"), **changed)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_of_version_1_opens(lazy, tmp_path) -> None:
    trace = small_trace()
    path = trace.save(tmp_path / "trace.safetensors")
    rewritten(path, header={"version": "1"}, drop=["extras"])
    assert_same(trace, Trace.load(path, lazy=lazy))


def test_a_lazy_trace_reads_what_is_used_and_cannot_be_changed(tmp_path) -> None:
    trace = with_extras(small_trace(layers=3))
    path = trace.save(tmp_path / "trace.safetensors")
    lazy = Trace.load(path, lazy=True)
    assert is_mapped(lazy.values) and is_mapped(lazy.extra("delta_norm").values) and not is_mapped(trace.values)
    assert is_mapped(lazy.select(tokens=slice(1, 3)).values)
    with pytest.raises(ValueError, match="read-only"):
        lazy.values[0] = 0
    # whatever changes in the file shows: nothing was read before
    raw = path.read_bytes()
    at = raw.index(trace.values.tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.float32(7).tobytes())
    assert lazy.values[0, 0, 0] == 7


def test_opening_a_large_trace_lazily_reads_none_of_its_values(tmp_path) -> None:
    sites, adapters, tokens = tuple(map(str, range(200))), tuple("abcdefghij"), 4000
    path = tmp_path / "large.safetensors"
    plain = small_trace(tuple("x" * tokens), 1, 1)
    values = np.zeros((tokens, len(sites), len(adapters)), np.float32)
    values[100:] = np.nan
    source = np.where(np.arange(tokens) < 100, np.arange(tokens), -1)
    replace(plain, values=values, sites=sites, adapters=adapters, source=source).save(path)
    del values
    code = (
        "import re; from workbench.instrument.trace import Trace; import safetensors.numpy\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
        f"before = peak(); trace = Trace.load({str(path)!r}, lazy=True); assert trace.values.nbytes == 32_000_000\n"
        "part = trace.select(tokens=slice(5, 9)).share(); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16_000, "KiB"
