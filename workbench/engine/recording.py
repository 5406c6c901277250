"""Recording: the recorders that are open on one engine, and their place in its steps.

Contract: without an open recorder that measures, a step pays for an empty loop; hooks on the model are there only while
a recorder wants them. Recorders open and close between steps. Whatever goes wrong in one stops that one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workbench.engine.batch import StepBatch
from workbench.engine.interrupts import held_interrupts
from workbench.engine.measuring import Measurement, decoder_layers
from workbench.engine.options import require_loaded, require_one
from workbench.engine.request import Request
from workbench.engine.traces import TraceLabels
from workbench.engine.watcher import Watcher
from workbench.errors import UserError
from workbench.instrument.recorder import Recorder
from workbench.instrument.wanted import Wanted

if TYPE_CHECKING:
    from workbench.adapters.entry import Entry
    from workbench.adapters.model import LoRAModel
    from workbench.engine.engine import Engine
    from workbench.engine.handle import Handle


class Recording:
    """The open recorders of an engine.

    Args:
        engine: whose.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._watchers: list[Watcher] = []
        self._stepping: tuple[tuple[Watcher, Measurement | None], ...] = ()
        self._measuring: tuple[Measurement, ...] = ()
        self._hooks: list[Any] = []

    def open(self, wanted: Wanted, memory_bytes: int, run: str | Path | None) -> Recorder:
        """Return a recorder that attends every step from now on."""
        engine = self._engine
        layers = decoder_layers(engine.model) if "hidden_norm" in wanted.kinds else []
        # what was recorded may outlive the engine, and does not keep its weights
        size_of = functools.partial(_size_of, weakref.ref(engine), wanted)
        writer = recorder = None
        try:
            with engine.adapters.turn, held_interrupts():
                writer = None if run is None else _run_writer(engine, run, wanted)
                recorder = Recorder(wanted, memory_bytes, self.close, size_of, writer)
                if layers and not self._hooks:
                    self._hooks = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]
                self._watchers.append(Watcher(engine, recorder, len(layers)))
        except BaseException:
            # nobody gets this recorder, so nobody could close it
            with held_interrupts():
                self.close(recorder)
                if writer is not None:
                    writer.abandon()
            raise
        return recorder

    def close(self, recorder: Recorder | None) -> None:
        """Let a recorder attend no more steps; between steps."""
        with self._engine.adapters.turn, held_interrupts():
            mine = [watcher for watcher in self._watchers if watcher.recorder is recorder]
            self._watchers = [watcher for watcher in self._watchers if watcher.recorder is not recorder]
            for watcher in mine:
                watcher.closed()
            if not any("hidden_norm" in watcher.recorder.wanted.kinds for watcher in self._watchers):
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []

    @contextlib.contextmanager
    def watching(self, batch: StepBatch) -> Iterator[Recording]:
        """Measure the forward that runs inside."""
        routing = self._engine.model.routing
        try:
            attending = [watcher for watcher in self._watchers if watcher.recorder.is_recording]
            began = []
            for watcher in attending:
                with _stopping(watcher, "look at a step"):
                    began.append((watcher, watcher.begin(batch)))
            self._stepping = tuple(began)
            self._measuring = tuple(measurement for _, measurement in began if measurement is not None)
            routing.watchers = tuple(measurement.take_site for measurement in self._measuring)
            yield self
        finally:
            routing.watchers, self._measuring = (), ()

    def answered(self, hidden: Tensor, logits: Tensor) -> None:
        """Take the forward's hidden state `[row, hidden]` and logits `[answer, vocab]`; inside `watching`."""
        for measurement in self._measuring:
            measurement.take_answer(hidden, logits)

    def commit(self, batch: StepBatch) -> None:
        """Take what the forward has said; before the step is committed."""
        for watcher, measurement in self._attending():
            with _stopping(watcher, "take a step's values"):
                watcher.committed(batch, measurement)

    def stepped(self, batch: StepBatch) -> None:
        """Take the numbers of a step that has been committed."""
        for watcher, _ in self._attending():
            with _stopping(watcher, "count a step"):
                watcher.stepped(batch)
        self._stepping = ()

    def ended(self, request: Request) -> None:
        """Take a request that has ended."""
        engine = self._engine
        for watcher in self._watchers:
            if watcher.recorder.is_recording:
                with _stopping(watcher, f"take request {request.id!r}"):
                    watcher.ended(request, TraceLabels(engine.base_id, engine.config.dtype))

    def _attending(self) -> list[tuple[Watcher, Measurement | None]]:
        return [each for each in self._stepping if each[0].recorder.is_recording]

    def _hook(self, index: int) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            for measurement in self._measuring:
                measurement.take_layer(index, output)

        return hook


