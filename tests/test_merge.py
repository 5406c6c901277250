"""Merges equal PEFT's, LoRAX's where asked, and keep their algebra: `pytest tests/test_merge.py`."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Adapter, tiny_model
from peft import PeftModel
from peft.utils import merge_utils

from workbench.adapters.config import AdapterConfig
from workbench.adapters.merge import MergedAdapters, constant_weights, content_key, dare_mask, merge, sign_agreement
from workbench.adapters.model import LoRAModel
from workbench.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:The density 1.0 is greater than or equal to 1")
MERGES = ("ties", "dare_linear", "dare_ties")
TIES = {"merge_strategy": "ties", "density": 1}


def made(name, seed=0, rank=3, alpha=5.0, sites=("x.q", "x.v"), rslora=False, wide_in=6, wide_out=5) -> LoRAModel:
    """Return a random adapter in memory; its scale is alpha / rank, or alpha / sqrt(rank)."""
    generator = torch.Generator().manual_seed(seed)
    config = AdapterConfig(r=rank, lora_alpha=alpha, use_rslora=rslora)
    scale = config.scale_at("", rank)
    a = {site: torch.randn(rank, wide_in, generator=generator) for site in sites}
    b = {site: torch.randn(rank, wide_out, generator=generator) * scale for site in sites}
    return LoRAModel(name=name, config=config, a=a, b=b, content_hash=f"{name}{seed}")


def settings(ids, weights=(), strategy="ties", density=1.0, **more) -> MergedAdapters:
    return MergedAdapters(tuple(ids), tuple(weights), strategy, density if strategy != "linear" else None, **more)


def delta(adapter: LoRAModel, site: str = "x.q") -> torch.Tensor:
    """Return `[out, in]`, scale included."""
    return adapter.b[site].T @ adapter.a[site]


def merged_delta(adapters, weights=(), strategy="ties", density=1.0, site="x.q", **more) -> torch.Tensor:
    chosen = settings([adapter.name for adapter in adapters], weights, strategy, density, **more)
    return delta(merge(adapters, chosen, "m"), site)


def close(ours, theirs, tolerance=1e-5) -> None:
    error, size = (ours - theirs).abs().max(), theirs.abs().max()
    assert error <= tolerance * max(size, 1e-3), f"differs by {error:.1e} of {size:.1e}"


# ranks and scales alike or not; "c" leaves v_proj out, "d" has the scale alpha / sqrt(rank)
ON_DISK = {
    "a": Adapter(("q_proj", "v_proj", "down_proj"), alpha=5, seed=1),
    "b": Adapter(("q_proj", "v_proj", "down_proj"), alpha=3, seed=2),
    "c": Adapter(("q_proj", "down_proj"), alpha=7, seed=3, dtype=torch.bfloat16),
    "d": Adapter(("q_proj", "v_proj"), alpha=3, seed=4, config={"use_rslora": True}),
    "wide": Adapter(("q_proj", "v_proj"), rank=6, alpha=4, seed=5),
}
WEIGHTS = {"a": 0.7, "b": -0.4, "c": 1.3, "d": 0.9, "wide": 0.5}


@pytest.fixture(scope="module", params=["llama", "mistral"])
def peer(request, tmp_path_factory):
    """Return PEFT's model with every adapter of ON_DISK loaded, and our readings of the same files."""
    folder, model = tmp_path_factory.mktemp("adapters"), tiny_model(request.param)
    paths = {name: adapter.write(folder / name, model) for name, adapter in ON_DISK.items()}
    peft = PeftModel.from_pretrained(model, paths["a"], adapter_name="a")
    for name in list(paths)[1:]:
        peft.load_adapter(paths[name], name)
    return peft, {name: LoRAModel.read(path) for name, path in paths.items()}


def layers_of(peft: PeftModel) -> dict:
    named = {name.removeprefix("base_model.model."): layer for name, layer in peft.named_modules()}
    return {name: layer for name, layer in named.items() if hasattr(layer, "get_delta_weight")}


