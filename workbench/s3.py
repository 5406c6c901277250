"""Fetch a folder of an S3 bucket into the workbench's cache, through s3fs (the extra `s3`).

Credentials, profile, region and endpoint are the machine's own, found as boto finds them (AWS_ACCESS_KEY_ID,
AWS_PROFILE, AWS_ENDPOINT_URL, ...). An address says nothing about versions, so the bucket is listed each time: a copy
in the cache is used when it has the ETags of that listing, and so never outlives the right to list. Only offline mode
uses the copy fetched last without asking. Messages are written here: a server's own may repeat what it was sent.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.demo_base import cache_folder
from workbench.errors import ContentError, TransientError, UserError, names, nearest
from workbench.snapshot import REACH_TIMEOUT_S, Repo, is_offline, refuse_pickles, unreachable, without_password

EXTRA = "pip install 'lora-workbench[s3]'"
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, LIST_TIMEOUT_S, ABANDONED_S = 5, 20, 45, 6 * 3600
ADDRESS = re.compile(r"[sS]3:/{1,2}(?P<bucket>[^/]*)(?P<key>.*)", re.DOTALL)
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
LATEST = "latest-"
PART = ".part-"


@dataclass(frozen=True)
class Object:
    """One file of the bucket: its full path there, its size in bytes and what changes with its content."""

    path: str
    size: int
    version: str


def is_address(source: str | Path) -> bool:
    """Whether a source names a place on S3; a `Path` made of one has lost a slash."""
    return str(source)[:4].lower() == "s3:/"


def checked_address(source: str | Path, noun: str) -> str:
    """Return the address as `s3://bucket/folder`, or raise a UserError that says what is wrong with it."""
    found = ADDRESS.fullmatch(str(source))
    key = found["key"].removeprefix("/").rstrip("/") if found else ""
    if found is None or not BUCKET.fullmatch(found["bucket"]) or not _is_safe(key) or "?" in key:
        raise UserError(f"{noun} {str(source)!r} is no folder on S3, expected 's3://bucket/path/to/folder'")
    return f"s3://{found['bucket']}/{key}"


def fetch(repo: Repo, offline: bool | None = None, progress: bool = True) -> Path:
    """Return the local folder of `repo`, whose id is an address on S3: see the module's first lines."""
    home = cache_folder() / "s3" / _digest([_endpoint(), repo.repo_id])
    with _as_user_errors(repo):
        if is_offline(offline):
            return _fetched_last(repo, home)
        bucket = connect()
        wanted = _wanted(repo, _within(LIST_TIMEOUT_S, lambda: _list(bucket, repo)))
        folder = home / _digest([[name, item.size, item.version] for name, item in sorted(wanted.items())])
        if not _is_whole(folder, wanted):
            _download(bucket, repo, wanted, folder, progress)
        _check(repo, folder)
        _note(home, repo, folder)
    return folder


def connect() -> Any:
    """Return a file system over S3."""
    try:
        import s3fs
    except ImportError:
        raise UserError(f"S3 is read through s3fs, which is not installed; type `{EXTRA}`") from None
    config = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S, "retries": {"max_attempts": 1}}
    system = s3fs.S3FileSystem(config_kwargs=config, skip_instance_cache=True, use_listings_cache=False)
    system.retries = 2
    reason = unreachable(_endpoint(), REACH_TIMEOUT_S) if _endpoint() else None
    if reason:
        raise TransientError(f"{_shown_endpoint()} {reason}; check the connection and AWS_ENDPOINT_URL")
    return system


def _list(bucket: Any, repo: Repo) -> dict[str, Object]:
    """Return name inside the folder -> object, of all files under the address."""
    root = repo.repo_id.removeprefix("s3://")
    files = {}
    for path, info in bucket.find(root, detail=True).items():
        place = path.lstrip("/")
        if place == root:
            raise UserError(f"{repo.label} is a file, expected a folder; its folder is {_parent(repo.repo_id)!r}")
        name = place.removeprefix(root + "/")
        # some tools mark a folder by an empty object of its name
        if name and not name.endswith("/"):
            changes = info.get("ETag") or info.get("mtime") or info.get("created")
            files[name] = Object(path, info["size"], str(changes))
    if not files:
        raise UserError(f"{repo.label}: there is nothing at that address{_nearest_folder(bucket, repo)}")
    return files


def _nearest_folder(bucket: Any, repo: Repo) -> str:
    """Return a hint at a folder of a like name, or nothing: the bucket need not let itself be listed higher up."""
    with contextlib.suppress(Exception):
        beside = bucket.ls(_parent(repo.repo_id).removeprefix("s3://"), detail=False)
        return nearest(PurePosixPath(repo.repo_id).name, [PurePosixPath(path).name for path in beside])
    return ""


