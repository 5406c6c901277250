"""Orderings, read, checked and made: `pytest tests/test_ordering.py`."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UserError
from workbench.jsonfile import parse_json
from workbench.ordering import Ordering, expand_names, lora_sites, make_from_config, meta_model

ORDERINGS = Path(__file__).parent.parent / "orderings"
BLOCK = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32}
OPT = {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}

# every entry: architecture, sizes, prefix of a block, its linear layers in registration order
REGISTRATION = [
    ("llama", SIZES, "model.layers", BLOCK + MLP),
    ("mistral", SIZES, "model.layers", BLOCK + MLP),
    ("qwen2", SIZES, "model.layers", BLOCK + MLP),
    ("gemma", SIZES, "model.layers", BLOCK + MLP),
    ("phi3", SIZES, "model.layers", ["self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]),
    ("starcoder2", SIZES, "model.layers", [*BLOCK, "mlp.c_fc", "mlp.c_proj"]),
    ("mixtral", SIZES, "model.layers", BLOCK),
    (
        "opt",
        OPT,
        "model.decoder.layers",
        [f"self_attn.{name}_proj" for name in ("k", "v", "q", "out")] + ["fc1", "fc2"],
    ),
    ("gpt2", GPT2, "transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
]

adapter_names = st.lists(st.from_regex(r"[a-zA-Z0-9][\w-]{0,12}", fullmatch=True), min_size=1, max_size=6, unique=True)
site_names = st.lists(
    st.from_regex(r"(model|layers)(\.\w{1,6}){1,3}", fullmatch=True), min_size=2, max_size=9, unique=True
)


@st.composite
def orderings(draw) -> dict:
    sites = draw(site_names)
    indices = draw(st.permutations(range(len(sites))))
    layers = draw(st.sampled_from([None, dict(zip(sites, indices, strict=True))]))
    return {"order": draw(adapter_names), "layers": layers, "base_model_id": draw(st.sampled_from([None, "org/base"]))}


@given(data=orderings())
def test_written_ordering_reads_back_equal(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ordering") / "ordering.json"
    ordering = Ordering.from_dict(data)
    ordering.write(path)
    assert Ordering.read(path) == ordering
    assert json.loads(path.read_text()) == data


@given(sites=site_names, which=st.data())
def test_one_wrong_index_is_refused_and_named(sites, which):
    layers = {site: index for index, site in enumerate(sites)}
    site = which.draw(st.sampled_from(sites))
    wrong = which.draw(st.integers(-3, len(sites) + 3).filter(lambda index: index != layers[site]))
    layers[site] = wrong
    with pytest.raises(UserError, match=re.escape(site)) as caught:
        Ordering.from_dict({"order": ["a"], "layers": layers})
    expected = "given twice" if 0 <= wrong < len(sites) else "out of range"
    assert expected in str(caught.value) and "missing" in str(caught.value)


@given(sites=site_names, which=st.data())
def test_one_misspelt_site_is_refused_and_named_with_the_right_one(sites, which):
    site = which.draw(st.sampled_from(sites))
    layers = {name + "_typo" * (name == site): index for index, name in enumerate(sites)}
    ordering = Ordering.from_dict({"order": ["a"], "layers": layers})
    with pytest.raises(UserError) as caught:
        ordering.verify(sites)
    assert f"does not have: '{site}_typo'; did you mean '{site}'" in str(caught.value)
    assert f"lacks 1 site of the model: '{site}'" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": None}, "'order' is null, expected a list"),
        ({"order": "adapter_1"}, "'order' is a text, expected a list"),
        ({"order": []}, "'order' is empty"),
        ({"order": ["a", "b", "a"]}, "'order' repeats 'a'"),
        ({"order": ["a", 3]}, "'order' holds 3, expected only adapter names"),
        ({"order": ["a", "../b"]}, "'order' holds '../b', expected names of folders inside"),
        ({"order": ["/etc"]}, "'order' holds '/etc'"),
        ({"order": [""]}, "'order' holds ''"),
        ({"layers": [0, 1]}, "'layers' is a list"),
        ({"layers": {}}, "'layers' is empty"),
        ({"layers": {"s.q": True, "s.k": 0}}, "'layers' holds 's.q: true', expected whole numbers"),
        ({"layers": {"s.q": 0.0}}, "'layers' holds 's.q: 0.0'"),
        ({"layers": {"s.q": "0"}}, "'layers' holds"),
        ({"layers": {"s.q": None}}, "'layers' holds 's.q: null'"),
        ({"layers": {"s.q": 0, "s.k": 2}}, "must be 0 to 1, each once: out of range 's.k: 2'; missing 1"),
        ({"layers": {"s.q": 0, "s.k": 0}}, "given twice '0: s.q and s.k'; missing 1"),
        ({"base_model_id": 7}, "'base_model_id' is 7"),
        ({"base_model_id": ""}, "'base_model_id' is ''"),
        ({"layer": None}, "unknown key 'layer'.*; did you mean 'layers'"),
        ({"preload_adapters": "a"}, "'preload_adapters' is a text"),
        ({"preload_adapters": [{"name": "a"}]}, "'preload_adapters' holds {'name': 'a'}"),
        ({"preload_adapters": [{"name": "a", "adapter_model_id": "x"}] * 2}, "'preload_adapters' repeats 'a'"),
    ],
)
def test_wrong_field_is_named(change, message):
    good = {"order": ["a", "b"], "layers": {"s.q": 0}, "base_model_id": "base"}
    Ordering.from_dict(good)
    with pytest.raises(UserError, match=message):
        Ordering.from_dict(good | change)


def test_order_must_be_there():
    with pytest.raises(UserError, match="'order' is missing"):
        Ordering.from_dict({"layers": None})


def test_preload_adapters_survive_a_round_trip():
    data = {"order": ["a"], "layers": None, "base_model_id": None}
    data["preload_adapters"] = [{"name": "extra", "adapter_model_id": "org/extra"}]
    assert Ordering.from_dict(data).to_dict() == data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"order": ["a"],\n "layers": nul}', "not valid JSON: .* at line 2, column 12"),
        (b'{"order": ["a"], "layers": {"s.q": 0, "s.q": 1}}', "the same key twice in one object: 's.q'"),
        (b'{"order": ["a"], "order": ["b"]}', "the same key twice in one object: 'order'"),
        (b"[1]", "is a list, expected an object with the keys 'order'"),
        (b"", "not valid JSON: .* line 1, column 1"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_file_is_a_sentence(tmp_path, content, message):
    path = tmp_path / "ordering.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Ordering.read(path)


def test_missing_file_names_the_nearest(tiny, tmp_path):
    with pytest.raises(UserError, match=r"orderin.json' does not exist; did you mean 'ordering.json'"):
        Ordering.read(tiny / "orderin.json")
    with pytest.raises(UserError, match="does not exist: there is no folder"):
        Ordering.read(tmp_path / "nowhere" / "ordering.json")
    with pytest.raises(UserError, match="is a folder, expected a JSON file; it holds .*'ordering.json'"):
        Ordering.read(tiny)


def test_writing_into_no_folder_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be written: No such file"):
        Ordering(("a",)).write(tmp_path / "nowhere" / "ordering.json")


def test_a_byte_order_mark_is_no_error():
    assert parse_json("\ufeff{}".encode().decode("utf-8-sig"), "it") == {}


def test_adapters_match_folders_exactly():
    ordering = Ordering(("adapter_1", "adapter_2"))
    ordering.verify([], adapters=["adapter_2", "adapter_1", "adapter_10", "notes"])
    with pytest.raises(UserError, match="names 1 adapter without a folder: 'adapter_2'; did you mean 'adapter_20'"):
        ordering.verify([], adapters=["adapter_1", "adapter_20"])


def test_all_offenders_are_in_one_message():
    ordering = Ordering(("a", "lost"), {"s.q": 0, "s.x": 1, "s.y": 2})
    with pytest.raises(UserError) as caught:
        ordering.verify(["s.q", "s.k"], adapters=["a"])
    for offender in ("'s.x'", "'s.y'", "'s.k'", "'lost'"):
        assert offender in str(caught.value)


def test_null_layers_mean_the_model_s_own_order():
    sites = ["s.k", "s.q"]
    assert Ordering(("a",)).site_index(sites) == {"s.k": 0, "s.q": 1}
    assert Ordering(("a",), {"s.q": 0, "s.k": 1}).site_index(sites) == {"s.q": 0, "s.k": 1}


@pytest.mark.parametrize(("kind", "sizes", "prefix", "block"), REGISTRATION, ids=[row[0] for row in REGISTRATION])
def test_sites_come_in_registration_order(kind, sizes, prefix, block):
    model = meta_model({"model_type": kind, **sizes})
    sites = [f"{prefix}.{index}.{name}" for index in range(2) for name in block]
    assert lora_sites(model, "all-linear") == sites
    # the order asked for must not matter
    assert lora_sites(model, [name.rsplit(".", 1)[-1] for name in reversed(block)]) == sites
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "target", [["q_proj"], ["self_attn.q_proj", "gate_proj"], r".*\.1\..*_proj", ["lm_head", "embed_tokens", "v_proj"]]
)
def test_sites_match_as_peft_matches(target):
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    model = meta_model({"model_type": "llama", **SIZES})
    sites = lora_sites(model, target)
    wrapped = get_peft_model(model, LoraConfig(target_modules=target)).base_model.model
    assert sites == [name for name, module in wrapped.named_modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["q_proj", "gate_prj"], "names 'gate_prj', found nowhere .*; did you mean 'gate_proj'"),
        (["proj"], "names 'proj', found nowhere"),
        ([], "names none"),
        (["self_attn"], r"'model.layers.0.self_attn', which is a LlamaAttention and can carry no LoRA weights"),
        ("q_proj", "a regular expression for whole module paths, matches none"),
        ("*q_proj", r"'\*q_proj' is not a regular expression"),
    ],
)
def test_target_that_fits_nothing_is_named(target, message):
    with pytest.raises(UserError, match=message):
        lora_sites(meta_model({"model_type": "llama", **SIZES}), target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, "the architecture 'lama' is not supported; did you mean 'llama'"),
        ({"hidden_size": 16}, "has no 'model_type'"),
        ({"model_type": "clip"}, "'clip' is not supported: it is no causal language model"),
        (
            {"model_type": "llama", **SIZES, "num_hidden_layers": "many"},
            "is not a valid 'llama' config: .*num_hidden_layers",
        ),
        ({"model_type": "llama", **SIZES, "hidden_act": "silly"}, "built from this 'llama' config: .*silly"),
        ("nowhere/config.json", "model config 'nowhere/config.json' does not exist"),
    ],
)
def test_config_that_makes_no_model_is_a_sentence(config, message):
    with pytest.raises(UserError, match=message):
        meta_model(config)


def test_config_may_be_a_folder_a_file_a_dict_or_an_object(tiny):
    file = tiny / "base" / "config.json"
    object_form = meta_model(file).config
    forms = [file.parent, str(file), json.loads(file.read_text()), object_form]
    for form in forms:
        assert len(lora_sites(meta_model(form), ["q_proj"])) == 2


def test_fixture_s_ordering_is_what_make_makes(tiny):
    target = ["gate_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    order = expand_names("adapter_1..adapter_3")
    assert make_from_config(tiny / "base", target, order, "tiny-mistral") == Ordering.read(tiny / "ordering.json")


PUBLISHED = [
    ("xlora-paper-ordering", "zephyr-7b-beta", "HuggingFaceH4/zephyr-7b-beta", 9, 32, [*BLOCK, MLP[0]]),
    ("xlora-gemma-paper-ordering", "gemma-7b-it", "google/gemma-7b-it", 4, 28, BLOCK + MLP),
]


@pytest.mark.parametrize(("file", "config", "base", "num_adapters", "num_blocks", "block"), PUBLISHED)
def test_published_ordering_is_made_again_and_has_the_closed_form(file, config, base, num_adapters, num_blocks, block):
    committed = json.loads((ORDERINGS / f"{file}.json").read_text())
    order = [f"adapter_{index + 1}" for index in range(num_adapters)]
    layers = {
        f"model.layers.{index}.{name}": index * len(block) + place
        for index in range(num_blocks)
        for place, name in enumerate(block)
    }
    assert committed == {"order": order, "layers": layers, "base_model_id": base}
    assert list(committed["layers"]) == list(layers)
    target = [name.rsplit(".", 1)[-1] for name in block]
    made = make_from_config(ORDERINGS / "configs" / config, target, expand_names(f"adapter_1..{num_adapters}"), base)
    assert made.to_dict() == committed
    assert (ORDERINGS / f"{file}.json").read_text() == json.dumps(made.to_dict(), indent=1) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter_1..adapter_3", ["adapter_1", "adapter_2", "adapter_3"]),
        ("adapter_9..11", ["adapter_9", "adapter_10", "adapter_11"]),
        ("a_08..a_10", ["a_08", "a_09", "a_10"]),
        ("code, x1..x2 ,german", ["code", "x1", "x2", "german"]),
        ("0..2", ["0", "1", "2"]),
    ],
)
def test_names_expand(text, expected):
    assert expand_names(text) == expected


@pytest.mark.parametrize(
    "text", ["a_3..a_1", "a..b", "a_1..b_2", "../x", "a,,b", "", "a,a", "a1..a3,a2", "a1..a99999999"]
)
def test_names_that_do_not_expand_are_refused(text):
    with pytest.raises(UserError, match="adapter names"):
        expand_names(text)
