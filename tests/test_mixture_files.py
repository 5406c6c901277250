"""X-LoRA repositories in every layout: `pytest tests/test_mixture_files.py`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import Adapter, MixtureSpec, peft_names, tiny_model, xlora_names
from safetensors.torch import load_file, save_file

from workbench import Ordering, UserError
from workbench.engine.hf import linear_targets
from workbench.hub import resolve_mixture
from workbench.xlora import Mixture, find_mixture

pytestmark = pytest.mark.filterwarnings("ignore:the (mixture|ordering) was made for base")
MODEL = tiny_model("llama")
TARGETS = linear_targets(MODEL)
DEEP = {"layerwise_scalings": True, "xlora_depth": 3, "xlora_size": 10}
SPEC = MixtureSpec(
    {"beta": Adapter(("q_proj", "v_proj"), seed=1), "alpha": Adapter(("up_proj", "q_proj"), rank=3, seed=2)}, DEEP
)


def read(folder: Path, ordering: Ordering | None = None, **settings) -> Mixture:
    return Mixture.read(find_mixture(resolve_mixture(folder)), "m", TARGETS, "tiny", 32, ordering, **settings)


def assert_is_spec(mixture: Mixture, spec: MixtureSpec = SPEC, names: tuple[str, ...] | None = None) -> None:
    """Check that every number of `spec` came back, in class order."""
    assert mixture.adapter_names == (names or tuple(spec.adapters))
    assert list(mixture.sites) == spec.sites(MODEL)
    for adapter, wanted in zip(mixture.adapters, spec.adapters.values(), strict=True):
        tensors = wanted.factors(MODEL)
        assert len(adapter.sites) == len(tensors) // 2
        for site in adapter.sites:
            assert torch.equal(adapter.a[site], tensors[f"base_model.model.{site}.lora_A.weight"])
            up = tensors[f"base_model.model.{site}.lora_B.weight"] * wanted.scale_at(site)
            assert torch.equal(adapter.b[site], up.T)
    for (weight, bias), (found, found_bias) in zip(spec.layers(MODEL), mixture.classifier.layers, strict=True):
        assert torch.equal(weight, found) and torch.equal(bias, found_bias)


@pytest.fixture
def folder(tmp_path) -> Path:
    return SPEC.write(tmp_path / "repo", MODEL)


def edit_json(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


# layouts


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_the_xlora_packages_layout(tmp_path, depth, stride):
    spec = MixtureSpec(SPEC.adapters, {**DEEP, "xlora_depth": depth})
    mixture = read(spec.write(tmp_path, MODEL, stride))
    assert_is_spec(mixture, spec)


def test_adapter_folders_one_level_down(folder):
    (folder / "X-LoRA_adapters").mkdir()
    for name in SPEC.adapters:
        shutil.move(folder / name, folder / "X-LoRA_adapters" / name)
    assert_is_spec(read(folder))


def test_config_and_classifier_one_level_down_with_a_prefix(folder):
    """An early revision of a published repository; a broken copy of the config lies beside the good one."""
    (folder / "X-LoRA").mkdir()
    shutil.move(folder / "xlora_config.json", folder / "X-LoRA" / "X-LoRA_xlora_config.json")
    shutil.move(folder / "xlora_classifier.safetensors", folder / "X-LoRA" / "X-LoRA_xlora_classifier.safetensors")
    (folder / "A").mkdir()
    (folder / "A" / "xlora_config.json").write_text("{adapters={")
    assert_is_spec(read(folder))


def test_config_and_classifier_with_a_prefix(folder):
    for name in ("xlora_config.json", "xlora_classifier.safetensors"):
        shutil.move(folder / name, folder / f"my-model-{name}")
    assert_is_spec(read(folder))


@pytest.mark.parametrize(
    "style", ["{}_config.json {}_model.safetensors", "{}_adapter_config.json {}_adapter_model.safetensors"]
)
def test_the_flat_layout(folder, style):
    for name in SPEC.adapters:
        config, weights = style.format(name, name).split()
        shutil.move(folder / name / "adapter_config.json", folder / config)
        shutil.move(folder / name / "adapter_model.safetensors", folder / weights)
        (folder / name).rmdir()
    assert find_mixture(folder).layout == "flat"
    assert_is_spec(read(folder))


def peft_config(spec: MixtureSpec, names: list[str]) -> dict:
    paths = {name: f"/somewhere/else/{name}" for name in names}
    return {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": 32, "adapters": paths,
            "base_model_name_or_path": "tiny", "use_trainable_adapters": False, **spec.settings}  # fmt: skip


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("depth", [1, 6])
def test_pefts_layout_with_adapter_folders_as_trained(tmp_path, depth, stride):
    spec = MixtureSpec(SPEC.adapters, {**DEEP, "xlora_depth": depth})
    for number, adapter in enumerate(spec.adapters.values()):
        adapter.write(tmp_path / str(number), MODEL)
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(spec, ["0", "1"])))
    save_file(peft_names(spec.layers(MODEL), stride), tmp_path / "adapter_model.safetensors")
    mixture = read(tmp_path)
    assert find_mixture(tmp_path).layout == "peft"
    assert_is_spec(mixture, spec, names=("0", "1"))


def save_as_peft(spec: MixtureSpec, model, folder: Path, old: bool) -> Path:
    """Write the adapter folders as PEFT did: every tensor with the adapter's number in its name, then renamed."""
    state = {f"base_model.lora_model.model.{key}": value for key, value in model.state_dict().items()}
    for number, adapter in enumerate(spec.adapters.values()):
        for key, value in adapter.factors(model).items():
            key = key.replace("base_model.model.", "base_model.lora_model.model.")
            state[key.replace(".weight", f".{number}.weight")] = value
    classifier = peft_names(spec.layers(model))
    for number, adapter in enumerate(map(str, range(len(spec.adapters)))):
        mine = {key: value for key, value in {**state, **classifier}.items() if "lora_" in key and adapter in key}
        if old:  # up to 0.15: the number goes wherever it stands
            mine = {key.replace(f".{adapter}", ""): value for key, value in mine.items()}
        else:
            mine = {key.replace(f".{adapter}.weight", ".weight"): value for key, value in mine.items()}
        (folder / adapter).mkdir(parents=True)
        save_file({key: value.clone() for key, value in mine.items()}, folder / adapter / "adapter_model.safetensors")
        config = list(spec.adapters.values())[number].json()
        (folder / adapter / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text(
        json.dumps(peft_config(spec, [str(i) for i in range(len(spec.adapters))]))
    )
    save_file(classifier, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("old", [True, False], ids=["PEFT 0.15", "PEFT 0.19"])
def test_pefts_own_save_of_a_whole_model(tmp_path, old):
    """Its adapter files also hold base weights, other adapters and classifier parts, and blocks without a number."""
    model = tiny_model("llama", num_hidden_layers=12)
    folder = save_as_peft(SPEC, model, tmp_path / "saved", old)
    assert any(".layers.self_attn" in key for key in load_file(folder / "0" / "adapter_model.safetensors")) is old
    assert any(".layers0.self_attn" in key for key in load_file(folder / "1" / "adapter_model.safetensors")) is old
    mixture = Mixture.read(find_mixture(folder), "m", linear_targets(model), "tiny", 32)
    for adapter, wanted in zip(mixture.adapters, SPEC.adapters.values(), strict=True):
        tensors = wanted.factors(model)
        assert len(adapter.sites) == len(tensors) // 2 == 24
        for site in adapter.sites:
            assert torch.equal(adapter.a[site], tensors[f"base_model.model.{site}.lora_A.weight"])


def test_what_new_peft_saves_lost_is_named(tmp_path):
    """PEFT 0.20 and later drop tensors whose names contain another adapter's number."""
    spec = MixtureSpec(SPEC.adapters, DEEP)
    folder = save_as_peft(spec, MODEL, tmp_path / "saved", old=False)
    whole = load_file(folder / "adapter_model.safetensors")
    save_file(
        {k: v for k, v in whole.items() if ".0." not in k and ".1." not in k}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match=r"must have 3 linear layers.*holds 2: .*layers\.3', .*layers\.6'; missing: "
                                        r"'internal_xlora_classifier\.layers\.0'.*PEFT 0\.20"):  # fmt: skip
        read(folder)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"the file holds 0: none; missing: 'all of internal_xlora_classifier\.layers"):
        read(folder)
    save_file(whole, folder / "adapter_model.safetensors")
    path = folder / "0" / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if ".1." not in k}, path)
    with pytest.raises(
        UserError, match=r"adapter '0': its weights lack 2 of the sites that its config targets.*layers.1"
    ):
        read(folder)


