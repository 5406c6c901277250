"""Four text corpora that share no language or register: Python code, German, Spanish, King James scripture.

Everything comes from Python itself and from Debian packages unpacked into one folder (README.md has the
commands). Nothing is committed; the split into train and held-out depends on the content alone.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DOMAINS = ("python", "german", "spanish", "scripture")
HELD_OUT_PERCENT = 10

GERMAN_FILES = ("zitate", "sprichworte", "anekdoten", "wusstensie")
SPANISH_LEFT_OUT = ("pintadas", "varios", "leydemurphy", "informatica")
PYTHON_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data",
                   "lib2to3", "__pycache__", "__phello__", "turtledemo", "ensurepip"}
# Old collections of sayings carry slurs and contempt; whole documents that touch these words are left out.
GERMAN_UNWANTED = re.compile(r"hitler|goebbels|göring|himmler|\bjud|neger|zigeuner|nutte|fick|weiber|schwul", re.I)
SPANISH_UNWANTED = re.compile(r"jud[ií]|\bmoros?\b|gitan|mujer|hembra|\bput[ao]|maric|coj[oó]n|coño|\bnegr[oa]s?\b"
                              r"|hitler|suegra|viuda|mierda|culo\b", re.I)


@dataclass(frozen=True)
class Corpus:
    """Documents of one domain, in an order that depends only on their content."""

    domain: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def build(domain: str, packages: Path) -> Corpus:
    """Return the corpus of `domain`; `packages` is the folder the Debian packages were unpacked into."""
    pairs = {"python": _python, "german": _german, "spanish": _spanish, "scripture": _scripture}[domain](packages)
    train, held_out = {}, {}
    for split_key, text in pairs:
        letters = _letters(text)
        side = held_out if _digest(split_key) % 100 < HELD_OUT_PERCENT else train
        side.setdefault(letters, text)
    # A document on both sides (possible only when split keys differ) stays on the training side.
    held_out = {letters: text for letters, text in held_out.items() if letters not in train}
    return Corpus(domain, _ordered(train.values()), _ordered(held_out.values()))


def _ordered(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=_digest))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _letters(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def _python(_: Path) -> Iterable[tuple[str, str]]:
    """Yield (split key, text) for every module of the standard library of the running Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if PYTHON_LEFT_OUT & set(relative.parts) or path.stat().st_size < 1000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.isascii():
            yield _letters(text), text.strip() + "\n"


def _german(packages: Path) -> Iterable[tuple[str, str]]:
    folder = packages / "usr/share/games/fortunes/de"
    return _sayings([folder / name for name in GERMAN_FILES], GERMAN_UNWANTED)


def _spanish(packages: Path) -> Iterable[tuple[str, str]]:
    """Yield sayings from the inoffensive files; `off/` is not entered at all."""
    folder = packages / "usr/share/games/fortunes/es"
    files = [path for path in sorted(folder.glob("*.fortunes")) if path.stem not in SPANISH_LEFT_OUT]
    return _sayings(files, SPANISH_UNWANTED)


def _sayings(files: list[Path], unwanted: re.Pattern[str]) -> Iterable[tuple[str, str]]:
    """Yield each fortune as one line, without its attribution.

    The split key is the opening of the text: variants of one proverb stay on one side.
    """
    for path in files:
        for fortune in path.read_text(encoding="utf-8").split("\n%\n"):
            lines = [line.strip() for line in fortune.strip("%\n").splitlines()]
            kept = [line for line in lines if line and not line.startswith(("--", "[", "("))]
            text = re.sub(r"\s+", " ", " ".join(kept)).strip()
            if len(text) >= 25 and not unwanted.search(fortune):
                yield _letters(text)[:20], text + "\n"


def _scripture(packages: Path) -> Iterable[tuple[str, str]]:
    """Yield the chapters of the King James Version, verse references removed."""
    command = [str(packages / "usr/bin/bible"), "-p", str(packages / "usr/lib"), "-f", "Gen1:1-Rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    chapters: dict[str, list[str]] = {}
    for line in printed.splitlines():
        match = re.match(r"(\S+?\d+):\d+ (.*)", line)
        if match:
            chapters.setdefault(match.group(1), []).append(match.group(2).strip())
    for verses in chapters.values():
        text = " ".join(verses)
        yield _letters(text), text + "\n"
