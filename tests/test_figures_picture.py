"""A picture carries its words into every file, whatever they hold. Run: pytest tests/test_figures_picture.py"""

from __future__ import annotations

import base64
import io
import logging
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from html import unescape

import matplotlib
import numpy as np
import pytest
from figure_parts import recorded, texts, without_scalings
from matplotlib.figure import Figure
from PIL import Image
from trace_problem import HOSTILE, make_trace, small_trace

import workbench
from workbench.display import Picture, figures, fonts
from workbench.display.marks import MARKERS, line_style
from workbench.display.sheet import shortened, styled
from workbench.errors import UserError
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")
OF_A_TRACE = (
    *("token_adapter", "site_token", "overview", "by_depth", "by_projection", "depth_projection", "over_time"),
    *("entropy", "delta_norms", "hidden_norms", "top_tokens"),
)
NAMES = ("$\\frac{$ <b>", "\u202eevil\nname\x00", "漢字 with a very very long name " + "x" * 80)


def hostile() -> Trace:
    trace = recorded(replace(small_trace(HOSTILE, adapters=3), adapters=NAMES))
    edits = ["ablate $x$", "force <script>alert(1)</script> for ever and ever and ever and ever"]
    return replace(trace, metadata={"base": "$x$</title>\n", "edits": edits, "dtype": "torch.bfloat16"})


@cache
def drawn(name: str) -> Picture:
    """Return a figure of the hostile trace; each is made once."""
    return getattr(figures, name)(hostile())


@pytest.fixture(scope="module")
def picture() -> Picture:
    return figures.by_projection(hostile(), title="</title><script> $x$ \x1b")


def test_a_cell_gets_the_image_and_its_words(picture: Picture) -> None:
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "text/html"}
    assert base64.b64decode(bundle["image/png"])[:4] == b"\x89PNG"
    alt = unescape(re.search(r'alt="([^"]*)"', bundle["text/html"]).group(1))
    assert alt == picture.description and alt.startswith(picture.title)
    assert "<script" not in bundle["text/html"] and "\x1b" not in bundle["text/html"]
    assert " ".join(bundle["text/plain"].split()) == " ".join(picture.description.split())


def test_every_file_has_the_words_in_its_metadata(picture: Picture, tmp_path) -> None:
    png = Image.open(io.BytesIO(picture.png)).info
    assert png["Title"] == picture.title and png["Description"] == picture.description
    svg = ElementTree.fromstring(picture.write("svg"))
    assert svg.get("role") == "img"
    assert svg[0].tag.endswith("title") and svg[0].text == picture.title
    assert svg[1].tag.endswith("desc") and svg[1].text == picture.description
    assert b"/Subject" in picture.write("pdf")
    for suffix in (".png", ".svg", ".pdf", ".html"):
        assert picture.save(tmp_path / f"p{suffix}").stat().st_size > 1000
    page = (tmp_path / "p.html").read_text()
    assert "<script" not in page and not re.search(r"(src|href)=\"http", page)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "p.pdf", "p.png", "p.svg"]


def test_equal_pictures_are_equal_files() -> None:
    one, other = (figures.token_adapter(small_trace()) for _ in range(2))
    assert all(one.write(kind) == other.write(kind) for kind in ("png", "svg", "pdf"))
    assert figures.write(one, "png") == one.png and figures.write(one.figure, "svg")


