"""The kernels' check, bench and ahead-of-time compilation: `pytest tests/test_kernel_tools.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_kernels import bench as bench_tool
from lora_kernels import check as check_tool
from lora_kernels import compile as compile_tool
from lora_kernels.bench import WrongResult, bench
from lora_kernels.compile import Built, build, compare, kernels, read_table, write_table
from lora_kernels.problems import POPULARITY, error_ratio, make_problem, row_error, slots_for
from lora_kernels.registry import ALL_OPS, LIMITS, OPS, Case, cases_of, check, ops_on
from lora_kernels.roofline import table
from lora_kernels.timing import copy_rate, time_calls
from lora_kernels.triton_support import interpreting, triton
from workbench.cli import main

SMALL = {"shapes": ("smol",), "layers": ("kv",), "num_rows": (3,), "ranks": (4,), "repeats": 3}
CPU = torch.device("cpu")


def wrong(name: str):
    """Return an op whose result is a hundredth too large."""
    op = ALL_OPS[name]
    return replace(op, run=lambda problem: lambda: op.run(problem)() * 1.01)


# the registry and its check


def test_every_op_has_a_file_of_its_name_and_a_line_in_the_readme():
    folder = Path(compile_tool.__file__).parent
    readme = (folder / "README.md").read_text()
    files = {name: name.removesuffix("_groups") for name in ALL_OPS}  # blend is checked in both of its uses
    assert not [file for file in files.values() if not (folder / f"{file}.py").is_file() or f"`{file}`" not in readme]
    assert all(name == op.name for name, op in ALL_OPS.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL_OPS)
def test_every_op_is_right_on_the_torch_path(name, dtype):
    found = [check(ALL_OPS[name], problem) for problem in ALL_OPS[name].small(dtype, "cpu")]
    assert found and all(one.is_right and one.path == "torch" for one in found), list(map(str, found))
    assert all(one.twin_error is not None for one in found), "a check whose twin is not wrong shows nothing"


@pytest.mark.interpret
@pytest.mark.parametrize("name", OPS)
def test_every_op_is_right_in_the_interpreter(name):
    problem = OPS[name].small(torch.float32, "cpu")[-1]
    with interpreting():
        found = check(OPS[name], problem)
    assert found.is_right and found.path == "interpreter", str(found)


@pytest.mark.parametrize("name", ALL_OPS)
def test_a_wrong_op_is_named_with_how_wrong_it_is(name):
    found = check(wrong(name), ALL_OPS[name].small(torch.float32, "cpu")[0])
    assert not found.is_right and f"{name} (torch, float32) is wrong by " in str(found)


def test_a_wrong_reference_and_a_blind_check_are_told_apart():
    mix, problem = OPS["mix"], OPS["mix"].small(torch.float32, "cpu")[0]
    found = check(replace(mix, reference=lambda p: mix.reference(p) * 1.01), problem)
    assert not found.is_right and "mix: its reference is wrong by" in str(found)
    found = check(replace(mix, limits=dict.fromkeys(LIMITS, 10.0)), problem)
    assert not found.is_right and "the check sees nothing" in str(found)


def test_nan_is_never_right():
    mix = OPS["mix"]
    spoilt = replace(mix, run=lambda problem: lambda: mix.run(problem)() * float("nan"))
    assert not check(spoilt, mix.small(torch.float32, "cpu")[0]).is_right


@pytest.mark.parametrize("name", ALL_OPS)
def test_the_least_work_grows_with_rows(name):
    op = ALL_OPS[name]
    few, many = (op.cost(op.make_problem(Case(rows, shape="smol", layer="kv"))) for rows in (2, 32))
    assert 0 < few.num_bytes < many.num_bytes and 0 < few.flops < many.flops


def test_a_gpu_runs_ops_that_have_kernels_and_a_cpu_all_of_them():
    assert ops_on("cuda:1") is OPS and all(op.ahead for op in OPS.values())
    assert set(ops_on("cpu")) == set(ALL_OPS) > set(OPS)


def test_axes_that_an_op_does_not_read_count_once():
    axes = {"rank": (8, 16), "layer": ("q", "up"), "num_rows": (1, 2), "popularity": ("uniform", "skewed")}
    counts = {name: len(list(cases_of(OPS[name], Case(), **axes))) for name in ("bgmv", "mix", "scalings")}
    assert counts == {"bgmv": 16, "mix": 8, "scalings": 2}


# problems


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64])
@pytest.mark.parametrize("popularity", POPULARITY)
def test_rows_of_one_slot_lie_together_and_stay_below_the_number_of_adapters(popularity, num_rows):
    for num_adapters in (None, 3):
        slots = slots_for(popularity, num_rows, num_adapters, seed=1)
        runs = [slot for i, slot in enumerate(slots) if not i or slots[i - 1] != slot]
        assert len(slots) == num_rows and len(runs) == len(set(runs))
        assert all(-1 <= slot < (num_adapters or max(num_rows, 1)) for slot in slots)
    assert slots == slots_for(popularity, num_rows, 3, seed=1)


def test_popularities_are_what_they_say():
    used = {name: len(set(slots_for(name, 64)) - {-1}) for name in POPULARITY}
    assert used["identical"] == 1 and used["distinct"] == 64 and used["uniform"] == 8 and used["all_base"] == 0
    assert 1 < used["skewed"] < 64 and 1 < used["zipf:1.5"] < 64
    assert slots_for("half_base", 9).count(-1) == 5
    counts = sorted((slots_for("skewed", 64).count(slot) for slot in range(used["skewed"])), reverse=True)
    assert counts[0] > 2 * counts[3] and sum(counts) == 64


@pytest.mark.parametrize("popularity", ["unifrom", "zipf", "zipf:-1", "zipf:inf", ""])
def test_an_unknown_popularity_is_refused(popularity):
    with pytest.raises(ValueError, match="popularity must be one of identical, .*half_base"):
        slots_for(popularity, 3)


@pytest.mark.parametrize("op", ["sgmv", "mix"])
def test_outputs_have_unit_scale_whatever_the_shape(op):
    for shape in ((40, 4, 33, 200), (40, 64, 900, 130)):
        p = make_problem(op, *shape)
        assert 0.4 < (p.exact() - p.y).std() < 1.4 and 0.8 < p.y.std() < 1.2


def test_errors_of_nan_and_of_other_shapes_are_seen():
    exact = torch.ones(3, 2, dtype=torch.float64)
    spoilt = exact.clone()
    spoilt[1, 1] = float("nan")
    for error in (error_ratio, row_error):
        assert error(exact, exact) == 0 and not error(spoilt, exact) <= 1
        with pytest.raises(ValueError, match=r"found has shape \[3\]"):
            error(torch.ones(3), exact)
    spoilt[1, 1] = 2.0
    assert error_ratio(spoilt, exact) == pytest.approx((1 / 6) ** 0.5)
    assert row_error(spoilt, exact) == pytest.approx(0.5**0.5)


# bench


def test_bench_times_every_op():
    records = bench(**SMALL)
    assert [record["op"] for record in records] == list(ALL_OPS)
    for record in records:
        assert 0 < record["p20_us"] <= record["p50_us"] <= record["p80_us"]
        assert record["bytes_per_s"] == pytest.approx(record["num_bytes"] / (1e-6 * record["p50_us"]))
        assert record["share_of_copy"] > 0 and record["share_of_copy_this_size"] > 0
        assert record["path"] == "torch" and record["error"] <= 1e-5


def test_there_is_no_number_on_red(monkeypatch):
    def never(*args):
        raise AssertionError("a wrong op was timed")

    monkeypatch.setattr(bench_tool, "time_calls", never)
    with pytest.raises(WrongResult, match=r"mix \(torch, float32\) is wrong by \d.* than 1e-05, at 3 rows, .*rank"):
        bench([wrong("mix")], **SMALL)


def test_a_wrong_op_ends_the_command_with_1_and_no_record(monkeypatch, capsys):
    monkeypatch.setitem(ALL_OPS, "mix", wrong("mix"))
    assert main(["kernels", "bench", "--op", "mix", "--shape", "smol", "--layer", "kv", "--repeats", "3"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: mix (torch, float32) is wrong by")


@pytest.mark.parametrize("json_only", [True, False])
def test_the_last_line_of_bench_is_json(json_only, capsys):
    options = ["--op", "bgmv", "mix", "--shape", "smol", "--layer", "kv", "--rows", "1", "3", "--repeats", "3"]
    assert main(["kernels", "bench", *options, *["--json"] * json_only]) == 0
    lines = capsys.readouterr().out.splitlines()
    records = json.loads(lines[-1])["records"]
    assert [(record["op"], record["num_rows"]) for record in records] == [
        ("bgmv", 1), ("bgmv", 3), ("mix", 1), ("mix", 3)
    ]  # fmt: skip
    assert len(lines) == (1 if json_only else 6)


def test_a_longer_call_takes_longer_and_a_copy_rate_is_a_rate():
    small, large = torch.ones(10), torch.ones(3_000_000)
    assert time_calls([lambda: large.sum()], CPU, 5).p50_us > time_calls([lambda: small.sum()], CPU, 5).p50_us
    assert copy_rate(CPU, 1_000_000, 5) > 1e6


def test_the_readme_holds_the_computed_tables():
    readme = (Path(compile_tool.__file__).parent / "README.md").read_text()
    assert all(table(shape) in readme for shape in ("7b", "70b")), "python -m lora_kernels.roofline prints them"


# compilation ahead of time


def test_the_committed_table_is_of_the_kernels_that_are_launched():
    committed = read_table()["kernels"]
    assert set(committed) == set(kernels()), "after a change of kernels: python -m lora_kernels.compile --write"
    assert all(set(rows) == {"sm_80", "sm_90", "sm_100"} for rows in committed.values())


def test_nothing_in_the_committed_table_spills_or_asks_for_too_much():
    rows = [Built(name, int(sm[3:]), *row) for name, by_sm in read_table()["kernels"].items()
            for sm, row in by_sm.items()]  # fmt: skip
    assert rows and not [row.problem for row in rows if row.problem]
    assert all(0 < row.registers <= 255 for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_kernels_of_other_dtypes_compile_without_a_spill(dtype):
    names = kernels(dtype=compile_tool.DTYPES[dtype])
    built = build([(name, sm) for name in names for sm in (80, 90, 100)], 2, dtype)
    assert len(built) > 30 and not [row.problem for row in built if row.problem]


def pairs(is_full: bool) -> list[tuple[str, int]]:
    """Return kernels and architectures to build: all, or of each op's stage the one that takes most registers."""
    every = [(name, int(sm[3:]), row[0]) for name, by_sm in read_table()["kernels"].items()
             for sm, row in by_sm.items()]  # fmt: skip
    if is_full:
        return [(name, sm) for name, sm, _ in every]
    worst: dict[str, tuple[str, int, int]] = {}
    for one in every:
        label = one[0].split()[0]
        worst[label] = max(worst.get(label, one), one, key=lambda row: row[2])
    return [(name, sm) for name, sm, _ in worst.values()]


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["worst", "all"])
def test_kernels_compile_without_a_spill_as_the_table_says(is_full):
    built = build(pairs(is_full), jobs=2 if is_full else 1)
    assert not [row.problem for row in built if row.problem]
    if read_table()["triton"] == triton.__version__:
        assert not compare(built, read_table()), "after a change of kernels: python -m lora_kernels.compile --write"


