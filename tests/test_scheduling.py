"""Requests beside each other: who runs when, who fails alone, what stays: `pytest tests/test_scheduling.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from byte_engine import (  # noqa: F401 - fixtures are named by their users' arguments
    MODEL,
    SPEC,
    TOLERANCE,
    VOCAB,
    assert_idle,
    engine,
    engine_on,
    finish,
    shelf,
)
from models import (
    Adapter,
    MixtureSpec,
    Probe,
    by_definition,
    byte_ids,
    save_base,
    tiny_model,
)

from workbench import Engine, UserError, exact, non_granular
from workbench.engine.batch import ADAPTED, SCALING

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")


# cancelling, and failing alone


def test_a_cancelled_request_keeps_what_it_has_and_frees_the_rest(engine):
    recorder = engine.record("scalings")
    request = engine.enqueue("hello", mixture="mix", max_tokens=50, ignore_eos=True, request_id="mine")
    queued = engine.enqueue("never ran", mixture="mix", request_id="queued", max_tokens=5)
    engine.cancel(queued)
    while len(request.generated) < 3:
        engine.step()
    engine.cancel(request)
    engine.cancel(request)
    assert (request.finish_reason, queued.finish_reason) == ("cancelled", "cancelled")
    trace = recorder.trace("mine")
    assert trace.num_tokens == 8 and trace.metadata["finish_reason"] == "cancelled"
    assert recorder.trace("queued").prompt_tokens == 9 and not recorder.trace("queued").computed.any()
    assert_idle(engine)


def test_a_prompt_that_cannot_run_fails_alone_in_a_list(engine):
    alone = engine.generate("fine", max_tokens=4)
    first, second, third, fourth = engine.generate(["", "fine", [5, 999], "x" * 200], max_tokens=4)
    assert second.token_ids == alone.token_ids and second.error is None
    assert "the prompt is empty" in first.error and "not 999" in third.error
    assert "204 in all, but base 'tiny' has room for 128" in fourth.error
    for failed in (first, third, fourth):
        assert failed.finish_reason == "error" and failed.token_ids == () and str(failed).startswith("error: ")
    one, other = engine.generate(["fine", "fine"], adapter=["a", "b"], max_tokens=4)
    assert one.error is None and "no adapter 'b' is loaded" in other.error


def test_what_is_wrong_with_every_prompt_alike_is_raised(engine):
    with pytest.raises(UserError, match="unknown setting 'max_token'; did you mean 'max_tokens'"):
        engine.generate(["fine", "too"], max_token=4)
    with pytest.raises(UserError, match="adapter has 1 entries for 2 prompts"):
        engine.generate(["fine", "too"], adapter=["a"])


@pytest.mark.parametrize("who", [{}, {"adapter": "a"}, {"mixture": "mix"}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_request_alone(shelf, tmp_path, who, bad):
    """A base whose embedding of one token is broken; only the request that has it fails."""
    model = tiny_model("llama", vocab_size=VOCAB)
    model.get_input_embeddings().weight[byte_ids("X")[0]] = bad
    broken = Engine(save_base(model, tmp_path / "tiny"))
    broken.load_adapter(shelf / "mix" / "a")
    broken.load_mixture(shelf / "mix", "mix")
    alone = broken.generate(byte_ids("fine"), max_tokens=4, ignore_eos=True, **who)
    assert alone.error is None
    failed, fine = broken.generate([byte_ids("aXb"), byte_ids("fine")], max_tokens=4, ignore_eos=True, **who)
    assert failed.finish_reason == "error" and "NaN or infinite" in failed.error and failed.token_ids == ()
    assert fine.error is None and fine.token_ids == alone.token_ids
    assert_idle(broken)


def test_a_draft_that_breaks_does_not_fail_the_request(shelf, tmp_path):
    """The base model drafts a token whose embedding is broken; the adapted model, forced here, never says it."""
    prompt = byte_ids("hi")
    model = tiny_model("llama", vocab_size=VOCAB)
    drafted = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    model.get_input_embeddings().weight[drafted] = float("nan")
    results = []
    for drafting in (True, False):
        engine = Engine(save_base(model, tmp_path / "tiny"), drafting=drafting)
        engine.load_mixture(shelf / "mix", "mix")
        probe = Probe(engine, forced={"mine": byte_ids("abcd")})
        request = engine.enqueue(prompt, request_id="mine", mixture="mix", max_tokens=4, ignore_eos=True)
        finish(engine, request)
        assert request.finish_reason == "length"
        results.append(probe.decoded("mine", 1, 4))
    assert (results[0] - results[1]).abs().max() < TOLERANCE


class Interrupted(KeyboardInterrupt):
    pass


def interrupt_once(monkeypatch, where: str, engine: Engine) -> None:
    """Make the next step stop at `where`."""
    if where == "layer":
        handles = []

        def hook(*_):
            handles.pop().remove()
            raise Interrupted

        handles.append(engine.model.model.model.layers[1].register_forward_pre_hook(hook))
        return
    owner = engine.model if where in ("hidden", "logits") else engine.scheduler if where == "commit" else engine

    def stop(*_):
        monkeypatch.undo()
        raise Interrupted

    monkeypatch.setattr(owner, where, stop)


PLACES = ["layer", "hidden", "classifier", "logits", "sampler", "commit"]


@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_in_a_step_leaves_every_request_as_it_was(shelf, monkeypatch, where):
    settings = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}
    engine = engine_on(shelf, **settings)
    jobs = [("hello", {}), ("world, how are you", {"adapter": "a"}), ("again", {"mixture": "mix"})]
    whole = [engine.generate(text, max_tokens=5, ignore_eos=True, **who) for text, who in jobs]
    requests = [engine.enqueue(text, max_tokens=5, ignore_eos=True, **who) for text, who in jobs]
    for _ in range(4):
        interrupt_once(monkeypatch, where, engine)
        with pytest.raises(Interrupted):
            engine.step()
        assert engine.model.routing.rows is None
        engine.step()
    finish(engine, *requests)
    for request, done in zip(requests, whole, strict=True):
        assert tuple(request.generated) == done.token_ids and tuple(request.logprobs) == done.logprobs
    assert_idle(engine)


@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_of_generate_leaves_the_engine_usable(engine, monkeypatch, where):
    wanted = engine.generate("hello", mixture="mix", max_tokens=4)
    waiting = engine.enqueue("mine", max_tokens=3, ignore_eos=True)
    interrupt_once(monkeypatch, where, engine)
    with pytest.raises(Interrupted):
        engine.generate(["hello", "world"], mixture="mix", max_tokens=4)
    assert list(engine.scheduler.requests()) == [waiting]
    assert engine.generate("hello", mixture="mix", max_tokens=4).token_ids == wanted.token_ids
    finish(engine, waiting)
    engine.unload("mix")
    assert_idle(engine)


# scheduling


@pytest.mark.parametrize("options", [{"max_rows_per_step": n} for n in (1, 2, 3, 7)] + [{"max_requests": 2}], ids=str)
def test_every_request_ends_with_the_same_result_under_any_budget(shelf, engine, options):
    jobs = [("hello", {}), ("a longer prompt than the others", {"mixture": "mix"}), ("x", {"mixture": "mix"}),
            ("short", {"adapter": "a"}), ("k", {"mixture": "mix", "tgt_non_granular_index": 1})]  # fmt: skip
    tight = engine_on(shelf, **options)
    probe = Probe(tight)
    requests = [tight.enqueue(text, max_tokens=6, ignore_eos=True, **who) for text, who in jobs]
    finish(tight, *requests)
    for (text, who), request in zip(jobs, requests, strict=True):
        assert tuple(request.generated) == engine.generate(text, max_tokens=6, ignore_eos=True, **who).token_ids
    for batch in probe.batches:
        assert sum(rows for *_, rows in batch) <= options.get("max_rows_per_step", 512)
        assert len({owner for owner, *_ in batch}) <= options.get("max_requests", 64)
        assert batch, "a step without rows"


@pytest.mark.parametrize("settings", [{}, {"layerwise_scalings": True}, {"scaling_pass_value": 0.5}], ids=str)
def test_equal_requests_of_a_mixture_with_one_site_run_together(shelf, tmp_path, settings):
    """Their rows have equal weights, which are one constant row only where a row is all there is."""
    q = ("layers.1.self_attn.q_proj",)
    spec = MixtureSpec({"a": Adapter(q, seed=1), "b": Adapter(q, seed=2)}, settings)
    engine = engine_on(shelf)
    engine.load_mixture(spec.write(tmp_path / "one", MODEL), "one")
    alone = engine.generate("hello", mixture="one", max_tokens=4, ignore_eos=True)
    for done in engine.generate(["hello"] * 3, mixture="one", max_tokens=4, ignore_eos=True):
        assert done.token_ids == alone.token_ids
        assert done.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_decoding_goes_on_while_a_long_prompt_is_read(shelf):
    engine = engine_on(shelf, max_rows_per_step=8)
    short = engine.enqueue("ab", max_tokens=10, ignore_eos=True)
    engine.step()
    engine.enqueue("x" * 100, max_tokens=1, request_id="long")
    for count in range(2, 11):
        engine.step()
        assert len(short.generated) == count


def test_requests_take_turns_when_the_budget_does_not_reach_everyone(shelf):
    engine = engine_on(shelf)
    requests = [engine.enqueue("x", max_tokens=12, ignore_eos=True) for _ in range(5)]
    engine.step()
    engine.scheduler.max_rows = 2  # all five are decoding now
    while all(request.finish_reason is None for request in requests):
        engine.step()
    assert min(len(request.generated) for request in requests) >= 8
    finish(engine, *requests)


def test_a_request_cancelled_while_its_rows_run_gets_no_token_of_that_step(engine):
    """Whoever reads a stream may cancel another request from there."""
    victim = None
    first = engine.enqueue("x", max_tokens=6, ignore_eos=True, on_text=lambda _: engine.cancel(victim))
    victim = engine.enqueue("y", max_tokens=6, ignore_eos=True, mixture="mix", request_id="victim")
    with engine.record() as recorder:
        while first.output.text == "" and first.finish_reason is None:
            engine.step()
    assert victim.finish_reason == "cancelled"
    said = len(victim.generated)
    finish(engine, first)
    assert len(victim.generated) == said and recorder.trace("victim").num_tokens == 1 + said
    assert sum(stream.num_blocks for request in (first, victim) for stream in request.streams.values()) == 0


def test_the_scaling_stream_is_freed_when_its_scalings_are_frozen(engine):
    request = engine.enqueue("hello", mixture="mix", tgt_non_granular_index=2, max_tokens=8, ignore_eos=True)
    while len(request.generated) < 1:
        engine.step()
    assert request.streams[SCALING].num_blocks > 0
    while len(request.generated) < 4:
        engine.step()
    assert SCALING not in request.streams and request.streams[ADAPTED].num_blocks > 0
    finish(engine, request)


@dataclass(frozen=True)
class every_other:
    """A policy of this test's own: generated tokens share scalings in pairs."""

    name: str = "every_other"

    def source(self, position: int, prompt_tokens: int) -> int:
        return position - max(0, position - prompt_tokens) % 2

    def last_own(self, prompt_tokens: int) -> None:
        return None


