"""What every notebook keeps to, without running it: question first, parameters, short cells, claims checked, links.

Run: pytest tests/test_notebooks.py. `pytest --nbmake notebooks` runs the notebooks themselves.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from workbench.display.palette import ADAPTER_COLOURS

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
MAX_LINES, MAX_PICTURE_BYTES = 15, 150_000


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def cells(path) -> list:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook.cells


def code(cells) -> list:
    return [cell for cell in cells if cell.cell_type == "code"]


def prose(cells) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def tagged(cells, tag: str) -> list:
    return [cell for cell in cells if tag in cell.metadata.get("tags", [])]


def links(text: str) -> list[str]:
    return [target for target in LINK.findall(text) if "://" not in target]


def test_the_tours_links_lead_somewhere() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [target for target in links(readme) if not (FOLDER / target).exists()] == []


def test_names_count_up_from_00() -> None:
    assert [path.name[:3] for path in PATHS] == [f"{number:02}_" for number in range(len(PATHS))]


def test_it_begins_with_its_title_and_its_question(cells) -> None:
    first = cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert re.match(r"# .+\n\n\*\*[A-Z][^*]*\?\*\*", first.source), "a question in bold follows the title"
    assert prose(cells[1:]).count("\n# ") == 0, "one title"


def test_its_second_cell_is_parameters_that_papermill_can_set(cells) -> None:
    assert tagged(cells, "parameters") == [cells[1]] and cells[1].cell_type == "code"
    for statement in ast.parse(cells[1].source).body:
        assert isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)
        ast.literal_eval(statement.value)


def test_its_cells_are_short(cells) -> None:
    long = {cell.source.splitlines()[0]: len(cell.source.splitlines()) for cell in code(cells)}
    assert all(lines <= MAX_LINES for lines in long.values()), long


def test_code_is_introduced_by_prose(cells) -> None:
    kinds = "".join("m" if cell.cell_type == "markdown" else "c" for cell in cells)
    assert "cccc" not in kinds, "at most three code cells follow each other"
    assert len(prose(cells).split()) >= 150


def test_outputs_are_stripped(path, cells) -> None:
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code(cells))
    assert "widgets" not in nbformat.read(path, as_version=4).metadata


def test_it_ends_by_checking_its_claims(cells) -> None:
    titles = [cell.source.split("\n")[0] for cell in cells if cell.cell_type == "markdown" and cell.source[0] == "#"]
    assert titles[-1] == "## What this notebook claims" or "\n## What this notebook claims" in prose(cells)
    last = code(cells)[-1]
    assert cells[-1] is last
    asserted = [node for node in ast.walk(ast.parse(last.source)) if isinstance(node, ast.Assert)]
    assert asserted and not any(isinstance(node.test, ast.Constant) for node in asserted)


def test_it_links_back_and_forward(path, cells) -> None:
    place, targets = PATHS.index(path), links(prose(cells))
    neighbours = PATHS[max(place - 1, 0):place] + PATHS[place + 1:place + 2]
    assert {neighbour.name for neighbour in neighbours} <= set(targets)
    missing = [target for target in targets if not (FOLDER / target).exists()]
    assert not missing


def test_it_needs_nothing_but_the_package(cells) -> None:
    for cell in code(cells):
        assert not re.search(r"^\s*[!%]|sys\.path|autoreload|time\.sleep", cell.source, re.MULTILINE), cell.source


def test_the_tour_shows_it_with_one_picture_that_says_what_it_shows(path, cells) -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^## \[(\d\d) · [^\]]+\]\(([^)]+)\)$", readme, re.MULTILINE)
    assert listed == [(path.name[:2], path.name) for path in PATHS], "listed, in order"
    section = readme.split(f"]({path.name})\n", 1)[1].split("\n## ", 1)[0]
    question = re.search(r"\*\*([^*]+\?)\*\*", cells[0].source).group(1).split("?")[0]
    assert " ".join(question.split()) in " ".join(section.split()), "with its own question"
    (picture,) = re.findall(r"!\[([^\]]+)\]\((images/[^)]+)\)", section)
    alternative, name = picture
    assert name == f"images/{path.stem}.png" and len(alternative.split()) >= 10
    data = (FOLDER / name).read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) <= MAX_PICTURE_BYTES
    assert len(tagged(cells, "picture")) == 1, "the cell that makes the picture"


WITH_ADAPTERS = ["00_start_here", "03_scalings_in_depth", "04_interventions", "05_caching_the_scalings"]


@pytest.mark.parametrize("stem", WITH_ADAPTERS)
def test_a_smaller_picture_keeps_the_adapters_colours(stem) -> None:
    pixels = np.asarray(Image.open(FOLDER / "images" / f"{stem}.png").convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ADAPTER_COLOURS[:4]:
        wanted = [int(colour[at:at + 2], 16) for at in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(axis=1).min() <= 12, f"{colour} is in the legend"
