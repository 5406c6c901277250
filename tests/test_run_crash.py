"""A run whose writer dies, waits for a full disk or is being read keeps every row that was on disk, once and in order.

Run: pytest tests/test_run_crash.py
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_run import STEP, named
from trace_problem import small_trace

from workbench import RunWriter, UserError, open_run
from workbench.instrument import run_compact, run_files, run_lock
from workbench.instrument.run import remove_run

OPERATIONS = st.lists(st.sampled_from(["step", "request", "trace", "flush", "die", "look"]), max_size=25)


def steps_of(run) -> list[int]:
    return run.steps["step"].tolist()


def check(run, added: dict[str, int], flushed: dict[str, int], traces: int) -> None:
    """What is read is a beginning of what was added, and at least what was flushed; traces are all there."""
    for table, column in (("steps", "step"), ("requests", "preemptions")):
        found = getattr(run, table)[column].tolist()
        assert found == list(range(len(found))) and flushed[table] <= len(found) <= added[table]
    assert run.trace_ids == tuple(f"req-{index}" for index in range(traces))
    assert list(dict.fromkeys(run.tokens["request_id"])) == list(run.trace_ids) and len(run.tokens) == 4 * traces


@given(operations=OPERATIONS, ends=st.sampled_from(["close", "kill"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_at_every_moment_the_folder_is_a_run_with_all_that_was_flushed(tmp_path_factory, operations, ends):
    root = tmp_path_factory.mktemp("root")
    writer = RunWriter(root / "run")
    added, flushed, traces, copies = {"steps": 0, "requests": 0}, {"steps": 0, "requests": 0}, 0, 0
    for operation in operations:
        if operation == "step":
            writer.step({**STEP, "step": added["steps"]})
            added["steps"] += 1
        elif operation == "request":
            writer.request({"request_id": "x", "preemptions": added["requests"]})
            added["requests"] += 1
        elif operation == "trace":
            writer.trace(named(f"req-{traces}"))
            traces += 1
        elif operation == "flush":
            writer.flush()
            flushed = dict(added)
        elif operation == "look":
            run = open_run(root / "run")
            assert run.status == "running"
            check(run, added, flushed, traces)
        else:
            # what a killed process leaves: the files as they are, and nobody who holds the lock
            copies += 1
            shutil.copytree(root / "run", root / f"dead-{copies}")
            dead = open_run(root / f"dead-{copies}")
            assert dead.status == "interrupted"
            check(dead, added, flushed, traces)
            assert not list((root / f"dead-{copies}").glob("*.arrow"))
    writer.close()
    run = open_run(root / "run")
    assert run.status == "complete"
    check(run, added, added, traces)
    assert sorted(path.name for path in (root / "run").iterdir()) == [
        "requests.parquet", "run.json", "steps.parquet", "tokens.parquet", "traces",
    ]  # fmt: skip
    shutil.rmtree(root)


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_run import STEP, named
from workbench import RunWriter
writer = RunWriter(sys.argv[1])
number = 0
while True:
    for _ in range(50):
        writer.step({**STEP, "step": number})
        number += 1
    writer.request({"request_id": "x"})
    writer.trace(named(f"req-{number}"))
    writer.flush()
    print(number, flush=True)
"""


def test_a_killed_process_leaves_a_run_with_all_that_it_had_flushed(tmp_path):
    folder, tests = tmp_path / "run", str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder, tests], stdout=subprocess.PIPE, text=True)
    flushed = [int(process.stdout.readline()) for _ in range(4)][-1]
    assert open_run(folder).status == "running" and (folder / "steps.arrow").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    run = open_run(folder)
    assert run.status == "interrupted" and not (folder / "steps.arrow").exists()
    assert steps_of(run) == list(range(len(run.steps))) and len(run.steps) >= flushed
    assert len(run.trace_ids) >= 4 and set(run.tokens["request_id"]) == set(run.trace_ids)
    for request_id in run.trace_ids:
        np.testing.assert_array_equal(run.trace(request_id).values, small_trace().values)