def test_a_policy_of_ones_own_needs_no_change_in_the_engine(engine):
    probe, recorder = Probe(engine), engine.record("scalings")
    done = engine.generate("hello", mixture="mix", policy=every_other(), max_tokens=8, ignore_eos=True)
    ids = [*byte_ids("hello"), *done.token_ids[:-1]]
    sources = [every_other().source(position, 5) for position in range(len(ids))]
    own = by_definition(MODEL, SPEC, ids)[1]
    logits, _ = by_definition(MODEL, SPEC, ids, forced=own[sources])
    assert (probe.decoded(done.request_id, 4, 8) - logits[4:]).abs().max() < TOLERANCE
    trace = recorder.trace(done.request_id)
    assert trace.source[:-1].tolist() == sources and trace.source[-1] == -1
    assert done.scalings_reused == 3 and trace.metadata["policy"] == "every_other"


def test_policies_by_name(engine):
    plain = engine.generate("hello", mixture="mix", max_tokens=6, ignore_eos=True)
    same = engine.generate("hello", mixture="mix", policy=exact(), max_tokens=6, ignore_eos=True)
    k, policy = (engine.generate("hello", mixture="mix", max_tokens=6, ignore_eos=True, **how)
                 for how in ({"tgt_non_granular_index": 2}, {"policy": non_granular(2)}))  # fmt: skip
    assert plain.logprobs == same.logprobs and k.logprobs == policy.logprobs != plain.logprobs
    listed = engine.generate(
        ["hello"] * 2, mixture="mix", max_tokens=6, ignore_eos=True, tgt_non_granular_index=[None, 2]
    )
    assert [done.scalings_reused for done in listed] == [0, k.scalings_reused] == [0, 3]