def by_peft(peer, ids: str, combination: str, **more) -> dict:
    """Return site -> PEFT's layer, with the merge as its adapter "m"."""
    if "m" in peer[0].peft_config:
        peer[0].delete_adapter("m")
    peer[0].add_weighted_adapter(list(ids), [WEIGHTS[name] for name in ids], "m", combination, **more)
    return {site: layer for site, layer in layers_of(peer[0]).items() if "m" in layer.lora_A}


def by_us(peer, ids: str, strategy: str, density: float, **more) -> LoRAModel:
    chosen = settings(ids, [WEIGHTS[name] for name in ids], strategy, density, **more)
    return merge([peer[1][name] for name in ids], chosen, "m")


def our_masks_in_peft(peer, ids: str, density: float, seed: int, part: str):
    """Patch PEFT's random pruning to draw our masks; it recognises a tensor by its bytes."""
    masks = {}
    for (site, layer), name in itertools.product(layers_of(peer[0]).items(), ids):
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight.data, layer.lora_B[name].weight.data
            tensors = {"delta": layer.get_delta_weight(name)} if part == "delta" else {"A": a, "B": b.T}
            for which, tensor in tensors.items():
                mask = dare_mask(tensor.shape, density, seed, site, name, which)
                key = (b if which == "B" else tensor).numpy().tobytes()
                masks[key] = mask.T if which == "B" else mask
    inner = merge_utils.random_pruning

    def pruned(tensor, density, rescale):
        mask = masks[tensor.numpy().tobytes()].to(tensor.dtype)
        with mock.patch.object(torch, "bernoulli", lambda probabilities: mask):
            return inner(tensor, density, rescale)

    return mock.patch.object(merge_utils, "random_pruning", pruned)


@pytest.mark.parametrize("ids", ["ab", "abc", "cab", "dab"])
@pytest.mark.parametrize("density", [1.0, 0.6, 0.25])
@pytest.mark.parametrize(
    "strategy, signs", [("ties", "total"), ("ties", "frequency"), ("dare_linear", "total"), ("dare_ties", "frequency")]
)
def test_merged_factors_equal_peft(peer, ids, density, strategy, signs):
    """Not compared: PEFT's scale, too large by the root of the rank after "d", whose use_rslora the result keeps."""
    ours = by_us(peer, ids, strategy, density, majority_sign_method=signs, seed=7 * strategy.startswith("dare"))
    with our_masks_in_peft(peer, ids, density, 7, "factors"):
        theirs = by_peft(peer, ids, strategy, density=density, majority_sign_method=signs)
    assert set(ours.sites) == set(theirs)
    for site, layer in theirs.items():
        close(ours.a[site], layer.lora_A["m"].weight)
        close(ours.b[site].T, layer.lora_B["m"].weight)


@pytest.mark.parametrize("ids", ["ab", ("c", "wide", "a"), ("wide", "d")])
@pytest.mark.parametrize("density", [1.0, 0.3])
@pytest.mark.parametrize("strategy", MERGES)
@pytest.mark.parametrize("rank", [5, 24])
def test_merged_deltas_equal_pefts_svd(peer, ids, density, strategy, rank):
    ours = by_us(peer, ids, strategy, density, space="delta", svd_rank=rank)
    with our_masks_in_peft(peer, ids, density, 0, "delta"):
        theirs = by_peft(peer, ids, f"{strategy}_svd", density=density, svd_rank=rank)
    assert set(ours.sites) == set(theirs)
    for site, layer in theirs.items():
        close(delta(ours, site), layer.get_delta_weight("m"))
        assert len(ours.a[site]) == rank


@pytest.mark.parametrize("ids", ["ab", "cad", ("wide", "b", "c")])
def test_a_constant_row_equals_pefts_cat(peer, ids):
    weights = constant_weights(settings(ids, [WEIGHTS[name] for name in ids], "linear"))
    theirs = by_peft(peer, ids, "cat")
    for site, layer in theirs.items():
        here = [(weight, peer[1][name]) for weight, name in zip(weights, ids, strict=True) if site in peer[1][name].a]
        close(sum(weight * delta(adapter, site) for weight, adapter in here), layer.get_delta_weight("m"))


