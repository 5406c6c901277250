"""A map of an engine's memory: adapters in slots, and KV blocks by who holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from workbench.display.drawing import whole_numbers
from workbench.display.fonts import drawable
from workbench.display.labels import counted, runs, visible
from workbench.display.marks import colour, edge, ink_on, key
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import DPI, Sheet, head, heading, label, open_axes, plain, shortened, styled, ticks
from workbench.instrument.memory_state import (
    CACHED,
    FREE,
    KINDS,
    PRIVATE,
    PUBLISHED,
    SHARED,
    MemoryState,
    SlotState,
    memory_state,
)

MOST_STREAMS = 24
LEFT_IN, RIGHT_IN, ROW_IN = 1.6, 0.2, 0.24
# state of a block: fill, hatch, outline; told apart without colour too
BLOCK_STYLES = {
    FREE: {"facecolor": LIGHT.page, "edgecolor": LIGHT.line, "hatch": None},
    CACHED: {"facecolor": LIGHT.page, "edgecolor": LIGHT.scale[4], "hatch": "...."},
    PRIVATE: {"facecolor": LIGHT.scale[2], "edgecolor": LIGHT.page, "hatch": None},
    PUBLISHED: {"facecolor": LIGHT.scale[4], "edgecolor": LIGHT.page, "hatch": None},
    SHARED: {"facecolor": LIGHT.scale[5], "edgecolor": LIGHT.page, "hatch": "////"},
}
MEANINGS = {
    FREE: "free",
    CACHED: "cached: for requests to come",
    PRIVATE: "private: one stream's",
    PUBLISHED: "published: one stream's, can be found",
    SHARED: "shared: several hold it",
}


def memory_map(state: MemoryState | Any, adapters: tuple[str, ...] | None = None, title: str | None = None) -> Picture:
    """Draw which adapters lie in the slots, and which KV blocks each running request holds.

    Args:
        state: of `memory_state(engine)`, or the engine itself.
        adapters: in the order of a mixture, so that letters and colours are those of its traces; None takes the slots'.
        title: above the figure.

    Raises:
        UserError: it is neither.
    """
    state = state if isinstance(state, MemoryState) else memory_state(state)
    title = title or "Who holds what in memory"
    order = _order(state, adapters)
    with styled():
        sheet = Sheet()
        top = head(sheet, title, [_slot_line(state), _block_line(state)]) + 0.32
        width = sheet.width_in - LEFT_IN - RIGHT_IN
        axes = sheet.axes(LEFT_IN, top, width, 0.5)
        _slot_bar(axes, state, order)
        top += 1.25
        shown, stop = _shown(state), _stop(state)
        axes = sheet.axes(LEFT_IN, top, width, 0.3)
        _pool(axes, state, stop)
        heading(axes, _pool_heading(state, stop), 8.5)
        top += 0.42
        if not shown:
            label(axes, x=f"block ({state.block_tokens} tokens each)")
        else:
            axes.tick_params(axis="x", labelbottom=False)
            height = ROW_IN * len(shown)
            axes = sheet.axes(LEFT_IN, top, width, height)
            _streams(axes, state, shown, order, stop)
            top += height
        top = _key(sheet, top + 0.5)
        return Picture(sheet.close(top + 0.1), title, _words(state, title))


def _order(state: MemoryState, adapters: tuple[str, ...] | None) -> dict[str, int]:
    """Return the place of every adapter's name, where its letter and colour come from."""
    order = {name: place for place, name in enumerate(adapters or ())}
    for slot in state.slots:
        if slot.adapter is not None:
            order.setdefault(slot.adapter, len(order))
    return order


def _slot_line(state: MemoryState) -> str:
    held = [slot for slot in state.slots if slot.adapter is not None]
    pinned = sum(slot.is_pinned for slot in held)
    return (
        f"Slots: {counted(len(held), 'adapter')} of {_bytes(sum(slot.num_bytes for slot in held))} in stacks of "
        f"{_bytes(state.slot_bytes)}; {sum(slot.leases > 0 for slot in held)} in use, {pinned} pinned."
    )


def _block_line(state: MemoryState) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in state.counts().items() if count)
    size = f"{state.num_blocks} blocks of {state.block_tokens} tokens, {_bytes(state.block_bytes)} each"
    return f"KV pool: {size}: {counts}."


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _slot_bar(axes: Axes, state: MemoryState, order: dict[str, int]) -> None:
    """Draw the slots side by side, as wide as the adapters are large; an empty one is a thin hatched box."""
    held = sum(slot.num_bytes for slot in state.slots)
    empty = max(held * 0.02, 1.0)
    left, places = 0.0, []
    for slot in state.slots:
        size = slot.num_bytes if slot.adapter is not None else empty
        places.append((slot, left, size))
        left += size
    scale, unit = (1e6, "MB") if left >= 1e6 else (1e3, "kB") if left >= 1e3 else (1.0, "B")
    total = max(left, empty) / scale
    axes.set(xlim=(0, total), ylim=(0, 1), yticks=[])
    per_unit = axes.get_window_extent().width / DPI / total
    for slot, start, size in places:
        _slot(axes, slot, start / scale, size / scale, per_unit, order)
    heading(axes, "adapters in slots: ×2 = two requests use it, p = pinned, framed = part of a mixture", 8.5)
    label(axes, x=unit)
    open_axes(axes, grid=None)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    if not state.slots:
        axes.text(0.5, 0.5, "no adapter is loaded", transform=axes.transAxes, ha="center", va="center", fontsize=8)


