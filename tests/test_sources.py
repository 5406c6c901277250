"""Ludwig's folders, whose token sees what, and S3: `pytest tests/test_sources.py`."""

import logging
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from workbench import s3, snapshot
from workbench.errors import ContentError, TransientError, UserError
from workbench.hub import resolve_adapter, resolve_base, resolve_config, resolve_mixture

pytest_plugins = ("fake_hub",)
ANNA, BERT = "hf_a_secret_of_anna", "hf_another_secret_of_bert"
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
ADDRESS = "s3://models/team/one"


@pytest.mark.parametrize("inner", ["model_weights", "model/model_weights"])
def test_adapter_in_a_folder_of_ludwig_is_found(tiny, tmp_path, inner):
    shutil.copytree(tiny / "xlora" / "adapter_1", tmp_path / "run" / inner)
    (tmp_path / "run" / "description.json").write_text("{}")
    assert resolve_adapter(tmp_path / "run") == tmp_path / "run" / inner


def test_adapter_at_the_top_outranks_one_inside(tiny, tmp_path):
    shutil.copytree(tiny / "xlora" / "adapter_1", tmp_path / "run")
    shutil.copytree(tiny / "xlora" / "adapter_2", tmp_path / "run" / "model_weights")
    assert resolve_adapter(tmp_path / "run") == tmp_path / "run"


def test_two_or_no_folders_of_ludwig_are_refused(tiny, tmp_path):
    for inner in ("model_weights", "model/model_weights"):
        shutil.copytree(tiny / "xlora" / "adapter_1", tmp_path / "both" / inner)
    with pytest.raises(ContentError, match="has no 'adapter_config.json'; .* each hold one: give the path of the one"):
        resolve_adapter(tmp_path / "both")
    (tmp_path / "none" / "model_weights").mkdir(parents=True)
    with pytest.raises(ContentError, match="has no 'adapter_config.json'; it holds none$"):
        resolve_adapter(tmp_path / "none")


def test_folder_of_ludwig_that_links_outside_is_refused(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model_weights").symlink_to(tiny / "xlora" / "adapter_1")
    with pytest.raises(UserError, match="leads out of"):
        resolve_adapter(tmp_path / "run")


def test_folder_of_ludwig_on_the_hub(fake, tiny):
    shipped = {f"model/model_weights/{path.name}": path.read_bytes() for path in (tiny / "xlora/adapter_1").iterdir()}
    others = {"README.md": b"#", "description.json": b"{}", "model/logs/step.json": b"{}"}
    fake.repos["org/run"] = shipped | others
    folder = resolve_adapter("org/run", progress=False)
    assert (folder.parts[-2:], {path.name for path in folder.iterdir()}) == (("model", "model_weights"), ADAPTER_FILES)
    assert not any(path.endswith("step.json") for path in fake.seen)
    fake.seen.clear()
    assert resolve_adapter("org/run") == folder == resolve_adapter("org/run", offline=True) and fake.seen == []
    fake.repos["org/mix"] = {f"runs/a/{name}": content for name, content in shipped.items()}
    assert resolve_adapter("org/mix/runs/a", progress=False).parts[-3:] == ("a", "model", "model_weights")


@pytest.fixture
def private(fake, tiny):
    fake.add("anna/private", tiny / "xlora" / "adapter_1")
    fake.readers["anna/private"] = ANNA
    return fake


def test_private_adapter_is_served_to_nobody_else(private, caplog, capfd, tmp_path):
    caplog.set_level(logging.DEBUG)
    folder = resolve_adapter("anna/private", token=ANNA)
    assert {path.name for path in folder.iterdir()} == ADAPTER_FILES
    said = []
    for token in (BERT, None):
        for offline in (False, True):
            with pytest.raises(UserError, match="no such repository, or|offline mode is on; it is not") as caught:
                resolve_adapter("anna/private", token=token, offline=offline)
            said.append(str(caught.value))
    private.seen.clear()
    assert resolve_adapter("anna/private", token=ANNA) == folder
    assert resolve_adapter("anna/private", token=ANNA, offline=True) == folder and private.seen == []
    places = [str(path) for path in tmp_path.rglob("*")]
    for secret in (ANNA, BERT):
        assert not any(secret in text for text in (*said, *places, str(folder), caplog.text, *capfd.readouterr()))
    assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_private_adapters_cache_is_closed_to_other_users_of_the_machine(private, tmp_path):
    resolve_adapter("anna/private", token=ANNA, progress=False)
    (cache,) = (tmp_path / "cache" / snapshot.TOKEN_CACHES).iterdir()
    assert cache.stat().st_mode & 0o077 == 0 and cache.parent.stat().st_mode & 0o077 == 0


def test_each_token_fetches_for_itself_whatever_it_may_read(private, tiny):
    first = resolve_adapter("anna/private", token=ANNA, progress=False)
    private.readers.clear()
    assert len({first, *(resolve_adapter("anna/private", token=token, progress=False) for token in (BERT, None))}) == 3


def test_what_lies_in_the_shared_cache_is_served_to_every_token(fake, tiny):
    fake.add("org/public", tiny / "xlora" / "adapter_1")
    folder = resolve_adapter("org/public", progress=False)
    fake.seen.clear()
    assert resolve_adapter("org/public", token=ANNA) == folder
    assert resolve_adapter("org/public", token=BERT, offline=True) == folder and fake.seen == []


def test_names_of_private_repositories_are_no_hints(private):
    resolve_adapter("anna/private", token=ANNA, progress=False)
    with pytest.raises(UserError) as caught:
        resolve_adapter("anna/privat", token=BERT, progress=False)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "  ", True, 5])
