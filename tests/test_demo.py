"""The demo on its real base: the right adapter leads, the files are there, the counts add up, PEFT agrees.

Run: pytest tests/test_demo.py   (the base model is found or downloaded once, 93 MB)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench import open_run
from workbench.cli import main
from workbench.cli.demo import read_segments
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def engine():
    """An engine with the demo mixture."""
    from workbench import Engine

    return Engine.from_mixture("demo")


@pytest.fixture
def demo(tmp_path, capsys):
    """Return a function that runs `workbench demo --json` with more options and returns its document."""

    def call(*options: str) -> dict:
        capsys.readouterr()
        assert main(["demo", "--json", "--out", str(tmp_path / "out"), *options]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_the_right_adapter_leads_in_every_segment(demo):
    report = demo("--max-tokens", "6", "--tgt-non-granular-index", "4")
    expected = "base adapters segments text usage scalings_computed scalings_reused trace figure"
    assert set(expected.split()) <= set(report)
    assert report["dtype"] == "float32"
    assert [segment["top_adapter"] for segment in report["segments"]] == [s["domain"] for s in read_segments()]
    assert all(segment["share"] > 1 / len(report["adapters"]) for segment in report["segments"])
    assert report["scalings_computed"] == report["usage"]["prompt_tokens"] + 4
    assert report["scalings_reused"] == 6 - 1 - 4
    trace = Trace.load(report["trace"])
    assert trace.num_tokens == report["usage"]["total_tokens"]
    run = open_run(report["run"])
    assert run.status == "complete" and len(run.trace_ids) == 1 + len(report["segments"]) == len(run.requests)
    assert len(run.steps) == report["forwards"] and report["text"] in run.requests["text"].tolist()
    page = Path(report["figure"]).read_text(encoding="utf-8")
    assert page.startswith("<!") and "scripture" in page
    assert Path(report["picture"]).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("options", "said"), [
    (["--max-tokens", "100000"], "shorten the prompt or lower max_tokens"),
    (["--tgt-non-granular-index", "-1"], "tgt_non_granular_index must be a whole number"),
])
def test_what_cannot_run_is_a_sentence_before_the_base_is_loaded(tmp_path, capsys, monkeypatch, options, said):
    monkeypatch.setattr("workbench.engine.hf.BaseModel.load", lambda *_, **__: pytest.fail("the base was loaded"))
    assert main(["demo", "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_report_for_people_names_the_page(tmp_path, capsys):
    assert main(["demo", "--max-tokens", "2", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "out" / "demo.html") in shown
    for segment in read_segments():
        assert segment["domain"] in shown


def test_a_file_in_the_way_of_the_folder_is_a_sentence(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_peft_gives_the_demo_adapters_the_same_logits(engine):
    """Each shipped adapter, loaded by PEFT on the same base, gives the log-probabilities that the engine gives."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from workbench import hub

    base = AutoModelForCausalLM.from_pretrained(hub.resolve_base("demo"), dtype=torch.float32)
    folder, segments = hub.resolve_mixture("demo"), read_segments()
    model = None
    for name in engine.mixtures["demo"].adapter_names:
        model = PeftModel.from_pretrained(base, folder / name, name) if model is None else model
        if name not in model.peft_config:
            model.load_adapter(folder / name, name)
        model.set_adapter(name)
        engine.load_adapter(folder / name, f"{name} alone")
        text = next(segment["text"] for segment in segments if segment["domain"] == name)
        ours = engine.generate(text, adapter=f"{name} alone", max_tokens=4, ignore_eos=True)
        ids = torch.tensor([[*engine.tokenizer(text)["input_ids"], *ours.token_ids]])
        with torch.inference_mode():
            theirs = torch.log_softmax(model(ids).logits[0], dim=-1)
        rows = torch.arange(ids.shape[1] - 5, ids.shape[1] - 1)
        expected = theirs[rows, torch.tensor(ours.token_ids)].numpy()
        np.testing.assert_allclose(ours.logprobs, expected, atol=1e-4)
        engine.unload(f"{name} alone")


def test_the_demo_mixture_equals_its_definition(engine):
    """Scalings and log-probabilities of the engine equal the shortest exact X-LoRA forward, written out here."""
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional as F

    from workbench import hub

    text = read_segments()[1]["text"]
    with engine.record("scalings") as recorder:
        ours = engine.generate(text, mixture="demo", max_tokens=3, ignore_eos=True)
    trace = recorder.trace(ours.request_id)
    ids = torch.tensor([trace.token_ids[:-1].tolist()])
    model, scalings = _plain_model(hub.resolve_base("demo")), None
    folder = hub.resolve_mixture("demo")
    head = load_file(folder / "xlora_classifier.safetensors")
    names = engine.mixtures["demo"].adapter_names
    weights = [load_file(folder / name / "adapter_model.safetensors") for name in names]
    scale = [json.loads((folder / name / "adapter_config.json").read_text()) for name in names]

    def add_deltas(site: str, index: int):
        def hook(module, inputs, output):
            if scalings is None:
                return output
            for n, (tensors, config) in enumerate(zip(weights, scale, strict=True)):
                a, b = (tensors[f"base_model.model.{site}.lora_{side}.weight"].float() for side in "AB")
                delta = inputs[0] @ a.T @ b.T * (config["lora_alpha"] / config["r"])
                output = output + scalings[:, :, index, n, None] * delta
            return output

        return hook

    for index, site in enumerate(trace.sites):
        model.get_submodule(site).register_forward_hook(add_deltas(site, index))
    with torch.inference_mode():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        logits = F.linear(hidden, head["last.weight"].float(), head["last.bias"].float())
        scalings = logits.unflatten(-1, (len(trace.sites), len(names))).softmax(-1)
        theirs = torch.log_softmax(model(ids, use_cache=False).logits[0, -3:], dim=-1)
    np.testing.assert_allclose(trace.values[:-1], scalings[0].numpy(), atol=1e-5)
    expected = theirs[torch.arange(3), torch.tensor(ours.token_ids)].numpy()
    np.testing.assert_allclose(ours.logprobs, expected, atol=1e-4)


def _plain_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
