"""`compare`: one prompt under several settings, generated together in one batch, with a null pair beside them.

The null pair is the first setting once more, when the others are done, alone: its rows stand in forwards of other row
counts and at other places than before, which is what else differs between two settings of one batch. It must compute
everything again, or it would only read the first run's numbers back: it asks for its prompt's log-probabilities, and
such a request takes nothing from the prefix cache. (The settings themselves may; whatever a cached block was computed
beside is batch shape too, and the null pair shows it.)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.live.settings import WHO, require_comparable, settings_of

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine
    from workbench.engine.request import Request
    from workbench.instrument.trace import Trace

NULL = "null pair"
_IDLE_S = 0.001
_NUMBERS = itertools.count(1)


def compare(engine: Engine, prompt: Any, settings: Any = None, *, null: bool = True, **common: Any) -> Comparison:
    """Run a prompt under two to eight settings and return what differs; the first is what the others are compared with.

    Args:
        engine: where they run; other requests may run beside them.
        prompt: one prompt: text, token ids, or chat messages.
        settings: label -> options of `Engine.submit` (and `edits`, as for `Engine.edit`), or a list of options, which
            are labelled by what differs. None: one of `common` is a list, a setting per value, for instance
            `tgt_non_granular_index=[None, 0, 1, 4]`.
        null: run the first setting again in another batch shape, for the floor under which nothing is a difference.
        **common: options of every setting. Without a `seed`, all have the engine's.

    Returns:
        The comparison; a setting that failed is in its `failed`, with the reason. If that is the first, the others are
        compared with the next one that ran, and all that is shown says so.

    Raises:
        UserError: settings that cannot be compared, an option nobody knows, or fewer than two settings that ran.
    """
    engine.require_outside()
    engine.require_open()
    if engine.prompts.is_batch(prompt):
        raise UserError("compare takes one prompt; call it once for each")
    each = {label: _seeded(engine, options) for label, options in settings_of(settings, common).items()}
    require_comparable(engine, each)
    traces, failed = run_together(engine, prompt, each)
    if len(traces) < 2:
        reasons = "; ".join(f"{label!r}: {reason}" for label, reason in failed.items())
        raise UserError(f"{len(traces)} of {len(each)} settings ran, and two are needed. {reasons}")
    again = None
    if null:
        first = next(iter(traces))
        alone, broken = run_together(engine, prompt, {NULL: {**each[first], "prompt_logprobs": True}})
        again = alone.get(NULL)
        failed |= broken
    return Comparison.of(traces, again, failed, was_first(each, traces))


def was_first(settings: Iterable[str], traces: Mapping[str, Trace]) -> str | None:
    """Return the first setting's label if it has no trace, else None."""
    label = next(iter(settings))
    return None if label in traces else label


def why_unfinished(ended: Request | Completion) -> str | None:
    """Return why what has ended gave no result to compare; None if it gave one."""
    if ended.finish_reason == "deadline":
        return ended.error or "it was cut off by its deadline_s"
    if ended.finish_reason in ("error", "cancelled"):
        return ended.error or f"it was {ended.finish_reason}"
    return None


def run_together(
    engine: Engine, prompt: Any, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Trace], dict[str, str]]:
    """Generate a prompt under several settings in one batch; return the traces of those that ran, and who failed.

    Args:
        engine: where.
        prompt: one prompt.
        settings: label -> options, `edits` among them.
    """
    number = next(_NUMBERS)
    tries = [
        _Try(engine, prompt, label, f"compare-{number}-{place}", dict(options))
        for place, (label, options) in enumerate(settings.items())
    ]
    with ExitStack() as ends:
        for each in tries:
            ends.callback(each.end)
            each.begin()
        while any(each.request is not None and each.request.finish_reason is None for each in tries):
            if not engine.step() and not engine.scheduler.has_work():
                time.sleep(_IDLE_S)
    return (
        {each.label: each.trace for each in tries if each.trace is not None},
        {each.label: each.error for each in tries if each.error is not None},
    )


class _Try:
    """One setting on its way: its request, the recorder that watches it, and the edits that are open for it."""

    def __init__(self, engine: Engine, prompt: Any, label: str, request_id: str, options: dict[str, Any]):
        self.engine, self.prompt, self.label, self.id, self.options = engine, prompt, label, request_id, options
        self.request: Request | None = None
        self.trace: Trace | None = None
        self.error: str | None = None
        self._recorder, self._edits = None, None

    def begin(self) -> None:
        """Queue the request, watched and edited from its first row on; what is wrong with it is its `error`."""
        edits = self.options.pop("edits", None)
        try:
            # one recorder each: it complains at its end of a request that never ran
            self._recorder = self.engine.record(*_kinds(self.options), requests=[self.id])
            if edits is not None:
                self._edits = self.engine.edit(edits, requests=[self.id])
            self.request = self.engine.enqueue(self.prompt, request_id=self.id, **self.options)
        except UserError as error:
            self.error = str(error)

    def end(self) -> None:
        """Stop what runs and close what is open; its `trace` or its `error` is there then."""
        if self.request is not None:
            self.engine.cancel(self.request)
            self.error = why_unfinished(self.request)
        for opened in (self._edits, self._recorder):
            if opened is None:
                continue
            try:
                # told of an error, they do not complain of what never ran
                opened.__exit__(UserError if self.error else None, UserError(self.error) if self.error else None, None)
            except UserError as error:
                self.error = str(error)
        if self.error is None:
            self.trace = self._recorder.trace(self.id)


def _kinds(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to record: a request of the base model has no scalings, and a trace only with something else."""
    is_base = all(options.get(key) is None for key in WHO)
    return ("scalings", "entropy") if is_base else ("scalings",)


def _seeded(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a seed: left out, each request would get noise of its own."""
    has_seed = options.get("seed") is not None or getattr(options.get("sampling"), "seed", None) is not None
    return dict(options) if has_seed else {**options, "seed": engine.config.seed}
