"""Edits on an engine: whom they reach, what they leave alone, what is kept when rows run again, what does not fit.

Run: pytest tests/test_edit_engine.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from jobs import engine_on, write_shelf
from models import random_ids

from workbench import UserError
from workbench.edits import Faders, ablate, force, replay, scale
from workbench.engine.batch import ADAPTED

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
BITWISE = {"row_padding": 32, "max_rows_per_step": 32, "attention": "reference"}
KEY = "classifier:scalings"
PROMPT = random_ids(20, 5)
MIX = {"mixture": "mix", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"), "llama")


@pytest.fixture(scope="module")
def engine(shelf):
    return engine_on(shelf, **BITWISE)


def recorded(engine, edit=None, prompt=PROMPT, requests=None, **options):
    """Generate with an edit; return the completion and its trace."""
    with engine.record("scalings") as recorder:
        if edit is None:
            done = engine.generate(prompt, **{**MIX, **options})
        else:
            with engine.edit(edit if isinstance(edit, dict) else {KEY: edit}, requests):
                done = engine.generate(prompt, **{**MIX, **options})
    assert done.error is None, done.error
    return done, recorder.trace(done.request_id)


def test_forcing_one_adapter_is_that_adapter_alone(engine):
    """Its scalings are 1 everywhere, so the mixture is the plain adapter (times the mixture's global weight of 1)."""
    alone = engine.generate(PROMPT, adapter="python", max_tokens=6, ignore_eos=True)
    forced, trace = recorded(engine, force({"python": 1.0}))
    assert forced.token_ids == alone.token_ids
    np.testing.assert_allclose(forced.logprobs, alone.logprobs, atol=1e-5)
    assert trace.share()["python"] == 1.0 and trace.metadata["edits"] == ["force python=1"]
    assert forced.edits == ("force python=1",) and alone.edits == ()


def test_ablating_everything_is_the_base_model(engine):
    base = engine.generate(PROMPT, max_tokens=6, ignore_eos=True)
    without, _ = recorded(engine, ablate("python", "german", "law"))
    assert without.token_ids == base.token_ids
    np.testing.assert_allclose(without.logprobs, base.logprobs, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"tgt_non_granular_index": 1}, {"max_tokens": 12}])
def test_a_function_sees_every_row_once_with_what_it_would_use(engine, options):
    seen = {}

    def look(scalings, tap):
        for row, position in enumerate(tap.positions.tolist()):
            assert position not in seen
            seen[position] = scalings[row].clone()
            assert torch.equal(tap.scalings_at(position), scalings[row])

    done, plain = recorded(engine, **options)
    with engine.record() as recorder, pytest.raises(UserError, match="changed no row"), engine.edit({KEY: look}):
        again = engine.generate(PROMPT, **{**MIX, **options})
    trace = recorder.trace(again.request_id)
    assert again.token_ids == done.token_ids and again.edits == () and "edits" not in trace.metadata
    rows = int((trace.source >= 0).sum())
    assert sorted(seen) == list(range(rows))
    np.testing.assert_array_equal(np.stack([seen[p] for p in range(rows)]), plain.values[:rows])


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("rows", [32, 7])
def test_edited_scalings_are_what_the_trace_shows(shelf, drafting, rows):
    engine = engine_on(shelf, drafting=drafting, **{**BITWISE, "max_rows_per_step": rows})
    _, plain = recorded(engine)
    done, trace = recorded(engine, {"*.q_proj:scalings": scale("german", 3.0, positions=slice(8, None))})
    changed = [i for i, site in enumerate(trace.sites) if site.endswith("q_proj")]
    same = trace.token_ids == plain.token_ids
    upto = int(np.argmin(same)) if not same.all() else len(PROMPT)
    expected = plain.values[:upto].copy()
    expected[8:upto, changed, 1] *= np.float32(3)
    np.testing.assert_array_equal(trace.values[:8], expected[:8])
    # later scalings come from the scaling stream, which no edit reaches
    np.testing.assert_allclose(trace.values[:upto], expected, rtol=1e-6)
    assert trace.metadata["edits"] == list(done.edits) == ["scale german × 3 of tokens 8:"]


def test_a_replayed_trace_reproduces_its_tokens(engine):
    done, trace = recorded(engine, tgt_non_granular_index=0, max_tokens=10)
    exact, _ = recorded(engine, max_tokens=10)
    again, replayed = recorded(engine, replay(trace), max_tokens=10)
    assert again.token_ids == done.token_ids and again.logprobs == done.logprobs
    np.testing.assert_array_equal(replayed.values, trace.values)
    assert exact.logprobs != done.logprobs, "the settings do not differ: the test shows nothing"


