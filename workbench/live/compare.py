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
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError
from workbench.instrument.comparison import Comparison
from workbench.live.settings import require_comparable, settings_of

if TYPE_CHECKING:
    from workbench.engine import Engine
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
        The comparison; a setting that failed is in its `failed`, with the reason.

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
    return Comparison.of(traces, again, failed)


def run_together(
    engine: Engine, prompt: Any, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Trace], dict[str, str]]:
    """Generate a prompt under several settings in one batch; return the traces of those that ran, and who failed.

    Args:
        engine: where.
        prompt: one prompt.
        settings: label -> options, `edits` among them.
    """
    requests: dict[str, Request] = {}
    failed: dict[str, str] = {}
    number = next(_NUMBERS)
    ids = {label: f"compare-{number}-{place}" for place, label in enumerate(settings)}
    opened = {}
    with ExitStack() as stack:
        recorder = stack.enter_context(engine.record("scalings", requests=list(ids.values())))
        try:
            for label, options in settings.items():
                try:
                    own = dict(options)
                    edits = own.pop("edits", None)
                    if edits is not None:
                        opened[label] = engine.edit(edits, requests=[ids[label]])
                        stack.callback(opened[label].close)
                    requests[label] = engine.enqueue(prompt, request_id=ids[label], **own)
                except UserError as error:
                    failed[label] = str(error)
            while any(request.finish_reason is None for request in requests.values()):
                if not engine.step() and not engine.scheduler.has_work():
                    time.sleep(_IDLE_S)
        finally:
            for request in requests.values():
                engine.cancel(request)
    failed |= _unfinished(requests) | _unfired(opened, {**failed, **_unfinished(requests)})
    traces = {label: recorder.trace(ids[label]) for label in requests if label not in failed}
    return traces, {label: failed[label] for label in settings if label in failed}


def _seeded(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a seed: left out, each request would get noise of its own."""
    has_seed = options.get("seed") is not None or getattr(options.get("sampling"), "seed", None) is not None
    return dict(options) if has_seed else {**options, "seed": engine.config.seed}


def _unfinished(requests: Mapping[str, Request]) -> dict[str, str]:
    return {
        label: request.error or f"it was {request.finish_reason}"
        for label, request in requests.items()
        if request.finish_reason in ("error", "cancelled")
    }


def _unfired(opened: Mapping[str, Any], failed: Mapping[str, str]) -> dict[str, str]:
    """Return who was to be edited and was not."""
    found = {}
    for label, edits in opened.items():
        if label in failed:
            continue
        try:
            edits.__exit__(None, None, None)
        except UserError as error:
            found[label] = str(error)
    return found
