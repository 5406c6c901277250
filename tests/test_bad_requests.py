"""Prompts, settings and bases that do not fit, each a sentence: `pytest tests/test_bad_requests.py`."""

import json
from pathlib import Path

import pytest
import torch
from models import Adapter, MixtureSpec, byte_tokenizer, save_base, tiny_model
from safetensors.torch import load_file, save_file

from workbench import Engine, UserError, exact

pytestmark = pytest.mark.filterwarnings("ignore:the mixture was made for base")
MODEL = tiny_model("llama", vocab_size=259)
SPEC = MixtureSpec({"a": Adapter(("q_proj",)), "b": Adapter(("q_proj",), seed=2)})


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    folder = tmp_path_factory.mktemp("shelf")
    engine = Engine(byte_tokenizer(save_base(MODEL, folder / "tiny")))
    engine.load_mixture(SPEC.write(folder / "mix", MODEL), "mix")
    engine.load_adapter(folder / "mix" / "a", "legal")
    return engine


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        ([], "the prompt is empty"),
        (torch.zeros(0, dtype=torch.int64), "the prompt is empty"),
        ([3, 259], "token ids must be whole numbers from 0 to 258 .the vocabulary of base 'tiny'., not 259"),
        ([3, -1], "not -1"),
        ([3, 1.5], "not 1.5"),
        ([3, True], "not True"),
        ([3, "x"], "not 'x'"),
        ([3, None], "not None"),
        (None, "a prompt is text, token ids or a list of chat messages, not NoneType"),
        (3, "not int"),
        (b"text", "not bytes"),
        ({"role": "user"}, "not dict"),
        ([3] * 126, "the prompt has 126 tokens and max_tokens is 3: 129 in all, but base 'tiny' has room for 128"),
        ([{"role": "user"}], "a chat message needs role and content: {'role': 'user'}"),
        ([{"role": "user", "content": "x"}, "y"], "a chat message needs role and content: 'y'"),
        ([{"role": "wizard", "content": "x"}], "the chat template of base 'tiny' refuses these messages: no wizard"),
    ],
    ids=repr,
)
def test_a_prompt_that_does_not_fit_is_refused(engine, prompt, message):
    with pytest.raises(UserError, match=message):
        engine.enqueue(prompt, max_tokens=3)
    assert not engine.scheduler.has_work()


def test_the_longest_prompt_that_fits_runs(engine):
    assert len(engine.generate([3] * 125, max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "legl"}, "no adapter 'legl' is loaded; did you mean 'legal'.*; loaded: 'legal'"),
        ({"mixture": "mx"}, "no mixture 'mx' is loaded; did you mean 'mix'"),
        ({"adapter": "mix"}, "no adapter 'mix' is loaded"),
        ({"adapter": "legal", "mixture": "mix"}, "name one of adapter .'legal'. and mixture .'mix'., not both"),
        ({"tgt_non_granular_index": 1}, "tgt_non_granular_index and policy say how .*; name a mixture"),
        ({"adapter": "legal", "policy": exact()}, "name a mixture"),
        ({"mixture": "mix", "tgt_non_granular_index": -1}, "must be a whole number of at least 0, not -1"),
        ({"mixture": "mix", "tgt_non_granular_index": True}, "must be a whole number of at least 0, not True"),
        ({"mixture": "mix", "tgt_non_granular_index": 1.0}, "must be a whole number"),
        (
            {"mixture": "mix", "tgt_non_granular_index": 1, "policy": exact()},
            "give tgt_non_granular_index .1. or policy",
        ),
        ({"temprature": 1.0}, "unknown setting 'temprature'; did you mean 'temperature'"),
        ({"mixtures": "mix"}, "unknown setting 'mixtures'; did you mean 'mixture'"),
        ({"top_p": 2.0}, "top_p must be above 0 and at most 1, not 2.0"),
    ],
    ids=repr,
)
def test_options_that_do_not_fit_are_refused(engine, options, message):
    with pytest.raises(UserError, match=message):
        engine.enqueue([5, 6], **{"max_tokens": 3, **options})
    assert not engine.scheduler.has_work()


def test_a_running_requests_id_is_taken_and_free_again_afterwards(engine):
    request = engine.enqueue([5], request_id="mine", max_tokens=2, ignore_eos=True)
    with pytest.raises(UserError, match="request id 'mine' is taken by a request that is still running"):
        engine.enqueue([5], request_id="mine", max_tokens=2)
    while request.finish_reason is None:
        engine.step()
    engine.cancel(engine.enqueue([5], request_id="mine", max_tokens=2))


