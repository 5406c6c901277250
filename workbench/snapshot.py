"""Fetch a Hugging Face Hub repository into the user's cache: cache first, then the network, and never for long.

Only JSON, safetensors and tokenizer files are fetched, so nothing that could run code is ever downloaded. Messages are
written here and never quote the library's, which may repeat request headers and so a token.

What a token given by the caller fetches goes to a cache of that token's own, so that it is served to nobody else: not
to another token, and not to a request without one. Without a token everything is as in any program of the Hub's: the
machine's own login, and the shared cache. A request with a token is served from the shared cache too, offline or not:
whatever lies there, a request without a token gets as well, so that refusing it would protect nothing and fetch large
bases twice.
"""

from __future__ import annotations

import hashlib
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.errors import ContentError, TransientError, UserError, names, nearest

DATA_FILES = ("*.json", "*.safetensors")
TOKENIZER_FILES = ("*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
REACH_TIMEOUT_S = 5.0
TOKEN_CACHES = "lora-workbench-tokens"


def _nothing_more(files: list[str]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Repo:
    """One repository, or address on S3, to fetch.

    Attributes:
        allow, ignore: patterns of the files that are fetched, and of those among them that are not.
        check: raises UserError when a folder does not hold what is needed.
        also: from the names of all files to patterns of more that this one needs.
    """

    repo_id: str
    noun: str
    revision: str | None
    allow: tuple[str, ...]
    ignore: tuple[str, ...]
    check: Callable[[Path], object]
    also: Callable[[list[str]], tuple[str, ...]] = _nothing_more

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.noun} {self.repo_id!r}" + (f" at revision {self.revision!r}" if self.revision else "")


def fetch(repo: Repo, token: str | None = None, offline: bool | None = None, progress: bool = True) -> Path:
    """Return the local folder of `repo`, from the cache when it is complete there, else downloaded."""
    _require_text(token)
    caches = _caches(token)
    found_in = [_from_cache(repo, cache) for cache in caches]
    usable = [folder for folder, problem in found_in if folder is not None and problem is None]
    if usable:
        return usable[0]
    problem = next((problem for _, problem in found_in if problem), None)
    found = (
        f"; the cached copy is not usable: {problem}" if problem else f"; it is not in the cache{_near_cached(repo)}"
    )
    if is_offline(offline):
        raise UserError(
            f"{repo.label} cannot be fetched: offline mode is on{found}. Turn offline mode off (unset "
            f"HF_HUB_OFFLINE), or give the path of a local folder"
        )
    reason = unreachable(_endpoint(), REACH_TIMEOUT_S)
    if reason:
        raise TransientError(
            f"{repo.label} cannot be fetched: the Hub at {_shown_endpoint()} {reason}{found}. Check the "
            f"connection, or give the path of a local folder"
        )
    with _progress_bars(progress), _as_user_errors(repo, token):
        folder = _download(repo, token, caches[0])
    repo.check(folder)
    return folder


def _require_text(token: object) -> None:
    if token is not None and not (isinstance(token, str) and token.strip()):
        raise UserError("the token is not a text with something in it; leave it out to use this machine's own login")


def _caches(token: str | None) -> tuple[Path, ...]:
    """Return the folders to look in, the one that downloads go to first."""
    from huggingface_hub import constants

    shared = Path(constants.HF_HUB_CACHE)
    if token is None:
        return (shared,)
    digest = hashlib.sha256(b"lora-workbench cache of " + token.encode("utf-8", "surrogatepass")).hexdigest()
    return shared / TOKEN_CACHES / digest[:32], shared


def _download(repo: Repo, token: str | None, cache: Path) -> Path:
    files = _file_names(repo, token)
    if files and not any(name.endswith(".safetensors") for name in files):
        refuse_pickles(files, repo.label)
    if token is not None:
        # other users of the machine have no business in what a token fetched
        for folder in (cache.parent, cache):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = _snapshot(repo, token, cache)
    also = repo.also(files)
    return _snapshot(replace(repo, allow=also, ignore=()), token, cache) if also else folder


def is_offline(offline: bool | None = None) -> bool:
    """Return the caller's wish, or what the environment says when there is none."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE if offline is None else offline or constants.HF_HUB_OFFLINE


def unreachable(endpoint: str, timeout_s: float) -> str | None:
    """Return why `endpoint` cannot be used, as the end of a sentence, or None when a server answers there.

    One request with one deadline: the library would retry, and a name server that never answers has no timeout at all.
    """
    answer: list[str | None] = []
    worker = threading.Thread(target=lambda: answer.append(_probe(endpoint, timeout_s)), daemon=True)
    worker.start()
    worker.join(timeout_s + 1)
    return answer[0] if answer else f"did not answer within {timeout_s:.0f} seconds"


def _probe(endpoint: str, timeout_s: float) -> str | None:
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"answers with status {error.code}" if error.code in (502, 503, 504) else None
    except TimeoutError:
        return f"did not answer within {timeout_s:.0f} seconds"
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, TimeoutError):
            return f"did not answer within {timeout_s:.0f} seconds"
        # certificates are the library's business: it may know of ones that urllib does not
        if type(cause).__name__.startswith("SSL"):
            return None
        return f"cannot be reached ({getattr(cause, 'strerror', None) or cause})"


def _endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _shown_endpoint() -> str:
    return without_password(_endpoint())


def without_password(address: str) -> str:
    """Return an address without the user and password that it may carry."""
    scheme, separator, rest = address.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]


def _from_cache(repo: Repo, cache: Path) -> tuple[Path | None, str | None]:
    """Return the cached folder and what is wrong with it; (None, None) when nothing is cached."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(repo, None, cache, local_files_only=True)
        repo.check(folder)
    except HFValidationError:
        raise UserError(f"{repo.repo_id!r} is no valid Hub id, expected the form 'org/name'") from None
    except UserError as error:
        return folder, str(error)
    except LocalEntryNotFoundError as error:
        return None, "files are missing from it" if getattr(error, "snapshot_path", None) else None
    return folder, None


def _snapshot(repo: Repo, token: str | None, cache: Path, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo.repo_id,
            revision=repo.revision,
            token=token,
            endpoint=_endpoint(),
            local_files_only=local_files_only,
            cache_dir=cache,
            allow_patterns=list(repo.allow),
            ignore_patterns=list(repo.ignore),
            etag_timeout=REACH_TIMEOUT_S,
        )
    )