def test_a_spill_is_found_and_named(tmp_path):
    script = tmp_path / "spilling.py"
    script.write_text(textwrap.dedent("""
        import torch, triton
        import triton.language as tl
        from lora_kernels.compile import _built
        from lora_kernels.triton_support import Launch

        @triton.jit
        def greedy(x_ptr, BLOCK: tl.constexpr):
            cells = x_ptr + tl.arange(0, BLOCK)
            first = tl.load(cells)
            second = tl.load(cells + BLOCK)
            third = tl.load(cells + 2 * BLOCK)
            tl.debug_barrier()
            tl.store(cells + 3 * BLOCK, first * second * third)
            tl.store(cells + 4 * BLOCK, first + second + third)

        x = torch.empty(1, device="meta")
        launch = Launch("greedy.stage", greedy, (1,), {"x_ptr": x}, {"BLOCK": 8192}, {"num_warps": 1, "num_stages": 1})
        print(_built("greedy", launch, 90).problem)
    """))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("greedy on sm_90 spills: "), done.stdout + done.stderr


@pytest.fixture
def fake_builds(monkeypatch, tmp_path):
    """Build nothing: every kernel takes 10 registers; the table, in a folder of its own, says so too."""
    built = [Built(name, sm, 10, 0, 100) for name in kernels(["scalings"]) for sm in (80, 90, 100)]
    monkeypatch.setattr(compile_tool, "build", lambda wanted, jobs, dtype: built)
    monkeypatch.setattr(compile_tool, "kernels", lambda ops=None, dtype=None: kernels(["scalings"]))
    monkeypatch.setattr(compile_tool, "read_table", lambda: read_table(tmp_path / "aot.json"))
    write_table(built, tmp_path / "aot.json")
    return tmp_path / "aot.json", built


