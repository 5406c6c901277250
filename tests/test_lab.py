"""`workbench lab`: what it opens, in which Python, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lab_server import serve

from workbench import cli
from workbench.cli import lab
from workbench.errors import UserError

NOTEBOOK = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'


@pytest.fixture
def launched(monkeypatch) -> list:
    """Keep what JupyterLab would be started with, and do not start it."""
    calls: list = []

    def launch(argv: list[str]) -> None:
        from jupyter_client.kernelspec import KernelSpecManager

        calls.append((argv, KernelSpecManager().get_kernel_spec("python3").argv))

    monkeypatch.setattr("jupyterlab.labapp.LabApp.launch_instance", launch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    for name in ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return calls


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "b.ipynb").write_text(NOTEBOOK)
    return made


def run(*options: object) -> int:
    return cli.main(["lab", *map(str, options)])


def refused(capsys, *options: object) -> str:
    assert run(*options) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_it_opens_the_first_of_the_checkouts_notebooks(launched) -> None:
    assert run() == 0
    (argv, _), = launched
    assert argv[-1] == str(Path(__file__).parents[1] / "notebooks" / "00_start_here.ipynb")


def test_a_folder_without_the_first_notebook_opens_as_a_folder(launched, folder) -> None:
    run("--folder", folder)
    assert launched[0][0][-1] == str(folder)


def test_options_reach_jupyterlab_in_order_and_last(launched, folder) -> None:
    run("--folder", folder, "--no-browser", "--", "--ip", "0.0.0.0", "--debug")
    assert launched[0][0] == ["--no-browser", "--ip", "0.0.0.0", "--debug", str(folder)]


def test_the_kernel_is_this_environments_python(launched, folder, tmp_path, monkeypatch) -> None:
    for place in (tmp_path / "data", tmp_path / "path"):
        spec = place / "kernels" / "python3"
        spec.mkdir(parents=True)
        (spec / "kernel.json").write_text(json.dumps(
            {"argv": ["/elsewhere/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
             "display_name": "Python 3", "language": "python"}
        ))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "path"))
    run("--folder", folder)
    assert launched[0][1][0] == sys.executable
    assert os.environ["JUPYTER_PATH"].endswith(str(tmp_path / "path")), "what the user named is still looked through"


def test_nothing_is_left_behind(launched, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run("--folder", folder)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_copy_is_opened_and_what_is_there_is_kept(launched, tmp_path, capsys) -> None:
    copy = tmp_path / "deep" / "copy"
    run("--copy", copy)
    source = Path(__file__).parents[1] / "notebooks"
    assert {path.name for path in copy.glob("*.ipynb")} == {path.name for path in source.glob("*.ipynb")}
    assert (copy / "images" / "demo.png").read_bytes() == (source / "images" / "demo.png").read_bytes()
    assert launched[0][0][-1] == str(copy / "00_start_here.ipynb")
    (copy / "00_start_here.ipynb").write_text(NOTEBOOK)
    (copy / "01_adapters.ipynb").unlink()
    capsys.readouterr()
    run("--copy", copy)
    assert (copy / "00_start_here.ipynb").read_text() == NOTEBOOK and (copy / "01_adapters.ipynb").is_file()
    assert "kept as they are" in capsys.readouterr().err


def test_an_installed_package_opens_a_copy_of_its_notebooks(launched, tmp_path, monkeypatch) -> None:
    package = tmp_path / "site-packages" / "workbench"
    (package / "notebooks").mkdir(parents=True)
    (package / "notebooks" / "00_start_here.ipynb").write_text(NOTEBOOK)
    monkeypatch.setattr("workbench.__file__", str(package / "__init__.py"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run()
    assert launched[0][0][-1] == str(tmp_path / "here" / "workbench-notebooks" / "00_start_here.ipynb")


def test_no_notebooks_anywhere_is_a_sentence(launched, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("workbench.__file__", str(tmp_path / "workbench" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert "--folder" in refused(capsys)


def test_a_port_in_use_is_a_sentence(launched, folder, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refused(capsys, "--folder", folder, "--port", taken.getsockname()[1])
    assert "cannot be used (address already in use)" in said and "leave --port out" in said
    assert "from 0 to 65535" in refused(capsys, "--folder", folder, "--port", 70000)
    assert not launched


@pytest.mark.parametrize("module", ["jupyterlab", "ipykernel"])
def test_what_is_missing_is_named(launched, folder, monkeypatch, capsys, module) -> None:
    find = lab.importlib.util.find_spec
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert f"`pip install {module}`" in refused(capsys, "--folder", folder)


def test_root_is_told_the_option(launched, folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "-- --allow-root" in refused(capsys, "--folder", folder)
    assert run("--folder", folder, "--", "--allow-root") == 0


def test_a_target_that_cannot_be_written_is_a_sentence(tmp_path, folder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be copied"):
        lab.copy_notebooks(folder, tmp_path / "file")


def test_a_real_server_finds_the_kernel_and_ends_at_ctrl_c(tmp_path, folder) -> None:
    with serve(tmp_path / "home", folder) as server:
        spec = server.api("kernelspecs")["kernelspecs"]["python3"]["spec"]
        assert spec["argv"][0] == sys.executable
        assert [entry["name"] for entry in server.api("contents")["content"]] == ["b.ipynb"]
        server.interrupt()
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()


def test_in_a_terminal_it_ends_at_the_second_ctrl_c(tmp_path, folder) -> None:
    terminal, stdin = pty.openpty()
    with serve(tmp_path / "home", folder, stdin=stdin) as server:
        server.interrupt()
        server.wait_for_log("Shut down this Jupyter server")
        assert server.process.poll() is None
        server.interrupt()
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
    os.close(terminal)
    os.close(stdin)


def test_the_widgets_extensions_came_with_their_wheels() -> None:
    listed = subprocess.run([sys.executable, "-m", "jupyterlab.labextensions", "list"], capture_output=True, text=True)
    for extension in ("anywidget", "@jupyter-widgets/jupyterlab-manager"):
        (line,) = (line for line in (listed.stdout + listed.stderr).splitlines() if f" {extension} " in line)
        assert "enabled" in line and "OK" in line
