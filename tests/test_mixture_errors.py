"""Everything that can be wrong with an X-LoRA repository, named: `pytest tests/test_mixture_errors.py`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import Adapter, MixtureSpec, save_base, tiny_model
from safetensors.torch import load_file, save_file

from workbench import Engine, Ordering, UserError
from workbench.engine.hf import linear_targets
from workbench.xlora import Mixture, XLoRAConfig, find_mixture

pytestmark = pytest.mark.filterwarnings("ignore:the (mixture|ordering) was made for base")
MODEL = tiny_model("llama")
TARGETS = linear_targets(MODEL)
DEEP = {"layerwise_scalings": True, "xlora_depth": 3, "xlora_size": 10}
SPEC = MixtureSpec(
    {"beta": Adapter(("q_proj", "v_proj"), seed=1), "alpha": Adapter(("up_proj", "q_proj"), rank=3, seed=2)}, DEEP
)


def read(folder: Path, ordering: Ordering | None = None, **settings) -> Mixture:
    return Mixture.read(find_mixture(folder), "m", TARGETS, "tiny", 32, ordering, **settings)


@pytest.fixture
def folder(tmp_path) -> Path:
    return SPEC.write(tmp_path / "repo", MODEL)


def edit_json(path: Path, **changes) -> None:
    """Change keys of a JSON file; the value `...` takes a key out."""
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


# settings


def test_settings_left_out_are_the_xlora_packages_defaults():
    config = XLoRAConfig.from_dict({"hidden_size": 4}, "c")
    assert (config.xlora_depth, config.xlora_size, config.use_relu, config.use_bias) == (1, 2048, True, True)
    assert (config.enable_softmax, config.enable_softmax_topk, config.layerwise_scalings) == (True, False, False)
    assert (config.softmax_temperature, config.top_k_lora) == (1.0, None)
    assert (config.scaling_pass_value, config.global_scaling_weight) == (0.0, 1.0)


def test_relu_is_pefts_always_and_the_xlora_packages_by_its_flag():
    off = {"hidden_size": 4, "enable_relu_and_dropout": False}
    assert XLoRAConfig.from_dict(off, "c").use_relu is False
    assert XLoRAConfig.from_dict({**off, "peft_type": "XLORA"}, "c").use_relu is True


def test_what_files_in_the_wild_carry_is_accepted(folder):
    edit_json(folder / "xlora_config.json", stop_token_id=None, device="cuda", softmax_temperature=1, hidden_size=...,
              global_scaling_weight=1, base_model_id=...)  # fmt: skip
    assert read(folder).adapter_names == ("beta", "alpha")


def test_an_unknown_key_is_warned_of_and_changes_nothing(folder):
    edit_json(folder / "xlora_config.json", softmax_temprature=9.0)
    with pytest.warns(UserWarning, match="'softmax_temprature' not known.*did you mean 'softmax_temperature'"):
        assert read(folder).config.softmax_temperature == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 33}, "made for hidden size 33, base 'tiny' has 32"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"xlora_depth": 0}, "xlora_depth must be a whole number of at least 1, not 0"),
        ({"xlora_depth": 1.5}, "xlora_depth must be a whole number"),
        ({"top_k_lora": 0}, "top_k_lora must be a whole number of at least 1"),
        ({"softmax_temperature": 0}, "softmax_temperature must be above 0"),
        ({"softmax_temperature": "warm"}, "softmax_temperature must be a finite number"),
        ({"enable_softmax": "yes"}, "enable_softmax must be true or false"),
        ({"enable_relu_and_dropout": 1}, "must be true or false"),
        ({"scaling_pass_value": "base"}, "scaling_pass_value must be a finite number"),
        ({"use_bias": False}, "layer 1 of 3 has a bias, but the config says use_bias is false"),
        ({"xlora_size": 11}, r"layer 1 of 3 has shape \[10, 32\], but \[11, 32\] was expected"),
        ({"layerwise_scalings": False}, r"layer 3 of 3 has shape \[12, 10\], but \[2, 10\] was expected"),
        ({"xlora_depth": 4}, "must have 4 linear layers .* holds 3"),
        ({"xlora_depth": 2}, "must have 2 linear layers .* holds 3"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_with_the_files_name(folder, changes, message):
    edit_json(folder / "xlora_config.json", **changes)
    with pytest.raises(UserError, match=message) as caught:
        read(folder)
    assert (
        "xlora_config.json" in str(caught.value) or "classifier" in str(caught.value) or "mixture" in str(caught.value)
    )


def test_settings_given_by_the_caller_overrule_the_file(folder):
    assert read(folder, top_k_lora=1, scaling_pass_value=None).config.scaling_pass_value is None
    with pytest.raises(UserError, match="unknown X-LoRA setting 'topk'; did you mean 'top_k_lora'"):
        read(folder, topk=1)
    with pytest.raises(UserError, match="softmax_temperature must be above 0"):
        read(folder, softmax_temperature=0.0)


# what is missing or broken


def test_a_folder_without_a_mixture_says_what_it_is_instead(tmp_path, folder):
    with pytest.raises(UserError, match="mixture folder not found"):
        find_mixture(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a single LORA adapter, not an X-LoRA mixture: load it as an adapter"):
        find_mixture(folder / "beta")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is no X-LoRA mixture: it has neither xlora_config.json"):
        find_mixture(tmp_path / "empty")


def test_a_mixture_without_adapters_is_refused(folder):
    for name in SPEC.adapters:
        shutil.rmtree(folder / name)
    with pytest.raises(UserError, match="no adapters found; expected a folder for each"):
        read(folder)


@pytest.mark.parametrize("text", ["{adapters={", "[]", '{"hidden_size": 32, "hidden_size": 16}', ""])
def test_a_malformed_config_is_refused(folder, text):
    (folder / "xlora_config.json").write_text(text)
    with pytest.raises(UserError, match=r"xlora_config\.json"):
        read(folder)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            ("beta", "alpa"),
            r"no adapter folder for 'alpa' of the order; did you mean 'alpha'\?.*Found: 'alpha', 'beta'",
        ),
        (("beta", "alpha", "gamma", "delta"), "no adapter folder for 'gamma', 'delta'"),
    ],
)
def test_an_adapter_in_the_order_without_a_folder_is_refused_before_weights_are_read(folder, order, message):
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"not read")
    with pytest.raises(UserError, match=message):
        read(folder, Ordering(order))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers.pop("model.layers.1.mlp.up_proj"), "lacks 1 site of the model: 'model.layers.1.mlp"),
        (lambda layers: layers.update({"model.layers.1.mlp.up_pro": 6}),
         "names 1 site that the model does not have: 'model.layers.1.mlp.up_pro'; did you mean"),
    ],
    ids=["missing", "unknown"],
)  # fmt: skip
def test_an_ordering_of_other_sites_is_refused(folder, change, message):
    layers = {site: index for index, site in enumerate(SPEC.sites(MODEL))}
    change(layers)
    with pytest.raises(UserError, match=message):
        read(folder, Ordering(("beta", "alpha"), layers))


def test_layers_null_means_derive(folder):
    mixture = read(folder, Ordering.from_dict({"order": ["beta", "alpha"], "layers": None, "base_model_id": "tiny"}))
    assert mixture.site_index == {site: index for index, site in enumerate(SPEC.sites(MODEL))}


def test_one_adapter_more_or_less_than_the_classifier_is_refused(folder):
    SPEC.adapters["beta"].write(folder / "gamma", MODEL)
    with pytest.raises(UserError, match=r"layer 3 of 3 has shape \[12, 10\], but \[18, 10\] was expected"):
        read(folder, Ordering(("beta", "alpha", "gamma")))
    with pytest.raises(UserError, match=r"layer 3 of 3 has shape \[12, 10\], but \[4, 10\] was expected"):
        read(folder, Ordering(("beta",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"last.weight": torch.full((12, 10), float("nan"))}, "tensor 'last.weight' has NaN or infinite"),
        (lambda t: t | {"head.weight": torch.zeros(1, 1)}, "'head.weight' belong to no classifier layer"),
        (lambda t: {k: v for k, v in t.items() if k != "last.bias"}, "layer 3 of 3 has no bias"),
        (lambda t: {k: v for k, v in t.items() if k != "last.weight"}, "layer 3 of 3 has a bias but no weight"),
        (lambda t: t | {"last.bias": torch.zeros(3)}, r"layer 3 of 3 has a bias of shape \[3\], but \[12\]"),
    ],
)
def test_a_wrong_classifier_is_refused(folder, change, message):
    path = folder / "xlora_classifier.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UserError, match=message):
        read(folder)


def test_a_missing_truncated_or_pickled_classifier_is_refused(folder):
    path = folder / "xlora_classifier.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"xlora_classifier\.safetensors is not a readable safetensors file"):
        read(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"weights not found: .*xlora_classifier\.safetensors"):
        read(folder)
    (folder / "xlora_classifier.pt").write_bytes(b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(UserError, match=r"only pickle weights \('xlora_classifier.pt'\).*refused"):
        read(folder)


def test_an_adapter_that_is_broken_is_named(folder):
    (folder / "alpha" / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match="adapter 'alpha': .*is not a readable safetensors file"):
        read(folder)


def test_a_base_whose_sites_do_not_fit_is_refused(folder):
    wide = linear_targets(tiny_model("llama", intermediate_size=64))
    with pytest.raises(UserError, match="'alpha' does not fit base 'wide' at 2 sites: model.layers.0.mlp.up_proj is "
                                        "32 -> 64 in the base, 32 -> 48 in the adapter"):  # fmt: skip
        Mixture.read(find_mixture(folder), "m", wide, "wide", 32)
    other = linear_targets(tiny_model("gpt_neox"))
    with pytest.raises(
        UserError, match="adapter 'beta' does not fit base 'neox': 4 of its 4 sites are not in the model"
    ):
        Mixture.read(find_mixture(folder), "m", other, "neox", 32)


def test_another_base_by_name_is_only_warned_of(folder):
    with pytest.warns(UserWarning, match="the mixture was made for base 'tiny', this engine runs 'copy'"):
        Mixture.read(find_mixture(folder), "m", TARGETS, "copy", 32)
    with pytest.warns(UserWarning, match="the ordering was made for base 'org/one'"):
        read(folder, Ordering(("beta", "alpha"), None, "org/one"))


def test_a_mixture_that_does_not_load_leaves_the_engine_as_it_was(folder, tmp_path):
    engine = Engine(save_base(MODEL, tmp_path / "tiny"))
    engine.load_mixture(folder, "good")
    slots = dict(engine.slots.adapters)
    (folder / "alpha" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="adapter 'alpha'"):
        engine.load_mixture(folder, "bad")
    with pytest.raises(UserError, match="'good' is loaded already; unload it first"):
        engine.load_mixture(SPEC.write(tmp_path / "again", MODEL), "good")
    assert engine.slots.adapters == slots and list(engine.mixtures) == ["good"]
