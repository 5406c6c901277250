"""Measuring: statistics with known answers, workloads, checks that stop a wrong engine, and the `bench` command.

Run: pytest tests/test_bench.py
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench import Engine, UserError
from workbench.cli import main
from workbench.sweep import checking, synthetic
from workbench.sweep.checking import CheckFailed, check, require_counts
from workbench.sweep.measure import Point, measure, measure_all, num_runs
from workbench.sweep.plan import Plan
from workbench.sweep.statistics import estimate, ratio
from workbench.sweep.workload import Workload

LENGTHS = {"concurrency": 4, "tokens": 5, "prompt_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny base."""
    where = tmp_path_factory.mktemp("bench")
    model = synthetic.random_model(synthetic.base_config("tiny"), torch.float32, "cpu")
    return synthetic.save_base(model, where / "tiny")


@pytest.fixture(scope="module")
def engine(folder):
    """Return an engine with three synthetic adapters and a synthetic mixture of three more."""
    made = Engine(folder)
    synthetic.load_adapters(made, synthetic.write_adapters(folder.parent / "a", made.model.targets, 3, 4))
    mixture = synthetic.write_mixture(folder.parent / "m", made.model.targets, 64, 3, 4, made.base_id, seed=1)
    made.load_mixture(mixture, "mix")
    return made


NAMES = ("synthetic-0", "synthetic-1", "synthetic-2")
WORKLOADS = {
    "base": Workload("base", **LENGTHS),
    "lora": Workload("lora", adapters=NAMES, **LENGTHS),
    "merged": Workload("merged", adapters=NAMES, **LENGTHS),
    "xlora": Workload("xlora", mixture="mix", **LENGTHS),
    "reused": Workload("xlora", mixture="mix", tgt_non_granular_index=1, **LENGTHS),
    "never reused": Workload("xlora", mixture="mix", tgt_non_granular_index=9, **LENGTHS),
}


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12), st.floats(0.1, 10))
def test_the_ratio_of_rounds_that_scale_together_is_exact_and_certain(baseline, factor):
    found = ratio([factor * value for value in baseline], baseline)
    assert found.value == pytest.approx(factor) and found.width == pytest.approx(0, abs=1e-9 * factor)
    assert found.n == len(baseline)


def test_a_ratio_is_that_of_the_medians_not_the_median_of_ratios():
    assert ratio([1, 10, 4], [2, 4, 8]).value == 1.0


@pytest.mark.parametrize("given, wrong", [
    (lambda: estimate([]), "at least one number"), (lambda: estimate([1.0, float("nan")]), "finite"),
    (lambda: estimate([1.0], confidence=1.0), "between 0 and 1"), (lambda: ratio([1, 2], [1]), "the same rounds"),
    (lambda: ratio([1], [0]), "above 0"),
])  # fmt: skip
def test_statistics_of_nothing_are_refused(given, wrong):
    with pytest.raises(ValueError, match=wrong):
        given()


def test_every_mode_is_measured_with_its_counts(engine):
    points = [Point(name, engine, workload) for name, workload in WORKLOADS.items()]
    done: list[str] = []
    found = {each.name: each for each in measure_all(points, repeats=2, progress=done.append).points}
    assert len(done) == num_runs(points, 2)
    # the rounds run in turns, each in the other order
    assert [text.rpartition(" ")[0] for text in done[-12:]] == [*WORKLOADS, *reversed(WORKLOADS)]
    inputs = 4 * (6 + 5 - 1)
    counts = {name: (each.counts["scalings_computed"][0], each.counts["scalings_reused"][0])
              for name, each in found.items()}
    assert counts == {"base": (0, 0), "lora": (0, 0), "merged": (0, 0), "xlora": (inputs, 0),
                      "reused": (4 * 7, inputs - 4 * 7), "never reused": (inputs, 0)}
    for name, each in found.items():
        record = each.to_dict()
        assert record["repeats"] == 2 and record["tok_s"] > 0 and record["ttft_ms"] > 0 and record["kv_bytes"] > 0
        assert record["tok_s_low"] <= record["tok_s"] <= record["tok_s_high"]
        assert record["forwards_per_token"] == record["forwards"] / 5
        assert record["checked"]["compared"] == 4
        assert record["checked"]["differ_from_base"] == (0 if name == "base" else 4)


def test_one_workload_can_be_measured_by_itself(engine):
    found = measure(engine, WORKLOADS["lora"], repeats=1)
    assert found.name == "lora" and len(found.samples["tok_s"]) == 1


def test_ratios_compare_with_the_named_point(engine):
    points = [Point(name, engine, WORKLOADS["base"]) for name in ("one", "two")]
    results = measure_all(points, repeats=3)
    assert list(results.ratios("two")) == ["one"]
    both = {point.name: np.median(point.samples["tok_s"]) for point in results.points}
    assert results.ratios("two")["one"]["tok_s"].value == pytest.approx(both["one"] / both["two"])
    with pytest.raises(UserError, match="did you mean 'two'"):
        results.ratios("tow")


