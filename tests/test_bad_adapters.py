"""Bad adapters, disks and Hubs: each its own status and sentence, and nothing else is touched.

`pytest tests/test_bad_adapters.py`; the zoo itself is in `make_bad_adapters.py`.
"""

import errno
import re
import shutil
from pathlib import Path

import pytest
from fake_hub import fake, online  # noqa: F401 (fixtures)
from make_bad_adapters import CONFIG, GOOD, MAX_RANK, MODEL, WEIGHTS, ZOO, make
from models import random_ids, save_base

from workbench import Engine
from workbench.adapters import LoRAConfig, LoRAStatus
from workbench.cli import main

PROMPT = random_ids(5)
OPTIONS = {"max_tokens": 24, "ignore_eos": True}
SHA, TOKEN = "0123456789abcdef0123456789abcdef01234567", "hf_a_secret_that_stays_secret"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> dict[str, Path]:
    return make(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(MODEL, tmp_path_factory.mktemp("bases") / "tiny")


@pytest.fixture(scope="module")
def engine(base, tmp_path_factory) -> Engine:
    made = Engine(base, lora=LoRAConfig(max_num_loras=2, max_lora_rank=MAX_RANK))
    made.load_adapter(GOOD.write(tmp_path_factory.mktemp("good") / "good", MODEL))
    return made


@pytest.fixture(scope="module")
def alone(engine) -> list[int]:
    return list(engine.generate(PROMPT, adapter="good", **OPTIONS).token_ids)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def finish(engine: Engine, request) -> list[int]:
    while request.finish_reason is None:
        engine.step()
    assert request.error is None
    return list(request.generated)


@pytest.mark.parametrize("name", ZOO)
def test_a_bad_adapter_is_refused_and_nothing_else_notices(zoo, engine, alone, name, tmp_path):
    """Loaded while a request runs; then mended, and loaded again under the same name."""
    running = engine.enqueue(PROMPT, adapter="good", **OPTIONS)
    steps(engine, 3)
    before = engine.adapters.to_frame()
    answer = engine.adapters.load(zoo[name], "bad")
    assert answer.status is LoRAStatus.LOAD_INVALID_ADAPTER, answer
    assert re.search(ZOO[name].says, answer.message), answer.message
    assert "Traceback" not in answer.message and "\n" not in answer.message
    assert engine.adapters.to_frame().equals(before) and "bad" not in engine.adapters
    steps(engine, 3)
    mended = GOOD.write(tmp_path / "mended", MODEL)
    assert engine.adapters.load(mended, "bad").ok
    assert finish(engine, engine.enqueue(PROMPT, adapter="bad", **OPTIONS)) == alone
    assert finish(engine, running) == alone
    assert engine.adapters.unload("bad").ok


@pytest.mark.parametrize("name", ZOO)
def test_inspect_says_what_is_wrong(zoo, base, name, capsys):
    code = main(["inspect", str(zoo[name]), "--base", str(base)])
    shown = capsys.readouterr()
    if ZOO[name].engine_only:
        assert code == 0 and "no problems found" in shown.out
        return
    problems = [line for line in shown.out.splitlines() if line.startswith("problem: ")]
    assert code == 2 and len(problems) == 1 and not shown.err, (code, shown)
    says = ZOO[name].says.replace("base 'tiny'", f"base '{base}'")
    assert re.search(says, problems[0]), problems[0]


def test_pickles_are_never_opened(zoo, engine):
    assert not engine.adapters.load(zoo["pickle"], "bad").ok
    assert main(["inspect", str(zoo["pickle"])]) == 2
    assert not (zoo["pickle"].parent / "ran").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "an adapter's source is empty"),
        ("  ", "an adapter's source is empty"),
        ("x=", "is not of the form name=source"),
        ("/", "has no last part to name an adapter by; write name=/"),
        ("/nowhere/at/all", "folder not found; '/nowhere/at' does not exist either"),
        ("{zoo}/truncatd", "folder not found in '.*'; did you mean 'truncated'"),
        ("{zoo}/truncated/adapter_config.json", "is a file, expected a folder"),
        ("org/name/../../../etc", "offline mode is on"),
        ("demo/../../etc", "is none of the demo's"),
        ("a b", "is neither a folder here, nor a Hub id"),
        ("a\0b", "is neither a folder here, nor a Hub id"),
        ("x" * 5000, "cannot be looked up: File name too long"),
        ("~no_such_user/x", "cannot be looked up"),
    ],
)
def test_a_source_that_names_nothing(zoo, engine, source, says):
    answer = engine.adapters.load(source.format(zoo=zoo["pickle"].parent))
    assert answer.status is LoRAStatus.LOAD_INVALID_PATH
    assert re.search(says, answer.message), answer.message


