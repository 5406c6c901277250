"""A document as a list of blocks, written as Markdown and as one HTML page that needs nothing else.

Whatever a block says is text: nothing in it becomes markup.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.sweep.store import writing

if TYPE_CHECKING:
    from workbench.display.picture import Picture

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --muted: #57606a; --page: #fff; --ink: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --line: #343b44; --muted: #9198a1; --page: #0d1117; --ink: #e6edf3; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1400px; padding: 16px; }
body > p, body > ul, body > pre { max-width: 1100px; }
.scroll { overflow-x: auto; margin: 12px 0 24px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; line-height: 1.25; }
th:first-child, td:first-child { text-align: left; background: var(--page); }
@media (min-width: 700px) { th:first-child, td:first-child { position: sticky; left: 0; } }
img { max-width: 100%; height: auto; background: #fff; }
pre { padding: 10px; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
caption { text-align: left; color: var(--muted); padding-bottom: 6px; }
"""


@dataclass(frozen=True)
class Block:
    """A part of a report: "heading", "text", "list", "table", "code" or "picture"."""

    kind: str
    content: Any
    note: str = ""


@dataclass(frozen=True)
class Document:
    """Blocks, and the pictures they name.

    Attributes:
        title: its first line.
        blocks: in order.
        pictures: file name -> picture.
    """

    title: str
    blocks: tuple[Block, ...]
    pictures: Mapping[str, Picture]

    def markdown(self) -> str:
        """Return the text, with pictures by name."""
        return "\n\n".join([f"# {_plain(self.title)}", *map(_markdown, self.blocks)]) + "\n"

    def html(self) -> str:
        """Return a page that needs nothing else."""
        body = "\n".join(_html(block, self.pictures) for block in self.blocks)
        return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
                f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
                f"<style>{_STYLE}</style></head>\n<body><h1>{escape(self.title)}</h1>\n{body}\n</body></html>\n")

    def save(self, folder: str | Path, name: str) -> list[Path]:
        """Write `name`.md, `name`.html and the pictures; return their paths."""
        folder = Path(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / f"{name}.md", folder / f"{name}.html"]
            paths[0].write_text(self.markdown(), encoding="utf-8")
            paths[1].write_text(self.html(), encoding="utf-8")
        return paths + [picture.save(folder / file) for file, picture in self.pictures.items()]


def _markdown(block: Block) -> str:
    if block.kind == "heading":
        return f"## {_plain(block.content)}"
    if block.kind == "list":
        return "\n".join(f"* {_plain(each)}" for each in block.content)
    if block.kind == "code":
        return f"```sh\n{block.content}\n```"
    if block.kind == "picture":
        return f"![{_plain(block.note)}](<{block.content}>)"
    if block.kind == "table":
        head, *rows = ([_plain(cell) for cell in row] for row in block.content)
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        return "\n".join(lines) + (f"\n\n{_plain(block.note)}" if block.note else "")
    return _plain(block.content)


def _plain(text: Any) -> str:
    """Return text that Markdown shows as it is, on one line."""
    line = " ".join(str(text).split())
    marked = re.sub(r"([\\`*\[\]|~#])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", line)
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _html(block: Block, pictures: Mapping[str, Picture]) -> str:
    if block.kind == "heading":
        return f"<h2>{escape(block.content)}</h2>"
    if block.kind == "list":
        return "<ul>" + "".join(f"<li>{escape(str(each))}</li>" for each in block.content) + "</ul>"
    if block.kind == "code":
        return f"<pre>{escape(block.content)}</pre>"
    if block.kind == "picture":
        data = base64.b64encode(pictures[block.content].png).decode()
        return f'<p><img alt="{escape(block.note, quote=True)}" src="data:image/png;base64,{data}"></p>'
    if block.kind == "table":
        head, *rows = block.content
        body = "".join(_row(row, "td") for row in rows)
        return (f'<div class="scroll"><table><caption>{escape(block.note)}</caption><thead>{_row(head, "th")}</thead>'
                f"<tbody>{body}</tbody></table></div>")
    return f"<p>{escape(str(block.content))}</p>"


def _row(cells: Iterable[Any], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
