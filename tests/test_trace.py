"""A trace keeps what was recorded, and refuses what is not a trace. Run: pytest tests/test_trace.py"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_problem import assert_same, rewritten
from safetensors.numpy import save_file
from trace_problem import make_trace, small_trace

from workbench.errors import UserError
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace
from workbench.instrument.trace_file import FORMAT

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def extras(draw: st.DrawFn, tokens: int) -> dict[str, Recorded]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = {}
    for name in draw(st.lists(TEXT.filter(bool), max_size=3, unique=True)):
        axes = draw(st.sampled_from([("token",), ("token", "layer"), ("token", "site", "adapter")]))
        labels = {axis: tuple(draw(st.lists(TEXT, min_size=1, max_size=3, unique=True))) for axis in axes[1:]}
        shape = (tokens, *map(len, labels.values()))
        dtype = draw(st.sampled_from(["float32", "float64", "float16", "int64"]))
        found[name] = Recorded(rng.integers(-1, 9, shape).astype(dtype), axes, labels, draw(TEXT), draw(TEXT))
    return found


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    tokens, sites, adapters = draw(st.integers(1, 6)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
    adapters = adapters if sites else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    positions = np.cumsum(rng.integers(1, 4, tokens)) - 1
    source = np.where(rng.random(tokens) < 0.7, positions, rng.integers(-1, positions + 1))
    values = rng.normal(0.5, 1, (tokens, sites, adapters)).astype(draw(st.sampled_from(["float32", "float16"])))
    values[rng.random(values.shape) < 0.1] = np.nan
    values[source < 0] = np.nan
    prompt = draw(st.integers(0, tokens))
    return Trace(
        values=values,
        adapters=tuple(draw(st.lists(TEXT, min_size=adapters, max_size=adapters, unique=True))),
        sites=tuple(draw(st.lists(TEXT, min_size=sites, max_size=sites, unique=True))),
        token_ids=rng.integers(0, 2**62, tokens),
        tokens=tuple(draw(st.lists(TEXT, min_size=tokens, max_size=tokens))),
        positions=positions,
        generated=np.arange(tokens) >= prompt,
        source=source,
        draft=rng.integers(-1, 2, tokens),
        time_s=rng.random(tokens) * 1e3,
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        extras=draw(extras(tokens)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_a_saved_trace_loads_as_it_was(trace: Trace, tmp_path) -> None:
    path = trace.save(tmp_path / "trace.safetensors")
    assert_same(trace, Trace.load(path))
    assert_same(trace, Trace.load(path, lazy=True))
    assert [file.name for file in tmp_path.iterdir()] == ["trace.safetensors"]


def test_views_and_transposes_are_saved_by_value_not_by_memory(tmp_path) -> None:
    trace = small_trace(layers=3)
    turned = replace(trace, values=np.asfortranarray(trace.values)[:, ::-1])
    assert_same(turned, Trace.load(turned.save(tmp_path / "turned.safetensors")))


def test_float16_is_kept_and_the_rounding_is_named() -> None:
    half = make_trace(2, dtype="float16")
    assert half.values.dtype == np.float16
    assert "float16" in half.metadata["rounding"]
    assert "rounding" not in make_trace(2).metadata


def test_computed_reused_and_never_an_input_are_told_apart() -> None:
    trace = make_trace(2, reuse_after=5)
    prompt, generated = trace.prompt_tokens, trace.num_tokens - trace.prompt_tokens
    assert int(trace.computed.sum()) == prompt + 5
    assert int(trace.reused.sum()) == generated - 1 - 5
    assert not trace.computed[-1] and not trace.reused[-1]
    assert trace.text.startswith("def mean(values):\n")


def test_share_is_the_mean_over_sites_and_tokens_that_have_values() -> None:
    trace = make_trace(2)
    expected = np.nanmean(trace.values[:-1].astype(np.float64), (0, 1))
    np.testing.assert_allclose(list(trace.share().values()), expected)
    one = trace.values[3].mean(0, dtype=np.float64)
    for tokens in (slice(3, 4), np.arange(trace.num_tokens) == 3, [3], [3 - trace.num_tokens]):
        np.testing.assert_allclose(list(trace.share(tokens).values()), one)
    assert all(np.isnan(share) for share in trace.share(slice(-1, None)).values())


def test_the_leading_adapter_has_the_largest_mean() -> None:
    trace = make_trace(2)
    assert trace.leading()[10] == 0 and trace.leading()[-1] == -1
    np.testing.assert_array_equal(trace.leading()[:-1], trace.values[:-1].mean(1).argmax(1))
    values = trace.values.copy()
    values[5, :, 0] = np.nan
    assert replace(trace, values=values).leading()[5] == np.nanargmax(values[5].mean(0))


def test_frame_has_one_line_per_token_site_and_adapter() -> None:
    trace = small_trace(layers=2)
    frame = trace.to_frame()
    columns = ["token", "position", "text", "generated", "computed", "site", "adapter", "scaling"]
    assert list(frame.columns) == columns and len(frame) == trace.values.size
    line = frame[(frame.token == 2) & (frame.site == trace.sites[4]) & (frame.adapter == "adapter_1")]
    assert line.scaling.item() == trace.values[2, 4, 1]
    assert line.text.item() == "\n" and bool(line.generated.item())
    wide = frame.pivot_table(index="token", columns="adapter", values="scaling", observed=True)
    np.testing.assert_allclose(wide.to_numpy(), trace.token_means(), rtol=1e-5)


def test_select_keeps_the_asked_part_with_its_labels() -> None:
    trace = make_trace(3)
    part = trace.select(tokens=~trace.generated, sites="*.q_proj", adapters=["scripture", "python"])
    assert part.adapters == ("scripture", "python") and len(part.sites) == 3
    assert part.num_tokens == trace.prompt_tokens and part.tokens == trace.tokens[: part.num_tokens]
    np.testing.assert_array_equal(part.values, trace.values[: part.num_tokens, ::5][:, :, [3, 0]])
    assert trace.select(sites=["*.2.*", "*.0.*"]).sites == trace.sites[:5] + trace.sites[10:]
    assert trace.select(tokens=slice(100, None)).positions[0] == 100


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sites": "*.q_prj"}, "did you mean '*.q_proj'"),
        ({"sites": []}, "selects nothing"),
        ({"adapters": ["pyton"]}, "did you mean 'python'"),
        ({"adapters": []}, "selects nothing"),
        ({"tokens": slice(5, 5)}, "selects no token"),
        ({"tokens": [0, 9999]}, "token index 9999 is out of range"),
        ({"tokens": [3, 2]}, "increasing order"),
        ({"tokens": [1, 1]}, "increasing order"),
        ({"tokens": [True, False]}, "token mask has shape"),
        ({"tokens": [0.5]}, "integer indices"),
    ],
)
def test_a_selection_of_nothing_is_an_error(asked: dict, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("*", r"\*")):
        make_trace(2).select(**asked)


WRONG = {
    "2 axes": ({"values": np.zeros((4, 10), np.float32)}, "3 axes"),
    "float64": ({"values": np.zeros((4, 10, 2))}, "not float64"),
    "integers": ({"values": np.zeros((4, 10, 2), int)}, "not int64"),
    "sites": ({"sites": ("a", "b")}, "site axis of values has length 10"),
    "adapters": ({"adapters": ("a",)}, "adapter axis of values has length 2"),
    "tokens": ({"tokens": ("a", "b")}, "token axis of values has length 4"),
    "no tokens": ({"values": np.zeros((0, 10, 2), np.float32), "tokens": ()}, "token axis is empty"),
    "no adapters": ({"values": np.zeros((4, 10, 0), np.float32), "adapters": ()}, "has sites but no adapters"),
    "no sites": ({"values": np.zeros((4, 0, 2), np.float32), "sites": ()}, "has adapters but no sites"),
    "extras": ({"extras": [1]}, "extras must map names"),
    "an extra": ({"extras": {"entropy": np.zeros(4)}}, r"extras\['entropy'\] must be a Recorded, not ndarray"),
    "a short extra": (
        {"extras": {"entropy": Recorded(np.zeros(3), ("token",), {}, "nats", "")}}, "has 3 tokens, but the trace has 4"
    ),
    "a string": ({"tokens": "abcd"}, "sequence of strings"),
    "not strings": ({"adapters": (1, 2)}, "sequence of strings"),
    "twice": ({"adapters": ("a", "a")}, "repeated: 'a'"),
    "surrogate": ({"tokens": ("a", "b", "\ud800", "d")}, "surrogate"),
    "token_ids": ({"token_ids": np.arange(3)}, "token_ids has shape"),
    "float ids": ({"token_ids": np.zeros(4)}, "token_ids must be int64"),
    "negative ids": ({"token_ids": np.array([0, 1, 2, -5])}, "negative; found -5"),
    "huge ids": ({"token_ids": np.array([0, 1, 2, 2**63], np.uint64)}, "do not fit int64"),
    "generated": ({"generated": np.zeros(4, int)}, "generated must be bool"),
    "positions": ({"positions": np.array([0, 2, 1, 3])}, "increase"),
    "negative positions": ({"positions": np.array([-1, 0, 1, 2])}, "non-negative"),
    "later source": ({"source": np.array([0, 1, 3, 3])}, "source of token 2 is 3"),
    "source below -1": ({"source": np.array([-2, 1, 2, 3])}, "source of token 0 is -2"),
    "no source": ({"source": np.array([0, 1, 2, -1])}, "token 3 has scalings, but its source is -1"),
    "draft": ({"draft": np.array([0, 1, 2, -1])}, "draft must be"),
    "draft too wide": ({"draft": np.array([0, 1, 300, -1])}, "do not fit int8"),
    "time": ({"time_s": np.array([0, 0, 0, -1.0])}, "time_s"),
    "endless time": ({"time_s": np.array([0, 0, 0, np.inf])}, "time_s"),
    "nan time": ({"time_s": np.array([0, 0, 0, np.nan])}, "time_s"),
    "metadata": ({"metadata": [1]}, "must be a dict"),
    "metadata key": ({"metadata": {1: 2}}, "keys must be strings"),
    "metadata value": ({"metadata": {"k": object()}}, r"metadata\['k'\] cannot be stored"),
    "metadata nan": ({"metadata": {"k": float("nan")}}, r"metadata\['k'\] cannot be stored"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_refused_by_name(case: str) -> None:
    changed, said = WRONG[case]
    with pytest.raises(UserError, match=said):
        replace(small_trace(), **changed)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"header": {"format": "pt"}}, "not a trace"),
        ({"drop": ["format"]}, "not a trace"),
        ({"header": {"version": "3"}}, "trace version 3; this workbench reads up to 2"),
        ({"drop": ["extras"]}, "lacks 'extras'"),
        ({"tensors": {"extra.entropy": np.zeros(4)}}, "holds 'entropy', but its header describes none"),
        ({"header": {"extras": '{"entropy": {}}'}}, "holds none, but its header describes 'entropy'"),
        ({"header": {"extras": "[]"}}, r"its header describes \[\]"),
        ({"header": {"version": "1"}, "tensors": {"extra.entropy": np.zeros(4)}}, "no trace has, 'extra.entropy'"),
        (
            {"header": {"extras": '{"a": {"axes": 1}}'}, "tensors": {"extra.a": np.zeros(4)}},
            "what it says of 'a' does not fit",
        ),
        ({"header": {"version": "one"}}, "damaged: its trace version is 'one'"),
        ({"drop": ["draft"]}, "lacks 'draft'"),
        ({"drop": ["tokens"]}, "lacks 'tokens'"),
        ({"tensors": {"more": np.zeros(1)}}, "tensors no trace has, 'more'"),
        ({"header": {"sites": "[1"}}, "no valid JSON"),
        ({"header": {"sites": '"abc"'}}, "sites in its header is not a list"),
        ({"header": {"sites": '["a"]'}}, "not a usable trace: sites has 1 names"),
        ({"header": {"metadata": "[]"}}, "not a usable trace: metadata must be a dict"),
        ({"tensors": {"values": np.zeros((2, 10, 2), np.float32)}}, "not a usable trace: tokens has 4 names"),
        ({"tensors": {"values": np.zeros((4, 10, 2), np.float64)}}, "not a usable trace: values must be float32"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(damage: dict, said: str, tmp_path) -> None:
    path = small_trace().save(tmp_path / "trace.safetensors")
    rewritten(path, **damage)
    with pytest.raises(UserError, match=said) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(keep: int, tmp_path) -> None:
    path = small_trace().save(tmp_path / "trace.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    for lazy in (False, True):
        with pytest.raises(UserError, match="truncated"):
            Trace.load(path, lazy=lazy)


def test_files_that_are_not_there_or_not_ours_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Trace.load(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="it is a folder"):
        Trace.load(tmp_path)
    (tmp_path / "x.safetensors").write_text("hello, this is no tensor file at all")
    with pytest.raises(UserError, match="truncated, or not safetensors"):
        Trace.load(tmp_path / "x.safetensors")
    save_file({"lora_A": np.zeros((2, 2), np.float32)}, tmp_path / "adapter.safetensors")
    with pytest.raises(UserError, match="not a trace; it holds 'lora_A'"):
        Trace.load(tmp_path / "adapter.safetensors")
    with pytest.raises(UserError, match="saved as .safetensors, not .npz"):
        small_trace().save(tmp_path / "trace.npz")
    with pytest.raises(UserError, match="does not exist"):
        small_trace().save(tmp_path / "nowhere" / "trace.safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = small_trace().save(tmp_path / "trace.safetensors")
    before = path.read_bytes()

    def broken(arrays, target, metadata):
        with open(target, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", broken)
    with pytest.raises(UserError, match="No space left on device"):
        make_trace(2).save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_the_header_is_readable_without_this_package(tmp_path) -> None:
    path = small_trace(("é", "", "\x00")).save(tmp_path / "trace.safetensors")
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert header["format"] == FORMAT and json.loads(header["tokens"]) == ["é", "", "\x00"]


def test_reading_a_trace_needs_neither_torch_nor_pandas(tmp_path) -> None:
    path = small_trace().save(tmp_path / "trace.safetensors")
    code = (
        "import sys; from workbench.instrument.trace import Trace; "
        f"Trace.load({str(path)!r}).share(); "
        "print([name for name in ('torch', 'pandas', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