def test_a_picture_cannot_be_saved_just_anywhere(picture: Picture, tmp_path) -> None:
    with pytest.raises(UserError, match="did you mean '.png'"):
        picture.save(tmp_path / "p.pngg")
    with pytest.raises(UserError, match="the folder .* does not exist"):
        picture.save(tmp_path / "no" / "p.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(UserError, match="cannot save"):
        picture.save(tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


@pytest.mark.parametrize("name", OF_A_TRACE)
def test_hostile_names_and_tokens_are_inert_in_every_figure(name: str) -> None:
    picture = drawn(name)
    shown = texts(picture)
    assert isinstance(picture.figure, Figure) and len(picture.description) > 40
    joined = "\n".join(shown)
    assert not [char for char in joined if char in "\u202e\x00\x1b"]
    assert any("edited: ablate $x$" in text for text in shown) and "bf16" in shown
    maths = [text for text in picture.figure.findobj(matplotlib.text.Text) if "$" in text.get_text()]
    assert all(not text.get_parse_math() for text in maths)


@pytest.mark.parametrize("name", OF_A_TRACE)
def test_nothing_is_cut_off_at_the_figures_edge(name: str) -> None:
    figure = drawn(name).figure
    inked, page = figure.get_tightbbox(), figure.bbox_inches
    assert inked.x0 >= 0 and inked.y0 >= 0 and inked.x1 <= page.x1 and inked.y1 <= page.y1, inked


def test_a_missing_glyph_is_a_box_and_an_acting_one_too() -> None:
    assert fonts.drawable("aé\u202e\x07") == "aé□□"
    assert fonts.drawable("\ue000") == "□" and fonts.drawable("a\nb") == "a\nb"
    assert fonts.families()[0] == fonts.SANS and fonts.families(fonts.MONO)[:2] == (fonts.MONO, fonts.SANS)


def test_an_installed_font_is_used_for_what_the_first_lacks(monkeypatch) -> None:
    monkeypatch.setattr(fonts, "FALLBACKS", ("cmsy10", "No Such Font"))
    fonts.families.cache_clear(), fonts._characters.cache_clear()
    try:
        assert fonts.families() == ("DejaVu Sans", "cmsy10")
        with styled():
            assert matplotlib.rcParams["font.family"] == ["DejaVu Sans", "cmsy10"]
    finally:
        monkeypatch.undo()
        fonts.families.cache_clear(), fonts._characters.cache_clear()


def test_the_style_leaves_the_users_settings_and_log_as_they_were(monkeypatch) -> None:
    log = logging.getLogger("matplotlib.font_manager")
    monkeypatch.setattr(log, "level", logging.WARNING)
    before = dict(matplotlib.rcParams), log.level
    figures.entropy(small_trace())
    assert (dict(matplotlib.rcParams), log.level) == before


def test_long_names_keep_both_ends() -> None:
    assert shortened("adapter_with_a_long_name_29", 14) == "adapter…ame_29"
    assert shortened("short", 14) == "short" and shortened("漢字漢字漢字", 7) == "漢字…字"


def test_adapters_are_told_apart_without_colour() -> None:
    styles = [(str(line_style(i)["linestyle"]), line_style(i)["marker"]) for i in range(len(MARKERS))]
    assert len(set(styles)) == len(styles) and len({dashes for dashes, _ in styles}) == 5


def test_figures_of_recorded_traces_need_neither_torch_nor_pyplot() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from trace_problem import make_trace\n"
        "from workbench import figures; figures.overview(make_trace(1)).png\n"
        "print([name for name in ('torch', 'matplotlib.pyplot', 'workbench.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_figures_are_public() -> None:
    assert workbench.figures is figures
    assert set(OF_A_TRACE) | {"difference", "timeline", "latency", "cache_hits", "memory_map"} <= set(figures.__all__)
    assert all(hasattr(figures, name) for name in figures.__all__)


def test_a_long_trace_is_drawn_in_seconds_not_minutes() -> None:
    base, length = make_trace(4, None), 3000
    index = np.arange(length) % 134
    trace = replace(
        base, values=base.values[index], token_ids=base.token_ids[index], tokens=tuple(base.tokens[i] for i in index),
        positions=np.arange(length), generated=np.arange(length) >= 2000, source=np.arange(length),
        draft=np.full(length, -1), time_s=np.zeros(length),
    )  # fmt: skip
    picture = figures.over_time(trace, smooth=9)
    assert picture.figure.get_figheight() < 6 and sum(len(axes.get_xticklabels()) for axes in picture.figure.axes) < 60
    assert without_scalings(trace).num_tokens == length