def test_a_merge_has_scale_1_and_can_be_merged(peer):
    first = replace(by_us(peer, "ac", "ties", 0.5), name="first")
    second = replace(by_us(peer, ("a", "wide"), "ties", 0.5, space="delta"), name="second")
    assert {len(second.a[site]) for site in second.sites} == {4, 10}
    for adapter, site in [*((first, site) for site in first.sites), *((second, site) for site in second.sites)]:
        assert adapter.config.rank_at(site) == len(adapter.a[site])
        assert adapter.config.scale_at(site, len(adapter.a[site])) == 1
    both = merge([first, second], settings(["first", "second"], strategy="dare_linear", space="delta"), "both")
    close(delta(both, site), delta(first, site) + delta(second, site))


@pytest.mark.parametrize(
    "mode, strategy, times",
    [
        ({"space": "factors"}, "ties", (1, 0.5, 0.25)),
        ({"space": "factors"}, "dare_ties", (1, 0.5, 0.25)),
        ({"space": "factors"}, "dare_linear", (4, 2, 1)),
        ({"space": "delta"}, "ties", (1, 0.5, 0.5)),
        ({"space": "delta"}, "dare_linear", (2, 1, 1)),
        ({"compat": "lorax"}, "linear", (4, 1, 1)),
        ({"compat": "lorax"}, "ties", (1, 0.25, 0.25)),
    ],
)
def test_two_equal_adapters(mode, strategy, times):
    """At weights (1, 0) too: under TIES the adapter of weight 0 still votes and counts, as in PEFT and LoRAX."""
    twins = [made("a"), made("b")]
    for weights, share in zip([(1, 1), (0.5, 0.5), (1, 0)], times, strict=True):
        close(merged_delta(twins, weights, strategy, **mode), share * delta(twins[0]))


def test_sign_agreement_is_that_of_lorax():
    columns = torch.tensor([[1.0, -1, 2], [-3, 1, 1], [2, 3, 0], [0, 0, 0]])
    masks = {
        "total": [[1, 0, 1], [1, 0, 0], [1, 1, 0], [0] * 3],
        "frequency": [[1, 0, 1], [0, 1, 1], [1, 1, 0], [0] * 3],
    }
    for method, expected in masks.items():
        assert torch.stack(sign_agreement(list(columns.T), method), dim=1).int().tolist() == expected


def by_lorax(tensors, weights, strategy, density, method, masks) -> torch.Tensor:
    """LoRAX's formulas; the agreement has its own test."""
    if strategy == "ties":
        magnitudes = [t.abs().flatten().sort(descending=True).values for t in tensors]
        masks = [t.abs() >= m[int(density * len(m)) - 1] for t, m in zip(tensors, magnitudes, strict=True)]
    kept = torch.stack(tensors) * (1 if strategy == "linear" else torch.stack(masks))
    agree = torch.stack(sign_agreement(list(kept), method)) if "ties" in strategy else torch.ones_like(kept)
    total = torch.einsum("n,nri->ri", torch.tensor(weights), kept * agree)
    return total / agree.sum(0).clamp(min=1) if "ties" in strategy else total


@pytest.mark.parametrize("strategy", ["linear", *MERGES])
@pytest.mark.parametrize("method", ["total", "frequency"])
def test_lorax_merges_raw_factors_and_takes_the_first_scale(strategy, method):
    adapters = [made("a", 1, alpha=5), made("b", 2, alpha=2), made("c", 3, sites=("x.q",), rslora=True)]
    weights, density = (0.7, -0.4, 1.3), 0.6
    signs = {"majority_sign_method": method} if strategy.endswith("ties") else {}
    ours = merge(adapters, settings("abc", weights, strategy, density, compat="lorax", **signs), "m")
    for site, here in (("x.q", adapters), ("x.v", adapters[:2])):
        for part, side, scale in (("A", ours.a, 1), ("B", ours.b, 5 / 3)):
            raw = [x.a[site] if part == "A" else x.b[site] / x.config.scale_at(site, 3) for x in here]
            masks = [dare_mask(t.shape, density, 0, site, x.name, part) for t, x in zip(raw, here, strict=True)]
            close(side[site], by_lorax(raw, weights[: len(here)], strategy, density, method, masks) * scale)


