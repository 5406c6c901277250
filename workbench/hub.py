"""Turn what a user calls a model, adapter or mixture into a local folder that holds it.

A source is the word "demo", the path of a folder, a Hub id "org/name", or an address on S3, "s3://bucket/folder". Every
folder returned has the files its kind needs, as safetensors; whether their contents fit together is for the loaders to
say. A `revision` and a `token` are the Hub's: `workbench.snapshot` says whom a token's downloads are kept from.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from workbench import s3, snapshot
from workbench.errors import ContentError, TransientError, UserError, names, nearest
from workbench.jsonfile import read_json
from workbench.snapshot import DATA_FILES, PICKLE_SUFFIXES, TOKENIZER_FILES, Repo, refuse_pickles

DEMO = "demo"
DEMO_MIXTURE = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
XLORA_CONFIG = "xlora_config.json"
LUDWIG_FOLDERS = ("model_weights", "model/model_weights")


def resolve_base(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """Return the folder of a base model: config.json, safetensors, and the tokenizer when there is one."""
    if source == DEMO:
        from workbench.demo_base import demo_base_folder

        _refuse_revision(revision, "the demo base is pinned by its content")
        return demo_base_folder(progress)
    local = local_folder(source, "base model")
    if local is not None:
        _refuse_revision(revision, f"base model {str(source)!r} is a local folder")
        check_base(local)
        return local
    # "*/*" keeps other formats' folders away, and mistral repositories carry a second copy named consolidated
    ignore = ("*/*", "consolidated*")
    remote = _remote_id(source, "base model", revision)
    repo = Repo(remote, "base model", revision, DATA_FILES + TOKENIZER_FILES, ignore, check_base)
    return _fetch(repo, token, offline, progress)


def resolve_config(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """Return a folder that holds a base model's config.json, without fetching its weights."""
    if source == DEMO:
        return resolve_base(source, revision=revision, progress=progress)
    local = local_folder(source, "base model")
    if local is not None:
        _refuse_revision(revision, f"base model {str(source)!r} is a local folder")
        _check_config(local)
        return local
    remote = _remote_id(source, "base model", revision)
    repo = Repo(remote, "base model", revision, ("config.json",), (), _check_config)
    return _fetch(repo, token, offline, progress)


