"""What every test shares: no network, no display, one torch thread, and the tiny fixture.

Triton decides whether to interpret when a kernel is decorated, so the variable is set before anything imports it.
"""

import os
import signal
import socket
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("quick", max_examples=40, deadline=None, database=None)
hypothesis.settings.load_profile("quick")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # a shell starts what runs in its background with Ctrl-C ignored, and many tests press it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Return the folder of the golden fixture: base/, xlora/, ordering.json and golden.json."""
    return Path(__file__).parent / "data" / "xlora-tiny"


@pytest.fixture(scope="session", autouse=True)
def loopback_only():
    """Fail a test that talks to another machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    socket.socket.connect = guarded
    yield
    socket.socket.connect = connect


@pytest.fixture(autouse=True)
def skip_without_cuda(request: pytest.FixtureRequest) -> None:
    """Skip `gpu` tests where there is no GPU (see SKIPS.md)."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