def _file_names(repo: Repo, token: str | None) -> list[str]:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_endpoint(), token=token)
    info = api.model_info(repo.repo_id, revision=repo.revision, timeout=2 * REACH_TIMEOUT_S)
    return [sibling.rfilename for sibling in info.siblings or ()]


def refuse_pickles(files: list[str], label: str) -> None:
    """Raise when pickled weights are among `files`: loading a pickle runs whatever code is in it."""
    pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ContentError(
            f"{label} holds its weights only as {names(pickles, 4)}, a pickle file, which can run any code "
            f"when loaded and is refused; convert it to safetensors (safetensors.torch.save_file)"
        )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _as_user_errors(repo: Repo, token: str | None) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    # httpx, requests, the Hub's own and the file system's errors share no base class
    except Exception as error:
        kind = UserError if _will_last(error) else TransientError
        raise kind(f"{repo.label} cannot be fetched: {_explain(repo, error, token)}") from None


def _will_last(error: Exception) -> bool:
    """Whether asking again would give the same error."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return isinstance(error, ValueError) and not isinstance(error, OSError)
    return 400 <= status < 500 and status not in (408, 429)


def _explain(repo: Repo, error: Exception, token: str | None) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access to it is restricted; ask for access at {_shown_endpoint()}/{repo.repo_id}, then give "
            f"{'a token of an account that has it' if token else 'a token, or log in with `hf auth login`'}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository exists, but has no such revision (branch, tag or commit)"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        access = "the token given has no access to it" if token else "it is private and needs a token"
        return f"the Hub has no such repository, or {access}{_near_cached(repo)}"
    if status is not None:
        return f"the Hub answered with status {status}; try again later"
    if isinstance(error, errors.LocalEntryNotFoundError) or "Timeout" in type(error).__name__:
        return "the connection to the Hub broke off; try again, files already fetched are kept"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"the connection to the Hub failed ({type(error).__name__}); try again, files already fetched are kept"


def _near_cached(repo: Repo) -> str:
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    cached = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    return nearest(repo.repo_id, [name for name in cached if name != repo.repo_id])
