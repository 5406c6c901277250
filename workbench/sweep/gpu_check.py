"""Everything that needs a card, in one run of a few minutes: is it right there, and how fast.

Sections yield records; each is written to the results file as it comes, so a crash or a time limit loses nothing. A
section that cannot finish in its share of the budget says so, and the check has not passed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.errors import UserError, names, nearest
from workbench.sweep.machine import environment, load_average

SCHEMA = 1
RIGHT, WRONG, UNFINISHED = "right", "wrong", "unfinished"
_CHECKOUT = Path(__file__).resolve().parents[2]
_SHOWN = 12  # problems in the printed summary; the file has all of them
_SAVE_S = 1.0


@dataclass(frozen=True)
class Setting:
    """Where a section runs.

    Attributes:
        device: the card, or a CPU for a rehearsal.
        toy: sizes that a CPU runs in seconds.
        deadline: `time.monotonic()` after which a section must not begin another record.
    """

    device: torch.device
    toy: bool = False
    deadline: float = float("inf")

    def has_time(self) -> bool:
        """Whether the section may go on."""
        return time.monotonic() < self.deadline


Record = dict[str, Any]
Run = Callable[[Setting], Iterator[Record]]


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
        name: on the command line and in the file.
        title: what it shows.
        run: yields records; `"ok": False` with a `"problem"` marks what is wrong, `"line"` is shown in the summary.
            When there is no time left it yields `cut_short` and ends.
        weight: its share of the time that is left when it starts, beside the sections after it.
    """

    name: str
    title: str
    run: Run
    weight: float


@dataclass
class Report:
    """The results file: written whole after every record, by renaming, so that it is never half a file.

    Attributes:
        path: where.
        data: what.
        ran: sections of this run; the file may hold others.
    """

    path: Path
    data: dict[str, Any]
    ran: list[str] = field(default_factory=list)
    _saved: float = field(default=0.0, repr=False)

    @classmethod
    def start(cls, path: Path, setting: Setting, command: str, kept: Sequence[str] = ()) -> Report:
        """Begin a report; sections named in `kept` stay as an earlier run on the same card left them.

        Raises:
            UserError: the file cannot be written.
        """
        head = {
            "schema": SCHEMA, "card": card_name(setting.device), "toy": setting.toy, **environment(setting.device),
            **_card_facts(setting.device), "commit": _commit(), "command": command, "load_before": load_average(),
        }  # fmt: skip
        earlier = _earlier(path, head["card"]) if kept else {}
        report = cls(path, {**head, "sections": {name: earlier[name] for name in kept if name in earlier}})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            report.save()
        except OSError as error:
            raise UserError(f"--out {str(path)!r} cannot be written: {error.strerror}") from None
        return report

    def save(self) -> None:
        """Write the file."""
        self._saved = time.monotonic()
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def add(self, name: str, record: Record) -> None:
        """Add a record to a section; the file follows within a second."""
        self.data["sections"][name]["records"].append(record)
        if time.monotonic() - self._saved > _SAVE_S:
            self.save()