def test_files_of_the_hubs_cache_are_links_and_are_read(engine, tmp_path):
    snapshot = GOOD.write(tmp_path / "models--org--x" / "snapshots" / SHA / "inner", MODEL)
    blobs = tmp_path / "models--org--x" / "blobs"
    blobs.mkdir()
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../../blobs/{name}")
    assert engine.adapters.load(snapshot, "cached").ok
    assert engine.adapters.unload("cached").ok
    (tmp_path / "best").symlink_to(GOOD.write(tmp_path / "runs" / "7", MODEL))
    assert engine.adapters.load(tmp_path / "best").ok, "a link that the user named is no trap"
    assert engine.adapters.unload("best").ok


# disks


@pytest.fixture
def failing(monkeypatch):
    """Return a function after which reading a file of this name fails with this error, and one that ends it."""
    real, faults = Path.open, {}

    def opened(self: Path, *given, **more):
        if self.name in faults:
            raise OSError(faults[self.name], "Input/output error")
        return real(self, *given, **more)

    monkeypatch.setattr(Path, "open", opened)
    return faults


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_disk_that_fails_may_be_asked_again(engine, alone, failing, name, tmp_path):
    folder = GOOD.write(tmp_path / "later", MODEL)
    running = engine.enqueue(PROMPT, adapter="good", **OPTIONS)
    engine.step()
    failing[name] = errno.EIO
    answer = engine.adapters.load(folder)
    assert answer.status is LoRAStatus.LOAD_ERROR
    assert name in answer.message and "cannot be read: Input/output error" in answer.message
    failing.clear()
    assert engine.adapters.load(folder).ok
    assert finish(engine, running) == alone
    assert engine.adapters.unload("later").ok


def test_a_folder_that_may_not_be_read(engine, monkeypatch, tmp_path):
    folder = GOOD.write(tmp_path / "closed", MODEL)
    real = Path.iterdir

    def iterdir(self: Path):
        if self == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    answer = engine.adapters.load(folder)
    assert answer.status is LoRAStatus.LOAD_ERROR and "closed' cannot be read: Permission denied" in answer.message
    assert main(["inspect", str(folder)]) == 2


def test_what_nobody_thought_of_is_this_adapters_failure(engine, monkeypatch, tmp_path):
    folder = GOOD.write(tmp_path / "odd", MODEL)
    monkeypatch.setattr("workbench.adapters.reading.LoRAModel.read", lambda *given: {}["surprise"])
    answer = engine.adapters.load(folder)
    assert answer.status is LoRAStatus.LOAD_ERROR
    assert f"adapter 'odd' from '{folder}': unexpected KeyError: 'surprise'" in answer.message
    monkeypatch.undo()
    assert engine.adapters.load(folder).ok and engine.adapters.unload("odd").ok