def _wanted(repo: Repo, files: Mapping[str, Object]) -> dict[str, Object]:
    """Return those files that the kind of source needs; a pickle is never among them."""
    if not any(name.endswith(".safetensors") for name in files):
        refuse_pickles(list(files), repo.label)

    def matches(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    also = repo.also(list(files))
    wanted = {
        name: item
        for name, item in files.items()
        if matches(name, also) or (matches(name, repo.allow) and not matches(name, repo.ignore))
    }
    unsafe = [name for name in wanted if not _is_safe(name)]
    if unsafe:
        raise ContentError(f"{repo.label} holds {names(unsafe)}, which cannot be the name of a file inside a folder")
    if not wanted:
        raise ContentError(f"{repo.label} holds nothing of a {repo.noun}; it holds {names(list(files))}")
    return wanted


def _download(bucket: Any, repo: Repo, wanted: Mapping[str, Object], folder: Path, progress: bool) -> None:
    """Fetch the wanted files beside `folder`, check them, and only then move them to their place in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # private buckets' files are nobody else's
    folder.parent.chmod(0o700)
    _remove_abandoned(folder.parent)
    with tempfile.TemporaryDirectory(prefix=PART, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / "made"
        _copy(bucket, repo, wanted, made, progress)
        if _wanted(repo, _within(LIST_TIMEOUT_S, lambda: _list(bucket, repo))) != wanted:
            raise TransientError(f"{repo.label} changed while it was fetched; try again")
        _check(repo, made)
        _publish(made, folder, wanted)


def _check(repo: Repo, folder: Path) -> None:
    """Raise unless the folder has what is needed, in words about the address and not about the cache."""
    try:
        repo.check(folder)
    except UserError as error:
        raise type(error)(str(error).replace(str(folder), repo.repo_id)) from None


def _copy(bucket: Any, repo: Repo, wanted: Mapping[str, Object], made: Path, progress: bool) -> None:
    from fsspec.callbacks import Callback
    from tqdm import tqdm

    class Advance(Callback):
        def relative_update(self, inc: int = 1) -> None:
            bar.update(inc)

    total = sum(item.size for item in wanted.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Fetching {repo.repo_id}", disable=not progress) as bar:
        for name, item in wanted.items():
            target = made / name
            target.parent.mkdir(parents=True, exist_ok=True)
            bucket.get_file(item.path, str(target), callback=Advance())
            if target.stat().st_size != item.size:
                raise TransientError(f"{repo.label} changed while it was fetched ({name!r}); try again")


def _publish(made: Path, folder: Path, wanted: Mapping[str, Object]) -> None:
    try:
        os.replace(made, folder)
    except OSError:
        # another process may have been first; what someone took files out of has to make way
        if not _is_whole(folder, wanted):
            os.replace(folder, made.parent / "damaged")
            os.replace(made, folder)


def _is_whole(folder: Path, wanted: Mapping[str, Object]) -> bool:
    paths = {folder / name: item.size for name, item in wanted.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _fetched_last(repo: Repo, home: Path) -> Path:
    """Return the newest copy that has what is needed: a base's config alone may have been fetched after the base."""
    problem = "it is not in the cache"
    for note in sorted(home.glob(LATEST + "*"), key=lambda path: path.stat().st_mtime, reverse=True):
        folder = home / note.read_text(encoding="utf-8")
        try:
            _check(repo, folder)
            return folder
        except UserError as error:
            problem = f"the cached copy is not usable: {error}"
    raise UserError(
        f"{repo.label} cannot be fetched: offline mode is on; {problem}. Turn offline mode off (unset HF_HUB_OFFLINE), "
        "or give the path of a local folder"
    )


def _note(home: Path, repo: Repo, folder: Path) -> None:
    """Remember that `folder` is what the address holds now, for this kind of source."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=PART, dir=home, delete=False) as file:
        file.write(folder.name)
    os.replace(file.name, home / (LATEST + _digest([repo.allow, repo.ignore])))


def _remove_abandoned(home: Path) -> None:
    """Delete what killed runs left behind."""
    for path in home.glob(PART + "*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or raise TimeoutError: looking up a name has no time-out of its own."""
    done: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except Exception as error:
            done.append((None, error))

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    if not done:
        raise TimeoutError
    value, error = done[0]
    if error is not None:
        raise error
    return value


@contextmanager
def _as_user_errors(repo: Repo) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if repo.repo_id in str(error):
            raise
        raise type(error)(f"{repo.label} cannot be fetched: {error}") from None
    # botocore's, aiohttp's, fsspec's and the file system's errors share no base class
    except Exception as error:
        kind, reason = _explain(repo, error)
        raise kind(f"{repo.label} cannot be fetched: {reason}") from None


def _explain(repo: Repo, error: Exception) -> tuple[type[UserError], str]:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    kind, shown = type(error).__name__, f" ({code})" if re.fullmatch(r"[A-Za-z]{3,60}", code) else ""
    bucket = repo.repo_id.split("/")[2]
    if "Credential" in kind or "SSO" in kind or kind in ("ProfileNotFound", "TokenRetrievalError"):
        return UserError, (
            "there are no usable AWS credentials here; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a "
            "profile that has them in AWS_PROFILE"
        )
    if code == "NoSuchBucket":
        return UserError, f"there is no bucket {bucket!r} at {_shown_endpoint()}"
    if code in ("NoSuchKey", "404"):
        return TransientError, "a file of it was removed while it was fetched; try again"
    if isinstance(error, PermissionError) and not error.filename or status in (401, 403):
        return UserError, f"access is denied{shown}; check that these AWS credentials may list and read it"
    if response:
        lasting = 400 <= status < 500 and status not in (408, 429)
        advice = "check the address and AWS_ENDPOINT_URL" if lasting else "try again later"
        return UserError if lasting else TransientError, f"{_shown_endpoint()} answered {status}{shown}; {advice}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, TimeoutError):
        return TransientError, error.strerror + (f" ({error.filename})" if error.filename else "")
    return TransientError, f"{_shown_endpoint()} cannot be reached, or broke off ({kind}); check the connection"


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _shown_endpoint() -> str:
    return f"S3 at {without_password(_endpoint())}" if _endpoint() else "Amazon S3"


def _is_safe(key: str) -> bool:
    parts = key.split("/")
    return all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)


def _parent(address: str) -> str:
    return address.rpartition("/")[0]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]
