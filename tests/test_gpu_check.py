"""The check on a card, rehearsed on a CPU: every section runs, what is wrong is seen, nothing already found is lost.

Run: pytest tests/test_gpu_check.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layers import ABSENT

from lora_kernels.registry import OPS
from workbench import UserError
from workbench.cli import main
from workbench.sweep import gpu_check, gpu_engine, gpu_kernels
from workbench.sweep.gpu_check import Report, Section, Setting, cut_short, problems, run_sections, summary
from workbench.sweep.workload import Workload

ROOT = Path(__file__).parent.parent
TOY = Setting(torch.device("cpu"), toy=True)
SECTIONS = ("exact", "kernels", "graphs", "decode", "roofline")


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs `workbench gpu-check` here: (exit code, standard output, standard error)."""
    monkeypatch.setattr("warnings.showwarning", __import__("warnings").showwarning)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["gpu-check", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def report_of(tmp_path, *sections: Section, budget_s: float = 60.0) -> tuple[bool, Report]:
    """Run sections and return whether all is right, and the report."""
    report = Report.start(tmp_path / "report.json", TOY, "a test")
    return run_sections(sections, TOY, report, budget_s), report


def test_every_section_runs_at_toy_size(run, tmp_path):
    path = tmp_path / "deep" / "toy.json"
    code, out, err = run("--device", "cpu", "--toy", "--out", path, "--budget-s", 600)
    assert code == 0, out
    data = json.loads(path.read_text())
    assert {name: section["status"] for name, section in data["sections"].items()} == dict.fromkeys(SECTIONS, "right")
    assert data["versions"]["torch"] == torch.__version__ and "--toy" in data["command"] and data["created"]
    records = {name: section["records"] for name, section in data["sections"].items()}
    assert {each["op"] for each in records["kernels"]} == {each["op"] for each in records["graphs"]} == set(OPS)
    assert {each["dtype"] for each in records["kernels"]} == {"bfloat16", "float16", "float32"}
    assert {each["op"] for each in records["roofline"]} == set(OPS)
    assert [each["mode"] for each in records["exact"]][:4] == ["base", "lora", "lora, half base", "merged"]
    modes = [each["mode"] for each in records["decode"] if "mode" in each]
    assert modes == ["base", "lora", "xlora", "xlora", "base", "lora", "base", "lora"]
    assert "16 rows, 4 adapters" in out and str(path) in out and "kernels   right" in err


def test_it_runs_in_a_checkout_without_installation_and_without_jupyter(tmp_path):
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {ABSENT}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path[:] = [Block(), *(f for f in sys.meta_path if 'editable' not in repr(f))]\n"
        "sys.path[:] = [p for p in sys.path if 'editable' not in p]\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('lora_kernels') is None\n"
        "from workbench.cli import main\n"
        f"command = 'gpu-check --device cpu --toy --sections graphs --out {tmp_path / 'x'}'\n"
        "code = main(command.split())\n"
        f"print(code, [name for name in {ABSENT} if name in sys.modules], sys.modules['workbench'].__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"0 [] {ROOT / 'workbench' / '__init__.py'}"


def test_without_a_card_it_is_one_sentence(run):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, out, err = run()
    assert code == 2 and out == "" and err == (
        "error: gpu-check needs a CUDA card, and torch finds none here; workbench bench measures a CPU\n"
    )


@pytest.mark.parametrize("line, wrong", [
    ("--sections kernel", "did you mean 'kernels'?"), ("--sections ,", "names no section"),
    ("--budget-s 0", "must be above 0 seconds"), ("--budget-s nan", "must be above 0 seconds"),
    ("--out /dev/null/x", "cannot be written"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(run, line, wrong):
    code, out, err = run("--device", "cpu", "--toy", *line.split())
    assert code == 2 and out == "" and "Traceback" not in err
    assert len([each for each in err.splitlines() if each.startswith("error: ") and wrong in each]) == 1


def test_a_cpu_is_no_card(run):
    assert run("--device", "cpu")[0] == 2


def test_a_section_that_crashes_loses_nothing(tmp_path):
    def crash(setting):
        yield {"ok": True, "op": "first"}
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")

    is_right, report = report_of(
        tmp_path, Section("a", "crashes", crash, 1), Section("b", "fine", lambda _: iter([{"ok": True}]), 1)
    )
    saved = json.loads(report.path.read_text())["sections"]
    assert not is_right and saved["a"]["status"] == "wrong" and saved["b"]["status"] == "right"
    assert saved["a"]["records"][0] == {"ok": True, "op": "first"}
    assert problems(report) == ["a: RuntimeError: CUDA error: an illegal memory access was encountered more of it"]


def test_what_was_found_is_on_disk_when_the_process_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_SAVE_S", 0.0)

    def stopped(setting):
        yield {"ok": True, "op": "first"}
        # a process that is killed has no time to write
        assert json.loads((tmp_path / "report.json").read_text())["sections"]["a"]["records"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_of(tmp_path, Section("a", "stopped", stopped, 1))
    saved = json.loads((tmp_path / "report.json").read_text())["sections"]["a"]
    assert saved["records"] == [{"ok": True, "op": "first"}] and saved["status"] == "unfinished"


def test_a_section_without_time_has_not_passed(tmp_path):
    def slow(setting):
        while setting.has_time():
            time.sleep(0.01)
            yield {"ok": True}
        yield cut_short("the rest")

    is_right, report = report_of(
        tmp_path, Section("a", "slow", slow, 1), Section("b", "slow", slow, 3), budget_s=0.4
    )
    sections = report.data["sections"]
    assert not is_right and sections["a"]["status"] == sections["b"]["status"] == "unfinished"
    # the second has its share although the first used all of its own
    assert sections["a"]["seconds"] < 0.25 and len(sections["b"]["records"]) > 2
    assert problems(report)[0] == "a: not finished; no time was left for the rest; raise --budget-s"
    assert "problem: b: not finished" in summary(report)


def test_sections_of_an_earlier_run_on_the_same_card_stay(run, tmp_path):
    path = tmp_path / "toy.json"
    options = ("--device", "cpu", "--toy", "--out", path)
    assert run(*options, "--sections", "graphs")[0] == 0
    assert run(*options, "--sections", "kernels")[0] == 0
    assert list(json.loads(path.read_text())["sections"]) == ["graphs", "kernels"]
    path.write_text("no JSON")
    assert run(*options, "--sections", "graphs")[0] == 0
    assert list(json.loads(path.read_text())["sections"]) == ["graphs"]


def test_a_wrong_op_is_named(tmp_path, monkeypatch):
    right = OPS["mix"]
    monkeypatch.setitem(OPS, "mix", replace(right, run=lambda p: lambda: right.run(p)() * 1.1))
    is_right, report = report_of(tmp_path, Section("kernels", "", gpu_kernels.kernels, 1))
    found = problems(report)
    assert not is_right and found and all("mix (torch, " in each and "is wrong by" in each for each in found)
    # its speed is of no interest either
    _, report = report_of(tmp_path, Section("roofline", "", gpu_kernels.roofline, 1))
    assert any("is wrong by" in each and "nothing was timed" in each for each in problems(report))


def test_a_replay_that_keeps_old_operands_is_named(tmp_path, monkeypatch):
    right = OPS["bgmv"]
    section = Section("graphs", "", gpu_kernels.graphs, 1)
    stale = "a replayed graph does not follow its operands"
    with monkeypatch.context() as patch:
        patch.setitem(OPS, "bgmv", replace(right, run=lambda p: right.run(replace(p, x=p.x.clone()))))
        assert problems(report_of(tmp_path, section)[1]) == [f"graphs: bgmv: {stale}"]

    def once(call, device):
        made = call().clone()
        return lambda: None, lambda: made

    monkeypatch.setattr(gpu_kernels, "_captured", once)
    assert problems(report_of(tmp_path, section)[1]) == [f"graphs: {op}: {stale}" for op in OPS]
    monkeypatch.setattr(gpu_kernels, "_captured", lambda call, device: (lambda: None, lambda: call() + 1))
    assert all("differs from an eager launch" in each for each in problems(report_of(tmp_path, section)[1]))


def test_an_engine_that_mixes_up_adapters_is_named(tmp_path, monkeypatch):
    options = Workload.options

    def mixed_up(self):
        given = options(self)
        return {**given, "adapter": given["adapter"][::-1]} if "adapter" in given else given

    monkeypatch.setattr(Workload, "options", mixed_up)
    monkeypatch.setattr(Workload, "options_of", lambda self, number: {k: v[number] for k, v in options(self).items()})
    _, report = report_of(tmp_path, Section("exact", "", gpu_engine.exact, 1))
    assert any("lora: request" in each and "alone" in each for each in problems(report))


def test_a_results_file_is_named_after_its_card(monkeypatch):
    monkeypatch.setattr(gpu_check, "card_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert gpu_check.results_path(torch.device("cpu")) == (
        ROOT / "experiments" / "results" / "gpu" / "nvidia-h100-80gb-hbm3.json"
    )


def test_unknown_sections_are_refused():
    with pytest.raises(UserError, match="sections are 'a'"):
        gpu_check.chosen([Section("a", "", iter, 1)], ["zzz"])
