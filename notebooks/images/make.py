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
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 150_000
WIDTHS = (1200, 1000, 850, 700)


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
        for colours in (255, 128, 64):
            written = io.BytesIO()
            scaled.quantize(colours, dither=Image.Dither.NONE).save(written, "png", optimize=True)
            if written.tell() <= MAX_BYTES:
                return written.getvalue()
    raise SystemExit(f"the picture does not fit into {MAX_BYTES} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
