"""`workbench show`: pages and figures of traces and runs; every mistake is one sentence.

Run: pytest tests/test_cli_show.py
"""

from __future__ import annotations

import pytest
from test_run import STEP, named
from trace_problem import small_trace

from workbench import Comparison, RunWriter
from workbench.cli import main
from workbench.cli.demo import _earlier_run


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Return a function that runs `workbench show` in an empty folder: (exit code, standard output, error)."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["show", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def mistake(call):
    """Return a function that expects a user's mistake and returns the sentence."""

    def run(*arguments: object) -> str:
        code, _, error = call(*arguments)
        assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
        return error

    return run


@pytest.fixture
def folder(tmp_path):
    """A run with two traces."""
    with RunWriter(tmp_path / "monday") as writer:
        writer.step(STEP)
        for name in ("req-1", "req/2"):
            writer.trace(named(name, small_trace(tokens=("Alpha", " beta", f" {name}", "."))))
    return tmp_path / "monday"


@pytest.fixture
def trace(tmp_path):
    return small_trace(tokens=("<script>", " beta", " gamma", ".")).save(tmp_path / "one.safetensors")


def test_a_trace_becomes_a_page_in_the_working_folder(call, trace, tmp_path):
    code, out, _ = call(trace, "--title", "A <title>")
    assert (code, out) == (0, "one.html\n")
    page = (tmp_path / "here" / "one.html").read_text(encoding="utf-8")
    assert page.startswith("<!") and "gamma" in page and "A &lt;title&gt;" in page


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_says_what_is_written(call, trace, tmp_path, suffix, magic):
    code, out, _ = call(trace, "--out", tmp_path / f"figure.{suffix}")
    assert code == 0 and out == f"{tmp_path}/figure.{suffix}\n"
    assert (tmp_path / f"figure.{suffix}").read_bytes().startswith(magic)


def test_a_request_of_a_run_is_shown_and_its_id_decides_no_path(call, folder, tmp_path):
    code, out, _ = call(folder, "--request", "req/2")
    assert (code, out) == (0, "monday-req-2.html\n")
    assert " req/2" in (tmp_path / "here" / "monday-req-2.html").read_text(encoding="utf-8")


def test_the_only_trace_of_a_run_needs_no_name(call, tmp_path):
    with RunWriter(tmp_path / "tuesday") as writer:
        writer.trace(named("req-1", small_trace(tokens=("Only", " one", "!", "?"))))
    for path, name in ((tmp_path / "tuesday", "tuesday"), (tmp_path / "tuesday" / "run.json", "tuesday")):
        assert call(path)[:2] == (0, f"{name}.html\n")
        assert "Only" in (tmp_path / "here" / f"{name}.html").read_text(encoding="utf-8")


def test_a_run_with_several_traces_or_none_is_shown_as_a_run(call, folder, tmp_path, monkeypatch):
    shown = []

    class Picture:
        def save(self, path):
            path.write_text("page")

    monkeypatch.setattr("workbench.display.show", lambda it, title=None: shown.append((it, title)) or Picture())
    code, out, said = call(folder, "--title", "T")
    assert (code, out) == (0, "monday.html\n") and "2 traces: 'req-1', 'req/2'; --request ID" in said
    assert shown[0][0].name == "monday" and shown[0][1] == "T"
    RunWriter(tmp_path / "empty").close()
    assert call(tmp_path / "empty")[0] == 0 and shown[1][0].name == "empty"


def test_a_page_is_opened_in_the_browser_if_there_is_one(call, trace, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) == 1)
    assert call(trace, "--open")[2] == "" and opened == [(tmp_path / "here" / "one.html").as_uri()]
    assert "no browser could be opened; open one.html yourself" in call(trace, "--open")[2]


def test_a_comparison_is_shown_from_its_folder_or_its_index(call, mistake, tmp_path):
    trace = small_trace(tokens=("Alpha", " beta", " gamma", "."))
    folder = Comparison.of({"exact": trace, "k = 4": trace}).save(tmp_path / "compared")
    for path in (folder, folder / "comparison.safetensors"):
        assert call(path, "--title", "Two <settings>")[:2] == (0, "compared.html\n")
        page = (tmp_path / "here" / "compared.html").read_text(encoding="utf-8")
        assert "Two &lt;settings&gt;" in page and "What each setting changed" in page and "k = 4" in page
    assert "is a comparison" in mistake(folder, "--request", "req-1")
    (folder / "setting-1.safetensors").unlink()
    assert "is damaged: it lacks 'setting-1.safetensors'" in mistake(folder)


def test_every_mistake_is_a_sentence(mistake, trace, folder, tmp_path):
    assert "did you mean 'one.safetensors'?" in mistake(tmp_path / "on.safetensors")
    assert "no trace of request 'req-3' in run 'monday'; did you mean 'req-1'?" in mistake(folder, "--request", "req-3")
    assert "--request chooses a trace of a run" in mistake(trace, "--request", "req-1")
    assert "one of .html, .png, .svg, .pdf" in mistake(trace, "--out", tmp_path / "x.gif")
    assert "there is no folder" in mistake(trace, "--out", tmp_path / "no" / "x.html")
    assert "is no run, it has no run.json" in mistake(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("notes")
    assert "cannot be read as a trace" in mistake(other)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(trace.read_bytes()[:-20])
    assert "truncated" in mistake(cut)
    assert not list((tmp_path / "here").iterdir())


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert "workbench show runs/monday --request req-3" in capsys.readouterr().out


def test_the_demo_replaces_its_own_run_and_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("workbench.cli.demo._engine", lambda *_: pytest.fail("the base was loaded"))
    prompts = ["one", "two"]
    assert not _earlier_run(tmp_path / "none", prompts)
    for name, prompt, is_ours in (("killed", None, True), ("mine", "one", True), ("other", "three", False)):
        with RunWriter(tmp_path / name / "run") as writer:
            if prompt:
                writer.request({"request_id": "req-1", "prompt": prompt})
        if is_ours:
            assert _earlier_run(tmp_path / name / "run", prompts)
    assert main(["demo", "--out", str(tmp_path / "other")]) == 2
    assert "other/run' holds a run that is not the demo's; choose another --out" in capsys.readouterr().err
    (tmp_path / "notes" / "run").mkdir(parents=True)
    assert not _earlier_run(tmp_path / "notes" / "run", prompts)
    (tmp_path / "notes" / "run" / "notes.txt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "notes")]) == 2
    assert "is no run, it has no run.json; it holds 'notes.txt'" in capsys.readouterr().err
