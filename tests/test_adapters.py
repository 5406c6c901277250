"""One adapter from its folder to its slot: `pytest tests/test_adapters.py`."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Adapter, random_ids, save_base, tiny_model
from safetensors.torch import load_file, save_file

from workbench import Engine, UserError
from workbench.adapters import AdapterConfig, LoRALinear, LoRAModel
from workbench.adapters.slots import SlotTable
from workbench.engine.hf import linear_targets

MODEL = tiny_model("llama")
TARGETS = linear_targets(MODEL)
ADAPTER = Adapter(("q_proj", "up_proj"), rank=3, alpha=6)


@pytest.fixture
def folder(tmp_path) -> Path:
    return ADAPTER.write(tmp_path / "mine", MODEL)


def edit_config(folder: Path, **changes) -> Path:
    """Change keys of the adapter's config; the value `...` takes a key out."""
    path = folder / "adapter_config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def edit_weights(folder: Path, change) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    return folder


def load(folder: Path) -> LoRAModel:
    return LoRAModel.read(folder).fit(TARGETS, "tiny")


# reading


def test_alpha_over_rank_is_folded_into_b_once(folder):
    adapter = load(folder)
    tensors = ADAPTER.factors(MODEL)
    for site in adapter.sites:
        assert torch.equal(adapter.a[site], tensors[f"base_model.model.{site}.lora_A.weight"])
        assert torch.equal(adapter.b[site], (tensors[f"base_model.model.{site}.lora_B.weight"] * 2).T)
    assert adapter.name == "mine" and len(adapter.sites) == 4
    assert adapter.num_bytes == 4 * sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize(
    ("config", "site", "rank", "scale"),
    [
        ({}, "model.layers.0.self_attn.q_proj", 8, 2.0),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 8, 16 / 8**0.5),
        ({"rank_pattern": {"q_proj": 4}}, "model.layers.0.self_attn.q_proj", 4, 4.0),
        ({"rank_pattern": {"proj": 4}}, "model.layers.0.self_attn.q_proj", 8, 2.0),  # a whole last part, not its end
        ({"rank_pattern": {"layers.1.*q_proj": 4}}, "model.layers.1.self_attn.q_proj", 4, 4.0),
        ({"rank_pattern": {"layers.1.*q_proj": 4}}, "model.layers.11.self_attn.q_proj", 4, 4.0),  # `.` is any character
        ({"rank_pattern": {"q_proj": 4, ".*": 2}}, "model.layers.0.self_attn.q_proj", 4, 4.0),  # the first that matches
        ({"alpha_pattern": {"q_proj": 1}}, "model.layers.0.self_attn.q_proj", 8, 1 / 8),
        ({"alpha_pattern": {"q_proj": 1}}, "model.layers.0.self_attn.k_proj", 8, 2.0),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True},
         "model.layers.0.self_attn.q_proj", 4, 1.0),
    ],
)  # fmt: skip
def test_rank_and_scale_of_a_site(config, site, rank, scale):
    made = AdapterConfig.from_dict({"r": 8, "lora_alpha": 16, **config}, "c")
    assert made.rank_at(site) == rank
    assert made.scale_at(site, rank) == pytest.approx(scale)


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.model.", "", "language_model."])
@pytest.mark.parametrize("middle", ["", ".default"])
def test_names_of_other_wrappers_are_understood(folder, prefix, middle):
    def rename(tensors):
        return {
            key.replace("base_model.model.", prefix, 1).replace(".weight", f"{middle}.weight"): value
            for key, value in tensors.items()
        }

    assert set(load(edit_weights(folder, rename)).sites) == set(load(ADAPTER.write(folder.parent / "b", MODEL)).sites)


def test_content_decides_the_hash_and_the_name_does_not(folder, tmp_path):
    same = ADAPTER.write(tmp_path / "another name", MODEL)
    other = Adapter(("q_proj", "up_proj"), rank=3, alpha=6, seed=9).write(tmp_path / "other", MODEL)
    assert LoRAModel.read(folder).content_hash == LoRAModel.read(same).content_hash
    assert LoRAModel.read(folder).content_hash != LoRAModel.read(other).content_hash
    assert LoRAModel.read(folder).content_hash != LoRAModel.read(edit_config(same, lora_alpha=7)).content_hash