def resolve_adapter(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """Return the folder of one adapter, which may also be "org/name/folder" on the Hub or "demo/NAME".

    In a folder that Ludwig wrote the adapter lies further inside, and that inner folder is returned.
    """
    text = str(source)
    if text.split("/")[0] == DEMO:
        _refuse_revision(revision, "the demo ships with the package")
        return _demo_adapter(text)
    local = local_folder(source, "adapter")
    if local is not None:
        _refuse_revision(revision, f"adapter {text!r} is a local folder")
        return _adapter_within(local)
    repo_id, inside = (text, "") if s3.is_address(text) else _split_inside(text)

    def within(folder: Path) -> Path:
        return _adapter_within(subfolder(folder, inside) if inside else folder)

    allow = tuple(f"{inside}/{pattern}" for pattern in DATA_FILES) if inside else DATA_FILES
    ignore = () if inside else ("*/*",)
    remote = _remote_id(repo_id, "adapter", revision)
    repo = Repo(remote, "adapter", revision, allow, ignore, within, _ludwig_patterns)
    return within(_fetch(repo, token, offline, progress))


def resolve_mixture(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """Return the folder of an X-LoRA mixture, in any of its layouts."""
    if source == DEMO:
        _refuse_revision(revision, "the demo mixture ships with the package")
        if not (DEMO_MIXTURE / XLORA_CONFIG).is_file():
            raise UserError("the demo mixture is missing from this installation; install lora-workbench again")
        return DEMO_MIXTURE
    local = local_folder(source, "mixture")
    if local is not None:
        _refuse_revision(revision, f"mixture {str(source)!r} is a local folder")
        check_mixture(local)
        return local
    allow = DATA_FILES + TOKENIZER_FILES
    repo = Repo(_remote_id(source, "mixture", revision), "mixture", revision, allow, (), check_mixture)
    return _fetch(repo, token, offline, progress)


def local_folder(source: str | Path, noun: str) -> Path | None:
    """Return the folder a path names, or None when `source` is no path; a path to nothing is an error."""
    if s3.is_address(source):
        return None
    if not str(source).strip():
        raise UserError(f"the {noun} is an empty text, expected a folder, a Hub id 'org/name' or 'demo'")
    try:
        path = Path(source).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{noun} {str(source)[:200]!r} cannot be looked up: {reason}") from None
    if is_folder:
        return path
    if exists:
        raise UserError(f"{noun} {str(source)!r} is a file, expected a folder; its folder is {str(path.parent)!r}")
    text = str(source)
    is_path = isinstance(source, Path) or text.startswith((".", "~", os.sep))
    if not is_path and not (os.sep in text and path.parent.is_dir()):
        return None
    if not path.parent.is_dir():
        raise UserError(f"{noun} {text!r}: folder not found; {str(path.parent)!r} does not exist either")
    hint = nearest(path.name, [child.name for child in path.parent.iterdir() if child.is_dir()])
    raise UserError(f"{noun} {text!r}: folder not found in {str(path.parent)!r}{hint}")


def subfolder(root: Path, name: str) -> Path:
    """Return the folder `name` inside `root`; a name that leads out of `root`, by `..` or a link, is refused."""
    path = root / name
    outside = Path(name).is_absolute() or ".." in Path(name).parts or not name.strip()
    if outside or not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{name!r} leads out of {str(root)!r}, expected the name of a folder inside it")
    if not path.is_dir():
        hint = nearest(name, [child.name for child in root.iterdir() if child.is_dir()]) if root.is_dir() else ""
        raise UserError(f"there is no folder {name!r} in {str(root)!r}{hint}")
    return path


def check_base(folder: Path) -> None:
    """Raise unless `folder` has a config and all of its weights as safetensors."""
    _check_config(folder)
    label = f"base model {str(folder)!r}"
    if (folder / WEIGHTS_INDEX).is_file():
        index = read_json(folder / WEIGHTS_INDEX, "index of weights")
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
            raise UserError(f"{label}: {WEIGHTS_INDEX} has no 'weight_map' of tensor names to names of files beside it")
        missing = sorted({name for name in shards.values() if not (folder / name).is_file()})
        if missing:
            raise UserError(f"{label} lacks {names(missing)}, which {WEIGHTS_INDEX} names")
    elif not (folder / WEIGHTS).is_file():
        _report_no_weights(folder, label, f"{WEIGHTS!r} or {WEIGHTS_INDEX!r}")


def check_adapter(folder: Path) -> None:
    """Raise unless `folder` has an adapter's config and weights, in files of its own."""
    label = f"adapter {str(folder)!r}"
    files = _file_names(folder)
    if ADAPTER_CONFIG not in files:
        if any(XLORA_CONFIG in name for name in files):
            inner = sorted(child.parent.name for child in folder.glob(f"*/{ADAPTER_CONFIG}"))
            one = f"such as its folders {names(inner)}" if inner else "such as a folder of it, 'mixture/folder'"
            raise ContentError(f"{label} is a mixture, expected one adapter, {one}")
        hint = nearest(ADAPTER_CONFIG, files)
        both = names(_ludwig_folders(folder))
        several = f"; its folders {both} each hold one: give the path of the one meant" if both != "none" else ""
        raise ContentError(f"{label} has no {ADAPTER_CONFIG!r}{hint}; it holds {names(files)}{several}")
    if ADAPTER_WEIGHTS not in files:
        _report_no_weights(folder, label, repr(ADAPTER_WEIGHTS))
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _refuse_outside(folder, name, label)


def check_mixture(folder: Path) -> None:
    """Raise unless `folder` looks like an X-LoRA mixture with weights that can be read safely."""
    label = f"mixture {str(folder)!r}"
    files = _file_names(folder)
    configs = [name for name in files if XLORA_CONFIG in name]
    configs += [child.name for child in folder.glob(f"*/*{XLORA_CONFIG}")]
    if not configs and ADAPTER_CONFIG not in files:
        hint = nearest(XLORA_CONFIG, files)
        raise UserError(f"{label} has neither {XLORA_CONFIG!r} nor {ADAPTER_CONFIG!r}{hint}; it holds {names(files)}")
    classifiers = [name for name in files if "xlora_classifier" in name]
    if classifiers and not any(name.endswith(".safetensors") for name in classifiers):
        refuse_pickles(classifiers, label)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*/*.safetensors")):
        _report_no_weights(folder, label, "a classifier and adapters as safetensors")


def _adapter_within(folder: Path) -> Path:
    """Return the folder that holds the adapter: `folder`, or the one inside it where Ludwig keeps what it trained."""
    inner = _ludwig_folders(folder)
    if not (folder / ADAPTER_CONFIG).is_file() and len(inner) == 1:
        folder = subfolder(folder, inner[0])
    check_adapter(folder)
    return folder


def _ludwig_folders(folder: Path) -> list[str]:
    return [name for name in LUDWIG_FOLDERS if (folder / name / ADAPTER_CONFIG).is_file()]


def _ludwig_patterns(files: list[str]) -> tuple[str, ...]:
    """Return patterns of Ludwig's folders, where a repository has its adapter there and not at its top."""
    inner = [name for name in LUDWIG_FOLDERS if f"{name}/{ADAPTER_CONFIG}" in files and ADAPTER_CONFIG not in files]
    return tuple(f"{name}/{pattern}" for name in inner for pattern in DATA_FILES)


def _check_config(folder: Path) -> None:
    files = _file_names(folder)
    if "config.json" not in files:
        label = f"base model {str(folder)!r}"
        if ADAPTER_CONFIG in files:
            raise UserError(f"{label} is an adapter ({ADAPTER_CONFIG!r} is there), expected a base model")
        raise UserError(f"{label} has no 'config.json'{nearest('config.json', files)}; it holds {names(files)}")


def _report_no_weights(folder: Path, label: str, expected: str) -> None:
    files = _file_names(folder)
    refuse_pickles(files, label)
    weights = [name for name in files if name.endswith((".safetensors", ".gguf", *PICKLE_SUFFIXES))]
    raise ContentError(f"{label} has no weights: expected {expected}; it holds {names(weights or files)}")


def _refuse_outside(folder: Path, name: str, label: str) -> None:
    """Raise if `name` is a link that leads out of `folder`; in the Hub's cache every file is a link to its blobs."""
    target, root = (folder / name).resolve(), folder.resolve()
    repos = [parent.parent for parent in root.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(inside) for inside in (root, *(repo / "blobs" for repo in repos))):
        raise ContentError(
            f"{label}: {name!r} is a link that leads out of the folder, to {str(target)!r}; copy the file, or name the "
            "folder that holds it"
        )


def _demo_adapter(text: str) -> Path:
    inner = sorted(child.parent.name for child in DEMO_MIXTURE.glob(f"*/{ADAPTER_CONFIG}"))
    name = text.partition("/")[2]
    if name not in inner:
        hint = nearest(name, inner) if name else ""
        raise UserError(
            f"adapter {text!r} is none of the demo's{hint}; expected 'demo/NAME' with NAME from {names(inner)}"
        )
    return DEMO_MIXTURE / name


def _split_inside(text: str) -> tuple[str, str]:
    parts = text.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:])


