"""Watcher: one recorder at work in one engine: whose rows it looks at, and where their values go.

Contract: a request's values lie by position in buffers of a size declared at its first row. A position that is
computed again, after a preemption, overwrites what it wrote before; one that never ran stays empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workbench.engine.batch import ADAPTED, RowSpan, StepBatch
from workbench.engine.measuring import Measured, Measurement
from workbench.engine.request import Request
from workbench.engine.tally import Tally, request_row
from workbench.engine.text import token_texts
from workbench.engine.traces import Ran, TraceLabels, require_traceable, trace_of
from workbench.errors import UserError
from workbench.instrument.recorded import Recorded
from workbench.instrument.recorder import Recorder

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

_MEANINGS = {
    "entropy": ("nats", "entropy of the distribution of the token after this one"),
    "logits:top.ids": ("token id", "the likeliest tokens after this one"),
    "logits:top.logprobs": ("nats", "their log-probabilities"),
    "hidden_norm": ("norm", "L2 norm of the hidden state after each layer, and after the final norm"),
    "delta_norm": ("ratio", "‖w·BAx‖ / ‖Wx‖: how far the adapter's delta moves the site's output"),
}


@dataclass(slots=True)
class _Watched:
    """A request with rows in recorded steps.

    Attributes:
        ran: what it runs with.
        first: position of its first recorded row.
        num_cached: of the positions before it, how many were found in the prefix cache.
        stop: position after its last recorded row.
        columns: of its sites, on the site axis of a measurement.
        buffers: what was measured, by place: position divided by `every`.
        is_measured: which places have values, bool.
    """

    ran: Ran
    first: int = 0
    num_cached: int = 0
    stop: int = 0
    columns: np.ndarray | None = None
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    is_measured: np.ndarray | None = None


class Watcher:
    """Attends an engine's steps for a recorder.

    Args:
        engine: whose steps.
        recorder: who keeps what is seen.
        num_layers: of the model.
    """

    def __init__(self, engine: Engine, recorder: Recorder, num_layers: int):
        self.recorder, self._engine, self._num_layers = recorder, engine, num_layers
        self._wanted = recorder.wanted
        self._watched: dict[Request, _Watched] = {}
        self._used_ids: dict[str, int] = {}
        self._sites: dict[str, int] = {}
        self._num_sites_known = 0
        self._tally = Tally(engine) if recorder.has_steps else None

    def begin(self, batch: StepBatch) -> Measurement | None:
        """Look at the rows of a forward that is about to run; None when none of them is to be measured."""
        for request in batch.requests:
            if not self._wanted.includes(request.id):
                self.recorder.passed(request.id)
            elif request not in self._watched:
                self._watched[request] = _Watched(self._ran(request))
                self.recorder.saw(request.id)
        if not self._wanted.measures:
            return None
        self._learn_sites()
        rows = [row for span, _ in self._mine(batch) for row in self._rows(span)]
        if not rows:
            return None
        has_deltas = "delta_norm" in self._wanted.kinds
        widths = [len(watched.ran.adapters) for _, watched in self._mine(batch)]
        sites = self._sites if has_deltas else {}
        return Measurement(batch, rows, self._wanted, sites, max(widths), self._num_layers)

    def committed(self, batch: StepBatch, measurement: Measurement | None) -> None:
        """Take what a forward has said, before its requests are told; it will not be undone."""
        for span, watched in self._mine(batch):
            # after a preemption rows run again that ran before the recording began
            if not watched.stop or span.plan.first < watched.first:
                watched.first = span.plan.first
                watched.num_cached = min(span.plan.first, span.plan.request.cached.get(ADAPTED, 0))
            watched.stop = max(watched.stop, span.plan.stop)
        if measurement is None:
            return
        if measurement.error is not None:
            raise measurement.error
        measured, first = measurement.drain(), 0
        for span, watched in self._mine(batch):
            count = len(self._rows(span))
            if count:
                self._fill(span, watched, measured, slice(first, first + count))
            first += count

    def stepped(self, batch: StepBatch) -> None:
        """Take the numbers of a step that has been committed."""
        if self._tally is not None:
            self.recorder.add_step(self._tally.step(batch))

    def ended(self, request: Request, labels: TraceLabels) -> None:
        """Take a request that has ended."""
        if self._tally is not None:
            self._tally.ended(request)
        if not self._wanted.includes(request.id):
            return
        watched = self._watched.pop(request, None) or _Watched(self._ran(request))
        ran, name = self._ended_ran(request, watched), self._free_id(request.id)
        extras = self._extras(request, watched)
        tokenizer = self._engine.tokenizer
        prompt = "".join(token_texts(tokenizer, request.prompt_ids)) if tokenizer else ""
        row = request_row(request, self.recorder.began_s, prompt)
        self.recorder.add_request({**row, "request_id": name})
        try:
            require_traceable(request, ran, self._wanted, extras)
        except UserError as error:
            self.recorder.add_untraced(name, str(error))
            return
        has_all = request.mixture is None or ran.sites == request.mixture.sites
        is_lazy = has_all and not request.scored_distributions
        num_bytes = 4 * len(request.tokens) * len(ran.sites) * len(ran.adapters)
        num_bytes = max(num_bytes, _held_bytes(request) if is_lazy else 0)
        num_bytes += sum(recorded.values.nbytes for recorded in extras.values())
        labels = TraceLabels(labels.base, labels.dtype, {**labels.extra, "request_id": name})
        wanted, every = self._wanted, self._wanted.every
        self.recorder.add_trace(
            name, num_bytes,
            lambda: trace_of(request, tokenizer, labels, ran, wanted, _spread(extras, every, len(request.tokens))),
            # a trace still to be made keeps its request, which may hold a vocabulary of numbers per token, or the
            # scalings of sites that nobody asked for
            is_lazy=is_lazy,
        )

    def closed(self) -> None:
        """Give back the buffers of requests that have not ended."""
        for watched in self._watched.values():
            for buffer in watched.buffers.values():
                self.recorder.store.release(buffer)
        self._watched.clear()

    def _mine(self, batch: StepBatch) -> list[tuple[RowSpan, _Watched]]:
        spans = batch.spans_of(ADAPTED)
        return [(span, self._watched[r]) for span in spans if (r := span.plan.request) in self._watched]

    def _rows(self, span: RowSpan) -> range:
        """The rows of a span whose positions `every` divides."""
        return range(span.start + -span.plan.first % self._wanted.every, span.stop, self._wanted.every)

    def _places(self, span: RowSpan) -> slice:
        every = self._wanted.every
        return slice(-(-span.plan.first // every), -(-span.plan.stop // every))

    def _learn_sites(self) -> None:
        """Add the sites that adapters loaded since have brought; those known keep their places."""
        known = self._engine.slots.sites
        if len(known) != self._num_sites_known:
            self._num_sites_known = len(known)
            for site in known:
                if site not in self._sites and self._wanted.matches(site):
                    self._sites[site] = len(self._sites)

    def _ran(self, request: Request) -> Ran:
        """Return what a request runs with; nothing of a request that has not run with an adapter yet."""
        if request.mixture is not None:
            adapters, sites = request.mixture.adapters, request.mixture.sites
            names = request.mixture.adapter_names
        elif request.streams and request.names:
            slots = request.merged_slots if request.merged is not None else (request.slot,)
            adapters, names = [self._engine.slots.adapters[slot] for slot in slots], request.names
            touched = {site for adapter in adapters for site in adapter.sites}
            sites = [site for site in self._engine.model.targets if site in touched]
        else:
            return Ran()
        keys = {name: adapter.content_hash for name, adapter in zip(names, adapters, strict=True)}
        return Ran(tuple(names), tuple(site for site in sites if self._wanted.matches(site)), keys)

    def _fill(self, span: RowSpan, watched: _Watched, measured: Measured, rows: slice) -> None:
        """Write one span's values, rows `rows` of the measurement, to its request's buffers."""
        places = self._places(span)
        if watched.is_measured is None:
            self._declare(span.plan.request, watched)
        buffers = watched.buffers
        if "hidden_norm" in buffers:
            buffers["hidden_norm"][places] = measured.hidden_norm[:, rows].T
        if "delta_norm" in buffers:
            new = measured.delta_norm[watched.columns, rows, : len(watched.ran.adapters)].transpose(1, 0, 2)
            # computed again, a row may lack what it had at the output head: known tokens get no logits
            keeps = watched.is_measured[places, None, None] & np.isnan(new)
            buffers["delta_norm"][places] = np.where(keeps, buffers["delta_norm"][places], new)
        answers = (measured.with_logits >= rows.start) & (measured.with_logits < rows.stop)
        at = measured.with_logits[answers] - rows.start + places.start
        for name, values in (
            ("entropy", measured.entropy), ("logits:top.ids", measured.top_ids),
            ("logits:top.logprobs", measured.top_logprobs),
        ):  # fmt: skip
            if name in buffers and len(at):
                buffers[name][at] = values[answers]
        watched.is_measured[places] = True

    def _declare(self, request: Request, watched: _Watched) -> None:
        """Make the buffers of a request, as long as it can become."""
        wanted, store = self._wanted, self.recorder.store
        length = -(-request.max_length // wanted.every)
        watched.is_measured = np.zeros(length, dtype=bool)
        sites, adapters = watched.ran.sites, watched.ran.adapters
        watched.columns = np.asarray([self._sites[site] for site in sites if site in self._sites], dtype=np.int64)
        shapes = {
            "entropy": (length,), "logits:top.ids": (length, wanted.top), "logits:top.logprobs": (length, wanted.top),
            "hidden_norm": (length, self._num_layers + 1), "delta_norm": (length, len(sites), len(adapters)),
        }  # fmt: skip
        for name, shape in shapes.items():
            if name.partition(".")[0] in wanted.kinds and all(shape[1:]):
                watched.buffers[name] = store.array(shape, np.int64 if name.endswith(".ids") else np.float32)
        for name in ("entropy", "logits:top.ids", "logits:top.logprobs"):
            if name in watched.buffers:
                watched.buffers[name][:] = -1 if name.endswith(".ids") else np.nan

    def _extras(self, request: Request, watched: _Watched) -> dict[str, Recorded]:
        """Return what was measured, by place, and give the buffers back."""
        if watched.is_measured is None:
            return {}
        count = -(-len(request.tokens) // self._wanted.every)
        missing = ~watched.is_measured[:count]
        found = {}
        for name, buffer in watched.buffers.items():
            values = buffer[:count].copy()
            self.recorder.store.release(buffer)
            values[missing] = -1 if values.dtype.kind == "i" else np.nan
            found[name] = self._recorded(name, values, watched.ran)
        watched.buffers = {}
        return found

    def _recorded(self, name: str, values: np.ndarray, ran: Ran) -> Recorded:
        labels: dict[str, tuple[str, ...]] = {}
        if name.startswith("logits:top"):
            labels = {"rank": tuple(str(rank) for rank in range(1, values.shape[1] + 1))}
        elif name == "hidden_norm":
            labels = {"layer": (*(f"layer {index}" for index in range(self._num_layers)), "final norm")}
        elif name == "delta_norm":
            labels = {"site": ran.sites, "adapter": ran.adapters}
        return Recorded(values, ("token", *labels), labels, *_MEANINGS[name])

    def _ended_ran(self, request: Request, watched: _Watched) -> Ran:
        """Return what is known of an ended request: how far it came, and why values are missing."""
        num_inputs = max(watched.stop, len(request.tokens) - 1 if request.choices else 0)
        notes = []
        if self._wanted.measures and watched.first:
            if watched.num_cached:
                last = watched.num_cached - 1
                notes.append(f"positions 0 to {last} were found in the prefix cache: they did not run")
            if watched.first > watched.num_cached:
                between = f"positions {watched.num_cached} to {watched.first - 1}"
                notes.append(f"{between} ran before the recording began")
        if self._wanted.measures and self._wanted.every > 1:
            notes.append(f"only positions that {self._wanted.every} divides were measured")
        ran = watched.ran
        return Ran(ran.adapters, ran.sites, ran.keys, num_inputs, tuple(notes))

    def _free_id(self, request_id: str) -> str:
        """Return a request's id, numbered when one of this id has ended before."""
        count, name = self._used_ids.get(request_id, 0) + 1, request_id
        while name in self._used_ids:
            count += name != request_id
            name = f"{request_id}#{count}"
        self._used_ids[request_id] = count
        self._used_ids.setdefault(name, 1)
        return name


def _held_bytes(request: Request) -> int:
    """Return what an ended request holds of its scalings; an edited row is part of what was edited with it."""
    if request.scalings is None:
        return 0
    edited = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in request.edited.values()}
    return request.scalings.nbytes + sum(edited.values())


def _spread(extras: dict[str, Recorded], every: int, num_tokens: int) -> dict[str, Recorded]:
    """Return values by place as values by position: nothing at positions that were not measured."""
    if every == 1:
        return extras
    found = {}
    for name, recorded in extras.items():
        values = recorded.values
        spread = np.full((num_tokens, *values.shape[1:]), -1 if values.dtype.kind == "i" else np.nan, values.dtype)
        spread[::every] = values
        found[name] = Recorded(spread, recorded.axes, recorded.labels, recorded.unit, recorded.meaning)
    return found
