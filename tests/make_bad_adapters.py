"""A zoo of adapters that must be refused, made from a good one: `python tests/make_bad_adapters.py FOLDER`.

Each animal is a folder, how the good adapter was broken, the status a load must answer with, and what the sentence must
say. Nothing binary is committed: the tests make the zoo where they need it.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from models import Adapter, tiny_model
from safetensors.torch import load_file, save_file

MODEL = tiny_model("llama")
GOOD = Adapter(("q_proj", "up_proj"), rank=4)
MAX_RANK = 16
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Animal:
    """One bad adapter.

    Attributes:
        spoil: turns the folder of a good adapter into a bad one.
        says: regular expression of what the sentence must say.
        engine_only: whether only an engine's own settings refuse it, which `workbench inspect` does not know.
    """

    spoil: Callable[[Path], object]
    says: str
    engine_only: bool = False


def weights(change: Callable[[dict], dict]) -> Callable[[Path], object]:
    """Change the tensors."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def put(key: str, value: torch.Tensor) -> Callable[[Path], object]:
    """Add a tensor, or put another in its place."""
    return weights(lambda tensors: {**tensors, key: value})


def take(*parts: str) -> Callable[[Path], object]:
    """Take away the tensors whose names have any of these parts."""
    return weights(lambda tensors: {k: v for k, v in tensors.items() if not any(part in k for part in parts)})


def rename(old: str, new: str) -> Callable[[Path], object]:
    """Rename tensors."""
    return weights(lambda tensors: {key.replace(old, new): value for key, value in tensors.items()})


