"""The page, the text report and `show` say what the trace says. Run: pytest tests/test_display.py"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from trace_problem import HOSTILE, make_trace, small_trace, with_outliers

from workbench.display import payload, show, text_report
from workbench.display.labels import facts
from workbench.display.marks import COMPUTED, NO_SOURCE, source_kinds
from workbench.display.page import module
from workbench.display.report import columns
from workbench.errors import UserError
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(6, reuse_after=10)


@pytest.fixture(scope="module")
def html(trace: Trace) -> str:
    return show(trace).html


def test_codes_are_within_half_a_step_and_marks_are_apart() -> None:
    values = np.linspace(0, 1, 1001, dtype=np.float32).reshape(-1, 1, 1)
    codes = payload.quantised(values)
    assert codes.max() == payload.STEPS
    assert np.abs(codes / payload.STEPS - values).max() <= 0.5 / payload.STEPS + 1e-6
    marks = payload.quantised(np.array([[[np.nan, 1.001, -0.001, np.inf]]], np.float32))
    assert marks.ravel().tolist() == [payload.MISSING, payload.ABOVE, payload.BELOW, payload.ABOVE]


def test_values_outside_the_scale_are_sent_exactly(trace: Trace) -> None:
    odd = with_outliers(trace)
    state = payload.state(odd, "t")
    at, value = np.frombuffer(state["outlier_at"], "<u4"), np.frombuffer(state["outlier_value"], "<f4")
    np.testing.assert_array_equal(odd.values.reshape(-1)[at], value)
    assert len(at) == odd.values[3].size + 1


def test_the_leader_of_a_cell_is_exact_where_codes_tie() -> None:
    values = np.array([[[0.5, 0.5009, np.nan], [np.nan] * 3]], np.float32)
    assert payload.quantised(values)[0, 0, 0] == payload.quantised(values)[0, 0, 1]
    assert payload.leaders(values).tolist() == [[1, payload.MISSING_LEADER]]


def test_tokens_whose_scalings_are_no_numbers_are_not_called_computed(trace: Trace) -> None:
    values = trace.values.copy()
    values[3:5] = np.nan
    values[6, 0, 0] = np.nan
    seen = replace(trace, values=values)
    wanted = [payload.NO_VALUE if token in (3, 4) else source for token, source in enumerate(trace.source)]
    assert payload.state(seen, "t")["source"] == wanted
    assert (source_kinds(seen)[2:7] == [COMPUTED, NO_SOURCE, NO_SOURCE, COMPUTED, COMPUTED]).all()
    nothing = replace(trace, values=np.full_like(trace.values, np.nan))
    assert ("Scalings", f"0 computed, 0 reused, {(trace.source >= 0).sum()} without a value") in facts(nothing)
    assert "without" not in dict(facts(trace))["Scalings"]


def test_a_large_trace_is_averaged_over_layers_and_says_so(trace: Trace) -> None:
    values, rows, notes = payload.pooled(trace, max_bytes=trace.values.size)
    assert values is trace.values and rows["labels"] == list(trace.sites) and not notes
    values, rows, notes = payload.pooled(trace, max_bytes=trace.values.size // 2)
    assert values.shape == (135, 6, 4) and rows["layers"] == list(range(6))
    np.testing.assert_allclose(values[7, 2], trace.values[7, 10:15].mean(0), rtol=1e-5)
    assert rows["labels"][2] == "layer 2 (mean of 5 sites)" and "mean over the sites of a layer" in notes[0]
    values, rows, notes = payload.pooled(trace, max_bytes=135 * 4 * 3)
    assert values.shape == (135, 3, 4) and rows["labels"][1] == "layers 2-3 (mean of 10 sites)"
    assert "the sites of 2 layers" in notes[0] and np.isnan(values[-1]).all()


def test_the_page_is_self_contained(trace: Trace, tmp_path) -> None:
    html = show(trace).save(tmp_path / "page.html").read_text(encoding="utf-8")
    without_data = re.sub(r"base64,[A-Za-z0-9+/=]+|\"[A-Za-z0-9+/=]{60,}\"", "", html)
    assert not re.search(r"https?:|//[a-z]", without_data)
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module">']
    assert re.findall(r"\s(?:src|href)=\"([^,]*),", html) == ["data:", "data:image/png;base64"]
    assert not re.search(r"\b(eval|Function|fetch|import|XMLHttpRequest|WebSocket|insertAdjacentHTML)\s*\(", html)
    assert "innerHTML" not in html and html.count("</script>") == 1
    assert "export default { render };" in module()


def test_nothing_from_a_trace_becomes_markup(tmp_path) -> None:
    names = ("<img src=x onerror=alert(1)>", "</style>", "b")
    trace = replace(small_trace(HOSTILE, adapters=3), adapters=names, metadata={"base": "<b>&\"'"})
    html = show(trace, title="</title><script>x</script>").save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.count("<script") == 1 and html.count("</script") == 1 and html.count("</style>") == 2
    assert "<img src=x" not in html and "<b>" not in html and "&lt;/title&gt;&lt;script&gt;" in html


def test_the_image_comes_first_and_has_words(html: str) -> None:
    alt = re.search(r'<img alt="([^"]+)"', html)
    assert alt and "scripture" in alt.group(1) and html.index("<img") < html.index("<script")


def test_the_state_in_the_page_holds_the_trace(trace: Trace, html: str) -> None:
    state = json.loads(re.search(r"const state = (\{.*\});\n", html).group(1))
    means = np.frombuffer(base64.b64decode(state["means"]), "<f4").reshape(trace.num_tokens, -1)
    np.testing.assert_allclose(means, trace.token_means(), rtol=1e-6)
    codes = np.frombuffer(base64.b64decode(state["values"]), np.uint8).reshape(state["shape"])
    np.testing.assert_array_equal(codes, payload.quantised(trace.values))
    assert state["source"] == trace.source.tolist() and state["rows"]["labels"] == list(trace.sites)


def test_equal_traces_give_equal_pages_and_different_ones_different_ids(trace: Trace, html: str) -> None:
    assert show(trace).html == html
    ids = [re.search(r'data-lw="(\w+)"', show(one).html).group(1) for one in (trace, small_trace())]
    assert ids[0] != ids[1]


def test_the_demo_page_is_small() -> None:
    assert len(show(make_trace(30)).html) < 1_500_000


def test_jupyter_gets_text_image_and_html(trace: Trace) -> None:
    bundle = show(trace)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "text/html"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"] == text_report(trace, colour=False)


STARTS = {".html": b"<!doctype", ".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize(("suffix", "start"), STARTS.items())
def test_pictures_are_saved_by_suffix(suffix: str, start: bytes, tmp_path) -> None:
    trace = small_trace()
    path = show(trace).save(tmp_path / f"trace{suffix}")
    assert path.read_bytes().startswith(start) and len(list(tmp_path.iterdir())) == 1
    assert show(trace).save(tmp_path / f"again{suffix}").read_bytes() == path.read_bytes()


def test_what_cannot_be_shown_or_saved_is_refused(trace: Trace, tmp_path) -> None:
    with pytest.raises(UserError, match=r"one of \.html, \.png, \.svg, \.pdf; did you mean '\.png'"):
        show(trace).save(tmp_path / "trace.pngg")
    with pytest.raises(UserError, match="the folder .* does not exist"):
        show(trace).save(tmp_path / "nowhere" / "trace.png")
    with pytest.raises(UserError, match="takes a Trace .*, not dict"):
        show({})
    with pytest.raises(AttributeError, match="no attribute 'sow'"):
        from workbench import display

        display.sow  # noqa: B018


def test_display_needs_no_torch_and_registers_no_figure(tmp_path) -> None:
    path = small_trace().save(tmp_path / "trace.safetensors")
    code = (
        "import sys, workbench.display.shown; from workbench.display import show; "
        "from workbench.instrument.trace import Trace; "
        f"trace = Trace.load({str(path)!r}); show(trace).save({str(tmp_path / 'x.html')!r}); "
        "found = ('torch', 'transformers', 'matplotlib.pyplot', 'workbench.engine', 'pandas'); "
        "print([name for name in found if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_report_marks_every_change_of_lead_by_letter(trace: Trace) -> None:
    report = text_report(trace, colour=False)
    assert "\x1b" not in report
    assert "[A]def mean(values):↵\n    total" in report and "── generated ──\n[D]and the people" in report
    leading = trace.leading()
    changes = 1 + int((leading[1:] != leading[:-1]).sum())
    body = report[report.index("── prompt") : report.index("\nadapter ")]
    # the first generated token is marked again on its own line
    assert len(re.findall(r"\[[A-D-]\]", body)) == changes + 1
    shares = trace.share(trace.generated)
    assert re.search(rf"D scripture .*{shares['scripture']:.1%}", report)


def test_the_report_keeps_the_text_and_the_width(trace: Trace) -> None:
    for width in (30, 77):
        report = text_report(trace, colour=False, width=width)
        body = report[report.index("── prompt") : report.index("\nadapter ")]
        assert all(columns(line) <= width for line in body.splitlines())
        text = re.sub(r"\[[A-D-]\]|── \w+ ──|\n", "", body).replace("↵", "\n")
        assert text == trace.text


def test_the_report_shows_control_characters_instead_of_sending_them() -> None:
    report = text_report(small_trace(HOSTILE, adapters=2), colour=False)
    assert "\x1b" not in report and "‹ESC›[31mred" in report and "‹U+202E›evil" in report


def test_colour_depends_on_the_terminal(trace: Trace, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "48;2;0;114;178m" in text_report(trace, colour=True)
    monkeypatch.setenv("COLORTERM", "")
    assert "48;5;25m" in text_report(trace, colour=True)
    assert "\x1b" not in text_report(trace)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in text_report(trace)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in text_report(trace)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text_report(trace, colour=True, width=60))
    assert plain == text_report(trace, colour=False, width=60)


def test_terminal_columns_count_wide_and_combining_characters() -> None:
    assert [columns(text) for text in ("abc", "漢字", "e\u0301", "")] == [3, 4, 1, 0]