class Observing:
    """The part of an engine that records."""

    recording: Recording

    def record(
        self, *what: str, requests: str | Handle | Sequence[str | Handle] | None = None,
        sites: str | Sequence[str] | None = None, every: int = 1, memory_bytes: int = 1 << 28,
        run: str | Path | None = None,
    ) -> Recorder:
        """Record requests and steps while the returned context is open; tokens and logits are the same, bit for bit.

        Values belong to the rows of a request's adapted stream. What never ran has none (NaN): tokens found in the
        prefix cache, and those before the recording began; the trace's metadata says so under "unmeasured". A second
        request of one id is kept as "ID#2".

        Args:
            *what: any of "scalings" (the default), "logits:top" or "logits:top:K" (the 8 or K likeliest next tokens),
                "delta_norm" (‖w·BAx‖ / ‖Wx‖ at each site for each adapter, the bias left out), "hidden_norm" (after
                each layer, and after the final norm), "entropy" (of the next token, nats), and "cache" and
                "throughput", which both record the table of steps.
            requests: ids or handles to record; one that never runs is an error at the end.
            sites: patterns such as "*.q_proj": of these sites only, scalings too.
            every: measure positions that it divides; scalings are whole in any case.
            memory_bytes: beyond it, buffers and finished traces go to a temporary folder.
            run: a new folder that gets everything, as it comes, for `open_run`.

        Raises:
            UserError: an unknown kind, patterns without a site, or a folder that cannot be written.
        """
        self.require_open()
        wanted = Wanted.of(what, requests, sites, every, self.model.vocab_size)
        if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 0:
            raise UserError(f"record: 'memory_bytes' must be a whole number of at least 0, not {memory_bytes!r}")
        wanted.require_sites(self.model.targets, f"base {self.base_id!r}")
        if (touched := _touched(self)) is not None:
            wanted.require_sites(touched, "the loaded adapters")
        return self.recording.open(wanted, memory_bytes, run)


@contextlib.contextmanager
def _stopping(watcher: Watcher, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever is wrong with a recording, the step goes on
        watcher.recorder.stop(what, error)


def _touched(engine: Engine) -> list[str] | None:
    """Return the sites of everything loaded; None when nothing is, or an adapter's are not known without its file."""
    found = [mixture.sites for mixture in engine.mixtures.values()]
    for entry in engine.adapters.entries():
        model = _model_of(engine, entry)
        if model is None:
            return None
        found.append(model.sites)
    touched = {site for sites in found for site in sites}
    return [site for site in engine.model.targets if site in touched] or None


def _model_of(engine: Engine, entry: Entry) -> LoRAModel | None:
    return entry.model if entry.slot is None else engine.slots.adapters.get(entry.slot, entry.model)


def _size_of(
    engine_of: Callable[[], Engine | None], wanted: Wanted, mixture: str | None, adapter: str | None
) -> tuple[int, int, int]:
    """Return how many sites, adapters and layers a request's values have; of an adapter on disk, the most."""
    engine = engine_of()
    if engine is None:
        raise UserError("the engine of this recorder is gone; ask one that is there")
    require_one(mixture=mixture, adapter=adapter)
    require_loaded(mixture, "mixture", engine.mixtures)
    require_loaded(adapter, "adapter", engine.adapters)
    layers, sites, count = engine.model.config.num_hidden_layers, (), 0
    if mixture is not None:
        sites, count = engine.mixtures[mixture].sites, len(engine.mixtures[mixture].adapters)
    elif adapter is not None:
        entry = next(each for each in engine.adapters.entries() if each.name == adapter)
        model = _model_of(engine, entry)
        sites, count = engine.model.targets if model is None else model.sites, 1
    return sum(map(wanted.matches, sites)), count, layers


def _run_writer(engine: Engine, folder: str | Path, wanted: Wanted) -> Any:
    from workbench.instrument.run_meta import meta_of
    from workbench.instrument.run_writer import RunWriter

    asked = {"kinds": wanted.kinds, "requests": wanted.requests, "sites": wanted.patterns, "every": wanted.every}
    return RunWriter(folder, meta={**meta_of(engine), "recording": asked})