@pytest.mark.parametrize("name", ["last.weight", "inner.3.weight"])
def test_a_classifier_file_that_lost_a_layer_is_refused(folder, name):
    path = folder / "xlora_classifier.safetensors"
    stem = name.removesuffix(".weight")
    save_file({k: v for k, v in load_file(path).items() if not k.startswith(stem)}, path)
    expected = "missing: 'last'" if stem == "last" else r"missing: '1 of inner\.\*'"
    with pytest.raises(UserError, match=expected):
        read(folder)


# names and order


def test_adapter_1_is_not_adapter_10(tmp_path):
    adapters = {f"adapter_{i}": Adapter(("q_proj",), rank=1 + i % 3, seed=i) for i in range(1, 12)}
    spec = MixtureSpec(adapters, {})
    assert_is_spec(read(spec.write(tmp_path, MODEL)), spec)
    shutil.rmtree(tmp_path / "adapter_1")
    with pytest.raises(UserError, match="no adapter folder for 'adapter_1' of the order; did you mean 'adapter_1[01]'"):
        read(tmp_path, Ordering(tuple(adapters)))


def test_without_a_list_numbered_folders_are_in_number_order(tmp_path):
    adapters = {f"adapter_{i}": Adapter(("q_proj",), seed=i) for i in range(1, 12)}
    spec = MixtureSpec(adapters, {"adapters": None})
    assert_is_spec(read(spec.write(tmp_path, MODEL)), spec)