def test_replay_aligns_adapters_and_sites_by_name_and_may_extend(engine):
    _, trace = recorded(engine, max_tokens=3)
    shuffled = trace.select(adapters=list(trace.adapters[::-1]))
    done, replayed = recorded(engine, replay(shuffled, extend="last"), max_tokens=9)
    rows = trace.num_tokens - 1
    np.testing.assert_array_equal(replayed.values[:rows], trace.values[:rows])
    assert (replayed.values[rows:-1] == trace.values[rows - 1]).all()
    with engine.edit({KEY: replay(trace)}):
        short = engine.generate(PROMPT, **{**MIX, "max_tokens": 9})
    assert "no scalings of position" in short.error and "extend='last'" in short.error
    done = engine.generate(PROMPT, **MIX)
    assert done.error is None and done.edits == ()


def test_only_the_named_requests_are_edited_in_a_mixed_batch(engine):
    options = [{"mixture": "mix"}, {"mixture": "mix"}, {"adapter": "german"}, {}]
    ids = ("one", "two", "three", "four")

    def run():
        requests = [
            engine.enqueue(PROMPT, max_tokens=5, ignore_eos=True, request_id=name, **each)
            for name, each in zip(ids, options, strict=True)
        ]
        while any(request.finish_reason is None for request in requests):
            engine.step()
        return {request.id: (tuple(request.generated), tuple(request.logprobs)) for request in requests}

    plain = run()
    with engine.edit({KEY: force({"law": 1.0})}, requests="two") as edits:
        edited = run()
    assert edits[KEY].fired == len(PROMPT) + 4
    assert edited["two"] != plain["two"]
    assert {name: edited[name] for name in ids if name != "two"} == {name: plain[name] for name in ids if name != "two"}


def test_edited_blocks_are_found_by_nobody_and_edits_find_none(shelf):
    """A prompt that ran edited, and the same one plain: neither sees the other's adapted KV."""
    engine = engine_on(shelf, **BITWISE)
    fresh = engine_on(shelf, prefix_cache=False, **BITWISE)
    long = random_ids(40, 9)
    expected, _ = recorded(fresh, prompt=long)
    edited, _ = recorded(fresh, force({"law": 1.0}), prompt=long)
    for edit, wanted in ((force({"law": 1.0}), edited), (None, expected)) * 2:
        done, _ = recorded(engine, edit, prompt=long)
        assert (done.token_ids, done.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert done.cached_tokens == 0 or edit is None
    assert done.cached_tokens == 32


def test_what_ran_before_an_edit_stays_in_the_cache(shelf):
    engine = engine_on(shelf, **BITWISE)
    late = force({"law": 1.0}, positions=slice(16, None))
    recorded(engine, late, prompt=random_ids(40, 9))
    plain, _ = recorded(engine, prompt=random_ids(40, 9))
    assert plain.cached_tokens == 16


@pytest.mark.parametrize("steps", [2, 4, 7])
def test_a_preempted_request_replays_its_edits(shelf, steps):
    engine = engine_on(shelf, prefix_cache=False, **BITWISE)
    calls = []

    def restless(scalings, tap):
        """Another answer each time it is asked about a position."""
        calls.extend(tap.positions.tolist())
        return scalings * torch.tensor([1 + 0.5 * calls.count(p) for p in tap.positions.tolist()])[:, None, None]

    def run(preempt_after=None):
        calls.clear()
        with engine.edit({KEY: restless}):
            request = engine.enqueue(PROMPT, **{**MIX, "max_tokens": 8})
            count = 0
            while request.finish_reason is None:
                engine.step()
                count += 1
                if count == preempt_after:
                    engine.scheduler.preempt(request)
        return tuple(request.generated), tuple(request.logprobs), list(calls)

    assert run() == run(steps)


def test_faders_move_a_running_request(engine):
    faders, moves = Faders(), []

    def move(request):
        if len(request.choices) == 3 and not moves:
            moves.append(len(request.sources))
            faders.set("law", 1.0, "force")

    with engine.record() as recorder, engine.edit(faders) as edits:
        request = engine.enqueue(PROMPT, **{**MIX, "max_tokens": 9})
        request.on_progress = move
        while request.finish_reason is None:
            engine.step()
    law = recorder.trace(request.id).values[:-1, :, 2]
    assert (law[moves[0] :] == 1).all() and not (law[: moves[0]] == 1).any()
    assert edits[KEY].fired == len(law) - moves[0] and request.edits == ["faders"]


def test_edits_end_with_their_context_even_for_what_runs_on(engine):
    with engine.edit(force({"law": 1.0})):
        request = engine.enqueue(PROMPT, **{**MIX, "max_tokens": 9})
        for _ in range(4):
            engine.step()
        rows = len(request.sources)
    while request.finish_reason is None:
        engine.step()
    used = request.used(0, len(request.sources))[..., 2]
    assert (used[:rows] == 1).all() and not (used[rows:] == 1).any() and request.edits == ["force law=1"]


def test_nested_edits_apply_in_the_order_they_were_opened(engine):
    with engine.record() as recorder, engine.edit(force({"law": 1.0})), engine.edit(scale("law", 0.5)):
        done = engine.generate(PROMPT, **MIX)
    assert recorder.trace(done.request_id).share()["law"] == 0.5
    assert done.edits == ("force law=1", "scale law × 0.5")


def test_scored_text_is_edited_too(engine):
    forced = None
    with engine.edit(force({"german": 1.0})):
        forced = engine.score(PROMPT, random_ids(5, 1), mixture="mix")
    alone = engine.score(PROMPT, random_ids(5, 1), adapter="german")
    np.testing.assert_allclose(forced.logprobs, alone.logprobs, atol=1e-5)


def test_taps_say_what_can_be_edited(engine):
    taps = engine.taps
    mix = taps[taps.mixture == "mix"]
    assert mix.name.iloc[0] == KEY and len(mix) == 1 + len(engine.mixtures["mix"].sites)
    for key in mix.name[:3]:
        with engine.edit({key: scale("law", 2.0)}):
            engine.generate(PROMPT, **MIX)


# what does not fit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({}, "takes a dict"),
        ({"classifier:scaling": ablate("law")}, "did you mean 'scalings'"),
        ({"scalings": ablate("law")}, "site pattern"),
        ({"*.q_projj:scalings": ablate("law")}, "did you mean '\\*.q_proj'"),
        ({KEY: ablate("lawn")}, "did you mean 'law'"),
        ({KEY: scale("law", 2, sites="*.qproj")}, "did you mean"),
        ({KEY: "ablate"}, "an edit"),
        ({KEY: []}, "empty list"),
        (3, "takes a dict"),
    ],
)
def test_what_fits_no_mixture_is_refused_before_anything_runs(engine, edit, said):
    with pytest.raises(UserError, match=said):
        engine.edit(edit)
    assert not engine.editing._open