def _fetch(repo: Repo, token: str | None, offline: bool | None, progress: bool) -> Path:
    if s3.is_address(repo.repo_id):
        return s3.fetch(repo, offline, progress)
    return snapshot.fetch(repo, token, offline, progress)


def _remote_id(source: str | Path, noun: str, revision: str | None) -> str:
    if not s3.is_address(source):
        return _hub_id(source, noun)
    _refuse_revision(revision, f"{noun} {str(source)!r} is on S3")
    return s3.checked_address(source, noun)


def _hub_id(source: str | Path, noun: str) -> str:
    text = str(source)
    if not HUB_ID.fullmatch(text):
        hint = nearest(text, [child.name for child in Path().iterdir() if child.is_dir()] + [DEMO])
        raise UserError(
            f"{noun} {text!r} is neither a folder here, nor a Hub id of the form 'org/name', nor 'demo'{hint}"
        )
    return text


def _refuse_revision(revision: str | None, why: str) -> None:
    if revision is not None:
        raise UserError(f"revision {revision!r} applies only to Hub repositories, but {why}; leave the revision out")


def _file_names(folder: Path) -> list[str]:
    try:
        return sorted(child.name for child in folder.iterdir() if child.is_file())
    except OSError as error:
        raise TransientError(f"folder {str(folder)!r} cannot be read: {error.strerror or error}") from None


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name