def test_lorax_takes_the_first_scale_even_where_it_is_absent_and_leaves_one_adapter_as_it_is():
    first, second = made("a", 1, alpha=9, sites=("x.v",)), made("b", 2, alpha=6)
    close(merged_delta([first, second], compat="lorax"), delta(second) * 9 / 6)
    close(merged_delta([second, first], compat="lorax"), delta(second))

    alone = merge([first], settings("a", (0.3,), "ties", 0.2, compat="lorax"), "m")
    assert torch.equal(alone.a["x.v"], first.a["x.v"]) and torch.equal(alone.b["x.v"], first.b["x.v"])


@st.composite
def cases(draw, strategies=MERGES, spaces=("factors", "delta"), adapters=(1, 4), densities=(0.2, 0.5, 0.9, 1.0)):
    """Draw adapters (of mixed ranks in delta space), and the settings of their merge."""
    count, space = draw(st.integers(*adapters)), draw(st.sampled_from(spaces))
    ranks = st.integers(2, 5) if space == "delta" else st.just(draw(st.integers(2, 5)))
    facts = st.tuples(ranks, st.sampled_from([1.0, 5.0]), st.sampled_from([("x.q", "x.v"), ("x.q",)]), st.booleans())
    adapters = [made(f"ad{n}", n, *draw(facts)) for n in range(count)]
    strategy = draw(st.sampled_from(strategies))
    more = {"majority_sign_method": draw(st.sampled_from(["total", "frequency"]))} if "ties" in strategy else {}
    weights = draw(st.lists(st.sampled_from([-1.0, 0.3, 1.0, 2.5]), min_size=count, max_size=count))
    more["seed"] = draw(st.integers(0, 99)) if "dare" in strategy else 0
    ids, density = [adapter.name for adapter in adapters], draw(st.sampled_from(densities))
    return adapters, settings(ids, weights, strategy, density, space=space, **more)


@given(cases(adapters=(2, 4)), st.randoms(use_true_random=False))
def test_the_order_of_adapters_and_of_sites_does_not_matter(case, rng):
    adapters, chosen = case
    order = rng.sample(range(len(adapters)), len(adapters))
    shuffled = replace(chosen, ids=tuple(chosen.ids[n] for n in order), weights=tuple(chosen.weights[n] for n in order))
    turned = [replace(x, a=dict(reversed(x.a.items())), b=dict(reversed(x.b.items()))) for x in adapters]
    other = merge([turned[n] for n in order], shuffled, "m")
    for site in (ours := merge(adapters, chosen, "m")).sites:
        close(delta(ours, site), delta(other, site))


@given(cases(), st.sampled_from([0.25, 3.0]))
def test_a_merge_grows_with_its_weights(case, times):
    adapters, chosen = case
    grown = replace(chosen, weights=tuple(times * weight for weight in chosen.weights))
    close(delta(merge(adapters, grown, "m")), times * delta(merge(adapters, chosen, "m")))


@given(cases(adapters=(1, 1), densities=(1.0,)))
def test_one_adapter_of_density_1_is_itself_times_its_weight(case):
    (adapter,), chosen = case
    for site in (ours := merge([adapter], chosen, "m")).sites:
        close(delta(ours, site), chosen.weights[0] * delta(adapter, site))


@given(cases(strategies=("dare_linear",), adapters=(2, 4)))
def test_weight_0_drops_an_adapter_from_dare_linear(case):
    adapters, chosen = case
    chosen = replace(chosen, svd_rank=5 if chosen.space == "delta" else None)  # by default, it has a rank to give
    silent = replace(chosen, weights=(*chosen.weights[:-1], 0.0))
    fewer = replace(chosen, ids=chosen.ids[:-1], weights=chosen.weights[:-1])
    close(delta(merge(adapters, silent, "m")), delta(merge(adapters[:-1], fewer, "m")))