def test_a_faulty_edit_fails_its_request_alone(engine):
    def broken(scalings, tap):
        raise RuntimeError("no")

    plain = engine.generate(PROMPT, **MIX)
    for edit, said in (
        (broken, "RuntimeError: no"), (lambda s, t: s[:, :1], r"expected \[row, site, adapter\]"),
        (lambda s, t: s * math.nan, "NaN"), (lambda s, t: 1.0, "expected a tensor"),
    ):  # fmt: skip
        opened = engine.edit({KEY: edit}, requests="bad")
        requests = [engine.enqueue(PROMPT, request_id=name, **MIX) for name in ("bad", "good")]
        while any(request.finish_reason is None for request in requests):
            engine.step()
        opened.close()
        assert requests[0].finish_reason == "error"
        with pytest.raises(AssertionError if said is None else UserError, match=said):
            raise UserError(requests[0].error)
        assert tuple(requests[1].generated) == plain.token_ids
    assert engine.memory.pool.num_referenced == 0


def test_an_edit_that_never_fired_says_so_unless_something_else_failed(engine):
    with pytest.raises(UserError, match="changed no row of requests 'req-x'"), engine.edit(ablate("law"), "req-x"):
        engine.generate(PROMPT, **MIX)
    with pytest.raises(UserError, match="changed no row of any request"), engine.edit(ablate("law")):
        engine.generate(PROMPT, max_tokens=3)
    with pytest.raises(ZeroDivisionError), engine.edit(ablate("law")):
        raise ZeroDivisionError
    assert not engine.editing._open


def test_a_trace_of_other_adapters_or_sites_is_not_replayed(engine):
    _, trace = recorded(engine)
    with pytest.raises(UserError, match="no scalings of"):
        engine.edit({KEY: replay(trace.select(sites="*.q_proj"))})
    with engine.edit({"*.q_proj:scalings": replay(trace.select(sites="*.q_proj"))}):
        assert engine.generate(PROMPT, **MIX).error is None
    with pytest.raises(UserError, match="needs the same ones"):
        engine.edit({KEY: replay(trace.select(adapters=["law"]))})


def test_the_stream_of_an_edited_request_is_private(engine):
    with engine.edit(force({"law": 1.0})):
        request = engine.enqueue(random_ids(40, 11), **MIX)
        while len(request.choices) < 2:
            engine.step()
        assert request.streams[ADAPTED].num_published == 0
        while request.finish_reason is None:
            engine.step()
