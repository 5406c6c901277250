"""One request from prompt to result, its stream, its stops and its trace: `pytest tests/test_engine.py`."""

from __future__ import annotations

import pytest
import torch
from byte_engine import (  # noqa: F401 - fixtures are named by their users' arguments
    MODEL,
    SPEC,
    assert_idle,
    engine,
    engine_on,
    finish,
    shelf,
)
from models import (
    Probe,
    byte_ids,
)

from workbench import Engine, UserError

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


# prompts and results


def test_text_ids_and_chat_are_the_same_prompt(engine):
    written = engine.generate("u:hi;a:", max_tokens=5)
    assert engine.generate(byte_ids("u:hi;a:"), max_tokens=5).token_ids == written.token_ids
    assert engine.generate([{"role": "user", "content": "hi"}], max_tokens=5).token_ids == written.token_ids
    assert engine.generate(torch.tensor(byte_ids("u:hi;a:")), max_tokens=5).token_ids == written.token_ids
    assert engine.generate(torch.tensor(byte_ids("u:hi;a:")).numpy(), max_tokens=5).token_ids == written.token_ids
    assert engine.generate(list(torch.tensor(byte_ids("u:hi;a:")).numpy()), max_tokens=5).token_ids == written.token_ids


def test_one_prompt_gives_one_result_and_a_list_gives_a_list(engine):
    chat = [{"role": "user", "content": "hi"}]
    one = engine.generate("hi", max_tokens=3)
    many = engine.generate(["hi", byte_ids("hi"), chat], max_tokens=3)
    assert [done.token_ids for done in many[:2]] == [one.token_ids] * 2
    assert many[2].token_ids == engine.generate(chat, max_tokens=3).token_ids
    assert [done.request_id for done in many] == ["req-2", "req-3", "req-4"]
    assert engine.generate(["hi"], max_tokens=3)[0].token_ids == one.token_ids


def test_a_result_says_what_it_took(engine):
    done = engine.generate("hello", mixture="mix", max_tokens=6, ignore_eos=True)
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert 0 < usage.prompt_time_s < usage.total_time_s
    assert usage.total_time_s == pytest.approx(usage.prompt_time_s + usage.completion_time_s)
    assert usage.avg_prompt_tok_per_sec == pytest.approx(5 / usage.prompt_time_s)
    assert usage.avg_compl_tok_per_sec == pytest.approx(5 / usage.completion_time_s)
    data = done.to_dict()
    assert data["usage"]["completion_tokens"] == 6 and data["finish_reason"] == "length" and data["error"] is None
    assert str(done) == done.text


def test_log_probabilities_are_those_of_the_chosen_tokens(engine):
    probe = Probe(engine)
    done = engine.generate("hello", max_tokens=5, temperature=1.5, ignore_eos=True)
    rows = torch.log_softmax(probe.decoded(done.request_id, 4, 5), -1)
    assert list(done.logprobs) == pytest.approx(
        [row[token].item() for row, token in zip(rows, done.token_ids, strict=True)]
    )


def test_the_end_token_ends_and_is_not_text(engine):
    Probe(engine, forced={"mine": [*byte_ids("ab"), 1, *byte_ids("cd")]})
    request = engine.enqueue("x", request_id="mine", max_tokens=5)
    finish(engine, request)
    assert (request.finish_reason, request.output.text) == ("stop", "ab")
    assert request.generated == [*byte_ids("ab"), 1]
    request = engine.enqueue("x", request_id="mine", max_tokens=5, ignore_eos=True)
    finish(engine, request)
    assert (request.finish_reason, request.output.text) == ("length", "abcd")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_a_mixture_is_near_float32_and_its_scalings_are_float32(shelf, engine, dtype):
    half = engine_on(shelf, dtype=dtype)
    traces = []
    for each in (engine, half):
        Probe(each, forced={"mine": byte_ids(" world")})
        with each.record() as recorder:
            request = each.enqueue("hello", request_id="mine", mixture="mix", max_tokens=6, ignore_eos=True)
            finish(each, request)
        traces.append(recorder.trace())
    exact, rough = (trace.values[:-1] for trace in traces)
    assert abs(rough - exact).max() < 0.1 and abs(rough.sum(-1) - 1).max() < 1e-6
    assert traces[1].metadata["dtype"] == dtype


# streams and stop strings


def stream(engine: Engine, text: str, **options) -> tuple[list[str], object]:
    """Make the engine say `text`, byte by byte, and return the pieces and the completion."""
    ids = byte_ids(text) if isinstance(text, str) else text
    Probe(engine, forced={"mine": ids})
    pieces = engine.stream("x", request_id="mine", max_tokens=len(ids), **options)
    shown = []
    while True:
        try:
            shown.append(next(pieces))
        except StopIteration as end:
            return shown, end.value