def test_a_base_without_tokenizer_runs_token_ids_only(tmp_path):
    plain = Engine(save_base(MODEL, tmp_path / "plain"))
    done = plain.generate([5, 6], max_tokens=3, ignore_eos=True)
    assert len(done.token_ids) == 3 and done.text == ""
    with pytest.raises(UserError, match="base 'plain' has no tokenizer, so text cannot be encoded; give token ids"):
        plain.generate("hi", max_tokens=3)
    with pytest.raises(UserError, match="so chat messages cannot be encoded"):
        plain.generate([{"role": "user", "content": "hi"}], max_tokens=3)
    plain.load_mixture(SPEC.write(tmp_path / "mix", MODEL), "mix")
    with plain.record() as recorder:
        done = plain.generate([5, 6], mixture="mix", max_tokens=2, ignore_eos=True)
    assert recorder.trace().tokens == tuple(f"<{token}>" for token in (5, 6, *done.token_ids))


def test_a_base_without_chat_template_says_so(tmp_path):
    folder = byte_tokenizer(save_base(MODEL, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="base 'plain' has no chat template; give the prompt as text"):
        Engine(folder).generate([{"role": "user", "content": "hi"}], max_tokens=3)


def broken(folder: Path, how: str) -> Path:
    """Write a base and break it."""
    save_base(MODEL, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "pickle":
        weights.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    elif how == "lost a tensor":
        save_file({k: v for k, v in tensors.items() if "q_proj" not in k}, weights, {"format": "pt"})
    elif how == "another shape":
        tensors["lm_head.weight"] = torch.zeros(3, 32)
        save_file(tensors, weights, {"format": "pt"})
    elif how == "no config":
        config.unlink()
    elif how == "malformed config":
        config.write_text("{")
    elif how == "a list as config":
        config.write_text("[]")
    elif how == "no type":
        config.write_text(json.dumps({"hidden_size": 32}))
    elif how == "new type":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama9"}))
    elif how == "malformed tokenizer":
        byte_tokenizer(folder)
        (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "base 'sick': its weights in .* do not load"),
        ("no weights", "model.safetensors"),
        ("pickle", r"pytorch_model\.bin.*safetensors"),
        ("lost a tensor", "base 'sick': 4 weights are missing from .*: 'model.layers.0.self_attn.q_proj.bias', "),
        (
            "another shape",
            r"1 weights do not fit its config: lm_head.weight is \[3, 32\], not \[259, 32\]",
        ),
        ("no config", "config.json"),
        ("malformed config", "config.json"),
        ("a list as config", "config.json.* must hold a JSON object"),
        ("no type", "config.json"),
        ("new type", "llama9.*did you mean 'llama'"),
        ("malformed tokenizer", "the tokenizer in .* does not load"),
    ],
)
def test_a_base_that_does_not_load_says_why(tmp_path, how, message):
    with pytest.raises(UserError, match=message) as caught:
        Engine(broken(tmp_path / "sick", how))
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 900


def test_limits_of_the_engine_are_checked(tmp_path):
    folder = save_base(MODEL, tmp_path / "tiny")
    with pytest.raises(UserError, match="max_len 200 is beyond the context of base 'tiny', 128 tokens"):
        Engine(folder, max_len=200)
    with pytest.raises(UserError, match="base 'tiny' has room for 10"):
        Engine(folder, max_len=10).generate([3] * 8, max_tokens=3)
    with pytest.raises(UserError, match="unknown key 'dtypes'; did you mean 'dtype'"):
        Engine(folder, dtypes="float32")
    with pytest.raises(UserError, match="nowhere"):
        Engine(tmp_path / "nowhere")


def test_a_mixture_that_does_not_fit_is_refused_before_the_bases_weights_are_read(tmp_path):
    """The weights are broken too, but that would come second."""
    folder = broken(tmp_path / "tiny", "truncated")
    SPEC.write(tmp_path / "mix", tiny_model("llama", hidden_size=48))
    with pytest.raises(UserError, match="mixture 'mix' was made for hidden size 48, base 'tiny' has 32"):
        Engine.from_mixture(tmp_path / "mix", base=folder)
    with pytest.raises(UserError, match="do not load"):
        Engine.from_mixture(SPEC.write(tmp_path / "good", MODEL), base=folder)
