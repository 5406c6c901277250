"""How a user's mistake looks in a notebook: its sentence alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from workbench.errors import ContentError, UserError

CELL = """
def deep(n):
    if n:
        return deep(n - 1)
    raise {kind}("mixture 'dem' is not loaded; did you mean 'demo'?")

deep(5)
"""


@pytest.fixture
def shell(monkeypatch, tmp_path) -> InteractiveShell:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    without_history = Config(HistoryManager={"enabled": False})
    return InteractiveShell(user_ns={"UserError": UserError, "ContentError": ContentError}, config=without_history)


@pytest.mark.parametrize("kind", ["UserError", "ContentError"])
def test_a_cell_shows_the_sentence_alone(shell, capsys, kind) -> None:
    shell.run_cell(CELL.format(kind=kind))
    assert capsys.readouterr().out.strip() == f"{kind}: mixture 'dem' is not loaded; did you mean 'demo'?"


def test_where_it_was_raised_can_still_be_asked(shell, capsys) -> None:
    shell.run_cell(CELL.format(kind="UserError"))
    shell.run_cell("import traceback; traceback.print_last()")
    said = "".join(capsys.readouterr())
    assert said.count("in deep") + said.count("frame repeated") >= 4


def test_the_cause_is_not_told_twice(shell, capsys) -> None:
    shell.run_cell("try:\n    {}['x']\nexcept KeyError as error:\n    raise UserError('no x here') from error")
    assert capsys.readouterr().out.strip() == "UserError: no x here"


def test_other_errors_keep_their_traceback(shell, capsys) -> None:
    shell.run_cell(CELL.format(kind="ValueError"))
    assert "Traceback" in capsys.readouterr().out


def test_plain_python_is_unaffected() -> None:
    code = "from workbench.errors import UserError; raise UserError('no x here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.rstrip().endswith("UserError: no x here")
