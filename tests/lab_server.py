"""A JupyterLab started by `workbench lab`, for tests: its own port, token, settings and runtime folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOKEN = "of-the-tests"
# generous: on a busy machine JupyterLab takes half a minute to come up
START_S, STOP_S = 120, 30
OPTIONS = (
    "--allow-root", f"--IdentityProvider.token={TOKEN}", "--LabApp.extension_manager=readonly",
    "--expose-app-in-browser",
)


@dataclass
class Lab:
    """A running server: its address, the folder it serves, its log and its process."""

    url: str
    folder: Path
    log: Path
    process: subprocess.Popen

    def api(self, path: str, method: str = "GET") -> object:
        """Return the answer of the server's API as JSON."""
        asked = urllib.request.Request(f"{self.url}api/{path}", headers={"Authorization": f"token {TOKEN}"},
                                       method=method)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        return self.process.wait(STOP_S)

    def wait_for_log(self, text: str) -> None:
        """Wait until the log holds `text`."""
        until = time.monotonic() + STOP_S
        while text not in self.log.read_text():
            assert time.monotonic() < until, f"{text!r} is not in the log:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)


@contextlib.contextmanager
def serve(
    home: Path, folder: Path, *, environment: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> Iterator[Lab]:
    """Run `workbench lab` on a folder; what JupyterLab writes elsewhere goes below `home`.

    Raises:
        RuntimeError: it did not come up; the message ends with its log.
    """
    home.mkdir(parents=True, exist_ok=True)
    log = home / "lab.log"
    own = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(home / "ipython"), "BROWSER": "false"}
    command = [sys.executable, "-m", "workbench.cli", "lab", "--folder", str(folder), "--no-browser", "--port", "0"]
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [*command, "--", *OPTIONS], stdout=said, stderr=subprocess.STDOUT, stdin=stdin,
            env={**os.environ, **own, **(environment or {})}, cwd=home, start_new_session=True,
        )
    try:
        yield Lab(_wait_until_ready(process, Path(own["JUPYTER_RUNTIME_DIR"]), log), folder, log, process)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)


def _wait_until_ready(process: subprocess.Popen, runtime: Path, log: Path) -> str:
    """Return the server's address once it answers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            url = json.loads((runtime / f"jpserver-{process.pid}.json").read_text())["url"]
            urllib.request.urlopen(f"{url}api", timeout=10).close()
            # the address that the page's own requests are compared with
            return url.replace("localhost", "127.0.0.1")
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not come up (exit code {process.poll()}):\n{log.read_text()[-4000:]}")