def config(**changes: object) -> Callable[[Path], object]:
    """Change keys of the config."""

    def spoil(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Change a file's bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def header(text: str, data: bytes = b"") -> Callable[[Path], object]:
    """Write a weights file with this header."""
    return content(WEIGHTS, lambda _: struct.pack("<Q", len(text)) + text.encode() + data)


def other_base(kind: str, targets: tuple[str, ...], **sizes: int) -> Callable[[Path], object]:
    """Write an adapter of another base in its place."""
    return lambda folder: Adapter(targets, rank=4).write(folder, tiny_model(kind, **sizes))


def outside(name: str) -> Callable[[Path], object]:
    """Move a file out of the folder and leave a link to it."""

    def spoil(folder: Path) -> None:
        elsewhere = folder.parent / f"{folder.name}-elsewhere"
        elsewhere.mkdir(exist_ok=True)
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(f"../{elsewhere.name}/{name}")

    return spoil


def link(name: str, target: str) -> Callable[[Path], object]:
    """Put a link in a file's place."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def pickled(folder: Path) -> None:
    """Leave only pickled weights; whoever opens them leaves a file called `ran` beside the folder."""
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "ran")))


def as_folder(name: str) -> Callable[[Path], object]:
    """Put a folder in a file's place."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def lfs(_: bytes) -> bytes:
    """Return what Git leaves where the large files were not fetched."""
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


INF = float("inf")
UNREADABLE = f"{WEIGHTS} is not a readable safetensors file"
ZOO: dict[str, Animal] = {
    # the weights' file
    "truncated": Animal(content(WEIGHTS, lambda data: data[:-1]), UNREADABLE),
    "half": Animal(content(WEIGHTS, lambda data: data[: len(data) // 2]), UNREADABLE),
    "empty": Animal(content(WEIGHTS, lambda data: b""), UNREADABLE),
    "trailing": Animal(content(WEIGHTS, lambda data: data + b"more"), UNREADABLE),
    "noise": Animal(content(WEIGHTS, lambda data: bytes(range(256)) * 40), UNREADABLE),
    "huge-header": Animal(content(WEIGHTS, lambda data: struct.pack("<Q", 1 << 60) + data[8:]), UNREADABLE),
    "no-header": Animal(header("[]"), UNREADABLE),
    "odd-dtype": Animal(header('{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"0000"), UNREADABLE),
    "lying-shape": Animal(header('{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', b"0000"), UNREADABLE),
    "lfs-pointer": Animal(content(WEIGHTS, lfs), "is a Git LFS pointer, not the weights; fetch them with .git lfs"),
    "pickle": Animal(pickled, "only as 'adapter_model.bin', a pickle file, which can run any code .* refused"),
    "no-weights": Animal(lambda folder: (folder / WEIGHTS).unlink(), f"no weights: expected '{WEIGHTS}'; it holds"),
    "weights-are-a-folder": Animal(as_folder(WEIGHTS), f"no weights: expected '{WEIGHTS}'"),
    # the tensors
    "nan": Animal(put(f"{Q}.lora_A.weight", torch.full((4, 32), float("nan"))), f"'{Q}.lora_A.weight' has NaN"),
    "infinite": Animal(put(f"{Q}.lora_B.weight", torch.full((48, 4), -INF)), f"'{Q}.lora_B.weight' has NaN or"),
    "too-large-in-float32": Animal(put(f"{Q}.lora_B.weight", torch.full((48, 4), 1e300, dtype=torch.float64)),
                                   f"'{Q}.lora_B.weight' has NaN or infinite values"),
    "no-common-rank": Animal(put(f"{Q}.lora_B.weight", torch.zeros(48, 2)),
                             r"lora_A is \[4, 32\] and lora_B \[48, 2\]; .* must be the same rank"),
    "no-rank": Animal(weights(lambda tensors: {**tensors, f"{Q}.lora_A.weight": torch.zeros(0, 32),
                                               f"{Q}.lora_B.weight": torch.zeros(48, 0)}), r"lora_A is \[0, 32\]"),
    "vector": Animal(put(f"{Q}.lora_A.weight", torch.zeros(4)), r"has shape \[4\]; a matrix was expected"),
    "whole-numbers": Animal(put(f"{Q}.lora_A.weight", torch.ones(4, 32, dtype=torch.int8)), "is int8; expected float"),
    "half-a-pair": Animal(take(f"{Q}.lora_B"), "only one of lora_A and lora_B is there for 'model.layers.0.self_attn"),
    "twice": Animal(put(f"{Q}.lora_A.default.weight", torch.zeros(4, 32)), "two tensors hold lora_A of"),
    "magnitude": Animal(put(f"{Q}.lora_magnitude_vector", torch.zeros(48)), "1 tensors are neither lora_A nor lora_B"),
    "whole-module": Animal(put("base_model.model.lm_head.weight", torch.zeros(97, 32)),
                           "1 tensors are neither lora_A nor lora_B .*'base_model.model.lm_head.weight'"),
    "no-tensors": Animal(weights(lambda tensors: {}), "holds no LoRA tensors"),
    # the config
    "no-config": Animal(lambda folder: (folder / CONFIG).unlink(), "(has no|neither .*) '?adapter_config.json"),
    "config-is-a-folder": Animal(as_folder(CONFIG), "(has no|neither .*) '?adapter_config.json"),
    "cut-config": Animal(content(CONFIG, lambda data: data[:-5]), "is not valid JSON: .* at line 1, column"),
    "list-config": Animal(content(CONFIG, lambda data: b"[]"), "must hold a JSON object, not a list"),
    "binary-config": Animal(content(CONFIG, lambda data: b"\xff\xfe\x00"), "is not UTF-8 text"),
    "repeating-config": Animal(content(CONFIG, lambda data: b'{"r": 4, "r": 8}'), "gives the same key twice .*'r'"),
    "deep-config": Animal(content(CONFIG, lambda data: b"[" * 100_000), "nested too deeply"),
    "rank-zero": Animal(config(r=0), "r must be a whole number of at least 1, not 0"),
    "rank-in-words": Animal(config(r="4"), "r must be a whole number of at least 1, not '4'"),
    "other-rank": Animal(config(r=8), "config says rank 8 at .*, the tensors have 4"),
    "alpha-nan": Animal(config(lora_alpha=float("nan")), "lora_alpha must be a finite number, not nan"),
    "alpha-too-large": Animal(config(lora_alpha=1e300), "times its scale 2.5e.299 is infinite"),
    "bad-pattern": Animal(config(target_modules="(q_proj"), "target_modules '.q_proj' is no regular expression"),
    "dora": Animal(config(use_dora=True), "config sets use_dora, but lora_magnitude_vector is missing at 4 sites"),
    "saves-modules": Animal(config(modules_to_save=["lm_head"]), "it uses modules_to_save"),
    "bias": Animal(config(bias="all"), "bias='all'"),
    "other-method": Animal(config(peft_type="LOHA"), "peft_type is 'LOHA'; only LORA adapters"),
    "unknown-key": Animal(config(use_dorra=True), "'use_dorra' set, but not known here; did you mean 'use_dora'"),
    # the base
    "other-architecture": Animal(other_base("gpt2", ("c_attn",)), "2 of its 2 sites are not in the model"),
    "other-size": Animal(other_base("llama", ("q_proj", "up_proj"), hidden_size=16),
                         "does not fit base 'tiny' at 4 sites: .* is 32 -> 48 in the base, 16 -> 48 in the adapter"),
    "deeper": Animal(other_base("llama", ("q_proj", "up_proj"), num_hidden_layers=3),
                     "2 of its 6 sites are not in the model: 'model.layers.2.mlp.up_proj'"),
    "misspelt-site": Animal(rename("q_proj", "w_proj"), "2 of its 4 sites are not in the model: .*did you mean"),
    "lost-sites": Animal(take("q_proj"), "its weights lack 2 of the sites that its config targets"),
    "rank-above-the-limit": Animal(lambda folder: Adapter(("q_proj",), rank=MAX_RANK + 1).write(folder, MODEL),
                                   "has rank 17, but max_lora_rank is 16; raise max_lora_rank", engine_only=True),
    # where its files lie
    "weights-outside": Animal(outside(WEIGHTS), f"'{WEIGHTS}' is a link that leads out of the folder, to '.*'; copy"),
    "config-outside": Animal(outside(CONFIG), f"'{CONFIG}' is a link that leads out of the folder"),
    "link-to-a-secret": Animal(link(WEIGHTS, "/etc/passwd"), "leads out of the folder, to '/etc/passwd'"),
    "link-to-nothing": Animal(link(WEIGHTS, "gone"), "has no weights"),
    "link-to-itself": Animal(link(WEIGHTS, WEIGHTS), "has no weights"),
}  # fmt: skip


def make(folder: Path) -> dict[str, Path]:
    """Write every animal below `folder` and return their folders."""
    made = {}
    for name, animal in ZOO.items():
        made[name] = folder / name
        if made[name].exists():
            shutil.rmtree(made[name])
        GOOD.write(made[name], MODEL)
        animal.spoil(made[name])
    return made


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/make_bad_adapters.py FOLDER")
    print("\n".join(str(path) for path in make(Path(sys.argv[1])).values()))
