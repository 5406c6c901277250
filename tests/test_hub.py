"""Sources to folders, against a small Hub served on this machine: `pytest tests/test_hub.py`."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from workbench import hub, snapshot
from workbench.errors import UserError
from workbench.hub import local_folder, resolve_adapter, resolve_base, resolve_config, resolve_mixture, subfolder

pytest_plugins = ("fake_hub",)
TOKEN = "hf_a_secret_that_stays_secret"


def test_base_is_downloaded_once_then_found_offline(fake, tiny):
    fake.add("org/tiny", tiny / "base", **{"pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"other"})
    fake.repos["org/tiny"]["consolidated.safetensors"] = b"a second copy"
    folder = resolve_base("org/tiny", token=TOKEN, progress=False)
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tiny / "base").iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (tiny / "base" / "model.safetensors").read_bytes()
    assert not any(path.endswith((".bin", "onnx/model.safetensors")) for path in fake.seen)
    assert fake.tokens == {("api", f"Bearer {TOKEN}"), ("org", f"Bearer {TOKEN}")}
    fake.seen.clear()
    assert resolve_base("org/tiny", token=TOKEN) == folder
    assert resolve_base("org/tiny", token=TOKEN, offline=True) == folder
    assert fake.seen == []


def test_config_alone_is_fetched_without_weights(fake, tiny):
    fake.add("org/tiny", tiny / "base")
    assert [path.name for path in resolve_config("org/tiny", progress=False).iterdir()] == ["config.json"]
    # what is cached for the config is not enough for the base, and must not be mistaken for it
    assert (resolve_base("org/tiny", progress=False) / "model.safetensors").is_file()


def test_adapter_and_mixture_are_downloaded(fake, tiny):
    fake.add("org/mix", tiny / "xlora", **{"README.md": b"#"})
    fake.add("org/adapter", tiny / "xlora" / "adapter_1", **{"checkpoint-5/adapter_model.safetensors": b"x"})
    mixture = resolve_mixture("org/mix", progress=False)
    assert (mixture / "adapter_3" / "adapter_model.safetensors").is_file() and not (mixture / "README.md").exists()
    adapter = resolve_adapter("org/adapter", progress=False)
    assert {path.name for path in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_one_adapter_of_a_mixture_is_fetched_alone(fake, tiny):
    fake.add("org/mix", tiny / "xlora")
    folder = resolve_adapter("org/mix/adapter_2", progress=False)
    assert folder.name == "adapter_2" and [path.name for path in folder.parent.iterdir()] == ["adapter_2"]


def test_interrupted_download_is_completed(fake, tiny):
    fake.add("org/tiny", tiny / "base")
    folder = resolve_base("org/tiny", progress=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="offline mode is on; the cached copy is not usable: files are missing from it"):
        resolve_base("org/tiny", offline=True)
    assert (resolve_base("org/tiny", progress=False) / "tokenizer.json").is_file()


def test_part_of_a_snapshot_is_not_taken_for_the_whole(fake, tiny, tmp_path):
    fake.add("org/tiny", tiny / "base")
    # caches of older libraries do not say what a complete snapshot holds
    cached = tmp_path / "cache" / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(fake.sha)
    (cached / "snapshots" / fake.sha).mkdir(parents=True)
    shutil.copy(tiny / "base" / "config.json", cached / "snapshots" / fake.sha)
    assert resolve_config("org/tiny", offline=True).name == fake.sha
    with pytest.raises(UserError, match="the cached copy is not usable: .* has no weights"):
        resolve_base("org/tiny", offline=True)
    assert (resolve_base("org/tiny", progress=False) / "model.safetensors").is_file()


def test_repository_without_weights_is_refused(fake, tiny):
    fake.repos["org/empty"] = {"config.json": (tiny / "base" / "config.json").read_bytes(), "README.md": b"#"}
    with pytest.raises(UserError, match="has no weights: expected 'model.safetensors'"):
        resolve_base("org/empty", progress=False)


def test_pickled_weights_are_refused_before_download(fake, tiny):
    config = (tiny / "base" / "config.json").read_bytes()
    fake.repos["org/old"] = {"config.json": config, "pytorch_model.bin": b"pickle"}
    with pytest.raises(UserError, match=r"'org/old' holds its weights only as 'pytorch_model.bin', .* safetensors"):
        resolve_base("org/old", progress=False)
    assert not any("resolve" in path for path in fake.seen)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ((403, "GatedRepo"), "access to it is restricted; ask for access at .*/org/closed"),
        ((401, "RepoNotFound"), "no such repository, or the token given has no access"),
        ((401, ""), "no such repository, or the token given has no access"),
        ((404, "RepoNotFound"), "no such repository, or the token given has no access"),
        ((403, ""), "no such repository, or the token given has no access"),
        ((400, ""), "answered with status 400"),
    ],
)
def test_refusals_are_sentences_without_the_token(fake, status, message):
    fake.status["org/closed"] = status
    with pytest.raises(UserError, match=message) as caught:
        resolve_base("org/closed", token=TOKEN, progress=False)
    assert TOKEN not in str(caught.value) and caught.value.__suppress_context__
    assert "model 'org/closed'" in str(caught.value)


def test_token_that_cannot_be_a_header_is_not_repeated(fake, tiny):
    fake.add("org/tiny", tiny / "base")
    with pytest.raises(UserError) as caught:
        resolve_base("org/tiny", token=TOKEN + "\nX: y", progress=False)
    assert TOKEN not in str(caught.value)


def test_unknown_revision_is_named(fake, tiny):
    fake.add("org/tiny", tiny / "base")
    with pytest.raises(UserError, match="'org/tiny' at revision 'lost' .*no such revision"):
        resolve_base("org/tiny", revision="lost", progress=False)


def test_misspelt_repository_names_a_cached_one(fake, tiny):
    fake.add("org/tiny-mistral", tiny / "base")
    resolve_base("org/tiny-mistral", progress=False)
    with pytest.raises(UserError, match="no such repository, .*; did you mean 'org/tiny-mistral'"):
        resolve_base("org/tiny-mistrl", progress=False)


def test_refused_connection_fails_within_seconds(online):
    online.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"the Hub at http://127.0.0.1:9 cannot be reached \(Connection refused\)"):
        resolve_mixture("org/mix")
    assert time.monotonic() - started < 5


def test_password_in_the_endpoint_is_not_shown(online):
    online.setenv("HF_ENDPOINT", "http://me:open-sesame@127.0.0.1:9")
    with pytest.raises(UserError, match="the Hub at http://127.0.0.1:9 ") as caught:
        resolve_mixture("org/mix")
    assert "sesame" not in str(caught.value)


def test_silent_hub_fails_within_seconds(online):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        online.setattr(snapshot, "REACH_TIMEOUT_S", 0.3)
        started = time.monotonic()
        with pytest.raises(UserError, match="did not answer within"):
            resolve_adapter("org/adapter")
        assert time.monotonic() - started < 3


def test_name_server_that_never_answers_has_a_deadline(monkeypatch):
    monkeypatch.setattr(snapshot, "_probe", lambda *given: time.sleep(20))
    started = time.monotonic()
    assert "did not answer" in snapshot.unreachable("http://127.0.0.1:9", 0.1)
    assert time.monotonic() - started < 5


def test_offline_names_the_way_out(online):
    with pytest.raises(UserError, match="offline mode is on; it is not in the cache.*HF_HUB_OFFLINE.*local folder"):
        resolve_base("org/base", offline=True)


@pytest.mark.parametrize("source", ["mixtre", "a b/c", "org/na me", "https://host/org/name", "org/name/x"])
def test_text_that_is_neither_folder_nor_id_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "mixture").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is neither a folder here, nor a Hub id of the form 'org/name', nor 'demo'"):
        resolve_mixture(source)
    with pytest.raises(UserError, match="did you mean 'mixture'"):
        resolve_mixture("mixtre")


def test_local_folders_resolve_to_themselves(tiny, monkeypatch):
    assert resolve_base(tiny / "base") == tiny / "base"
    assert resolve_base(str(tiny / "base")) == tiny / "base"
    assert resolve_mixture(tiny / "xlora") == tiny / "xlora"
    monkeypatch.chdir(tiny)
    assert resolve_adapter("xlora/adapter_1") == Path("xlora/adapter_1")
    assert resolve_config("base") == Path("base")


def test_path_to_nothing_names_the_nearest(tiny):
    with pytest.raises(UserError, match="folder not found in .*; did you mean 'xlora'"):
        resolve_mixture(tiny / "xlor")
    with pytest.raises(UserError, match="folder not found in .*; did you mean 'adapter_1'"):
        resolve_adapter(f"{tiny}/xlora/adaptr_1")
    with pytest.raises(UserError, match="'./nowhere/x': folder not found; 'nowhere' does not exist either"):
        resolve_base("./nowhere/x")
    with pytest.raises(UserError, match="is a file, expected a folder"):
        resolve_mixture(tiny / "ordering.json")
    with pytest.raises(UserError, match="is an empty text"):
        local_folder(" ", "base model")
    with pytest.raises(UserError, match="cannot be looked up: File name too long"):
        local_folder("x" * 5000, "base model")
    with pytest.raises(UserError, match="cannot be looked up"):
        local_folder("~no_such_user/x", "base model")


def test_wrong_kind_of_folder_is_named(tiny):
    with pytest.raises(UserError, match="is an adapter .*, expected a base model"):
        resolve_base(tiny / "xlora" / "adapter_1")
    with pytest.raises(UserError, match="is a mixture, expected one adapter, such as its folders 'adapter_1'"):
        resolve_adapter(tiny / "xlora")
    with pytest.raises(UserError, match="has neither 'xlora_config.json' nor 'adapter_config.json'"):
        resolve_mixture(tiny / "base")
    with pytest.raises(UserError, match="has no 'config.json'; did you mean 'xlora_config.json'"):
        resolve_base(tiny / "xlora")


@pytest.mark.parametrize(
    ("resolve", "part", "weights", "pickle"),
    [
        (resolve_base, "base", "'model.safetensors' or", "pytorch_model.bin"),
        (resolve_adapter, "xlora/adapter_1", "'adapter_model.safetensors'", "adapter_model.bin"),
        (resolve_mixture, "xlora", "a classifier and adapters as safetensors", "xlora_classifier.pt"),
    ],
)
def test_folder_without_safetensors_is_refused(tiny, tmp_path, resolve, part, weights, pickle):
    folder = Path(shutil.copytree(tiny / part, tmp_path / "copy"))
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=f"has no weights: expected {weights}"):
        resolve(folder)
    (folder / pickle).write_bytes(b"pickle")
    with pytest.raises(UserError, match=rf"only as '{pickle}', a pickle file, .* refused; convert it to safetensors"):
        resolve(folder)


def test_pickled_classifier_beside_safe_adapters_is_refused(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny / "xlora", tmp_path / "copy"))
    (folder / "xlora_classifier.safetensors").rename(folder / "xlora_classifier.pt")
    with pytest.raises(UserError, match="only as 'xlora_classifier.pt', a pickle file"):
        resolve_mixture(folder)


def test_missing_shards_are_listed(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny / "base", tmp_path / "base"))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match="lacks 'model-2.safetensors', which model.safetensors.index.json names"):
        resolve_base(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))
    with pytest.raises(UserError, match="no 'weight_map' of tensor names to names of files beside it"):
        resolve_base(folder)


def test_revision_of_a_local_source_is_an_error(tiny):
    for source in (tiny / "base", "demo"):
        with pytest.raises(UserError, match="revision 'v1' applies only to Hub repositories"):
            resolve_base(source, revision="v1")
    with pytest.raises(UserError, match="applies only to Hub repositories"):
        resolve_mixture("demo", revision="v1")


def test_subfolder_never_leads_outside(tiny, tmp_path):
    root = tmp_path / "mixture"
    (root / "inner").mkdir(parents=True)
    (root / "link").symlink_to(tiny / "xlora" / "adapter_1")
    (root / "inside").symlink_to(root / "inner")
    assert subfolder(root, "inner") == root / "inner" and subfolder(root, "inside").is_dir()
    for name in ("link", "..", "inner/../../x", "/etc", str(tiny), ""):
        with pytest.raises(UserError, match="leads out of"):
            subfolder(root, name)
    with pytest.raises(UserError, match="there is no folder 'iner' in .*; did you mean 'inner'"):
        subfolder(root, "iner")


def test_demo_names_the_shipped_mixture_and_its_adapters(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "DEMO_MIXTURE", tiny / "xlora")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert resolve_mixture("demo") == tiny / "xlora"
    assert resolve_adapter("demo/adapter_2") == tiny / "xlora" / "adapter_2"
    for source in ("demo", "demo/adapter_9", "demo/../adapter_1"):
        with pytest.raises(UserError, match="is none of the demo's.*'demo/NAME' with NAME from 'adapter_1'"):
            resolve_adapter(source)
    monkeypatch.setattr(hub, "DEMO_MIXTURE", tmp_path / "demo")
    with pytest.raises(UserError, match="missing from this installation"):
        resolve_mixture("demo")


def test_demo_base_comes_from_the_pinned_one(monkeypatch, tmp_path):
    import workbench.demo_base

    asked = []
    monkeypatch.setattr(workbench.demo_base, "demo_base_folder", lambda progress: asked.append(progress) or tmp_path)
    assert resolve_base("demo", progress=False) == tmp_path and asked == [False]


def test_package_ships_the_demo_mixture():
    folder = resolve_mixture("demo")
    for name in json.loads((folder / "ordering.json").read_text())["order"]:
        assert resolve_adapter(f"demo/{name}") == folder / name
