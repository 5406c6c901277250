"""Make the pictures of notebooks/README.md: `python notebooks/images/make.py [NOTEBOOK …]`.

Runs each notebook and keeps the image below its cell tagged `picture`, so that the tour shows what the notebook shows.
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 150_000
WIDTHS = (1200, 1000, 850, 700)
# how far a pixel may be from its colour: the commonest colours little, edges of letters and rare shades a bit more
TOLERANCES = (2, 4, 6, 8, 10, 12)
COARSE, COMMONEST = 24, 200


def main(names: list[str]) -> None:
    """Make the pictures of the named notebooks, or of all."""
    for path in sorted(FOLDER.parent.glob("*.ipynb")):
        if not names or path.stem in {Path(name).stem for name in names}:
            started = time.monotonic()
            picture = shrunk(picture_of(path))
            (FOLDER / f"{path.stem}.png").write_bytes(picture)
            print(f"{path.stem}.png: {len(picture) / 1000:.0f} kB, ran {time.monotonic() - started:.0f} s")


def picture_of(path: Path) -> bytes:
    """Run a notebook and return the PNG below the cell tagged `picture`."""
    notebook = nbformat.read(path, as_version=4)
    # widget state in the result would have it drawn from another machine
    here = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=900, store_widget_state=False, resources=here).execute()
    for cell in notebook.cells:
        if "picture" in cell.metadata.get("tags", []):
            images = [out["data"]["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})]
            if images:
                return base64.b64decode(images[-1])
    raise SystemExit(f"{path.name}: no cell tagged `picture` shows an image")


def shrunk(png: bytes) -> bytes:
    """Return the picture in at most MAX_BYTES: with fewer colours, then narrower."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for width in WIDTHS:
        width = min(width, image.width)
        scaled = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
        for tolerance in TOLERANCES:
            coarse = with_palette(scaled, tolerance)
            if coarse is None:
                continue
            written = io.BytesIO()
            coarse.save(written, "png", optimize=True)
            if written.tell() <= MAX_BYTES:
                return written.getvalue()
    raise SystemExit(f"the picture does not fit into {MAX_BYTES} bytes")


def with_palette(image: Image.Image, tolerance: int) -> Image.Image | None:
    """Return the picture in 256 colours of its own, its commonest within `tolerance`, all within COARSE, or None.

    The distance is that of red, green and blue, 0 to 255 each. Median cut would average an adapter's colour away.
    """
    pixels = np.asarray(image).reshape(-1, 3).astype(np.int64) @ (65536, 256, 1)
    packed, place, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = packed[:, None] // (65536, 256, 1) % 256
    off, nearest, chosen = np.full(len(colours), np.inf), np.zeros(len(colours), np.uint8), []
    for each in np.argsort(-counts, kind="stable"):
        if off[each] <= (tolerance if len(chosen) < COMMONEST else COARSE):
            continue
        if len(chosen) == 256:
            return None
        distance = np.linalg.norm(colours - colours[each], axis=1)
        nearest[distance < off] = len(chosen)
        off = np.minimum(off, distance)
        chosen.append(colours[each])
    found = Image.fromarray(nearest[place].reshape(image.height, image.width), "P")
    found.putpalette(np.array(chosen, dtype=np.uint8).tobytes())
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