def test_an_adapter_without_effect_stops_the_measurement(engine, monkeypatch):
    monkeypatch.setattr(Workload, "options_of", lambda self, number: {"adapter": NAMES[number % 3]})
    monkeypatch.setattr(Workload, "options", lambda self: {})
    monkeypatch.setattr(checking, "_require_tie", lambda *_: None)
    with pytest.raises(CheckFailed, match="no adapter ran"):
        check(engine, WORKLOADS["lora"])


def test_a_batch_that_differs_from_its_requests_alone_stops_the_measurement(engine, monkeypatch):
    # the batch runs on the first adapter, the requests alone on the one they asked for
    monkeypatch.setattr(Workload, "options", lambda self: {"adapter": [NAMES[0]] * self.concurrency})
    monkeypatch.setattr(Workload, "options_of", lambda self, number: {"adapter": NAMES[1]})
    with pytest.raises(CheckFailed, match=r"request \d of 4 in mode 'lora' chooses token \d+ in its batch, but"):
        check(engine, WORKLOADS["lora"])


def test_a_choice_between_nearly_equal_tokens_is_no_failure(engine, monkeypatch):
    monkeypatch.setattr(Workload, "options", lambda self: {"adapter": [NAMES[0]] * self.concurrency})
    monkeypatch.setattr(Workload, "options_of", lambda self, number: {"adapter": NAMES[1]})
    monkeypatch.setitem(checking.GAPS, "float32", 100.0)
    assert check(engine, WORKLOADS["lora"]).near_ties > 0


def test_scalings_that_were_not_computed_stop_the_measurement(engine):
    done = checking.generate(engine, WORKLOADS["reused"].prompts(engine), 5, **WORKLOADS["reused"].options())
    require_counts(done, WORKLOADS["reused"])
    with pytest.raises(CheckFailed, match=r"computed and reused \(7, 3\) scalings, expected \(10, 0\)"):
        require_counts(done, WORKLOADS["xlora"])


def test_a_request_that_fails_stops_the_measurement(engine, monkeypatch):
    failed = engine.generate([[5]], max_tokens=2)
    monkeypatch.setattr(engine, "generate", lambda *_, **__: [replace(failed[0], error="out of luck")])
    with pytest.raises(CheckFailed, match="out of luck"):
        measure(engine, WORKLOADS["base"])


@given(st.sampled_from(["identical", "uniform", "skewed", "zipf:1.5", "all_base", "half_base"]),
       st.integers(1, 20), st.integers(1, 9), st.integers(0, 5))  # fmt: skip
def test_every_request_gets_an_adapter_that_exists(popularity, num_requests, num_adapters, seed):
    chosen = synthetic.adapter_of_each(popularity, num_requests, num_adapters, seed)
    assert len(chosen) == num_requests and all(-1 <= each < num_adapters for each in chosen)
    if popularity == "uniform":
        counts = [chosen.count(each) for each in range(num_adapters)]
        assert max(counts) - min(counts) <= 1
    assert (-1 in chosen) == (popularity in ("all_base", "half_base"))


def test_synthetic_adapters_follow_their_seed_and_have_their_size(engine, tmp_path):
    targets = engine.model.targets
    paths = [synthetic.write_adapter(tmp_path / str(i), targets, 4, seed) for i, seed in enumerate((1, 1, 2))]
    contents = [(path / "adapter_model.safetensors").read_bytes() for path in paths]
    assert contents[0] == contents[1] != contents[2]
    assert 0 < len(contents[0]) - synthetic.adapter_bytes(targets, 4) < 10_000


def test_a_base_without_the_seven_projections_gets_adapters_on_its_linear_modules():
    class Target:
        is_embedding = False

    sites = {"transformer.h.0.attn.c_attn": Target(), "lm_head": Target()}
    assert synthetic.sites_of(sites) == ["transformer.h.0.attn.c_attn"]
    with pytest.raises(UserError, match="no modules 'q_proj'; its linear modules are 'c_attn'"):
        synthetic.sites_of(sites, ["q_proj"])


def test_adapters_that_the_disk_cannot_hold_are_refused(engine, tmp_path, monkeypatch):
    free = 3 * synthetic.adapter_bytes(engine.model.targets, 64)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    synthetic.write_adapters(tmp_path / "two", engine.model.targets, 2, 64)
    with pytest.raises(UserError, match=r"3 adapters of rank 64 take \d+.\d GB, but .* has \d+.\d GB free"):
        synthetic.write_adapters(tmp_path / "three", engine.model.targets, 3, 64)


