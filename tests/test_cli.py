"""The command line: right answers as JSON, and every mistake one sentence and exit code 2, never a traceback.

Run: pytest tests/test_cli.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.cli import main
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("ignore:the ordering was made for base", "ignore:the mixture was made for base")


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command in this process: (exit code, standard output, standard error)."""
    # importing transformers in a process whose warnings main() redirects must not leak into other tests
    monkeypatch.setattr("warnings.showwarning", __import__("warnings").showwarning)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def mistake(run):
    """Return a function that runs the command, expects a user's mistake, and returns the sentence."""

    def call(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert code == 2, (out, err)
        assert "Traceback" not in err
        errors = [line for line in err.splitlines() if line.startswith("error: ") or ": error: " in line]
        assert len(errors) == 1, err
        return errors[0]

    return call


@pytest.fixture
def copy(tiny, tmp_path):
    """Return a folder with a writable copy of the tiny fixture."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny, folder)
    return folder


def mixture_arguments(folder, *more: object) -> list[object]:
    """Return a `generate` command on the fixture's base and mixture."""
    base, mixture, ordering = folder / "base", folder / "xlora", folder / "ordering.json"
    return ["generate", "--base", base, "--mixture", mixture, "--ordering", ordering, *more]


def rewrite(path, **changes: object) -> None:
    """Change fields of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    for key, new in changes.items():
        value[key] = new
        if new is None:
            del value[key]
    path.write_text(json.dumps(value))


def test_generate_equals_the_golden_row_and_saves_the_trace(run, tiny, tmp_path):
    rows = json.loads((tiny / "golden.json").read_text())["rows"]
    golden = next(r for r in rows if r["prompt"].startswith("t1 ") and r["tgt_non_granular_index"] == 2)
    file = tmp_path / "t.safetensors"
    code, out, _ = run(*mixture_arguments(tiny, "--prompt-ids", "1,2,3,4,5,6,7", "--max-tokens", 6, "--json",
                                          "--tgt-non-granular-index", 2, "--trace", file))
    assert code == 0
    answer = json.loads(out.splitlines()[-1])
    assert answer["token_ids"] == golden["tokens"]
    assert answer["logprobs"] == pytest.approx(golden["logprobs"], abs=1e-4)
    assert (answer["scalings_computed"], answer["scalings_reused"]) == (9, 3)
    assert answer["finish_reason"] == "length"
    assert {"prompt_tokens", "completion_tokens", "avg_prompt_tok_per_sec", "avg_compl_tok_per_sec"} <= set(
        answer["usage"]
    )
    assert answer["trace"] == str(file)
    trace = Trace.load(file)
    assert trace.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, *golden["tokens"]]
    assert trace.computed.sum() == 9 and trace.reused.sum() == 3


def test_text_is_streamed_and_json_says_the_same(run, tiny):
    ask = mixture_arguments(tiny, "--prompt", "t1 t2 t3", "--max-tokens", 5)
    _, plain, _ = run(*ask)
    _, document, _ = run(*ask, "--json")
    assert plain.strip() == json.loads(document)["text"]


def test_the_base_may_be_left_out_when_the_ordering_names_it(run, copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    rewrite(copy / "ordering.json", base_model_id="./copy/base")
    code, out, _ = run("generate", "--mixture", copy / "xlora", "--ordering", copy / "ordering.json", "--prompt-ids",
                       "5", "--max-tokens", 2, "--json")
    assert code == 0 and json.loads(out)["token_ids"] == [56, 56]


def test_settings_override_the_mixtures(run, tiny):
    rows = json.loads((tiny / "golden.json").read_text())["rows"]
    golden = next(row for row in rows if row.get("config", {}).get("global_scaling_weight") == 2.0)
    _, out, _ = run(*mixture_arguments(tiny, "--prompt-ids", "5", "--max-tokens", 6, "--json", "--set",
                                       "softmax_temperature=0.5", "--set", "global_scaling_weight=2.0"))
    assert json.loads(out)["token_ids"] == golden["tokens"]


@pytest.mark.parametrize(("options", "said"), [
    (["--prompt-ids", "1", "--sampling", "mintokens=3"], "did you mean 'min_tokens'?"),
    (["--prompt-ids", "1", "--sampling", "n=3"], "generate prints one answer"),
    (["--prompt-ids", "1", "--response-format", "nofile"], "neither a JSON object nor a readable file"),
    (["--prompt-ids", "1", "--response-format", "{bad"], "--response-format is no JSON"),
    (["--prompt-ids", "1", "--response-format", '{"type": "regexp"}'], "did you mean 'regex'?"),
    (["--prompt-ids", ""], "prompt is empty"),
    (["--prompt", ""], "prompt is empty"),
    (["--prompt-ids", "1,128"], "0 to 127"),
    (["--prompt-ids", "-1"], "0 to 127"),
    (["--prompt-ids", "1,x"], "no comma-separated list of token ids"),
    (["--prompt-ids", ",".join(["1"] * 256)], "room for 256"),
    (["--prompt-ids", "1", "--max-tokens", "0"], "max_tokens"),
    (["--prompt-ids", "1", "--temperature", "-1"], "temperature"),
    (["--prompt-ids", "1", "--temperature", "nan"], "temperature"),
    (["--prompt-ids", "1", "--top-p", "1.5"], "top_p"),
    (["--prompt-ids", "1", "--tgt-non-granular-index", "-1"], "tgt_non_granular_index"),
    (["--prompt-ids", "1", "--dtype", "float23"], "did you mean 'float32'"),
    (["--prompt-ids", "1", "--set", "top_k_lra=2"], "did you mean 'top_k_lora'"),
    (["--prompt-ids", "1", "--set", "top_k_lora=0"], "top_k_lora"),
    (["--prompt-ids", "1", "--set", "top_k_lora"], "NAME=VALUE"),
    (["--prompt-ids", "1", "--chat"], "--chat needs the prompt as text"),
    (["--prompt-ids", "1", "--trace", "/no/such/folder/t.safetensors"], "no folder"),
    (["--prompt-ids", "1", "--trace", "t.txt"], "'t.txt': expected the name of a .safetensors file"),
    (["--prompt-ids", "1", "--device", "cuda:99"], "'device' is 'cuda:99', but torch finds"),
    (["--prompt", "t1 \udcff"], "lone surrogate"),
])
def test_bad_requests_are_sentences_before_the_base_is_loaded(mistake, tiny, options, said, monkeypatch):
    monkeypatch.setattr("workbench.engine.hf.BaseModel.load", lambda *_, **__: pytest.fail("the base was loaded"))
    assert said in mistake(*mixture_arguments(tiny, *options))


@pytest.mark.parametrize(("arguments", "said"), [
    (["generate", "--prompt", "x", "--tgt-non-granular-index", "2"], "--mixture"),
    (["generate", "--prompt", "x", "--ordering", "o.json"], "--mixture"),
    (["generate", "--prompt", "x", "--base", "./nowhere"], "folder not found"),
    (["generate", "--prompt", "x", "--base", "nonsense"], "neither a folder"),
    (["demo", "--max-tokens", "0"], "max_tokens"),
    (["inspect", "./nowhere"], None),
    (["ordering", "check", "nowhere.json"], "does not exist"),
    (["ordering", "make", "--config", "nowhere.json", "--base-id", "x/y", "--adapters", "a", "--target-modules", "q"],
     "does not exist"),
    (["lab", "--folder", "./nowhere"], "no such folder"),
])
def test_bad_commands_are_sentences(run, mistake, arguments, said):
    if said is None:
        code, out, _ = run(*arguments)
        assert code == 2 and "problem: " in out
    else:
        assert said in mistake(*arguments)


def _order_of_another(copy):
    rewrite(copy / "ordering.json", order=["adapter_1", "adapter_2", "adapter_33"])
    return "'adapter_33'", "did you mean 'adapter_3'"


def _repeated_index(copy):
    layers = json.loads((copy / "ordering.json").read_text())["layers"]
    layers["model.layers.1.mlp.gate_proj"] = 0
    rewrite(copy / "ordering.json", layers=layers)
    return "model.layers.1.mlp.gate_proj", "missing"


def _unknown_site(copy):
    layers = json.loads((copy / "ordering.json").read_text())["layers"]
    layers["model.layers.1.mlp.gate_porj"] = layers.pop("model.layers.1.mlp.gate_proj")
    rewrite(copy / "ordering.json", layers=layers)
    return "gate_porj", "gate_proj"


def _broken_json(copy):
    (copy / "ordering.json").write_text('{"order": [')
    return "not valid JSON", "line 1"


def _wrong_depth(copy):
    rewrite(copy / "xlora" / "xlora_config.json", xlora_depth=2)
    return "classifier", "2 linear layers"


def _classifier_of_other_shape(copy):
    file = copy / "xlora" / "xlora_classifier.safetensors"
    tensors = load_file(file)
    save_file({"last.weight": tensors["last.weight"][:20].contiguous(), "last.bias": tensors["last.bias"][:20].clone()},
              file)
    return "[20, 32]", "[30, 32]"


def _truncated_adapter(copy):
    file = copy / "xlora" / "adapter_2" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    return "adapter_2", "safetensors"


def _pickled_adapter(copy):
    home = copy / "xlora" / "adapter_2"
    (home / "adapter_model.safetensors").rename(home / "adapter_model.bin")
    return "adapter_model.bin", "refused"


def _dora(copy):
    rewrite(copy / "xlora" / "adapter_1" / "adapter_config.json", use_dora=True)
    return "use_dora", "refused"


def _adapter_of_another_width(copy):
    file = copy / "xlora" / "adapter_3" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "q_proj.lora_A" in key)
    tensors[key] = torch.zeros(4, 48)
    save_file(tensors, file)
    return "adapter_3", "q_proj"


def _missing_adapter(copy):
    shutil.rmtree(copy / "xlora" / "adapter_2")
    return "'adapter_2'", "no adapter folder"


def _adapter_without_config(copy):
    (copy / "xlora" / "adapter_2" / "adapter_config.json").unlink()
    return "there is no adapter_config.json in 'adapter_2'"


def _broken_generation_config(copy):
    (copy / "base" / "generation_config.json").write_text("{")
    return "generation_config.json' is not valid JSON"


def _end_that_is_no_token(copy):
    rewrite(copy / "base" / "generation_config.json", eos_token_id="</s>")
    return "eos_token_id must be token ids, whole numbers, not '</s>'"


def _missing_preload(copy):
    rewrite(copy / "ordering.json", preload_adapters=[{"name": "more", "adapter_model_id": "./nowhere/more"}])
    return "./nowhere", "does not exist"


def _unsupported_architecture(copy):
    rewrite(copy / "base" / "config.json", model_type="bloom", architectures=["BloomForCausalLM"])
    return "bloom", "not supported"


@pytest.mark.parametrize("damage", [
    _order_of_another, _repeated_index, _unknown_site, _broken_json, _wrong_depth, _classifier_of_other_shape,
    _truncated_adapter, _pickled_adapter, _dora, _adapter_of_another_width, _missing_adapter,
    _adapter_without_config, _broken_generation_config, _end_that_is_no_token, _unsupported_architecture,
])
def test_damage_is_named_before_the_base_is_loaded(mistake, copy, damage, monkeypatch):
    said = damage(copy)
    monkeypatch.setattr("workbench.engine.hf.BaseModel.load", lambda *_, **__: pytest.fail("the base was loaded"))
    sentence = mistake(*mixture_arguments(copy, "--prompt-ids", "1,2"))
    for words in said:
        assert words in sentence


def test_a_corrupt_base_is_a_sentence(mistake, copy):
    file = copy / "base" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert "do not load" in mistake(*mixture_arguments(copy, "--prompt-ids", "1,2"))


def test_inspect_says_what_is_there_and_what_is_wrong(run, copy):
    code, out, _ = run("inspect", copy / "xlora", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["sites"] == 10 and facts["problems"] == []
    rewrite(copy / "xlora" / "adapter_1" / "adapter_config.json", use_dora=True)
    code, out, _ = run("inspect", copy / "xlora")
    assert code == 2 and "use_dora" in out
    code, out, _ = run("inspect", copy / "xlora" / "adapter_3", "--base", copy / "base", "--json")
    assert code == 0 and json.loads(out)["rank"] == "4 at 10 sites"


@pytest.mark.parametrize(("source", "kind"), [("org/xlora", "mixture"), ("org/xlora/adapter_1", "adapter")])
def test_inspect_tells_a_mixture_on_the_hub_from_an_adapter(run, tiny, monkeypatch, source, kind):
    monkeypatch.setattr("workbench.hub.local_folder", lambda name, noun: tiny / name.removeprefix("org/"))
    code, out, _ = run("inspect", source)
    assert code == 0 and out.splitlines()[0].split() == ["kind", kind]


def test_inspect_tells_a_base_from_its_files(run, mistake, copy):
    code, out, _ = run("inspect", copy / "base", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["kind"] == "base model" and "q_proj x2" in facts["linear sites"]
    assert "inspect its folder" in mistake("inspect", copy / "xlora" / "xlora_config.json")
    code, out, _ = run("inspect", copy / "xlora" / "xlora_classifier.safetensors")
    assert code == 2 and "kind  file" in out and "problem: " in out
    _unsupported_architecture(copy)
    code, out, _ = run("inspect", copy / "base")
    assert code == 2 and "bloom" in out


def test_ordering_make_writes_what_check_accepts(run, tiny, tmp_path):
    file = tmp_path / "made.json"
    code, _, _ = run("ordering", "make", "--base", tiny / "base", "--adapters", "adapter_1..adapter_3",
                     "--target-modules", "q_proj,k_proj,v_proj,o_proj,gate_proj", "--base-id", "tiny-mistral",
                     "--out", file)
    assert code == 0
    assert json.loads(file.read_text()) == json.loads((tiny / "ordering.json").read_text())
    code, out, _ = run("ordering", "check", file, "--mixture", tiny / "xlora", "--base", tiny / "base")
    assert code == 0 and "fits mixture" in out


def test_every_command_has_help_with_an_example(run):
    for command in ([], ["demo"], ["generate"], ["inspect"], ["lab"], ["ordering"], ["ordering", "make"],
                    ["ordering", "check"], ["show"]):
        code, out, _ = run(*command, "--help")
        assert code == 0 and "example" in out


def test_a_settings_file_says_how_to_run(run, mistake, tiny, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(f'[engine]\nbase = "{tiny / "base"}"\nmax_len = 20\n[lora_config]\nmax_lora_rank = 2\n')
    code, out, _ = run("generate", "--config", file, "--prompt-ids", "1,2", "--max-tokens", 3, "--json")
    assert code == 0 and len(json.loads(out)["token_ids"]) == 3
    assert "room for 20" in mistake("generate", "--config", file, "--prompt-ids", "1,2", "--max-tokens", 30)
    adapter = tiny / "xlora" / "adapter_1"
    assert "max_lora_rank is 2" in mistake("generate", "--config", file, "--adapter", adapter, "--prompt-ids", "1",
                                              "--max-tokens", 3)
    file.write_text("[engin]\n")
    assert "did you mean 'engine'" in mistake("generate", "--config", file, "--prompt-ids", "1")
    file.write_text("[lora_config]\nmax_num_lora = 2\n")
    assert "did you mean 'max_num_loras'" in mistake("generate", "--config", file, "--prompt-ids", "1")


def test_import_is_light():
    """`import workbench` and `workbench --help` load neither torch nor transformers."""
    code = ("import sys, workbench, workbench.cli; workbench.cli.parser(); "
            "print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