def test_token_without_text_is_refused(online, token):
    with pytest.raises(UserError, match="the token is not a text with something in it; leave it out"):
        resolve_adapter("org/adapter", token=token)


class Bucket(DirFileSystem):
    """A folder that answers what s3fs would: a listing raises `fails`, each file fetched calls `during`."""

    def __init__(self, root: Path):
        super().__init__(str(root), LocalFileSystem(), skip_instance_cache=True)
        self.fails: Exception | None = None
        self.during = lambda: None
        self.fetched: list[str] = []

    def find(self, path, **options):
        if self.fails:
            raise self.fails
        return super().find(path, **options)

    def get_file(self, rpath, lpath, **options):
        self.fetched.append(rpath)
        self.during()
        super().get_file(rpath, lpath, **options)


@pytest.fixture
def bucket(online, tiny, tmp_path):
    root = tmp_path / "s3"
    for part, place in (("xlora/adapter_1", "one"), ("base", "base"), ("xlora", "mix")):
        shutil.copytree(tiny / part, root / "models" / "team" / place)
    online.setenv("LORA_WORKBENCH_CACHE", str(tmp_path / "workbench"))
    online.delenv("AWS_ENDPOINT_URL", raising=False)
    online.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    stand_in = Bucket(root)
    online.setattr(s3, "connect", lambda: stand_in)
    return stand_in


def parts_left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "workbench").rglob(s3.PART + "*"))


def test_each_kind_of_source_comes_from_s3(bucket, tiny, tmp_path):
    (tmp_path / "s3/models/team/one/optimizer.bin").write_bytes(b"pickle")
    (tmp_path / "s3/models/team/one/checkpoint").mkdir()
    (tmp_path / "s3/models/team/one/checkpoint/adapter_model.safetensors").write_bytes(b"other")
    adapter = resolve_adapter(ADDRESS, progress=False)
    assert {path.name for path in adapter.iterdir()} == ADAPTER_FILES
    for name in ADAPTER_FILES:
        assert (adapter / name).read_bytes() == (tiny / "xlora" / "adapter_1" / name).read_bytes()
    assert (resolve_base("s3://models/team/base/", progress=False) / "model.safetensors").is_file()
    assert [path.name for path in resolve_config("s3://models/team/base", progress=False).iterdir()] == ["config.json"]
    mixture = resolve_mixture(Path("s3://models/team/mix"), progress=False)
    assert (mixture / "adapter_3" / "adapter_model.safetensors").is_file()
    assert not any(name.endswith(".bin") for name in bucket.fetched) and parts_left(tmp_path) == []


