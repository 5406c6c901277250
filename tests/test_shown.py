"""show draws traces, runs and comparisons; the one ES module has all views. Run: pytest tests/test_shown.py"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from trace_problem import HOSTILE, small_trace

from workbench.display import explore, page, show
from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.instrument.recorded import Recorded
from workbench.instrument.run import open_run
from workbench.instrument.run_columns import STEPS
from workbench.instrument.run_writer import RunWriter
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")
DECLARED = re.compile(r"^(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)


def without_scalings(tokens: tuple[str, ...] = HOSTILE, entropy: bool = True, edits: bool = False) -> Trace:
    """Return the trace of a base request."""
    trace = small_trace(tokens)
    nats = np.linspace(0, 3, len(tokens))
    nats[0] = np.nan
    recorded = Recorded(nats, ("token",), {}, "nats", "entropy of the next token")
    return replace(
        trace,
        values=np.zeros((len(tokens), 0, 0), np.float32),
        adapters=(),
        sites=(),
        source=np.full(len(tokens), -1),
        extras={"entropy": recorded} if entropy else {},
        metadata={"base": "<img src=x>", "request_id": "req-2", **({"edits": ["freeze(at=3)"]} if edits else {})},
    )


def inert(html: str) -> bool:
    """Return whether the page has no script and no element that the text could have made."""
    return not re.search(r"<script|<img src=x|https?:|onerror=alert\(1\)>", html)


@pytest.mark.parametrize("entropy", [True, False])
def test_a_trace_without_scalings_is_shown_as_its_text(entropy: bool, tmp_path) -> None:
    shown = show(without_scalings(entropy=entropy, edits=True), title="<b>t</b>")
    html = shown.save(tmp_path / "text.html").read_text(encoding="utf-8")
    assert inert(html) and "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "‹U+202E›evil" in html
    assert html.count('<bdi class="lw-plain-token') == len(HOSTILE) and "freeze(at=3)" in html
    assert html.count("lw-plain-high") - html.count(".lw-plain-high") == (4 if entropy else 0)
    assert ("3.00 nats before the next" in html) == entropy and "No scalings were recorded" in html
    for suffix in (".png", ".svg", ".pdf"):
        assert shown.save(tmp_path / f"text{suffix}").stat().st_size > 1000
    assert set(shown._repr_mimebundle_()) == {"text/plain", "image/png", "text/html"}


def step(number: int) -> dict:
    values = {name: kind(0) for name, kind in STEPS.items()}
    return {**values, "step": number, "time_s": 0.1 * number, "duration_ms": 90.0, "rows": 3, "tokens": 2, "running": 2}


@pytest.fixture
def folder(tmp_path):
    with RunWriter(tmp_path / "run", meta={"base": "<img src=x>", "dtype": "float32"}) as writer:
        for number in range(5):
            writer.step(step(number))
        measured = {"prompt_tokens": 2, "completion_tokens": 2, "ttft_s": 0.1, "total_s": 0.4, "tok_s": 5.0}
        said = {"mixture": "demo", "submitted_s": 0.0, "finish_reason": "length", "prompt": "Hi", "text": HOSTILE[0]}
        writer.request({"request_id": "req-1", **measured, **said})
        writer.request({"request_id": "req-2", "adapter": "german", "error": "it failed", "prompt": "Hi"})
        writer.trace(replace(small_trace(), metadata={"request_id": "req-1"}))
    return tmp_path / "run"


def test_a_run_is_shown_as_its_timeline_and_its_requests(folder, tmp_path) -> None:
    shown = show(open_run(folder))
    html = shown.save(tmp_path / "run.html").read_text(encoding="utf-8")
    assert inert(html) and "2 requests, 1 with a trace" in html
    cells = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<td[^>]*>(.*?)</td>", html)]
    assert cells[:9] == ["req-1", "yes", "demo", "2", "2", "0.1 s", "0.4 s", "5", "length"]
    assert cells[9] == "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert cells[10:13] == ["req-2", "no", "german"] and cells[-2:] == ["error", "it failed"]
    assert html.count("data:image/png") >= 2 and 'alt="Run run: ' in html
    assert shown.save(tmp_path / "run.pdf").stat().st_size > 1000 and "Run(" in repr(shown)


def test_a_run_with_nothing_in_it_says_so(tmp_path) -> None:
    with RunWriter(tmp_path / "run", meta={}), pytest.raises(UserError) as said:
        show(open_run(tmp_path / "run"))
    assert "nothing to show of the run 'run'" in str(said.value) and "still being written" in str(said.value)


def test_a_comparison_is_shown_as_its_figure() -> None:
    compared = Comparison.of({"one": small_trace(), "other": small_trace()})
    assert type(show(compared, title="two")).__name__ == "ComparedPicture"


def test_what_cannot_be_shown_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"takes a Trace .*, a Run .* or a Comparison .*, not list"):
        show([])


def test_a_title_that_is_no_text_is_a_sentence(folder) -> None:
    for what in (small_trace(), without_scalings(), open_run(folder)):
        with pytest.raises(UserError, match="title must be text, not 5"):
            show(what, title=5)
    with pytest.raises(UserError, match="title must be text, not 5"):
        explore(small_trace(), title=5)


def test_every_view_can_be_joined_alone_and_with_the_others() -> None:
    for view in [None, *page.VIEW_PARTS]:
        module = page.module(view)
        declared = DECLARED.findall(module)
        # in a module a second declaration of a name is a syntax error
        assert len(declared) == len(set(declared)), sorted(name for name in declared if declared.count(name) > 1)
        assert module.count("export default") == 1 and "__VIEWS__" not in module
        drawn = page.VIEW_PARTS if view is None else [view]
        assert all(page.renderer(name) in declared for name in drawn)
        assert page.css(view).startswith("/*") and "https:" not in page.css(view)
    with pytest.raises(ValueError, match="no view 'scaling'; did you mean 'scalings'"):
        page.module("scaling")


def test_every_rule_of_the_styles_is_the_views_own() -> None:
    css = re.sub(r"/\*.*?\*/|@[^{]+\{", "", page.css())
    # commas inside :is(…) part no selectors
    rules = [re.sub(r"\([^()]*\)", "()", rule) for rule in re.findall(r"([^{}]+)\{", css)]
    selectors = [one.strip() for rule in rules for one in rule.split(",")]
    # the steps of an animation are no selectors
    assert not [one for one in selectors if ".lw" not in one and one not in ("from", "to")]