def test_prompts_are_pieces_of_a_text_that_repeats():
    text = list(range(10))
    prompts = synthetic.text_prompts(text, 12, 15, seed=3)
    assert len({tuple(each) for each in prompts}) == 10
    assert all(b == (a + 1) % 10 for each in prompts for a, b in itertools.pairwise(each))


def test_a_mode_named_twice_and_several_popularities_have_names_of_their_own():
    plan = Plan(("base", "base", "lora"), popularity=("identical", "skewed"), baseline="base#2")
    assert plan.names() == ["base", "base#2", "lora/identical", "lora/skewed"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs `workbench bench` here: (exit code, standard output, standard error)."""
    monkeypatch.setattr("warnings.showwarning", __import__("warnings").showwarning)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["bench", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


SHORT = ("--concurrency", 3, "--tokens", 3, "--prompt-tokens", 4, "--repeats", 2)


def test_the_command_compares_all_modes(run, folder):
    code, out, err = run("--mode", "base,lora", "--mode", "merged,xlora", "--base", folder, "--json", *SHORT)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert [point["name"] for point in found["points"]] == ["base", "lora", "merged", "xlora"]
    assert found["baseline"] == "base" and set(found["ratios"]) == {"lora", "merged", "xlora"}
    assert found["versions"]["torch"] == torch.__version__ and found["points"][3]["rank"] == 8
    assert "--mode base,lora,merged,xlora" in found["command"] and "measuring" in err


def test_one_mode_has_its_figures_at_the_top(run, folder):
    options = ("--base", folder, "--tgt-non-granular-index", 0, "--rank", 3, "--json")
    code, out, err = run("--mode", "xlora", *options, *SHORT)
    found = json.loads(out.splitlines()[-1])
    wanted = ("tok_s", "ttft_ms", "forwards", "forwards_per_token", "scalings_computed", "scalings_reused")
    assert code == 0 and {*wanted, "peak_bytes"} <= set(found)
    assert found["rank"] == 3 and found["scalings_computed"] == 3 * 4 and found["scalings_reused"] == 3 * 2
    assert "--tgt-non-granular-index 0" in found["command"]


def test_given_adapters_run_and_the_table_says_the_ratio(run, folder, engine):
    given = [folder.parent / "a" / name for name in NAMES[:2]]
    code, out, _ = run("--mode", "base", "--mode", "lora", "--base", folder, "--adapter", *given, *SHORT)
    assert code == 0 and "ratio: of median tok/s to base's" in out and "6 requests have the tokens" in out


def test_a_wrong_result_prints_no_figure(run, folder, monkeypatch):
    monkeypatch.setattr(checking, "_NO_DELTA", 1e9)
    monkeypatch.setattr(checking, "_differs", lambda *_: False)
    code, out, err = run("--mode", "lora", "--base", folder, *SHORT)
    assert code == 1 and out == "" and "check failed, no figures: request" in err


MISTAKES = {
    "--mode bsae": "mode 'bsae' is not known; did you mean 'base'?",
    "--mode ,": "--mode names no mode",
    "--mode base --concurrency 0": "--concurrency must be a whole number of at least 1, not 0",
    "--mode base --tokens 1": "--tokens must be a whole number of at least 2",
    "--mode base --tgt-non-granular-index 2": "--tgt-non-granular-index is read by xlora only",
    "--mode base --adapters 2": "--adapters is read by lora, merged, or xlora",
    "--mode xlora --mixture demo --rank 2": "--rank is read by",
    "--mode base --no-drafting": "--no-drafting is read by xlora only",
    "--mode merged --popularity skewed": "--popularity is read by lora only",
    "--mode lora --adapter x --rank 2": "--rank is of synthetic adapters, and --adapter gives others",
    "--mode lora --popularity zip:1": "did you mean 'zipf:1.5'?",
    "--mode lora --popularity distinct --adapters 2": "gives each of 16 requests an adapter of its own",
    "--mode merged --adapters 4 --slots 3": "runs 4 adapters at once, more than --slots 3",
    "--mode base,lora --baseline xlora": "baseline 'xlora' is none of the measured points",
    "--mode base --tokens 600": "make 632, but base 'tiny' has room for 512",
    "--mode lora --adapter nowhere": "'nowhere'",
    "--mode xlora --mixture nowhere": "'nowhere'",
    "--mode base --dtype f32": "did you mean 'float32'?",
    "--mode base --device cuda:9": "CUDA devices here",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(run, folder, line):
    code, out, err = run(*line.split(), "--base", folder)
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert code == 2 and out == "" and "Traceback" not in err
    assert len(errors) == 1 and MISTAKES[line] in errors[0]


def test_random_prompts_follow_their_seed():
    assert synthetic.random_prompts(3, 5, 50, 1) == synthetic.random_prompts(3, 5, 50, 1)
    assert synthetic.random_prompts(3, 5, 50, 1) != synthetic.random_prompts(3, 5, 50, 2)