def test_copy_is_used_until_the_bucket_changes(bucket, tmp_path):
    folder = resolve_adapter(ADDRESS, progress=False)
    bucket.fetched.clear()
    assert resolve_adapter(ADDRESS, progress=False) == folder and bucket.fetched == []
    config = tmp_path / "s3/models/team/one/adapter_config.json"
    config.write_text(config.read_text() + "\n")
    newer = resolve_adapter(ADDRESS, progress=False)
    assert newer != folder and newer.is_dir() and (newer / config.name).read_text().endswith("\n")
    assert resolve_adapter(ADDRESS, offline=True) == newer


def test_offline_uses_only_what_was_fetched(bucket, online):
    with pytest.raises(UserError, match="offline mode is on; it is not in the cache.*HF_HUB_OFFLINE"):
        resolve_base("s3://models/team/base", offline=True)
    base = resolve_base("s3://models/team/base", progress=False)
    resolve_config("s3://models/team/base", progress=False)
    online.setattr(s3, "connect", None)
    assert resolve_base("s3://models/team/base", offline=True) == base
    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match="offline mode is on; the cached copy is not usable: .*has no"):
        resolve_base("s3://models/team/base", offline=True)


def test_damaged_copy_is_fetched_again(bucket):
    folder = resolve_adapter(ADDRESS, progress=False)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    assert resolve_adapter(ADDRESS, progress=False) == folder
    assert (folder / "adapter_model.safetensors").stat().st_size > 100


def test_other_endpoint_is_another_bucket(bucket, online):
    folder = resolve_adapter(ADDRESS, progress=False)
    online.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert resolve_adapter(ADDRESS, progress=False) != folder


def test_change_while_fetching_is_noticed(bucket, tmp_path):
    weights = tmp_path / "s3/models/team/one/adapter_model.safetensors"
    bucket.during = lambda: os.utime(weights, (0, 0))
    with pytest.raises(TransientError, match="changed while it was fetched"):
        resolve_adapter(ADDRESS, progress=False)
    assert parts_left(tmp_path) == []
    bucket.during = lambda: None
    assert resolve_adapter(ADDRESS, progress=False).is_dir()


def test_fetches_at_one_time_do_not_disturb_each_other(bucket):
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: resolve_adapter(ADDRESS, progress=False), range(8)))
    assert len(set(folders)) == 1 and {path.name for path in folders[0].iterdir()} == ADAPTER_FILES


def test_ludwig_on_s3_and_a_mixture_named_as_an_adapter(bucket, tiny, tmp_path):
    shutil.copytree(tiny / "xlora" / "adapter_1", tmp_path / "s3/models/team/run/model/model_weights")
    assert resolve_adapter("s3://models/team/run", progress=False).parts[-2:] == ("model", "model_weights")
    with pytest.raises(ContentError, match="adapter 's3://models/team/mix' is a mixture, expected one adapter"):
        resolve_adapter("s3://models/team/mix", progress=False)


def test_pickles_alone_are_refused_before_the_download(bucket, tmp_path):
    weights = tmp_path / "s3/models/team/one/adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ContentError, match=f"{ADDRESS}' holds its weights only as 'adapter_model.bin', a pickle file"):
        resolve_adapter(ADDRESS, progress=False)
    assert bucket.fetched == []


@pytest.mark.parametrize("name", ["../x.json", "a/../../x.json", "/etc/x.json", "a//x.json", "a\\x.json"])
def test_key_that_leads_out_of_the_folder_is_refused(bucket, online, name):
    found = {f"models/team/mix/{key}": {"size": 2, "ETag": "1"} for key in (name, "x.safetensors")}
    online.setattr(bucket, "find", lambda path, detail: found)
    with pytest.raises(ContentError, match="which cannot be the name of a file inside a folder"):
        resolve_mixture("s3://models/team/mix", progress=False)
    assert bucket.fetched == []


@pytest.mark.parametrize("address", ["s3://", "s3://models", "s3:///x", "s3://m odels/x", "s3://models/../x",
                                     "s3://models//x", "s3://models/x?versionId=3", "s3://models/a\nb"])
def test_address_that_is_none_is_refused(bucket, address):
    with pytest.raises(UserError, match="is no folder on S3, expected 's3://bucket/path/to/folder'"):
        resolve_adapter(address)


