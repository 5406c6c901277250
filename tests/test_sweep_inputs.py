"""Fingerprints of what points read depend on contents alone; other programs' cores are counted.

Run: pytest tests/test_sweep_inputs.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_problem import point_of, write_shelf

from workbench.sweep import inputs, others
from workbench.sweep.inputs import Inputs, as_text, changed, file_digest, folder_digest, of_text
from workbench.sweep.others import Watch


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write_shelf(tmp_path_factory.mktemp("shelf"))


def test_a_point_has_a_fingerprint_of_all_that_it_names(shelf, tmp_path):
    (tmp_path / "t").write_text("x")
    xlora = {"mode": "xlora", "mixture": str(shelf / "mix"), "base": str(shelf / "tiny")}
    for settings, keys in (
        ({}, {"base", "prompts"}), ({"mode": "lora"}, {"base", "prompts"}), ({"mode": "xlora"}, {"mixture", "base"}),
        ({"mode": "xlora", "mixture": "synthetic"}, {"base"}), (xlora, {"mixture", "base"}),
        ({"task": "fidelity", "mode": "xlora", "texts": "single:german"}, {"mixture", "base", "texts"}),
        ({**xlora, "task": "fidelity", "texts": str(tmp_path / "t")}, {"mixture", "base", "texts"}),
        ({"arrivals": "trace", "trace": str(tmp_path / "t")}, {"base", "trace"}),
    ):  # fmt: skip
        found = Inputs().of(point_of(**settings))
        assert found.keys() == keys | (set() if settings.get("task") else {"prompts"}), settings
        assert of_text(as_text(found)) == found and changed(found, found) == []


def test_what_is_not_here_has_none_and_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *given: pytest.fail("it went to the network"))
    for name in ("org/name", "s3://bucket/folder", str(tmp_path / "none"), "./none"):
        point = point_of(mode="xlora", mixture=name, arrivals="trace", trace=str(tmp_path / "none"))
        assert Inputs().of(point).keys() == {"prompts"}
    # a base that has not been made yet is known by its hash
    monkeypatch.setenv("LORA_WORKBENCH_CACHE", str(tmp_path))
    assert "base" in Inputs().of(point_of())


def test_a_snapshot_of_the_hub_goes_by_its_commit(tmp_path, monkeypatch):
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    monkeypatch.setattr(inputs.hub, "resolve_mixture", lambda source, **options: folder)
    assert Inputs().of(point_of(mode="xlora", mixture="org/name"))["mixture"] == "commit-0123abc"


def test_a_copy_is_the_same_and_a_changed_weight_is_not(shelf, tmp_path):
    before = folder_digest(shelf / "mix")
    copy = shutil.copytree(shelf / "mix", tmp_path / "copy")
    os.utime(next(copy.rglob("*.safetensors")), (1, 1))
    (copy / "notes.txt").write_text("not read")
    (copy / ".git").mkdir()
    (copy / ".git" / "x.json").write_text("{}")
    assert folder_digest(copy) == before
    weights = sorted(copy.rglob("*.safetensors"))
    # of the same size, name and header: as a mixture that was trained again
    content = bytearray(weights[-1].read_bytes())
    content[-1] ^= 1
    weights[-1].write_bytes(content)
    changed_weight = folder_digest(copy)
    assert changed_weight != before
    weights[0].rename(weights[0].with_name("other.safetensors"))
    assert folder_digest(copy) not in (before, changed_weight)


def test_linked_folders_are_read_and_circles_end(shelf, tmp_path):
    (tmp_path / "mix").mkdir()
    for path in (shelf / "mix").iterdir():
        (tmp_path / "mix" / path.name).symlink_to(path)
    assert folder_digest(tmp_path / "mix") == folder_digest(shelf / "mix")
    (tmp_path / "mix" / "round").symlink_to(tmp_path / "mix")
    assert folder_digest(tmp_path / "mix") == folder_digest(shelf / "mix")


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_files_differ_when_their_bytes_do(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("files")
    (folder / "one").write_bytes(one)
    (folder / "other").write_bytes(other)
    assert (file_digest(folder / "one") == file_digest(folder / "other")) == (one == other)


def test_a_very_large_file_is_looked_at_all_over(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(inputs, "_BLOCKS", 11)
    found = set()
    for number, place in enumerate((None, 0, 1001, 2009)):
        content = bytearray(2010)
        if place is not None:
            content[place] = 1
        (tmp_path / str(number)).write_bytes(content)
        found.add(file_digest(tmp_path / str(number)))
    (tmp_path / "shorter").write_bytes(bytes(2009))
    found.add(file_digest(tmp_path / "shorter"))
    assert len(found) == 5


def test_what_one_side_does_not_know_has_not_changed():
    assert changed(None, {"base": "a"}) == changed({"base": "a"}, {}) == changed({}, {"trace": "b"}) == []
    assert changed({"base": "a", "trace": "b"}, {"base": "a", "trace": "c"}) == ["trace"]
    assert of_text(None) == of_text(float("nan")) == {} and as_text({}) is as_text(None) is None


def stat_of(path, user=0, idle=0, steal=0, guest=0):
    path.write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} {guest} 0\ncpu0 1 2 3\n")


def test_others_are_the_machine_without_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(others, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(others, "own_cpu_s", lambda: own)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    own, now = 5.0, 100.0
    stat_of(tmp_path / "stat", user=1000)
    watch = Watch()
    # two seconds, three of the machine's processors' seconds, one of them this process's; idle, stolen: nobody's work
    stat_of(tmp_path / "stat", user=1000 + 3 * os.sysconf("SC_CLK_TCK"), idle=99, steal=99, guest=99)
    own, now = 6.0, 102.0
    assert watch.others_cores() == pytest.approx(1.0)
    own = 9.0
    assert watch.others_cores() == 0
    for content in ("", "cpu", "cpu  0 0 0 0 0 0 0 0 0 0\n", "nothing of the kind\n"):
        (tmp_path / "stat").write_text(content)
        assert watch.others_cores() is None and Watch().others_cores() is None
    (tmp_path / "stat").unlink()
    assert Watch().others_cores() is None


@pytest.mark.skipif(others.machine_cpu_s() is None, reason="/proc/stat says nothing here")
def test_own_work_is_not_that_of_others():
    watch = Watch()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    # whatever else runs here: at most the machine, less the core that this test keeps
    assert 0 <= watch.others_cores() <= (os.cpu_count() or 1) - 0.2