def test_dare_masks_are_a_function_of_seed_site_adapter_and_part():
    facts = {"seed": 1, "site": "x.q", "adapter": "a", "part": "A"}
    mask = dare_mask((40, 50), 0.3, **facts)
    assert torch.equal(mask, dare_mask((40, 50), 0.3, **facts))
    assert 0.27 < mask.float().mean() < 0.33
    for key, other in {"seed": 2, "site": "x.v", "adapter": "b", "part": "B"}.items():
        both = mask & dare_mask((40, 50), 0.3, **{**facts, key: other})
        assert 0.06 < both.float().mean() < 0.12, f"the masks are not independent of {key}"
    assert (dare_mask((40, 50), 0.6, **facts) | ~mask).all(), "a smaller density keeps a subset"


@pytest.mark.parametrize("space", ["factors", "delta"])
def test_dare_is_linear_on_average(space):
    adapters, weights, count = [made("a", 1), made("b", 2)], (0.8, -0.5), 1000
    chosen = settings("ab", weights, "dare_linear", 0.5, space=space)
    runs = torch.stack([delta(merge(adapters, replace(chosen, seed=seed), "m")) for seed in range(count)])
    expected = merged_delta(adapters, weights, "dare_linear", space=space)  # density 1
    deviations = (runs.mean(0) - expected).abs() / (runs.std(0) / count**0.5)
    assert deviations.max() < 4, f"the mean is {deviations.max():.1f} standard errors away"


@given(cases(spaces=("delta",), densities=(1.0,), strategies=("dare_linear",)))
def test_a_delta_of_density_1_is_exact_at_the_default_rank(case):
    adapters, chosen = case
    ours = merge(adapters, chosen, "m")
    for site in ours.sites:
        here = [(w, adapter) for w, adapter in zip(chosen.weights, adapters, strict=True) if site in adapter.a]
        close(delta(ours, site), sum(weight * delta(adapter, site) for weight, adapter in here))


def test_the_largest_entries_stay_and_of_equals_the_first():
    a = torch.tensor([[1.0, -2, 2, 0.5, -2, 3]])
    config = AdapterConfig(r=1, lora_alpha=1.0)
    adapter = LoRAModel(name="a", config=config, a={"x.q": a}, b={"x.q": torch.ones(1, 6)}, content_hash="a")
    for density, kept in ((0.5, [0, -2, 2, 0, 0, 3]), (0.67, [0, -2, 2, 0, -2, 3]), (0.2, [0, 0, 0, 0, 0, 3])):
        assert merge([adapter], settings("a", density=density), "m").a["x.q"].tolist() == [kept]


