"""Edits of scalings: what each makes of them, checked against arithmetic.

Run: pytest tests/test_edit.py
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench import UserError
from workbench.edits import Faders, Tap, ablate, force, freeze, replay, scale, swap

KEY = "classifier:scalings"
NAMES, SITES = ("python", "german", "law"), ("l.0.q_proj", "l.0.v_proj", "l.1.q_proj", "l.1.v_proj")


def tap_of(num_rows: int, first: int = 0, prompt_tokens: int = 4) -> Tap:
    positions = torch.arange(first, first + num_rows)
    return Tap(KEY, "r", NAMES, SITES, positions, prompt_tokens, lambda p: torch.full((4, 3), float(p)))


def softmaxed(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, 4, 3, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def test_force_gives_the_weights_and_the_rest():
    made = force({"german": 0.75})(softmaxed(3), tap_of(3))
    assert torch.equal(made, torch.tensor([0.0, 0.75, 0.0]).expand(3, 4, 3))
    old = softmaxed(3)
    kept = force({"german": 2.0}, rest=None)(old, tap_of(3))
    assert torch.equal(kept[..., 1], torch.full((3, 4), 2.0)) and torch.equal(kept[..., [0, 2]], old[..., [0, 2]])


def test_ablate_takes_an_adapter_out_and_may_share_its_weight():
    old = softmaxed(5)
    made = ablate("law")(old, tap_of(5))
    assert torch.equal(made[..., :2], old[..., :2]) and not made[..., 2].any()
    shared = ablate("law", renormalise=True)(old, tap_of(5))
    torch.testing.assert_close(shared.sum(-1), old.sum(-1))
    torch.testing.assert_close(shared[..., 0] / shared[..., 1], old[..., 0] / old[..., 1])
    assert torch.equal(ablate(*NAMES, renormalise=True)(old, tap_of(5)), torch.zeros(5, 4, 3))


def test_scale_and_swap():
    old = softmaxed(2)
    made = scale("python", -0.5)(old, tap_of(2))
    assert torch.equal(made[..., 0], old[..., 0] * -0.5) and torch.equal(made[..., 1:], old[..., 1:])
    made = swap("python", "law")(old, tap_of(2))
    assert torch.equal(made, old.flip(-1)) and torch.equal(swap("python", "law")(made, tap_of(2)), old)


def test_freeze_keeps_one_positions_scalings_for_all_later_ones():
    old = softmaxed(6)
    made = freeze(3)(old, tap_of(6, first=1))
    assert torch.equal(made[:3], old[:3]) and torch.equal(made[3:], torch.full((3, 4, 3), 3.0))
    assert torch.equal(freeze()(old, tap_of(6))[4:], torch.full((2, 4, 3), 3.0))
    assert freeze(9)(old, tap_of(6)) is None


@given(
    st.integers(0, 5),
    st.integers(1, 8),
    st.sampled_from(["prompt", "generated", slice(2, 5), slice(1, None, 3), (3, 6)]),
)
def test_positions_and_sites_choose_what_is_changed_and_nothing_else(first, num_rows, positions):
    old = softmaxed(num_rows)
    made = force({"law": 1.0}, sites="*.q_proj", positions=positions)(old, tap_of(num_rows, first))
    at = range(first, first + num_rows)
    named = {"prompt": range(4), "generated": range(4, 100)}
    wanted = named[positions] if isinstance(positions, str) else positions
    chosen = [p for p in at if p in (range(100)[wanted] if isinstance(wanted, slice) else wanted)]
    if not chosen:
        assert made is None
        return
    for row, position in enumerate(at):
        for site in range(4):
            is_changed = position in chosen and site in (0, 2)
            expected = torch.tensor([0.0, 0.0, 1.0]) if is_changed else old[row, site]
            assert torch.equal(made[row, site], expected)


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(-6, 6), min_size=1))
def test_a_biased_fader_is_a_bias_of_the_logits(biases):
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1))
    faders = Faders()
    for name, value in biases.items():
        faders.set(name, value)
    shift = torch.tensor([biases.get(name, 0.0) for name in NAMES])
    made = faders(logits.softmax(-1), tap_of(3))
    if any(biases.values()):
        torch.testing.assert_close(made, (logits + shift).softmax(-1))
    else:
        assert made is None


def test_faders_force_clear_and_extremes():
    faders, old = Faders(), softmaxed(2)
    assert faders(old, tap_of(2)) is None
    faders.set("german", 0.25, "force")
    faders.set("law", 1000.0)
    made = faders(old, tap_of(2))
    assert torch.isfinite(made).all() and torch.equal(made[..., 1], torch.full((2, 4), 0.25))
    torch.testing.assert_close(made[..., 2], torch.ones(2, 4))
    faders.clear("law")
    assert faders.settings == {"german": ("force", 0.25)}
    faders.clear()
    assert faders(old, tap_of(2)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: force({}), lambda: force({"law": math.nan}), lambda: ablate(), lambda: scale("law", "2"),
        lambda: swap("law", "law"), lambda: freeze(-1), lambda: replay("trace"),
        lambda: force({"law": 1}, positions=-3), lambda: force({"law": 1}, positions=slice(-3, None)),
        lambda: force({"law": 1}, positions="end"), lambda: force({"law": 1}, positions=[]),
        lambda: Faders().set("law", 1, "push"), lambda: Faders().set("law", math.inf),
    ],
)  # fmt: skip
def test_an_edit_that_makes_no_sense_is_refused_where_it_is_made(make):
    with pytest.raises(UserError):
        make()