# refusals of the config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "sets use_dora, but lora_magnitude_vector is missing at 4 sites"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters .it targets parameters .such as fused"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' .it leaves a residual"),
        ({"init_lora_weights": "pissa_niter_4"}, "residual"),
        ({"init_lora_weights": "olora"}, "residual"),
        ({"init_lora_weights": "loftq"}, "residual"),
        ({"init_lora_weights": "magic"}, "init_lora_weights='magic' .not known here"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA adapters"),
        ({"peft_type": "XLORA"}, "peft_type is 'XLORA'"),
        ({"use_dorra": True}, "'use_dorra' set, but not known here; did you mean 'use_dora'"),
        ({"r": 0}, "r must be a whole number of at least 1, not 0"),
        ({"r": 2.5}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a finite number, not None"),
        ({"lora_alpha": "16"}, "lora_alpha must be a finite number"),
        ({"use_rslora": "no"}, "use_rslora must be true or false, not 'no'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map module patterns to whole numbers"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must map module patterns to whole numbers of at least 1"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern must map"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern must map module patterns to numbers"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has '.', which is no regular expression"),
        ({"target_modules": 3}, "target_modules must be a list of module names or one regular expression, not 3"),
        ({"target_modules": "(q_proj"}, "target_modules '.q_proj' is no regular expression"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform must be block numbers"),
        ({"r": 4}, "config says rank 4 at model.layers.0.*, the tensors have 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_exactly_is_refused_by_name(folder, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        load(edit_config(folder, **changes))
    assert "mine" in str(caught.value)


def test_the_config_is_refused_before_weights_are_read(folder):
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="lora_bias"):
        load(edit_config(folder, lora_bias=True))


def test_every_feature_at_its_harmless_value_loads(folder):
    from peft import LoraConfig

    defaults = {key: value for key, value in LoraConfig().to_dict().items() if not isinstance(value, set)}
    mine = ADAPTER.json()
    given = {**{k: getattr(v, "value", v) for k, v in defaults.items()}, **mine}
    assert load(edit_config(folder, **given)).sites


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 1, "r": 2}', "\xff"])
def test_a_malformed_config_is_refused(folder, text):
    (folder / "adapter_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"adapter config '.*adapter_config\.json'"):
        load(folder)


# refusals of the weights


def with_tensor(key: str, value: torch.Tensor):
    return lambda tensors: {**tensors, key: value}


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tensor(f"{Q}.lora_A.weight", torch.full((3, 32), float("nan"))), "lora_A.weight' has NaN or infinite"),
        (with_tensor(f"{Q}.lora_B.weight", torch.full((48, 3), float("inf"))), "has NaN or infinite values"),
        (with_tensor(f"{Q}.lora_B.weight", torch.zeros(48, 2)), "the first dimension of A and the last of B must be"),
        (with_tensor(f"{Q}.lora_A.weight", torch.zeros(3, 31)), "is 32 -> 48 in the base, 31 -> 48 in the adapter"),
        (with_tensor(f"{Q}.lora_A.weight", torch.zeros(3)), r"has shape \[3\]; a matrix was expected"),
        (with_tensor(f"{Q}.lora_magnitude_vector", torch.zeros(48)), "1 tensors are neither lora_A nor lora_B"),
        (with_tensor(f"{Q}.lora_embedding_A", torch.zeros(3, 97)), "two tensors hold lora_A of"),
        (with_tensor("base_model.model.lm_head.weight", torch.zeros(97, 32)), "'base_model.model.lm_head.weight'"),
        (with_tensor(f"{Q}.lora_A.default.weight", torch.zeros(3, 32)), "two tensors hold lora_A of"),
        (lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_B.weight"}, "only one of lora_A and lora_B is there"),
        (lambda t: {k: v for k, v in t.items() if not k.startswith(Q)}, "lack 1 of the sites that its config targets"),
        (lambda t: {}, "holds no LoRA tensors"),
        (lambda t: {k.replace("q_proj", "w_proj"): v for k, v in t.items()}, "2 of its 4 sites are not in the model: "
         "'model.layers.0.self_attn.w_proj', .*did you mean 'model.layers.0.self_attn.[qkvo]_proj'"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(folder, change, message):
    with pytest.raises(UserError, match=message) as caught:
        load(edit_weights(folder, change))
    assert "adapter 'mine'" in str(caught.value)


def test_truncated_missing_and_pickled_weights_are_refused(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"adapter 'mine': .*adapter_model\.safetensors is not a readable safetensors file"
    ):
        load(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"weights not found: .*adapter_model\.safetensors"):
        load(folder)
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"only pickle weights \('adapter_model.bin'\), which can run code when opened"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        ({"target_modules": ["q_proj", "up_proj"]}, 0),
        ({"target_modules": ["q_proj", "up_proj", "w1"]}, 0),  # PEFT lets a name match nothing beside others that do
        ({"target_modules": ["q_proj", "up_proj", "v_proj"]}, 2),
        ({"target_modules": ["q_proj", "up_proj", "v_proj"], "exclude_modules": ["v_proj"]}, 0),
        ({"target_modules": ["q_proj", "up_proj", "v_proj"], "exclude_modules": r".*\.1\..*"}, 1),
        ({"target_modules": ["q_proj", "up_proj", "v_proj"], "layers_to_transform": [1]}, 1),
        ({"target_modules": ["q_proj", "up_proj", "v_proj"], "layers_to_transform": 5}, 0),
        ({"target_modules": ["v_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks"]}, 0),
        ({"target_modules": ["v_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, 1),
        ({"target_modules": r"model\.layers\.0\.self_attn\.(q|v)_proj"}, 1),
        ({"target_modules": "v_proj"}, 0),  # an expression must match a whole path
        ({"target_modules": "all-linear"}, 10),
        ({"target_modules": None}, 0),
    ],
)
def test_sites_that_the_config_targets_must_be_there(folder, config, lacking):
    edit_config(folder, **config)
    if not lacking:
        assert len(load(folder).sites) == 4
        return
    with pytest.raises(
        UserError, match=f"its weights lack {lacking} of the sites that its config targets in base 'tiny'"
    ):
        load(folder)


# slots


def random_factors(rank: int, seed: int, sites: tuple[str, ...]) -> LoRAModel:
    generator = torch.Generator().manual_seed(seed)
    a = {site: torch.randn(rank, 5, generator=generator) for site in sites}
    b = {site: torch.randn(rank, 4, generator=generator) for site in sites}
    return LoRAModel(f"{seed}", AdapterConfig(rank, 1.0), a, b, f"{seed}")


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([("x",), ("y",), ("x", "y")])) | st.integers(0, 5), max_size=14
    )
)
def test_slots_hold_what_was_put_there_whatever_was_dropped(actions):
    """A number drops the adapter of that rank among those loaded, a pair loads one."""
    table, loaded, most = SlotTable(torch.float32, torch.device("cpu")), {}, {}
    for seed, action in enumerate(actions):
        if isinstance(action, tuple):
            adapter = random_factors(action[0], seed, action[1])
            slot = table.put(adapter)
            assert slot == min(set(range(len(loaded) + 1)) - set(loaded)), "the lowest free slot"
            loaded[slot] = adapter
        elif loaded:
            slot = sorted(loaded)[action % len(loaded)]
            table.drop(slot)
            del loaded[slot]
        assert table.adapters == loaded
        for name, site in table.sites.items():
            ranks = sum(len(adapter.a[name]) for adapter in loaded.values() if name in adapter.a)
            most[name] = max(most.get(name, 0), 2 * ranks)
            here = {slot: adapter for slot, adapter in loaded.items() if name in adapter.a}
            assert set(site.spans) == set(here)
            spans = sorted(site.spans.values())
            assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False)), "no row is shared"
            assert site.a.shape[0] == site.b.shape[0] <= 2 * max(16, most.get(name, 0)), "gaps are used again"
            for slot, adapter in here.items():
                first, last = site.spans[slot]
                assert torch.equal(site.a[first:last], adapter.a[name])
                assert torch.equal(site.b[first:last], adapter.b[name])


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0), (0, 2), (1,), (2, 1, 0), (0, 7, 1)])
def test_a_mixtures_factors_are_its_adapters_in_its_order(slots):
    """Slot 7 has no factors at this site."""
    table = SlotTable(torch.float32, torch.device("cpu"))
    adapters = [random_factors(rank, rank, ("x",)) for rank in (2, 1, 3)]
    for adapter in adapters:
        table.put(adapter)
    a, b, owner = table.sites["x"].mixture(slots)
    here = [(place, adapters[slot]) for place, slot in enumerate(slots) if slot < 3]
    assert torch.equal(a, torch.cat([adapter.a["x"] for _, adapter in here]))
    assert torch.equal(b, torch.cat([adapter.b["x"] for _, adapter in here]))
    assert owner.tolist() == [place for place, adapter in here for _ in range(len(adapter.a["x"]))]
    table.drop(slots[0])
    assert len(table.sites["x"].mixture(slots)[0]) == sum(len(x.a["x"]) for p, x in here if p), "no stale view"