@pytest.mark.parametrize(
    "second, more, sentence",
    [
        (made("c", 2), {}, "its ids are 'a', 'b', but the adapters given are 'a', 'c'"),
        (made("b", 2, wide_in=7), {}, r"different bases: at x\.q 'a' is 6 -> 5, 'b' is 7 -> 5"),
        (made("b", 2, rank=4), {}, r"of different ranks .* at x\.q 3 of 'a', 4 of 'b'; merge with space='delta'$"),
        (made("b", 2, rank=4), {"compat": "lorax"}, "merge with space='delta' and without compat$"),
        (made("b", 2), {"strategy": "linear"}, "'linear' is not merged: it runs exactly, as a constant row"),
        (made("b", 2), {"density": 0.05}, r"'density' 0.05 keeps none of the 18 entries of A of 'a' at x\.q; .* 1/18"),
        (made("b", 2, alpha=0), {}, r"adapter 'b' has scale 0 at x\.q"),
        (made("b", 2), {"weights": (3e38, 3e38), "space": "delta"}, r"overflows at x\.q; give smaller weights"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_merged_are_refused(second, more, sentence):
    with pytest.raises(UserError, match=sentence):
        merge([made("a", 1), second], settings("ab", **more), "m")


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"ids": None}, "'ids' is empty"),
        ({"ids": "ab"}, "'ids' is 'ab', expected a list of adapter names"),
        ({"id": 1}, "unknown key 'id'; did you mean 'ids'?"),
        ({"ids": ["a", "b", "a"]}, "'ids' has 'a' more than once"),
        ({"ids": ["a", "b"], "weights": [1]}, "2 'ids' but 1 'weights'"),
        ({"weights": [True]}, "expected a list of numbers"),
        ({"weights": [float("nan")]}, "the weight of 'a' is nan, expected a finite float32 number"),
        ({"weights": [10**400]}, "expected a finite float32 number"),
        ({"merge_strategy": "tie"}, "expected one of 'linear', 'ties', 'dare_linear', 'dare_ties'; did you mean"),
        ({"merge_strategy": 3}, "'merge_strategy' is 3, expected a text"),
        ({"merge_strategy": "ties"}, "'density' is None, but merge_strategy 'ties' needs a number above 0"),
        ({"merge_strategy": "dare_ties", "density": 0.0}, "'density' is 0.0, but"),
        ({"merge_strategy": "dare_linear", "density": 1.01}, "'density' is 1.01, but"),
        ({"merge_strategy": "ties", "density": "0.5"}, "'density' is '0.5', expected a number or nothing"),
        ({"density": 0.5}, "'density' is 0.5, but merge_strategy 'linear' does not read it"),
        ({"space": "delta"}, "'space' is 'delta', but merge_strategy 'linear' does not read it"),
        ({**TIES, "seed": 1}, "only 'dare_linear', 'dare_ties' do; leave it out"),
        ({**TIES, "merge_strategy": "dare_linear", "majority_sign_method": "frequency"}, "'dare_linear' does not read"),
        ({**TIES, "svd_rank": 4}, "only space 'delta' reads it"),
        ({**TIES, "space": "delta", "svd_rank": 0}, "at least 1"),
        ({**TIES, "space": "delta", "compat": "lorax"}, "compat 'lorax' merges factors"),
        ({"compat": "lorx"}, "did you mean 'lorax'?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(UserError) as caught:
        MergedAdapters.from_dict({"ids": ["a"], **given})
    assert str(caught.value).startswith("merged_adapters: ") and sentence in str(caught.value)
    with pytest.raises(UserError, match="expected an object with 'ids'"):
        MergedAdapters.from_dict([given])


def test_a_request_of_loraxs_client_is_read():
    sent = {"ids": ["a", "b"], "weights": [1, 2], "density": 0.4, "majority_sign_method": "FREQUENCY"}
    read = MergedAdapters.from_dict({**sent, "merge_strategy": "TIES"})
    assert read == MergedAdapters(("a", "b"), (1.0, 2.0), "ties", 0.4, "frequency")
    least = {"ids": ["a", "b"], "weights": None, "merge_strategy": None, "density": 0.0, "majority_sign_method": None}
    assert MergedAdapters.from_dict(least) == MergedAdapters(("a", "b"), (1.0, 1.0))


def test_only_an_exact_linear_merge_is_a_constant_row():
    assert constant_weights(settings("abc", (2, 0, -1), "linear")) == (2.0, 0.0, -1.0)
    for other in (settings("a"), settings("a", strategy="linear", compat="lorax")):
        assert not other.is_constant_row
        with pytest.raises(UserError, match="no constant row of weights"):
            constant_weights(other)


def test_the_key_names_content_and_every_setting():
    adapters = [made("a", 1), made("b", 2)]
    base = settings("ab", strategy="dare_ties", density=0.5, space="delta")
    others = [
        replace(base, weights=(1.0, 2.0)), replace(base, density=0.4), replace(base, majority_sign_method="frequency"),
        replace(base, merge_strategy="dare_linear"), replace(base, seed=1), replace(base, svd_rank=2),
        replace(base, space="factors"), replace(base, space="factors", compat="lorax"),
    ]  # fmt: skip
    keys = [content_key(adapters, chosen) for chosen in (base, *others)]
    keys.append(content_key(adapters[::-1], replace(base, ids=("b", "a"))))
    keys.append(content_key([adapters[0], replace(adapters[1], content_hash="new")], base))
    keys.append(content_key([adapters[0], replace(adapters[1], name="c")], replace(base, ids=("a", "c"))))
    assert len(set(keys)) == len(keys) and all(len(key) == 64 for key in keys)
    whole, real = replace(base, density=1, weights=(1, 2)), replace(base, density=1.0, weights=(1.0, 2.0))
    assert content_key(adapters, whole) == content_key(adapters, real)
    ours = merge(adapters, base, "m")
    assert (ours.name, ours.content_hash) == ("m", keys[0])