@pytest.mark.parametrize(
    "adapters", [{"beta": "/tmp/x", "alpha": "hub/repo"}, ["beta", "alpha"]], ids=["a map", "a list"]
)
def test_the_configs_adapters_give_the_class_order(folder, adapters):
    edit_json(folder / "xlora_config.json", adapters=adapters)
    assert read(folder).adapter_names == ("beta", "alpha")


def test_without_any_order_the_ordering_is_asked_for(folder):
    edit_json(folder / "xlora_config.json", adapters=...)
    with pytest.raises(UserError, match=r"class order is unknown; give an ordering file"):
        read(folder)
    assert read(folder, Ordering(("beta", "alpha"))).adapter_names == ("beta", "alpha")


def test_an_ordering_overrules_the_config_and_permutes_both_axes(folder):
    sites = SPEC.sites(MODEL)
    layers = {site: len(sites) - 1 - index for index, site in enumerate(sites)}
    mixture = read(folder, Ordering(("alpha", "beta"), layers))
    assert mixture.adapter_names == ("alpha", "beta")
    assert list(mixture.sites) == sites[::-1]
    assert mixture.site_index == layers


def test_an_adapter_that_the_ordering_leaves_out_is_not_part_of_the_mixture(folder):
    edit_json(folder / "xlora_config.json", xlora_depth=1, layerwise_scalings=False)
    save_file(xlora_names([(torch.zeros(1, 32), torch.zeros(1))]), folder / "xlora_classifier.safetensors")
    assert read(folder, Ordering(("alpha",))).adapter_names == ("alpha",)


def test_other_files_in_the_folders_are_ignored(folder):
    (folder / "README.md").write_text("# A model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "todo.txt").write_text("")
    (folder / "beta" / "README.md").write_text("---\n")
    (folder / "beta" / "optimizer.pt").write_bytes(b"\x80\x02")
    (folder / "beta" / "another.safetensors").write_bytes(b"no safetensors")
    assert_is_spec(read(folder))


def test_a_second_folder_of_the_same_name_is_refused(folder):
    shutil.copytree(folder / "beta", folder / "old" / "beta")
    with pytest.raises(UserError, match="two folders are named 'beta'"):
        read(folder)


def test_a_folder_that_is_a_link_out_of_the_repository_is_refused(folder, tmp_path):
    shutil.move(folder / "beta", tmp_path / "beta")
    (folder / "beta").symlink_to(tmp_path / "beta")
    with pytest.raises(UserError, match="beta links to a place outside"):
        read(folder)
