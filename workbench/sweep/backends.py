"""Where units run: here, in processes of this machine (joblib), or on a Ray cluster. The same units, the same results.

Contract: a backend yields (unit, result) as units end, begins none after `stop` is set, and takes a worker's death for
one try of the unit it had: after `TRIES` of them the unit is recorded as failed.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.errors import UserError
from workbench.sweep.runner import execute, record_failure
from workbench.sweep.store import Store, Unit

TRIES = 3
Answer = tuple[Unit, dict[str, Any]]


class Here:
    """Runs units one after another in this process."""

    name, is_alone = "in process", True

    def __init__(self, measure: Any = None):
        self.measure = measure

    def run(self, store: Store, units: Sequence[Unit], stop: threading.Event) -> Iterator[Answer]:
        """Yield each unit's result."""
        for unit in units:
            if stop.is_set():
                return
            yield unit, execute(store, unit, self.measure or _measure())


class Processes:
    """Runs units in worker processes of this machine, each with engines of its own.

    Args:
        jobs: how many.
        threads: of torch in each; None shares the cores evenly.
    """

    def __init__(self, jobs: int, threads: int | None = None):
        if jobs < 1:
            raise UserError(f"--jobs must be at least 1, not {jobs}")
        if importlib.util.find_spec("joblib") is None:
            raise UserError("--jobs needs joblib, which is not installed here; type `pip install "
                            "'lora-workbench[sweep]'`")
        self.jobs, self.threads = jobs, threads
        self.name, self.is_alone = f"joblib {jobs}", jobs == 1

    def run(self, store: Store, units: Sequence[Unit], stop: threading.Event) -> Iterator[Answer]:
        """Yield each unit's result."""
        from joblib import Parallel, delayed, parallel_config
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        waiting, tried, at_once = list(units), Counter(), self.jobs
        while waiting and not stop.is_set():
            begun: list[Unit] = []
            try:
                with parallel_config("loky", inner_max_num_threads=self.threads):
                    # with one job joblib would run the unit in this process, and die with it
                    parallel = Parallel(
                        n_jobs=max(2, self.jobs), return_as="generator_unordered", pre_dispatch=at_once, batch_size=1
                    )
                    for unit, result in parallel(self._tasks(delayed, store, waiting, begun, stop)):
                        waiting.remove(unit)
                        yield unit, result
                return
            except TerminatedWorkerError:
                # a unit that is tried again has a result too, the one it failed with before
                ended = [unit for unit in begun if unit in waiting and store.has_ended(unit)]
                for unit in ended:
                    waiting.remove(unit)
                    yield unit, store.result(unit)
                suspects = [unit for unit in begun if unit in waiting]
                if at_once == 1 and suspects:
                    culprit = suspects[0]
                    tried[culprit.name] += 1
                    if tried[culprit.name] >= TRIES:
                        waiting.remove(culprit)
                        yield culprit, died(store, culprit)
                # nobody knows whose worker died: from now on one at a time
                at_once = 1

    def _tasks(
        self, delayed: Any, store: Store, waiting: Sequence[Unit], begun: list[Unit], stop: threading.Event
    ) -> Iterator[Any]:
        for unit in list(waiting):
            if stop.is_set():
                return
            begun.append(unit)
            yield delayed(work)(store, unit, self.threads, self.jobs)


class RayCluster:
    """Runs units on a Ray cluster: the workers need the same files at the same paths.

    Args:
        address: "local" starts one here; "auto" or host:port joins one.
        workers: of a local one; None is one per core.
        cpus, gpus: what a unit asks for.
    """

    name, is_alone = "ray", False

    def __init__(self, address: str = "local", workers: int | None = None, cpus: float = 1, gpus: float = 0):
        if importlib.util.find_spec("ray") is None:
            raise UserError("--ray needs Ray, which is not installed here; type `pip install 'lora-workbench[ray]'`")
        if not cpus > 0 or gpus < 0:
            raise UserError(f"a point needs more than 0 --cpus and at least 0 --gpus, not {cpus:g} and {gpus:g}")
        self.address, self.workers, self.cpus, self.gpus = address, workers, cpus, gpus

    def run(self, store: Store, units: Sequence[Unit], stop: threading.Event) -> Iterator[Answer]:
        """Yield each unit's result.

        Raises:
            UserError: no cluster there, one too small for a unit, or workers that write elsewhere.
        """
        import ray

        own = not ray.is_initialized()
        if own:
            self._connect(ray)
        try:
            yield from self._run(ray, store.absolute(), units, stop)
        finally:
            if own:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        if self.address == "local" and self.workers:
            options["num_cpus"] = self.workers * self.cpus
        try:
            ray.init(address=self.address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray {self.address}: no Ray cluster there ({str(error).splitlines()[0]}); start one "
                            "with `ray start --head`, or use --ray local") from None

    def _run(self, ray: Any, store: Store, units: Sequence[Unit], stop: threading.Event) -> Iterator[Answer]:
        room = self._room(ray)
        # ray's own retries would begin a unit behind our back after a stop
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)(work)
        waiting, running, tried = list(units), {}, Counter()
        while waiting or running:
            while waiting and len(running) < room and not stop.is_set():
                unit = waiting.pop(0)
                running[remote.remote(store, unit, None, room)] = unit
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1)
            for reference in ready:
                unit = running.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise _of_worker(error) from None
                except ray.exceptions.RayError:  # the worker, or its whole machine, died
                    tried[unit.name] += 1
                    if tried[unit.name] < TRIES:
                        waiting.insert(0, unit)
                    else:
                        yield unit, died(store, unit)
                    continue
                if not store.has_ended(unit):
                    raise UserError(f"a worker wrote its result to {str(store.path(unit))!r}, which is not there on "
                                    "this machine; give an --out that all machines of the cluster share")
                yield answer

    def _room(self, ray: Any) -> int:
        """Return how many units the cluster runs at once."""
        has = ray.cluster_resources()
        wants = {"CPU": self.cpus, "GPU": self.gpus}
        for kind, option in (("CPU", "--cpus"), ("GPU", "--gpus")):
            if wants[kind] > has.get(kind, 0):
                raise UserError(f"a point asks for {option} {wants[kind]:g}, but the cluster has {has.get(kind, 0):g}")
        return max(1, int(min(has[kind] / wants[kind] for kind in wants if wants[kind])))


def _of_worker(error: Any) -> UserError:
    """Return what went wrong in a worker outside of its point, as a user may read it."""
    if isinstance(error.cause, UserError):
        return error.cause
    last = str(error).strip().splitlines()[-1]
    return UserError(f"a worker could not run its point: {last}; every machine of the cluster needs the same workbench "
                     "and the same files")


def work(store: Store, unit: Unit, threads: int | None, workers: int) -> Answer:
    """Run one unit in a worker process, one of `workers` that may be on this machine."""
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C is for the process that the user talks to: it lets this unit finish
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from workbench.sweep.tasks import share_memory

    share_memory(workers)
    return unit, execute(store, unit, _measure())


def died(store: Store, unit: Unit) -> dict[str, Any]:
    """Record a unit whose workers died, and return its result."""
    return record_failure(store, unit, f"its worker process died {TRIES} times (killed, or out of memory)")


def _measure() -> Any:
    from workbench.sweep.tasks import measure

    return measure