@pytest.mark.parametrize("who", [{}, {"adapter": "a"}, {"mixture": "mix"}])
def test_pieces_of_a_stream_are_the_text(engine, who):
    shown, done = stream(engine, "aé€😀!", **who)
    assert shown == ["a", "é", "€", "😀", "!"]
    assert done.text == "aé€😀!" and done.finish_reason == "length"
    assert engine.generate("x", max_tokens=3, **who).text is not None


def test_a_character_cut_off_by_max_tokens_shows_at_the_end(engine):
    shown, done = stream(engine, byte_ids("a€")[:3])
    assert shown == ["a", "\ufffd"] and done.text == "a\ufffd"


def test_a_stop_string_across_tokens_is_held_back_and_cut(engine):
    shown, done = stream(engine, "one STOP two", stop=["STOP"])
    assert "".join(shown) == done.text == "one " and done.finish_reason == "stop"
    assert "S" not in "".join(shown)
    assert list(done.token_ids) == byte_ids("one STOP"), "no token is generated after the stop string"
    shown, done = stream(engine, "one STAY two", stop=["STOP", "EXIT"])
    assert "".join(shown) == done.text == "one STAY two" and done.finish_reason == "length"
    assert "STA" in shown and "S" not in shown, "held back until it was certain"


def test_a_stop_string_inside_a_character_of_several_tokens(engine):
    shown, done = stream(engine, "ab€cd", stop="€")
    assert "".join(shown) == done.text == "ab" and list(done.token_ids) == byte_ids("ab€")


def test_what_is_held_back_when_the_tokens_end_is_text(engine):
    shown, done = stream(engine, "one ST", stop=["STOP"])
    assert "".join(shown) == done.text == "one ST" and done.finish_reason == "length"


def test_leaving_a_stream_early_cancels_and_frees(engine):
    other = engine.enqueue("other", max_tokens=4, ignore_eos=True, mixture="mix")
    for _ in engine.stream("hello", request_id="left", max_tokens=50, ignore_eos=True, mixture="mix"):
        break
    assert [request.id for request in engine.scheduler.requests()] == [other.id]
    finish(engine, other)
    assert_idle(engine)


def test_a_stream_refuses_at_once_what_cannot_run(engine):
    with pytest.raises(UserError, match="no adapter 'nobody' is loaded"):
        next(iter(engine.stream("x", adapter="nobody")))
    assert_idle(engine)


# recording


def test_a_trace_has_every_token_once_with_what_it_used(engine):
    with engine.record("scalings") as recorder:
        done = engine.generate("hello", mixture="mix", tgt_non_granular_index=1, max_tokens=5, ignore_eos=True)
    trace = recorder.trace()
    assert trace.text == "hello" + done.text and trace.token_ids.tolist() == [*byte_ids("hello"), *done.token_ids]
    assert trace.adapters == ("a", "b") and list(trace.sites) == SPEC.sites(MODEL)
    assert trace.source.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, -1]
    assert int(trace.computed.sum()) == done.scalings_computed and int(trace.reused.sum()) == done.scalings_reused
    assert (trace.values[6:9] == trace.values[5]).all() and torch.from_numpy(trace.values[-1]).isnan().all()
    assert (trace.time_s[:5] == 0).all() and (trace.time_s[5:] > 0).all()
    assert trace.metadata["base"] == "tiny" and trace.metadata["dtype"] == "float32"
    later = engine.generate("hello", mixture="mix", max_tokens=2)
    with pytest.raises(UserError, match=f"no trace of request {later.request_id!r}"):
        recorder.trace(later.request_id)  # it was closed


def test_what_was_not_recorded_is_said(engine):
    with pytest.raises(UserError, match="cannot record 'scaling'; did you mean 'scalings'"):
        engine.record("scaling")
    with engine.record("scalings") as recorder:
        base, adapter = engine.generate(["hello"] * 2, adapter=[None, "a"], max_tokens=2)
        mixed = engine.generate(["hello"] * 2, mixture="mix", max_tokens=2)
    with pytest.raises(UserError, match=f"{base.request_id!r} ran the base model alone: it has no scalings"):
        recorder.trace(base.request_id)
    alone = recorder.trace(adapter.request_id)
    assert alone.adapters == ("a",) and (alone.values[:-1] == 1).all() and alone.metadata["adapter"] == "a"
    with pytest.raises(UserError, match="3 traces were recorded .*; name one"):
        recorder.trace()
    assert set(recorder.traces) == {done.request_id for done in [adapter, *mixed]}