def run_sections(
    sections: Sequence[Section], setting: Setting, report: Report, budget_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> bool:
    """Run sections one after the other within a budget and return whether all of it is right and complete.

    Args:
        sections: in order.
        setting: where; its deadline is set here, per section.
        report: takes the records.
        budget_s: for all of them.
        say: called with a line per section.
    """
    end = time.monotonic() + budget_s
    for number, section in enumerate(sections):
        weights = sum(each.weight for each in sections[number:])
        share = max(0.0, end - time.monotonic()) * section.weight / weights
        say(f"{section.name}: {section.title} ...")
        _run_section(section, Setting(setting.device, setting.toy, time.monotonic() + share), report)
        say(summary_line(section.name, report.data["sections"][section.name]))
    report.data["load_after"] = load_average()
    report.save()
    return all(report.data["sections"][section.name]["status"] == RIGHT for section in sections)


def _run_section(section: Section, setting: Setting, report: Report) -> None:
    """Run one section; whatever it raises is recorded, and the next one has its chance."""
    entry: dict[str, Any] = {"title": section.title, "status": UNFINISHED, "commit": report.data["commit"],
                             "created": report.data["created"], "seconds": 0.0, "records": []}
    report.data["sections"][section.name] = entry
    report.ran.append(section.name)
    started, is_done = time.monotonic(), False
    try:
        if setting.has_time():
            for record in section.run(setting):
                report.add(section.name, record)
            is_done = not any(record.get("cut_short") for record in entry["records"])
    except Exception as error:  # a launch, a compiler or a driver may raise anything; the report must survive it
        report.add(section.name, {"ok": False, "problem": f"{type(error).__name__}: {_short(error)}"})
    finally:
        entry["seconds"] = round(time.monotonic() - started, 2)
        if any(not record.get("ok", True) for record in entry["records"]):
            entry["status"] = WRONG
        elif is_done:
            entry["status"] = RIGHT
        report.save()


def cut_short(what: str) -> Record:
    """Return the record of a section that stops for want of time."""
    return {"ok": True, "cut_short": True, "note": f"no time was left for {what}"}


def problems(report: Report) -> list[str]:
    """Return a sentence for everything that is wrong or missing."""
    found = []
    for name in report.ran:
        section = report.data["sections"][name]
        found += [f"{name}: {record['problem']}" for record in section["records"] if not record.get("ok", True)]
        if section["status"] == UNFINISHED:
            notes = [record["note"] for record in section["records"] if record.get("cut_short")]
            found.append(f"{name}: not finished; {notes[0] if notes else 'it had no time'}; raise --budget-s")
    return found


def summary(report: Report) -> str:
    """Return the report as a few lines."""
    data = report.data
    lines = [f"{data['card']}, torch {data['versions']['torch']}, triton {data['versions']['triton']}"]
    for name in report.ran:
        section = data["sections"][name]
        lines.append(summary_line(name, section))
        lines += [f"  {record['line']}" for record in section["records"] if record.get("line")]
    wrong = problems(report)
    lines += [f"problem: {each}" for each in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(f"and {len(wrong) - _SHOWN} more problems, all in the file")
    return "\n".join([*lines, f"written to {report.path}"])


def summary_line(name: str, section: Mapping[str, Any]) -> str:
    """Return one line about a section."""
    records = [record for record in section["records"] if not record.get("cut_short")]
    right = sum(bool(record.get("ok", True)) for record in records)
    return f"{name:<10}{section['status']:<11}{right} of {len(records)} right, {section['seconds']:.1f} s"


def chosen(sections: Sequence[Section], wanted: Sequence[str]) -> list[Section]:
    """Return the sections named, in their own order; all of them when none is.

    Raises:
        UserError: an unknown name.
    """
    known = [section.name for section in sections]
    for name in wanted:
        if name not in known:
            raise UserError(f"--sections: {name!r} is not known{nearest(name, known)}; sections are {names(known)}")
    return [section for section in sections if not wanted or section.name in wanted]


def results_path(device: torch.device) -> Path:
    """Return the file of a card: in the checkout's results, or here when this is no checkout."""
    folder = _CHECKOUT / "experiments" / "results" / "gpu"
    slug = re.sub(r"[^a-z0-9]+", "-", card_name(device).lower()).strip("-")
    return (folder if (_CHECKOUT / "pyproject.toml").is_file() else Path()) / f"{slug}.json"


def card_name(device: torch.device) -> str:
    """Return the card's name, or what stands for it in a rehearsal."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "rehearsal on a CPU"


def _card_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{found.major}.{found.minor}", "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda, "driver": _driver(),
    }  # fmt: skip


def _driver() -> str | None:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _commit() -> str | None:
    return _output(["git", "-C", str(_CHECKOUT), "rev-parse", "HEAD"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _earlier(path: Path, card: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    fits = isinstance(data, dict) and data.get("schema") == SCHEMA and data.get("card") == card
    return data.get("sections", {}) if fits else {}


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else "without a message"
