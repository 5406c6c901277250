"""explore sends what the trace says, pooled where it must be, and answers exactly. Run: pytest tests/test_explore.py"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from browser_page import Wire
from hypothesis import given
from hypothesis import strategies as st
from trace_problem import make_trace, small_trace, with_outliers

from workbench import explore
from workbench.display import explore_answers, payload, slabs
from workbench.display.explore_state import BUDGET_BYTES, DELTA_SCALE, quantities, state, survey
from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.instrument.recorded import Recorded
from workbench.instrument.run import open_run
from workbench.instrument.run_writer import RunWriter
from workbench.instrument.trace import Trace, nan_mean

pytestmark = pytest.mark.filterwarnings("error")
LAYERS = [None, 0, 0, 1, 1, 1, 2, 3]


@st.composite
def value_arrays(draw) -> np.ndarray:
    """Return `[token, 8 sites, adapter]` float32: scalings, some missing, some outside 0 … 1."""
    shape = (draw(st.integers(1, 40)), len(LAYERS), draw(st.sampled_from([1, 2, 3, 300])))
    values = np.random.default_rng(draw(st.integers(0, 99))).random(shape, np.float32)
    if draw(st.booleans()):
        values[draw(st.integers(0, shape[0] - 1))] = np.nan
        values[0, draw(st.integers(0, 7))] = draw(st.sampled_from([np.nan, 1.5, -0.5]))
    return values


def pooled_with_numpy(values: np.ndarray, row_of: np.ndarray, block: int) -> np.ndarray:
    """Return `[adapter, row, column]`: the mean over the tokens of a block and the sites of a row, without NaN."""
    rows = range(int(row_of.max()) + 1)
    columns = range(0, len(values), block)
    return np.array(
        [[nan_mean(values[at : at + block][:, row_of == row], (0, 1)) for at in columns] for row in rows]
    ).transpose(2, 0, 1)


@given(value_arrays())
def test_what_is_sent_whole_equals_the_trace(values) -> None:
    row_of, block = slabs.pooling(len(values), LAYERS, values.shape[2], 10**9)
    whole = slabs.slab(values, 0, len(values), row_of, block, slabs.Scale())
    assert whole.is_exact and block == 1
    np.testing.assert_array_equal(whole.codes, payload.quantised(values).transpose(2, 1, 0))
    leaders = payload.leaders(values).T.astype(int)
    none = np.iinfo(whole.leaders.dtype).max
    np.testing.assert_array_equal(whole.leaders, np.where(leaders == payload.MISSING_LEADER, none, leaders))


@given(value_arrays(), st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 8]), st.integers(1, 50))
def test_a_pooled_overview_equals_pooling_with_numpy(values, block, merged, chunk) -> None:
    row_of = (np.arange(len(LAYERS)) // merged).astype("<u2")
    before, slabs.CHUNK_CELLS = slabs.CHUNK_CELLS, chunk * 64
    try:
        part = slabs.slab(values, 0, len(values), row_of, block, slabs.Scale())
    finally:
        slabs.CHUNK_CELLS = before
    expected = pooled_with_numpy(values, row_of, block)
    np.testing.assert_array_equal(part.codes == payload.MISSING, np.isnan(expected))
    inside = (expected > 0.001) & (expected < 0.999)
    assert np.abs(part.codes[inside] / payload.STEPS - expected[inside]).max(initial=0) <= 0.5 / payload.STEPS + 1e-5
    best = np.nanmax(np.where(np.isnan(expected), -np.inf, expected), 0)
    held = np.isfinite(best)
    chosen = np.take_along_axis(expected, np.where(held, part.leaders, 0)[None].astype(int), 0)[0]
    np.testing.assert_allclose(chosen[held], best[held], atol=1e-6)
    assert (part.leaders[~held] == np.iinfo(part.leaders.dtype).max).all()


@given(st.integers(1, 20_000), st.integers(1, 60), st.sampled_from([1, 2, 9, 200]), st.integers(2_000, 5_000_000))
def test_the_overview_fits_its_budget_or_is_as_coarse_as_it_gets(tokens, layers, adapters, max_bytes) -> None:
    row_of, block = slabs.pooling(tokens, np.repeat(np.arange(layers), 7).tolist(), adapters, max_bytes)
    rows, columns = int(row_of.max()) + 1, -(-tokens // block)
    assert block & (block - 1) == 0 and len(row_of) == 7 * layers
    assert rows * columns * (adapters + slabs.leader_dtype(adapters).itemsize) <= max_bytes or columns == 1
    assert columns >= min(tokens, slabs.MIN_COLUMNS) // 2 or rows == 1


@given(value_arrays(), st.data())
def test_a_window_equals_a_slice_of_the_codes(values, data) -> None:
    trace = trace_of(values)
    quantity = quantities(trace)["scalings"]
    start = data.draw(st.integers(0, len(values) - 1))
    stop = data.draw(st.integers(start + 1, len(values)))
    asked = {"type": "window", "start": start, "stop": stop, "block": 1}
    place, (codes, leaders, row_of) = explore_answers.answer(asked, quantity, range(8), range(values.shape[2]))
    assert place == {"start": start, "stop": stop, "block": 1} and len(row_of) == 2 * len(LAYERS)
    found = np.frombuffer(codes, np.uint8).reshape(values.shape[2], len(LAYERS), -1)
    np.testing.assert_array_equal(found, payload.quantised(values[start:stop]).transpose(2, 1, 0))
    assert len(leaders) == len(LAYERS) * (stop - start) * slabs.leader_dtype(values.shape[2]).itemsize


@given(value_arrays(), st.data())
def test_cells_and_spans_are_answered_exactly(values, data) -> None:
    quantity = quantities(trace_of(values))["scalings"]
    sites = sorted(data.draw(st.sets(st.integers(0, 7), min_size=1)))
    token, site = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 7))
    adapters = list(range(values.shape[2]))[::2]
    cell, _ = explore_answers.answer({"type": "cell", "token": token, "site": site}, quantity, sites, adapters)
    np.testing.assert_array_equal(floats(cell["values"]), values[token, site, adapters].astype(float))
    np.testing.assert_allclose(floats(cell["means"]), nan_mean(values[token, sites], 0)[adapters], rtol=1e-12)
    asked = {"type": "span", "start": token, "stop": len(values)}
    span, _ = explore_answers.answer(asked, quantity, sites, adapters)
    np.testing.assert_allclose(floats(span["means"]), nan_mean(values[token:, sites], (0, 1))[adapters], rtol=1e-9)


def floats(values: list) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


def trace_of(values: np.ndarray) -> Trace:
    positions = np.arange(len(values))
    names = ["embed" if layer is None else f"layers.{layer}.p{i}" for i, layer in enumerate(LAYERS)]
    return Trace(
        values=values,
        adapters=tuple(f"a{i}" for i in range(values.shape[2])),
        sites=tuple(names),
        token_ids=positions,
        tokens=tuple(f" t{i}" for i in positions),
        positions=positions,
        generated=positions >= len(values) // 2,
        source=np.where(np.isnan(values).all((1, 2)), -1, positions),
        draft=np.full(len(values), -1),
        time_s=positions * 0.5,
    )


@given(value_arrays())
def test_the_shares_beside_the_map_are_the_traces(values) -> None:
    trace = trace_of(values)
    seen = survey(values, slabs.Scale())
    for mask in (np.full(len(values), True), trace.generated):
        if not mask.any():
            continue
        expected = list(trace.share(mask).values())
        np.testing.assert_allclose(floats(seen.shares(mask)), expected, atol=6e-5)
    assert (seen.num_above, seen.num_below) == (int((values > 1).sum()), int((values < 0).sum()))


def test_a_log_scale_keeps_its_promise() -> None:
    values = np.array([0, 5e-4, 1e-3, 0.0316227766, 1, 1.1, np.nan], np.float32)
    codes = DELTA_SCALE.codes(values)
    assert codes.tolist() == [0, 0, 0, payload.STEPS // 2, payload.STEPS, payload.ABOVE, payload.MISSING]


def test_a_trace_of_millions_of_cells_is_sent_in_five_megabytes() -> None:
    wire = Wire(explore(large_trace(2048, 32, 8)))
    assert sum(wire.sent) + len(wire.widget._esm) + len(wire.widget._css) <= BUDGET_BYTES
    assert wire.widget.labels["block"] == 1 and not wire.widget.labels["notes"]
    pooled = Wire(explore(large_trace(8000, 32, 9)))
    assert sum(pooled.sent) + len(pooled.widget._esm) <= BUDGET_BYTES
    assert pooled.widget.labels["block"] == 4 and "mean of 4 tokens" in pooled.widget.labels["notes"][0]


def large_trace(num_tokens: int, layers: int, adapters: int) -> Trace:
    one = small_trace(("x",) * 8, adapters=adapters, layers=1)
    positions = np.arange(num_tokens)
    return replace(
        one,
        values=np.resize(one.values, (num_tokens, 7 * layers, adapters)),
        sites=tuple(f"layers.{layer}.p{i}" for layer in range(layers) for i in range(7)),
        tokens=tuple(f" w{i % 999}" for i in positions),
        **{name: np.resize(getattr(one, name), num_tokens) for name in ("token_ids", "draft", "time_s")},
        positions=positions,
        source=positions,
        generated=positions > num_tokens // 2,
    )


def test_the_selection_in_python_is_the_traces_own_part() -> None:
    trace = make_trace(3, reuse_after=10)
    view = explore(trace, selection=(5, 60), shown_adapters=["spanish", "german"], projection="v_proj", layers=(1, 2))
    part = trace.select(
        tokens=slice(5, 60),
        sites=["model.layers.1.self_attn.v_proj", "model.layers.2.self_attn.v_proj"],
        adapters=["german", "spanish"],
    )
    pd.testing.assert_frame_equal(view.selected(), part.to_frame())
    np.testing.assert_array_equal(view.selected_trace().values, part.values)
    view.selection = None
    with pytest.raises(UserError, match=r"nothing is selected: drag .*view\.selection = \(start, stop\)"):
        view.selected()


BAD = [
    ({"projektion": "q_proj"}, "no setting 'projektion'; did you mean 'projection'"),
    ({"projection": "qproj"}, "projection cannot be 'qproj'; did you mean 'q_proj'"),
    ({"shown_adapters": ["germn"]}, "no adapter 'germn' here; did you mean 'german'"),
    ({"shown_adapters": []}, "needs at least one"),
    ({"mode": "gernan"}, "mode cannot be 'gernan'; did you mean 'german'"),
    ({"selection": (5, 5)}, "no span of the 135 tokens"),
    ({"selection": (0, 136)}, "no span of the 135 tokens"),
    ({"selection": ("a", "b")}, r"selection is \(start, stop\)"),
    ({"selection": 3}, r"selection is \(start, stop\)"),
    ({"layers": (9, 12)}, "no site of this trace is anything in layers 9 to 12"),
    ({"visible": (3, float("nan"))}, r"visible is \(start, stop\)"),
    ({"theme": "drak"}, "theme cannot be 'drak'; did you mean 'dark'"),
    ({"quantity": "delta_norm"}, "no 'delta_norm' to explore"),
    ({"request": "req-2"}, "no trace of request 'req-2'; did you mean 'req-1'"),
]


@pytest.mark.parametrize(("settings", "said"), BAD)
def test_a_setting_that_does_not_fit_is_a_sentence(settings, said) -> None:
    trace = make_trace(3)
    with pytest.raises(UserError, match=said):
        explore(trace, **settings)
    ((name, value),) = settings.items()
    if name != "projektion":
        view = explore(trace)
        before = getattr(view, name)
        with pytest.raises(UserError, match=said):
            setattr(view, name, value)
        assert getattr(view, name) == before


def without_scalings() -> Trace:
    values, source = np.zeros((135, 0, 0), np.float32), np.full(135, -1)
    return replace(make_trace(1), values=values, adapters=(), sites=(), source=source)


def test_what_cannot_be_explored_is_refused(tmp_path) -> None:
    base = without_scalings()
    with pytest.raises(UserError, match=r"no scalings in this trace to explore: record the request with engine\.rec"):
        explore(base)
    with pytest.raises(UserError, match=r"takes a Trace .*or the path of one, not dict"):
        explore({})
    with pytest.raises(UserError, match="no trace at"):
        explore(tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match=r"is a comparison: show\(Comparison\.load"):
        explore(Comparison.of({"a": small_trace(), "b": small_trace()}).save(tmp_path / "compared"))
    RunWriter(tmp_path / "empty", meta={}).close()
    with pytest.raises(UserError, match="the run 'empty' has no trace to explore"):
        explore(tmp_path / "empty")


def test_a_trace_that_lies_in_a_file_is_explored_from_there(tmp_path) -> None:
    trace = with_outliers(make_trace(2, dtype="float16"))
    live, stored = explore(trace), explore(trace.save(tmp_path / "trace.safetensors"))
    assert stored.codes == live.codes and stored.labels["shares"] == live.labels["shares"]
    assert stored.labels["notes"] == [
        "Outside the scale and marked: 40 values above 1, 1 below 0; "
        "in means that are drawn they count as the end of the scale."
    ]


@pytest.fixture
def run(tmp_path):
    traces = {"req-1": without_scalings(), "req-2": make_trace(2), "req-3": small_trace(adapters=3)}
    with RunWriter(tmp_path / "run", meta={}) as writer:
        for name, trace in traces.items():
            writer.request({"request_id": name, "mixture": "demo", "prompt": "Wer\nzuletzt <b>"})
            writer.trace(replace(trace, metadata={"request_id": name}))
    return open_run(tmp_path / "run")


def test_the_traces_of_a_run_are_opened_one_at_a_time(run, monkeypatch) -> None:
    opened = []
    load = type(run).trace
    monkeypatch.setattr(type(run), "trace", lambda self, name: (opened.append(name), load(self, name))[1])
    view = explore(run, shown_adapters=["german"], selection=(1, 2), mode="german")
    assert view.request == "req-2" and opened == ["req-1", "req-2", "req-2"]
    texts = {one["value"]: one["text"] for one in view.labels["requests"]}
    assert list(texts) == ["req-1", "req-2", "req-3"] and texts["req-2"] == "req-2 · demo · Wer↵zuletzt·<b>"
    serial = view.labels["serial"]
    view.request = "req-3"
    assert view.trace.num_tokens == 4 and view.labels["serial"] > serial and view.labels["shape"] == [4, 10, 3]
    # what does not fit the new trace falls back to the usual
    assert view.selection == () and view.mode == "who leads" and view.shown_adapters == view.trace.adapters


def test_a_request_without_scalings_is_refused_and_the_last_one_stays(run) -> None:
    view = explore(run)
    codes = view.codes
    with pytest.raises(UserError, match="no scalings in this trace"):
        view.request = "req-1"
    assert (view.request, view.codes, view.trace.num_tokens) == ("req-2", codes, 135)
    # from the page there is nobody to catch it: the view says it
    wire = Wire(view)
    wire.to_python({"method": "update", "state": {"request": "req-1"}, "buffers": []})
    assert view.request == "req-2" and "no scalings in this trace" in view.problem
    wire.to_python({"method": "update", "state": {"request": "req-3"}, "buffers": []})
    assert view.request == "req-3" and view.problem == ""


def test_delta_norms_are_another_quantity_of_the_map() -> None:
    trace = make_trace(2)
    norms = np.abs(np.random.default_rng(0).normal(0.05, 0.02, (135, 2, 4))).astype(np.float32)
    labels = {"site": trace.sites[3:5], "adapter": trace.adapters}
    recorded = Recorded(norms, ("token", "site", "adapter"), labels, "ratio", "how far")
    trace = replace(trace, extras={"delta_norm": recorded})
    view = explore(trace, selection=(2, 9))
    assert [one["value"] for one in view.labels["quantities"]] == ["scalings", "delta_norm"]
    view.quantity = "delta_norm"
    assert view.labels["shape"] == [135, 2, 4] and "logarithmic, from 0.001" in view.labels["notes"][0]
    codes = np.frombuffer(view.codes, np.uint8).reshape(4, 2, 135)
    np.testing.assert_array_equal(codes, DELTA_SCALE.codes(norms).transpose(2, 1, 0))
    assert view.selection == (2, 9)
    pd.testing.assert_frame_equal(view.selected(), trace.select(slice(2, 9), list(trace.sites[3:5])).to_frame())


def test_questions_about_another_trace_or_without_sense_are_refused(run) -> None:
    view = explore(run)
    wire = Wire(view)
    asked = {"type": "span", "start": 0, "stop": 9, "id": "x", "turn": 4, "serial": view.labels["serial"]}
    asked |= {"adapters": ["german"], "projection": "", "layers": []}

    def answers(**changes) -> list:
        wire.to_python({"method": "custom", "content": {**asked, **changes}, "buffers": []})
        return wire.said()

    (answer,) = answers()
    assert (answer["id"], answer["turn"], answer["type"]) == ("x", 4, "span")
    for changes in ({"serial": 0}, {"type": "sapn"}, {"start": None}, {"type": "cell", "token": 10**6, "site": 0}):
        (answer,) = answers(**changes)
        assert answer["is_refused"] and "means" not in answer
    huge = answers(start=-5, stop=10**9)[0]
    assert (huge["start"], huge["stop"]) == (0, 135)


def test_the_static_twin_is_this_view_in_one_file(tmp_path) -> None:
    view = explore(small_trace(adapters=3), selection=(1, 3), mode="adapter_2", title="<b>it</b>")
    html = view.save(tmp_path / "view.html").read_text(encoding="utf-8")
    held = json.loads(re.search(r"const state = (\{.*\});\n", html).group(1))
    assert (held["view"], held["selection"], held["mode"]) == ("explore", [1, 3], "adapter_2")
    codes = np.frombuffer(base64.b64decode(held["codes"]), np.uint8)
    np.testing.assert_array_equal(codes, np.frombuffer(view.codes, np.uint8))
    assert "<b>it</b>" not in html and "renderExplore" in html and "renderScalings" not in html
    assert view.show().html == view.show().html
    for suffix in (".png", ".svg", ".pdf"):
        assert view.save(tmp_path / f"view{suffix}").stat().st_size > 1000
    with pytest.raises(UserError, match=r"one of \.html, \.png, \.svg, \.pdf"):
        view.save(tmp_path / "view.gif")


def test_without_a_front_end_the_view_is_a_report_in_words() -> None:
    view = explore(small_trace(), title="\u202eevil")
    data, _ = view._repr_mimebundle_()
    assert view.labels["title"] == "‹U+202E›evil"
    assert "adapter " in data["text/plain"] and " object at 0x" not in data["text/plain"]
    assert "needs a kernel" in data["text/plain"] and "of 420 tokens" not in data["text/plain"]
    trace = make_trace(1)
    several = np.arange(420) % (trace.num_tokens - 1)
    longer = {name: getattr(trace, name)[several] for name in ("values", "token_ids", "generated", "draft", "time_s")}
    texts = tuple(trace.tokens[i] for i in several)
    long = replace(trace, tokens=texts, positions=np.arange(420), source=np.arange(420), **longer)
    assert "the first 400 of 420 tokens" in repr(explore(long))


def test_odd_shapes_have_a_state() -> None:
    only_prompt = replace(small_trace(), generated=np.full(4, False))
    for trace in (small_trace(("a",), adapters=1), small_trace(adapters=200), only_prompt):
        quantity = quantities(trace)["scalings"]
        made = state(trace, "t", quantity, BUDGET_BYTES, is_live=False)
        json.dumps(made["labels"], allow_nan=False)
        assert len(made["codes"]) == trace.values.size
    empty = replace(small_trace(), values=np.full((4, 10, 2), np.nan, np.float32), source=np.full(4, -1))
    assert explore(empty).labels["shares"]["all"] == [None, None]
