"""A lock that says a run is being written: it ends with its process, however that ends.

It is advisory and on a file of its own. Where the file system or the system has no such locks nothing is held, and
`is_supported` says so: whoever would change a run must then leave it as it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Lock:
    """A lock taken on a file; `release` gives it up and removes the file."""

    def __init__(self, path: Path, descriptor: int, is_supported: bool):
        self.path, self.is_supported = path, is_supported
        self._descriptor: int | None = descriptor

    def __del__(self) -> None:
        # an interrupt may come before anybody has it
        self.release()

    def release(self) -> None:
        """Give the lock up; no error if that is done."""
        if self._descriptor is not None:
            # removed while it is held: who opens the path later makes a new file
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def take(path: Path) -> Lock | None:
    """Take the lock, or return None when another holds it.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = _lock(descriptor, is_shared=False)
    except BaseException:
        os.close(descriptor)
        raise
    if held is False:
        os.close(descriptor)
        return None
    return Lock(path, descriptor, is_supported=held is True)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _lock(descriptor, is_shared=True) is False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, is_shared: bool) -> bool | None:
    """Lock an open file without waiting: True, False when another has it, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