def test_a_stream_cut_anywhere_gives_its_whole_messages(tmp_path):
    writer = RunWriter(tmp_path / "run")
    ends = [0, (tmp_path / "run" / "steps.arrow").stat().st_size]
    for step in range(4):
        writer.step({**STEP, "step": step})
        writer.flush()
        ends.append((tmp_path / "run" / "steps.arrow").stat().st_size)
    content = (tmp_path / "run" / "steps.arrow").read_bytes()
    cut = tmp_path / "cut.arrow"
    near = {end + by for end in ends for by in (-1, 0, 1)} & set(range(len(content) + 1))
    for length in sorted({*range(0, len(content), 97), *near}):
        cut.write_bytes(content[:length])
        _, batches, unread = run_files.read_stream(cut)
        found = [step for batch in batches for step in batch.column("step").to_pylist()]
        assert found == list(range(sum(end <= length for end in ends[2:])))
        assert unread == length - max(end for end in ends if end <= length)
    cut.write_bytes(b"step,rows\n1,2\n")
    with pytest.raises(UserError, match="it is no Arrow stream"):
        run_files.read_stream(cut)
    writer.close()


def test_what_cannot_be_read_is_not_thrown_away(tmp_path):
    writer = RunWriter(tmp_path / "run")
    for step in range(3):
        writer.step({**STEP, "step": step})
        writer.flush()
    content = (tmp_path / "run" / "steps.arrow").read_bytes()
    shutil.copytree(tmp_path / "run", tmp_path / "dead")
    writer.close()
    damaged = content[: len(content) // 2] + bytes(200) + content[len(content) // 2 + 200 :]
    (tmp_path / "dead" / "steps.arrow").write_bytes(damaged)
    assert len(open_run(tmp_path / "dead").steps) < 3
    assert (tmp_path / "dead" / "steps.cut").read_bytes() == damaged
    remove_run(tmp_path / "dead")


@pytest.mark.parametrize("table", ["steps", "requests", "tokens"])
def test_a_run_killed_before_its_first_row_is_empty(tmp_path, table):
    writer = RunWriter(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "dead")
    writer.close()
    (tmp_path / "dead" / f"{table}.arrow").unlink()
    run = open_run(tmp_path / "dead")
    assert run.status == "interrupted" and getattr(run, table).empty and run.trace_ids == ()


def test_a_compaction_stopped_half_way_is_done_again(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run")
    writer.step(STEP)
    writer.request({"request_id": "x"})
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "dead")
    writer.close()
    real, wrote = run_files.write_parquet, []

    def stops(path, *rest):
        if wrote:
            raise KeyboardInterrupt
        wrote.append(path)
        real(path, *rest)

    monkeypatch.setattr(run_files, "write_parquet", stops)
    with pytest.raises(KeyboardInterrupt):
        open_run(tmp_path / "dead")
    monkeypatch.undo()
    assert len(list((tmp_path / "dead").glob("*.arrow"))) == 2
    run = open_run(tmp_path / "dead")
    assert len(run.steps) == len(run.requests) == 1 and not list((tmp_path / "dead").glob("*.lock"))


def test_a_trace_whose_rows_were_not_written_yet_has_them_all_the_same(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run")
    writer.trace(named("first"))
    monkeypatch.setattr(writer._streams["tokens"], "append", lambda batch: None)
    writer.trace(named("second"))
    assert open_run(tmp_path / "run").tokens["request_id"].value_counts().to_dict() == {"first": 4, "second": 4}
    writer.close()
    assert open_run(tmp_path / "run").tokens["request_id"].value_counts().to_dict() == {"first": 4, "second": 4}


def test_a_reader_beside_the_writer_sees_a_growing_beginning(tmp_path):
    writer, stop = RunWriter(tmp_path / "run"), threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            writer.step({**STEP, "step": number})
            number += 1
            if not number % 20:
                writer.flush()
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    run, seen = open_run(tmp_path / "run"), [0]
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            steps = steps_of(run)
            assert steps == list(range(len(steps)))
            seen.append(len(steps))
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen) and seen[-1] > 0
    assert run.status == "complete" and len(run.steps) >= seen[-1]


def test_rows_reach_the_disk_without_being_asked_to(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        run = open_run(tmp_path / "run")
        for step in range(2):
            writer.step({**STEP, "step": step})
            until = time.monotonic() + 20
            while len(run.steps) <= step and time.monotonic() < until:
                time.sleep(0.02)
            assert steps_of(run) == list(range(step + 1))


def test_a_run_left_open_at_the_end_of_the_process_has_its_rows(tmp_path):
    code = (
        "from workbench import RunWriter\n"
        "writer = RunWriter('run')\n"
        "for step in range(100): writer.step({'step': step})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    run = open_run(tmp_path / "run")
    assert run.status == "interrupted" and len(run.steps) == 100


@pytest.fixture
def full_disk(monkeypatch):
    """Return a switch: while it holds, a write of rows stops half-way with "no space left"."""
    is_full, real = threading.Event(), os.write

    def write(descriptor, content):
        if is_full.is_set() and len(content) > 100:
            real(descriptor, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(run_files.os, "write", write)
    return is_full


@pytest.mark.filterwarnings("ignore:run .*the disk is full")
def test_a_full_disk_is_a_sentence_and_loses_nothing_once_there_is_room(tmp_path, full_disk):
    writer = RunWriter(tmp_path / "run")
    writer.step({**STEP, "step": 0})
    writer.flush()
    full_disk.set()
    for step in (1, 2):
        writer.step({**STEP, "step": step})
    with pytest.raises(UserError, match="cannot write .*steps.arrow': the disk is full"):
        writer.flush()
    writer._flush_quietly()  # what the writing thread does, sooner or later
    assert steps_of(open_run(tmp_path / "run")) == [0] and "the disk is full" in str(writer.error)
    full_disk.clear()
    writer.step({**STEP, "step": 3})
    writer.close()
    assert steps_of(open_run(tmp_path / "run")) == [0, 1, 2, 3] and writer.error is None


@pytest.mark.filterwarnings("ignore:run .*the disk is full")
def test_a_run_that_cannot_be_ended_says_so_and_keeps_what_it_had(tmp_path, full_disk):
    writer = RunWriter(tmp_path / "run")
    writer.step({**STEP, "step": 0})
    writer.flush()
    full_disk.set()
    writer.step({**STEP, "step": 1})
    with pytest.raises(UserError, match="the disk is full"):
        writer.close()
    full_disk.clear()
    run = open_run(tmp_path / "run")
    assert run.status == "interrupted" and steps_of(run) == [0]


def test_a_trace_that_does_not_fit_the_disk_is_a_sentence(tmp_path):
    code = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_run import STEP, named\n"
        "from trace_problem import make_trace\n"
        "from workbench import RunWriter, UserError, open_run\n"
        "writer = RunWriter('run')\n"
        "trace = named('big', make_trace())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "try: writer.trace(trace)\n"
        "except UserError as error: print(error)\n"
        "writer.step(STEP)\n"
        "writer.close()\n"
        "run = open_run('run')\n"
        "print(run.status, len(run.steps), run.trace_ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, after = done.stdout.splitlines()
    assert said.startswith(f"cannot save {tmp_path}/run/traces/00001-big.safetensors") and after == "complete 1 ()"
    assert not list((tmp_path / "run" / "traces").iterdir())


def test_an_interrupted_run_that_cannot_be_changed_is_read_as_it_is(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run")
    writer.step(STEP)
    writer.trace(named("a"))
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "dead")
    writer.close()

    def read_only(path):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_lock, "take", read_only)
    run = open_run(tmp_path / "dead")
    assert run.status == "interrupted" and len(run.steps) == 1 and len(run.tokens) == 4
    assert (tmp_path / "dead" / "steps.arrow").exists()
    monkeypatch.undo()
    # another process is at it
    with_lock = run_lock.take(tmp_path / "dead" / run_files.COMPACT_LOCK)
    assert len(open_run(tmp_path / "dead").steps) == 1 and (tmp_path / "dead" / "steps.arrow").exists()
    with_lock.release()
    run_compact.compact_dead(tmp_path / "dead")
    assert not (tmp_path / "dead" / "steps.arrow").exists()


def test_a_step_costs_its_caller_little(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        row, times = dict.fromkeys(writer._columns["steps"], 1), []
        for _ in range(2000):
            start = time.perf_counter()
            writer.step(row)
            times.append(time.perf_counter() - start)
        reference = []
        for _ in range(2000):
            start = time.perf_counter()
            list(map(str, row))
            reference.append(time.perf_counter() - start)
    # about what writing the names of its columns would cost, and no file is touched
    assert np.median(times) < 10 * np.median(reference)