def test_a_file_overwritten_in_place_changes_no_adapter_that_is_loaded(engine, alone, tmp_path):
    folder = GOOD.write(tmp_path / "live", MODEL)
    assert engine.adapters.load(folder).ok
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * size)
        file.truncate(size // 2)
    assert finish(engine, engine.enqueue(PROMPT, adapter="live", **OPTIONS)) == alone
    assert engine.adapters.unload("live").ok


# the Hub


@pytest.mark.parametrize(
    ("status", "wanted", "says"),
    [
        ((401, ""), LoRAStatus.LOAD_INVALID_PATH, "the Hub has no such repository, or the token given has no access"),
        ((403, "GatedRepo"), LoRAStatus.LOAD_INVALID_PATH, "access to it is restricted; ask for access at"),
        ((404, "RepoNotFound"), LoRAStatus.LOAD_INVALID_PATH, "the Hub has no such repository"),
        ((500, ""), LoRAStatus.LOAD_ERROR, "the Hub answered with status 500; try again later"),
        ((503, ""), LoRAStatus.LOAD_ERROR, "the Hub answered with status 503; try again later"),
    ],
)
def test_a_hub_that_refuses(fake, engine, alone, status, wanted, says, tmp_path):  # noqa: F811
    fake.add("org/adapter", GOOD.write(tmp_path / "adapter", MODEL))
    fake.status["org/adapter"] = status
    running = engine.enqueue(PROMPT, adapter="good", **OPTIONS)
    engine.step()
    answer = engine.adapters.load("org/adapter", token=TOKEN)
    assert answer.status is wanted
    assert says in answer.message and "'org/adapter'" in answer.message and TOKEN not in answer.message
    fake.status.clear()
    assert engine.adapters.load("org/adapter", token=TOKEN).ok
    assert TOKEN not in repr(engine.adapters.entries())
    assert finish(engine, engine.enqueue(PROMPT, adapter="adapter", **OPTIONS)) == alone
    assert finish(engine, running) == alone
    assert engine.adapters.unload("adapter").ok


def test_a_repository_without_an_adapter_and_one_with_a_pickle(fake, engine, tmp_path):  # noqa: F811
    fake.repos["org/empty"] = {"adapter_config.json": b"{}", "README.md": b"#"}
    fake.repos["org/old"] = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    for repo, says in (("org/empty", "has no weights"), ("org/old", "a pickle file")):
        answer = engine.adapters.load(repo)
        assert answer.status is LoRAStatus.LOAD_INVALID_ADAPTER and says in answer.message
    fake.add("org/traps", GOOD.write(tmp_path / "inner", MODEL))
    answer = engine.adapters.load("org/traps/../../../etc")
    assert answer.status is LoRAStatus.LOAD_INVALID_PATH, answer


def test_a_hub_that_is_not_there_and_a_full_disk(online, engine, monkeypatch, tmp_path, fake):  # noqa: F811
    fake.add("org/adapter", GOOD.write(tmp_path / "adapter", MODEL))

    def full(*_, **given):
        if given["local_files_only"]:
            from huggingface_hub.errors import LocalEntryNotFoundError

            raise LocalEntryNotFoundError("not cached")
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/blob")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", full)
        answer = engine.adapters.load("org/adapter")
    assert answer.status is LoRAStatus.LOAD_ERROR and "No space left on device (/cache/blob)" in answer.message
    with monkeypatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        answer = engine.adapters.load("org/adapter")
    assert answer.status is LoRAStatus.LOAD_ERROR and "cannot be reached" in answer.message
    assert engine.adapters.load("org/adapter").ok and engine.adapters.unload("adapter").ok


def test_a_revision_of_a_local_folder(engine, tmp_path):
    answer = engine.adapters.load(GOOD.write(tmp_path / "local", MODEL), revision="v1")
    assert answer.status is LoRAStatus.LOAD_INVALID_PATH and "applies only to Hub repositories" in answer.message
    shutil.rmtree(tmp_path / "local")
    answer = engine.adapters.load(tmp_path / "local")
    assert answer.status is LoRAStatus.LOAD_INVALID_PATH and "folder not found in" in answer.message