def test_a_table_that_holds_passes(fake_builds):
    assert main(["kernels", "compile", "--check"]) == 0


def test_a_kernel_that_changed_came_or_went_is_named(fake_builds, capsys):
    path, built = fake_builds
    write_table([replace(built[0], registers=11), *built[1:-3], replace(built[0], kernel="old")], path)
    assert main(["kernels", "compile", "--check"]) == 1
    problems = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert problems[0] == f"{built[0].kernel} on sm_80 was [11, 0, 100] in the table and is [10, 0, 100]"
    assert problems[1:] == [f"{built[-1].kernel} on sm_{sm} has no row in the table" for sm in (80, 90, 100)] + [
        "old is in the table, but nothing launches it"
    ]


def test_a_table_of_another_triton_is_said_to_be_one_and_not_compared(fake_builds, capsys):
    path, built = fake_builds
    path.write_text(path.read_text().replace(triton.__version__, "3.6.0").replace("[10,", "[99,"))
    assert main(["kernels", "compile", "--check"]) == 0
    assert "the table is of Triton 3.6.0: here only spills and shared memory are checked" in capsys.readouterr().out
    built[0] = replace(built[0], stack_bytes=24)
    assert main(["kernels", "compile", "--check"]) == 1
    assert f"problem: {built[0].kernel} on sm_80 spills: 24 bytes of stack" in capsys.readouterr().err


