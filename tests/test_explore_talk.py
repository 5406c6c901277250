"""What explore's page sets and asks, and Python's word on it. Run: pytest tests/test_explore_talk.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from browser_page import Wire
from trace_problem import make_trace

from workbench import explore, show
from workbench.instrument.trace import Trace, nan_mean

pytestmark = pytest.mark.filterwarnings("error")


def with_head() -> Trace:
    """Return a trace with a site outside the layers, as lm_head is."""
    trace = make_trace(6)
    values = np.concatenate([trace.values, trace.values[:, :1]], 1)
    return replace(trace, values=values, sites=(*trace.sites, "lm_head"))


class Talk:
    """The page's side of an explore view."""

    def __init__(self, view):
        self.view, self.wire = view, Wire(view)
        self.wire.from_python()

    def set(self, **state) -> None:
        self.wire.to_python({"method": "update", "state": state, "buffers": []})

    def ask(self, kind: str, **content) -> dict:
        serial = self.view.labels["serial"]
        message = {"type": kind, "id": "x", "turn": 0, "serial": serial, **content}
        self.wire.to_python({"method": "custom", "content": message, "buffers": []})
        (answer,) = self.wire.said()
        return answer

    def told(self) -> dict:
        """Return the settings that the page was told, the last word of each."""
        updates = [message["state"] for message in self.wire.from_python() if message["method"] == "update"]
        return {name: value for state in updates for name, value in state.items()}


def filter_of(trace: Trace, adapters=None, projection: str = "", layers=()) -> dict:
    return {"adapters": list(adapters or trace.adapters), "projection": projection, "layers": list(layers)}


def test_a_setting_that_python_refuses_is_taken_back_on_both_sides_and_questions_go_on() -> None:
    trace = with_head()
    view = explore(trace, layers=(3, 5))
    talk = Talk(view)
    talk.set(projection="lm_head")
    assert view.projection == "" and "no site of this trace is lm_head in layers 3 to 5" in view.problem
    told = talk.told()
    assert told["projection"] == "" and told["problem"] == view.problem
    answer = talk.ask("cell", token=7, site=None, **filter_of(trace, layers=(3, 5)))
    np.testing.assert_allclose(answer["means"], nan_mean(trace.values[7:8, 15:30], (0, 1)), rtol=1e-5)
    # the sentence goes when its cause does, and comes again with it
    talk.set(mode="german")
    assert view.problem == ""
    talk.set(projection="lm_head")
    assert view.problem != ""
    talk.told()
    talk.set(projection="lm_head")
    assert talk.told()["problem"] == view.problem != ""
    # several at once: what goes together stays together
    talk.set(projection="lm_head", layers=[])
    assert (view.projection, view.layers, view.problem) == ("lm_head", (), "")


def test_a_span_that_comes_late_from_another_trace_is_no_mistake_of_the_users() -> None:
    view = explore(make_trace(2))
    talk = Talk(view)
    talk.set(visible=[0, 5000.5])
    talk.set(selection=[4000, 5000])
    assert (view.visible, view.selection, view.problem) == ((), (), "")
    assert talk.told() == {"visible": (), "selection": ()}
    talk.set(visible=[0, 20.5], mode="german")
    assert (view.visible, view.mode) == ((0, 20.5), "german")


def test_where_the_map_is_zoomed_to_does_not_unsay_a_problem() -> None:
    view = explore(with_head(), layers=(3, 5))
    talk = Talk(view)
    talk.set(projection="lm_head")
    talk.set(visible=[1, 9])
    assert "lm_head" in view.problem and view.visible == (1, 9)


def test_an_answer_is_about_the_adapters_and_sites_that_the_question_names() -> None:
    """A question overtakes a change of a setting that the page keeps back while the kernel is busy."""
    trace = make_trace(3)
    view = explore(trace)
    asked = filter_of(trace, ["spanish", "german"], "v_proj", (1, 2))
    sites = [trace.sites.index(f"model.layers.{layer}.self_attn.v_proj") for layer in (1, 2)]
    talk, order = Talk(view), [2, 1]
    cell = talk.ask("cell", token=5, site=4, **asked)
    np.testing.assert_allclose(cell["values"], trace.values[5, 4, order])
    np.testing.assert_allclose(cell["means"], trace.values[5, sites].mean(0)[order], rtol=1e-5)
    span = talk.ask("span", start=3, stop=9, **asked)
    np.testing.assert_allclose(span["means"], trace.values[3:9, sites].mean((0, 1))[order], rtol=1e-5)
    assert view.shown_adapters == trace.adapters


def test_every_question_gets_an_answer_if_only_that_there_is_none() -> None:
    trace = with_head()
    talk = Talk(explore(trace))
    asked = filter_of(trace)
    bad = [{"serial": 0}, {"start": None}, {"adapters": ["germn"]}, {"projection": 3}, {"layers": ["a"]}]
    bad += [{"projection": "lm_head", "layers": [3, 5]}, {"adapters": None}]
    answers = [talk.ask("span", **{"start": 0, "stop": 9, **asked} | changes) for changes in bad]
    for answer in [*answers, talk.ask("sapn", **asked)]:
        assert answer["is_refused"] and answer["id"] == "x" and "means" not in answer


@pytest.mark.parametrize("worst", [np.inf, -np.inf])
def test_values_without_an_end_are_drawn_saved_and_answered(tmp_path, worst: float) -> None:
    trace = make_trace(2)
    values = trace.values.copy()
    values[3], values[5, 2, 1] = worst, worst
    trace = replace(trace, values=values)
    with np.errstate(invalid="ignore"):
        view = explore(trace)
        assert view.labels["shares"]["prompt"][1] is None and view.labels["shares"]["generated"][1] is not None
        assert "renderExplore" in view.save(tmp_path / "view.html").read_text(encoding="utf-8")
        assert "renderScalings" in show(trace).html
        answer = Talk(view).ask("cell", token=3, site=0, **filter_of(trace))
    assert answer["values"] == answer["means"] == [None] * 4