def _slot(axes: Axes, slot: SlotState, start: float, size: float, per_unit: float, order: dict[str, int]) -> None:
    if slot.adapter is None:
        axes.broken_barh([(start, size)], (0, 1), facecolor=LIGHT.page, edgecolor=LIGHT.missing, hatch="////", lw=0.4)
        return
    index = order[slot.adapter]
    shade = colour(index)
    axes.broken_barh([(start, size)], (0, 1), facecolor=shade, edgecolor=LIGHT.page, lw=1)
    inset = 0.03 / per_unit
    if slot.mixture is not None and size > 3 * inset:
        frame = {"facecolor": "none", "edgecolor": ink_on(shade), "lw": 1}
        axes.broken_barh([(start + inset, size - 2 * inset)], (0.08, 0.84), **frame)
    room = int((size * per_unit - 0.12) / 0.062)
    marks = (f" ×{slot.leases}" if slot.leases else "") + (" p" if slot.is_pinned else "")
    lines = [f"{key(index)} {visible(slot.adapter)}", f"rank {slot.rank}{marks}"]
    if room < len(key(index)):
        return
    text = "\n".join(shortened(line, room) for line in lines) if room >= 8 else key(index)
    style = {"ha": "center", "va": "center", "fontsize": 7, "color": ink_on(shade)}
    plain(axes.text(start + size / 2, 0.5, drawable(text), **style))


def _shown(state: MemoryState) -> tuple[int, ...]:
    """Return the streams to draw: all, or those that hold most."""
    if len(state.streams) <= MOST_STREAMS:
        return tuple(range(len(state.streams)))
    sizes = [-len(stream.blocks) for stream in state.streams]
    return tuple(sorted(np.argsort(sizes, kind="stable")[:MOST_STREAMS].tolist()))


def _stop(state: MemoryState) -> int:
    """Return where the drawn part of the pool ends: a little behind the last block that is not free."""
    used = np.flatnonzero(state.kinds() != FREE)
    if not used.size:
        return min(state.num_blocks, 64)
    return min(state.num_blocks, max(16, int((used[-1] + 1) * 1.08) + 1))


def _pool_heading(state: MemoryState, stop: int) -> str:
    hidden = state.num_blocks - stop
    more = f"; the {hidden} behind them are free" if hidden else ""
    streams = len(state.streams)
    held = f"; below, the {MOST_STREAMS} of {streams} streams that hold most" if streams > MOST_STREAMS else ""
    return f"KV blocks 0 to {stop - 1}{more}{held}"


def _pool(axes: Axes, state: MemoryState, stop: int) -> None:
    """Draw every block by its state, one bar a run of equal ones."""
    kinds = state.kinds()[:stop]
    axes.set(xlim=(0, stop), ylim=(0, 1))
    ticks(axes, "y", [0.5], ["all blocks"])
    for first, last in runs(kinds):
        _blocks(axes, [(first, last - first)], (0, 1), int(kinds[first]), stop)
    axes.tick_params(length=0, pad=2, labelcolor=LIGHT.ink, labelsize=7.5)
    axes.xaxis.set_major_locator(whole_numbers(10))


def _blocks(axes: Axes, spans: list[tuple[int, int]], rows: tuple[float, float], kind: int, stop: int) -> None:
    style = dict(BLOCK_STYLES[kind])
    axes.broken_barh(spans, rows, lw=0 if stop > 400 and style["hatch"] is None else 0.5, label=KINDS[kind], **style)


def _streams(axes: Axes, state: MemoryState, shown: tuple[int, ...], order: dict[str, int], stop: int) -> None:
    """Draw a row per stream: its blocks by their state, and before them what it runs on."""
    kinds = state.kinds()
    axes.set(xlim=(0, stop), ylim=(len(shown) - 0.5, -0.5))
    texts = []
    for row, number in enumerate(shown):
        stream = state.streams[number]
        blocks = np.array(sorted(stream.blocks), dtype=np.int64)
        breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(kinds[blocks]) != 0)) + 1
        for part in np.split(blocks, breaks):
            if part.size:
                _blocks(axes, [(int(part[0]), len(part))], (row - 0.36, 0.72), int(kinds[part[0]]), stop)
        letter = f"{key(order[stream.runs_on])} " if stream.runs_on in order and not stream.is_mixture else ""
        kind = f": {stream.kind}" if stream.is_mixture else ""
        texts.append(shortened(f"{visible(stream.request_id)}: {letter}{visible(stream.runs_on)}{kind}", 25))
    ticks(axes, "y", range(len(shown)), texts, 7)
    axes.xaxis.set_major_locator(whole_numbers(10))
    label(axes, x=f"block ({state.block_tokens} tokens each)")
    open_axes(axes, grid="x")


def _key(sheet: Sheet, top: float) -> float:
    """Explain the states of a block."""
    axes = sheet.axes(LEFT_IN, top, sheet.width_in - LEFT_IN - RIGHT_IN, 0.2)
    axes.set_axis_off()
    handles = [Patch(label=MEANINGS[kind], linewidth=0.5, **style) for kind, style in BLOCK_STYLES.items()]
    for handle in handles:
        if handle.get_hatch() is None:
            handle.set_edgecolor(edge(LIGHT.line))
    axes.legend(handles=handles, ncols=len(handles), fontsize=7.4, frameon=False, loc="center left",
                bbox_to_anchor=(0, 0.5), borderaxespad=0, handlelength=2)  # fmt: skip
    return top + 0.2


def _words(state: MemoryState, title: str) -> str:
    streams = [
        f"{stream.request_id} ({stream.runs_on}, {stream.kind}) {len(stream.blocks)} blocks"
        for stream in state.streams[:8]
    ]
    return f"{title}. {_slot_line(state)} {_block_line(state)} Streams: {'; '.join(streams) or 'none'}."