def test_too_much_shared_memory_and_a_kernel_that_does_not_compile_are_problems():
    assert "needs 200000 bytes of shared memory, which has 166912" in Built("k", 80, 10, 0, 200_000).problem
    assert not Built("k", 90, 10, 0, 200_000).problem
    assert Built("k", 90, error="no such type").problem == "k on sm_90 does not compile: no such type"
    gone = compile_tool._built("scalings.gone bf16", None, 90)
    assert gone.problem == "scalings.gone bf16 on sm_90 does not compile: nothing launches it"


# the command


MISTAKES = [
    (["bench", "--op", "sgmw"], "op must be one of bgmv, sgmv, mix, .*did you mean 'sgmv'"),
    (["bench", "--shape", "8b"], "shape must be one of smol, 7b, 70b, not '8b'; did you mean '7b'"),
    (["bench", "--layer", "k"], "layer must be one of q, kv, up, down, not 'k'"),
    (["bench", "--popularity", "unifrom"], "popularity must be one of .*did you mean 'uniform'"),
    (["bench", "--dtype", "bf16"], "dtype must be one of .*did you mean 'bfloat16'"),
    (["check", "--op", "mixx"], "op must be one of .*did you mean 'mix'"),
    (["compile", "--op", "scaling"], "op must be one of .*did you mean 'scalings'"),
    (["compile", "--op", "mix", "--write"], "--write writes the whole table; leave out --op"),
    (["compile", "--sm", "90", "--write"], "--write writes the whole table; leave out --op and --sm"),
    (["compile", "--dtype", "fp32", "--check"], "the table is of bf16; leave out --dtype"),
    (["compile", "--dtype", "float32"], "dtype must be one of bf16, fp16, fp32, not 'float32'"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments, sentence, capsys):
    assert main(["kernels", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    with pytest.raises(ValueError, match=f"^error: .*{sentence}"):
        raise ValueError(err)


@pytest.mark.parametrize("option", ["--rows", "--rank", "--repeats"])
def test_a_count_below_one_is_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", "bench", option, "0"])
    assert "must be a whole number above 0, not '0'" in capsys.readouterr().err


def test_check_says_which_paths_ran(capsys):
    assert main(["kernels", "check", "--op", "scalings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["wrong"] == [] and found["paths"] == ["interpreter", "torch"]
    assert lines[0].startswith("scalings (torch, float32): error ")


def test_a_wrong_op_fails_check(monkeypatch, capsys):
    monkeypatch.setitem(ALL_OPS, "mix", wrong("mix"))
    monkeypatch.setattr(check_tool, "check_interpreted", lambda ops: [])
    assert main(["kernels", "check", "--op", "mix"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1, "a wrong op is no line among the right ones"
    assert err.startswith("error: mix (torch, float32) is wrong by") and json.loads(out.splitlines()[-1])["wrong"]


def test_without_triton_check_says_that_only_torch_ran(monkeypatch, capsys):
    monkeypatch.setattr(check_tool.triton_support, "triton", None)
    monkeypatch.setattr(compile_tool, "triton", None)
    assert main(["kernels", "check", "--op", "mix"]) == 0
    out = capsys.readouterr().out
    assert "Triton is not installed" in out and json.loads(out.splitlines()[-1])["paths"] == ["torch"]
    assert main(["kernels", "compile"]) == 2
    assert capsys.readouterr().err.startswith("error: Triton is not installed")


def test_the_command_and_the_options_import_nothing_heavy():
    code = "import workbench.cli.kernels, sys; print([m for m in ('torch', 'triton', 'IPython') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.gpu
def test_bench_on_a_gpu_runs_triton():
    records = bench(num_rows=(16,), layers=("kv",), repeats=5)
    assert all(record["path"] == "triton" and record["host_us"] > 0 for record in records)
