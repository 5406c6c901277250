"""Report of a sweep: what was asked, what came out, with intervals, how to make it again, and what to beware of.

One list of blocks becomes Markdown and a self-contained HTML page. Everything is computed from the table alone, so a
report can be made on any machine that has it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.grid import Grid
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import Estimate, estimate, ratio
from workbench.sweep.store import writing

if TYPE_CHECKING:
    import pandas as pd

    from workbench.display.picture import Picture

# figure -> (heading, digits after the point); the interval of fidelity's stands in the table already
THROUGHPUT = {
    "tok_s": ("tok/s", 1), "ttft_ms_p50": ("first token ms, median", 0), "ttft_ms_p95": ("95 %", 0),
    "time_per_token_ms_p50": ("ms/token, median", 1), "time_per_token_ms_p95": ("95 %", 1),
    "forwards_per_token": ("forwards/token", 2), "goodput_requests_s": ("goodput req/s", 2),
    "fairness": ("fairness", 3),
}  # fmt: skip
FIDELITY = {
    "kl": ("KL, nats/token", 5), "top1": ("same top token", 4), "perplexity": ("perplexity", 2),
    "perplexity_exact": ("exact", 2), "scalings_l1": ("scalings L1", 4), "scalings_rank": ("rank corr.", 3),
    "same_tokens": ("same tokens, free", 1), "forwards_per_token": ("forwards/token", 2), "tok_s": ("tok/s", 1),
}  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --muted: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #343b44; --muted: #9198a1; }
  body { background: #0d1117; color: #e6edf3; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; background: #fff; }
pre { padding: 10px; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
caption { text-align: left; color: var(--muted); }
"""


@dataclass(frozen=True)
class Block:
    """A part of a report: "heading", "text", "list", "table", "code" or "picture"."""

    kind: str
    content: Any
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A report as blocks, and the pictures it names.

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
        return "\n\n".join([f"# {self.title}", *map(_markdown, self.blocks)]) + "\n"

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


def read_table(path: str | Path) -> pd.DataFrame:
    """Return a sweep's table.

    Raises:
        UserError: there is none, or it is of something else.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise UserError(f"no results at {str(path)!r}; run `workbench sweep` on the grid first")
    try:
        frame = pd.read_parquet(path)
    except Exception as error:
        raise UserError(f"{str(path)!r} is no table of results: {str(error).splitlines()[0]}") from None
    if lacking := [key for key in ("point", "repeat", "status", "task") if key not in frame]:
        raise UserError(f"{str(path)!r} is no table of a sweep: it has no column {names(lacking)}")
    return frame


def report_of(grid: Grid, frame: pd.DataFrame) -> Report:
    """Return the report of a grid's results.

    Raises:
        UserError: no unit of this grid has finished.
    """
    ids = [point.id for point in grid.points]
    frame = frame[frame.point.isin(ids)]
    done = frame[frame.status == "done"]
    if not len(done):
        raise UserError(f"grid {grid.name!r}: none of its {len(ids)} points has finished; there is nothing to report")
    blocks = [Block("text", grid.question)] if grid.question else []
    pictures: dict[str, Picture] = {}
    for task, figures in (("throughput", THROUGHPUT), ("fidelity", FIDELITY)):
        points = [point for point in grid.points if point.task == task and point.id in set(done.point)]
        if not points:
            continue
        blocks += [Block("heading", {"throughput": "Throughput and latency", "fidelity": "What is lost"}[task])]
        blocks.append(_table(grid, points, done, figures))
        for name, picture in _pictures(grid, task, done[done.task == task]).items():
            file = f"{grid.name}-{name}.png"
            pictures[file] = picture
            blocks.append(Block("picture", file, picture.alt))
    blocks += [Block("heading", "How it was measured"), *_how(grid, frame, done)]
    return Report(f"Sweep: {grid.name}", tuple(blocks), pictures)


def aggregated(values: Sequence[float]) -> Estimate:
    """Return the median of repeats with its interval."""
    return estimate(list(values))


def against(frame: pd.DataFrame, point: PointSettings, baseline: PointSettings, figure: str) -> Estimate | None:
    """Return the ratio of two points' medians over the repeats that both have; None without any."""
    own, base = (frame[frame.point == each.id].set_index("repeat")[figure].dropna() for each in (point, baseline))
    both = own.index.intersection(base.index)
    return ratio(own[both].tolist(), base[both].tolist()) if len(both) and (base[both] > 0).all() else None


def _table(grid: Grid, points: Sequence[PointSettings], done: pd.DataFrame, figures: Mapping[str, tuple]) -> Block:
    present = {key: form for key, form in figures.items() if key in done and done[key].notna().any()}
    varied = [key for key in grid.varied if len({getattr(point, key) for point in points}) > 1]
    base = next((point for point in grid.baseline_points() if point in points), None)
    headings = [heading for heading, _ in present.values()]
    rows = [["point", *headings, *(["tok/s against baseline"] if base else []), "n"]]
    for point in points:
        own = done[done.point == point.id]
        cells = [point.label(varied)]
        cells += [_cell(own, key, digits) for key, (_, digits) in present.items()]
        if base is not None:
            found = against(done, point, _baseline_of(grid, point, base), "tok_s")
            cells.append("" if found is None else f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})")
        passages = own.get("num_passages")
        has_passages = passages is not None and passages.notna().any()
        cells.append(f"{len(own)}" + (f" × {int(passages.iloc[0])} passages" if has_passages else ""))
        rows.append(cells)
    note = ("median over repeats (95 % bootstrap interval of it)" if figures is THROUGHPUT else
            "mean over passages (95 % bootstrap interval); costs are medians over repeats")
    return Block("table", rows, note)