def test_address_of_a_file_or_of_nothing(bucket):
    with pytest.raises(UserError, match="there is nothing at that address; did you mean 'one'"):
        resolve_adapter("s3://models/team/ome", progress=False)
    with pytest.raises(UserError, match=f"is a file, expected a folder; its folder is '{ADDRESS}'"):
        resolve_adapter(f"{ADDRESS}/adapter_config.json", progress=False)
    with pytest.raises(UserError, match="revision 'v1' applies only to Hub repositories, but adapter .* is on S3"):
        resolve_adapter(ADDRESS, revision="v1")


class NoCredentialsError(Exception):
    """Stands for botocore's."""


def answer(status: int, code: str, kind: type[Exception] = OSError) -> Exception:
    """Return an error as s3fs makes it of an answer of S3."""
    error, cause = kind("the server's words, with AKIASECRET"), Exception()
    cause.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        (answer(404, "NoSuchBucket", FileNotFoundError), UserError, "there is no bucket 'models' at Amazon S3"),
        (answer(403, "AccessDenied", PermissionError), UserError, r"access is denied \(AccessDenied\)"),
        (answer(403, "InvalidAccessKeyId", PermissionError), UserError, r"denied \(InvalidAccessKeyId\)"),
        (answer(503, "SlowDown"), TransientError, r"Amazon S3 answered 503 \(SlowDown\); try again later"),
        (answer(400, "<b>"), UserError, "Amazon S3 answered 400; check the address and AWS_ENDPOINT_URL"),
        (NoCredentialsError("AKIASECRET"), UserError, "there are no usable AWS credentials here; set AWS_ACC"),
        (TimeoutError("AKIASECRET"), TransientError, r"Amazon S3 cannot be reached, or broke off \(TimeoutError\)"),
        (OSError(28, "No space left on device", "x"), TransientError, r"No space left on device \(x\)"),
    ],
)
def test_failures_are_sentences_without_secrets(bucket, fails, kind, message):
    bucket.fails = fails
    with pytest.raises(kind, match=message) as caught:
        resolve_adapter(ADDRESS, progress=False)
    assert type(caught.value) is kind and f"adapter '{ADDRESS}' cannot be fetched: " in str(caught.value)
    assert "AKIASECRET" not in str(caught.value) and caught.value.__suppress_context__


def test_listing_that_never_ends_has_a_deadline(bucket, online):
    stop = threading.Event()
    online.setattr(s3, "LIST_TIMEOUT_S", 0.05)
    online.setattr(bucket, "find", lambda path, detail: stop.wait(20))
    with pytest.raises(TransientError, match="cannot be reached, or broke off"):
        resolve_adapter(ADDRESS, progress=False)
    stop.set()


def test_missing_s3fs_names_the_extra(online, tmp_path):
    online.setenv("LORA_WORKBENCH_CACHE", str(tmp_path))
    online.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"adapter 's3://b1c/x' .*pip install 'lora-workbench\[s3\]'"):
        resolve_adapter("s3://b1c/x")


def test_s3fs_against_a_server(online, tiny, tmp_path):
    pytest.importorskip("s3fs", reason="needs s3fs and moto's server (SKIPS.md)")
    moto = pytest.importorskip("moto.server", reason="needs s3fs and moto's server (SKIPS.md)")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "a-secret-key", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "LORA_WORKBENCH_CACHE": str(tmp_path / "workbench"),
    }.items():
        online.setenv(name, value)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        for path in (tiny / "xlora" / "adapter_1").iterdir():
            client.put_object(Bucket="models", Key=f"team/one/{path.name}", Body=path.read_bytes())
        folder = resolve_adapter(ADDRESS, progress=False)
        assert {path.name for path in folder.iterdir()} == ADAPTER_FILES
        with pytest.raises(UserError, match="there is no bucket 'other' at S3 at http://127.0.0.1"):
            resolve_adapter("s3://other/x", progress=False)
        with pytest.raises(UserError, match="there is nothing at that address; did you mean 'one'"):
            resolve_adapter("s3://models/team/ome", progress=False)
    finally:
        server.stop()
    with pytest.raises(TransientError, match=r"cannot be reached \(Connection refused\)"):
        resolve_adapter(ADDRESS, progress=False)
    assert resolve_adapter(ADDRESS, offline=True) == folder