# in an engine


def test_layers_are_wrapped_where_an_adapter_acts_and_nowhere_else(folder, tmp_path):
    engine = Engine(save_base(MODEL, tmp_path / "tiny"))
    engine.load_adapter(folder, pinned=True)
    wrapped = {name for name, module in engine.model.model.named_modules() if isinstance(module, LoRALinear)}
    assert wrapped == {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")}
    layer = engine.model.model.get_submodule("model.layers.0.mlp.up_proj")
    assert (layer.in_features, layer.out_features) == (32, 48)
    assert torch.equal(layer.weight, MODEL.get_submodule("model.layers.0.mlp.up_proj").weight)
    with pytest.raises(AttributeError, match="no attribute 'in_feature'"):
        _ = layer.in_feature
    engine.model.unwrap()
    assert not any(isinstance(module, LoRALinear) for module in engine.model.model.modules())


def test_names_and_misspellings(folder, tmp_path):
    engine = Engine(save_base(MODEL, tmp_path / "tiny"))
    assert engine.load_adapter(folder) == "mine"
    assert engine.load_adapter(folder, "legal") == "legal"
    assert engine.load_adapter(folder) == "mine", "the same again changes nothing"
    edit_config(folder, lora_alpha=3)
    with pytest.raises(UserError, match="'mine' is loaded already, with other content.*unload it first, or load this"):
        engine.load_adapter(folder)
    with pytest.raises(UserError, match="no adapter 'lgal' is loaded; did you mean 'legal'.*; loaded: 'mine', 'legal'"):
        engine.generate(random_ids(3), adapter="lgal", max_tokens=1)
    with pytest.raises(UserError, match="no adapter or mixture 'min' is loaded; did you mean 'mine'"):
        engine.unload("min")
    with pytest.raises(UserError, match="no mixture 'mine' is loaded"):
        engine.generate(random_ids(3), mixture="mine", max_tokens=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_compute_dtype_holds_adapters_too(folder, tmp_path, dtype):
    engine = Engine(save_base(MODEL, tmp_path / "tiny"), dtype=dtype)
    engine.load_adapter(folder, pinned=True)
    assert engine.slots.sites["model.layers.0.self_attn.q_proj"].a.dtype == getattr(torch, dtype)
    done = engine.generate(random_ids(6), adapter="mine", max_tokens=4, ignore_eos=True)
    exact = Engine(tmp_path / "tiny")
    exact.load_adapter(folder)
    wanted = exact.generate(random_ids(6), adapter="mine", max_tokens=1, ignore_eos=True)
    assert len(done.token_ids) == 4 and done.logprobs[0] == pytest.approx(wanted.logprobs[0], abs=0.1)