def _baseline_of(grid: Grid, point: PointSettings, base: PointSettings) -> PointSettings:
    """Return the baseline that agrees with a point in everything the baseline does not say."""
    said = {key for key, _ in grid.baseline} | {"mixture"}
    rest = {key: value for key, value in point.settings.items() if key not in said}
    for candidate in grid.baseline_points():
        if all(candidate.settings.get(key) == value for key, value in rest.items()):
            return candidate
    return base


def _cell(own: pd.DataFrame, key: str, digits: int) -> str:
    values = own[key].dropna()
    if not len(values):
        return "–"
    if f"{key}_low" in own and own[f"{key}_low"].notna().any():
        low, high = own[f"{key}_low"].iloc[0], own[f"{key}_high"].iloc[0]
        return f"{_number(values.iloc[0], digits)} ({_number(low, digits)}–{_number(high, digits)})"
    found = aggregated(values)
    if found.n < 2 or math.isclose(found.low, found.high):
        return _number(found.value, digits)
    return f"{_number(found.value, digits)} ({_number(found.low, digits)}–{_number(found.high, digits)})"


def _number(value: float, digits: int) -> str:
    # what the digits would call nothing is not nothing
    return f"{value:.1e}" if value and abs(value) < 0.5 * 10**-digits else f"{value:,.{digits}f}"


def _pictures(grid: Grid, task: str, done: pd.DataFrame) -> dict[str, Picture]:
    from workbench.display.frontier_figure import frontier
    from workbench.display.sweep_view import sweep_view

    if task == "fidelity":
        return {"frontier": frontier(done)}
    varied = [key for key in grid.varied if key in done and done[key].nunique(dropna=False) > 1 and key != "mixture"]
    if not varied:
        return {}
    x = max(varied, key=lambda key: done[key].nunique(dropna=False))
    series = next((key for key in varied if key != x), None)
    kept = [key for key in (*varied, "repeat", "tok_s", "time_per_token_ms_p50") if key in done]
    view = sweep_view(done[kept], x=x, y="tok_s", series=series)
    return {"throughput": view.show()}


def _how(grid: Grid, frame: pd.DataFrame, done: pd.DataFrame) -> list[Block]:
    where = str(grid.path) if grid.path is not None else grid.name
    first, last = done.created.min(), done.created.max()
    machines = done[["cpu", "gpu", "threads"]].drop_duplicates().to_dict("records")
    facts = [f"run from {first} to {last}", *(_machine(each) for each in machines)]
    facts.append(f"{done.point.nunique()} of {len(grid.points)} points, {len(done)} units")
    return [Block("code", f"workbench sweep {where}\nworkbench report {where}"), Block("list", facts),
            Block("heading", "Beware"), Block("list", caveats(grid, frame))]


def _machine(each: Mapping[str, Any]) -> str:
    threads = "" if each["threads"] is None else f", {int(each['threads'])} threads"
    return f"{each['gpu'] or each['cpu']}{threads}"


def caveats(grid: Grid, frame: pd.DataFrame) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    done, failed = frame[frame.status == "done"], frame[frame.status == "failed"]
    found = []
    for error, count in failed.error.value_counts().items():
        found.append(f"{count} units failed: {error}")
    missing = [point for point in grid.points if point.id not in set(done.point)]
    if missing:
        found.append(f"{len(missing)} points have no result: {'; '.join(grid.label(point) for point in missing[:4])}")
    repeats = done.groupby("point")["repeat"].nunique()
    if repeats.min() < 5 and (done.task == "throughput").any():
        found.append(f"{repeats.min()} to {repeats.max()} repeats: an interval is no wider than the repeats themselves")
    if done.load_before.notna().any():
        busy = float((done.load_before > 2).mean())
        found.append(f"load average before a unit: {done.load_before.min():.1f} to {done.load_before.max():.1f}"
                     + ("; other programs ran, so times say less than counts" if busy > 0.5 else ""))
    if set(done.dtype.dropna()) - {"float32"}:
        found.append("in bfloat16 and float16 a batch's shape alone changes tokens: look at the null pair")
    if done.cpu.nunique() > 1 or done.gpu.nunique(dropna=False) > 1:
        found.append("points ran on different machines: their times cannot be compared")
    return found or ["nothing in particular"]


def _markdown(block: Block) -> str:
    if block.kind == "heading":
        return f"## {block.content}"
    if block.kind == "list":
        return "\n".join(f"* {each}" for each in block.content)
    if block.kind == "code":
        return f"```sh\n{block.content}\n```"
    if block.kind == "picture":
        return f"![{block.note.replace(']', ')')}]({block.content})"
    if block.kind == "table":
        head, *rows = ([str(cell).replace("|", "\\|") for cell in row] for row in block.content)
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        return "\n".join(lines) + (f"\n\n{block.note}" if block.note else "")
    return str(block.content)


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
