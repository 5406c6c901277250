"""Engine: one base model, its adapters and mixtures, and the requests that run on them together.

`step` is the whole architecture: which rows run, one forward, the classifier on scaling rows, the next tokens, the
commit. Everything a step changes, it changes in the commit. Whoever waits for a result steps; requests that nobody
waits for are stepped by a thread of the engine's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.adapters.types import LoRAConfig
from workbench.config import EngineConfig
from workbench.engine.base import BaseInfo
from workbench.engine.batch import StepBatch
from workbench.engine.driver import Driver
from workbench.engine.editing import Editing, Edits, taps
from workbench.engine.grammar import GrammarCompiler
from workbench.engine.handle import Handle, hear
from workbench.engine.hf import BaseModel
from workbench.engine.interrupts import held_interrupts
from workbench.engine.library import Library
from workbench.engine.loading import Loading
from workbench.engine.memory import memory_for
from workbench.engine.meters import Meters
from workbench.engine.options import batch_of, split_options
from workbench.engine.outcome import choose_tokens, classify, classify_rows
from workbench.engine.recording import Observing, Recording
from workbench.engine.request import Request
from workbench.engine.result import Completion, best_of, completion_of
from workbench.engine.scheduler import Scheduler, reason_of
from workbench.engine.sources import base_setting, prepare_mixture
from workbench.engine.submission import Submissions
from workbench.errors import UserError
from workbench.ordering import Ordering

if TYPE_CHECKING:
    import pandas as pd

_READ_WAIT_S, _IDLE_S = 0.05, 0.001  # how long a step without rows waits for an adapter to be read, for anything else
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine(Loading, Observing):
    """Runs base, single-adapter, merged and X-LoRA requests of one base model in one batch; safe to use from threads.

    Args:
        base: "demo", a folder, or a Hub id.
        lora: how adapters are held: slots, ranks, bytes; its `lora_paths` are loaded at once.
        config: every setting; keyword `options` override it.
        info: a base already looked at (`BaseInfo.read`), instead of `base`, `config` and `options`.
        model: weights already loaded, for `info`'s base.
        **options: fields of `EngineConfig`, for instance `dtype="bfloat16"`.

    Raises:
        UserError: the base cannot be found, loaded or supported, or a setting is wrong.
    """

    def __init__(
        self, base: str | Path | None = None, *, config: EngineConfig | None = None, info: BaseInfo | None = None,
        model: BaseModel | None = None, lora: LoRAConfig | None = None, **options: Any,
    ):
        if info is None:
            info = BaseInfo.read((config or EngineConfig()).change(**base_setting(base), **options))
        self.config = cfg = info.config
        self.base_id, self.prompts, self.tokenizer = info.label, info.prompts, info.prompts.tokenizer
        self.device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model or BaseModel.load(
            info.folder, info.label, _DTYPES[cfg.dtype], self.device, cfg.max_len, cfg.trust_remote_code,
            packed=not cfg.row_padding,
        )
        self.library = Library(self.model, self.base_id, lora or LoRAConfig())
        self.slots, self.adapters, self.mixtures = self.library.slots, self.library.adapters, self.library.mixtures
        self.memory = memory_for(
            self.model, self.slots, cfg, lambda request, rows: classify_rows(request, rows, cfg.row_padding)
        )
        self.editing = Editing()
        self.scheduler = Scheduler(
            self.memory, cfg.max_rows_per_step, cfg.max_requests, cfg.row_padding, cfg.attention == "reference",
            self._admit, self.library.end_lease, cfg.adapter_weights, self.editing.apply,
        )
        self.classifier, self.sampler = classify, choose_tokens
        self.grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size, info.eos_ids)
        self.submissions = Submissions(info, self.library, self.memory, self.grammars)
        self.meters = Meters()
        self.recording = Recording(self)
        self._driver, self._is_closed, self._door = Driver(self), False, threading.Lock()
        self._stepper: int | None = None  # the thread that runs a step
        for answer in self.adapters.load_all(self.adapters.config.sources()).values():
            answer.raise_for_status()

    @classmethod
    def from_mixture(
        cls, mixture: str | Path = "demo", *, ordering: Ordering | str | Path | None = None, name: str | None = None,
        base: str | Path | None = None, settings: dict[str, Any] | None = None, info: BaseInfo | None = None,
        lora: LoRAConfig | None = None, **options: Any,
    ) -> Engine:
        """Make an engine for a mixture and load it: on `base`, or on the base the ordering or the mixture names.

        The mixture is checked against the base's architecture before the base's weights are read.

        Args:
            mixture: "demo", folder or Hub id of an X-LoRA repository.
            ordering: an `Ordering` or its file.
            name: what requests call the mixture; by default the folder's name.
            base: a base of your own choice.
            settings: X-LoRA settings that override the repository's.
            info: a base already looked at, instead of `base` and `options`.
            lora: how plain adapters are held.
            **options: fields of `EngineConfig`.
        """
        info, read, given = prepare_mixture(mixture, ordering, name, base, settings, info, options)
        engine = cls(info=info, lora=lora)
        engine.library.install(read, engine.device)
        engine.library.preload(given)
        return engine

    def submit(self, prompt: Any, **options: Any) -> Handle:
        """Start a request and return its handle at once; the engine's own thread runs it.

        Args:
            prompt: text, token ids, or chat messages (dicts with role and content).
            adapter: run with this one adapter.
            mixture: run with this X-LoRA mixture.
            merged_adapters: run with these adapters merged: `{"ids": [...], "weights": [...], "merge_strategy": ...}`.
            tgt_non_granular_index: compute scalings for the prompt and the first k generated tokens, then reuse.
            policy: any other reuse policy, or its name: "exact", "periodic(8)", "lagged(1)".
            sampling: how tokens are chosen; keyword `options` that are fields of `Sampling` override it.
            response_format: what the text must match: `{"type": "json_schema", "schema": {...}}`, a regex, a grammar.
            on_text: called with each piece of text.
            request_id: a name of your own; "req-1", "req-2", ... otherwise.
            continuation: text or token ids to score instead of generating.
            distributions: with `continuation`, keep every log-probability, not just the given tokens'.
            priority: lower runs earlier.
            deadline_s: seconds from now after which it ends, finished or not.

        Raises:
            UserError: a prompt, name or setting that does not fit, or an engine that is closed.
        """
        request = self._one(prompt, options)
        handle = Handle(self, request)
        self._queue([request])
        self._driver.wake()
        return handle

    def enqueue(self, prompt: Any, **options: Any) -> Request:
        """Queue a request for whoever steps next, without waking the engine's thread; arguments as for `submit`."""
        self._queue([request := self._one(prompt, options)])
        return request

    def generate(self, prompts: Any, **options: Any) -> Completion | list[Completion]:
        """Generate to the end: one `Completion` for one prompt, a list for a list of prompts.

        Takes the arguments of `submit`; `adapter`, `mixture`, `merged_adapters`, `tgt_non_granular_index`, `policy`,
        `response_format` and `seed` may be lists with one entry per prompt. In a list, a prompt that cannot run gives a
        `Completion` with its `error` and the others run; what is wrong with all of them alike is raised. With `n`
        above 1, a `Completion` is the likeliest of `n`, all of them in its `choices`.
        """
        self.require_outside()
        is_batch = self.prompts.is_batch(prompts)
        made = self.submissions.batch(batch_of(prompts if is_batch else [prompts], options), is_batch)
        requests = [request for each in made if not isinstance(each, Completion) for request in each]
        self._queue(requests)
        try:
            while any(request.finish_reason is None for request in requests):
                self._step_or_wait()
        finally:
            for request in requests:
                self.cancel(request)
        done = [each if isinstance(each, Completion) else best_of(each) for each in made]
        return done if is_batch else done[0]

    def score(self, prompts: Any, continuations: Any, **options: Any) -> Completion | list[Completion]:
        """Return the log-probabilities of given continuations, as if they had been generated, reuse policy included.

        Args:
            prompts: one or a list, as for `generate`.
            continuations: text (encoded without special tokens) or token ids, at least one token; one per prompt.
            **options: `adapter`, `mixture`, `merged_adapters`, `tgt_non_granular_index` or `policy`, `top_logprobs`,
                and `distributions=True` for every log-probability of each token.

        Returns:
            `Completion`s whose `logprobs` are those of the continuations' tokens (natural log).
        """
        if continuations is None:
            raise UserError("score needs a continuation: text or token ids, one per prompt")
        if not self.prompts.is_batch(prompts):
            return self.generate(prompts, continuation=continuations, **options)
        if not isinstance(continuations, Sequence) or isinstance(continuations, str):
            raise UserError(f"{len(prompts)} prompts need a list of as many continuations, not {continuations!r}")
        return self.generate(prompts, continuation=list(continuations), **options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Yield pieces of text as they become certain; the generator returns the `Completion`.

        Takes the arguments of `submit`. Leaving the loop early cancels the request; one that fails raises a UserError.
        """
        self.require_outside()
        pieces: list[str] = []
        request = self._one(prompt, options)
        hear(request, pieces.append)
        self._queue([request])
        try:
            while request.finish_reason is None:
                self._step_or_wait()
                while pieces:
                    yield pieces.pop(0)
        finally:
            self.cancel(request)  # or wait until the thread that ended it is done with it
        yield from pieces
        if request.error:
            raise UserError(request.error)
        return completion_of(request)

    def edit(self, edits: Any, requests: Any = None) -> Edits:
        """Change the scalings that requests use while the returned context is open; results say what was done.

        Edited rows run like any other, in the same batch; their KV is shared with nobody. A fault in an edit ends the
        request it was applied to. See `workbench.edits`.

        Args:
            edits: "classifier:scalings" or "<site pattern>:scalings" -> an edit, a function of (scalings `[row, site,
                adapter]`, tap), or a list of them; an edit alone is for "classifier:scalings".
            requests: ids or handles it is for; None is every request of a mixture that it fits.

        Raises:
            UserError: a key, adapter or site that no loaded mixture has; on leaving, an edit that changed nothing.
        """
        self.require_open()
        opened = None
        try:
            with self.adapters.turn, held_interrupts():
                opened = self.editing.open(edits, requests, self.mixtures)
        except KeyboardInterrupt:
            if opened is not None:
                opened.close()  # nobody else can
            raise
        return opened

    @property
    def taps(self) -> pd.DataFrame:
        """What `edit` can change: name, mixture, dims and adapters of each."""
        return taps(self.mixtures)

    def cancel(self, request: Request) -> None:
        """End a request now; no error if it has ended."""
        with self.adapters.turn, held_interrupts():
            if request.finish_reason is None:
                self.scheduler.end(request, "cancelled")
                self._finished(self.scheduler.sweep())

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one forward and return the requests that finished in it; nothing to run is no error.

        An exception in it fails the request it belongs to; the others go on.
        """
        self.require_outside()
        if not self.scheduler.has_work():
            return []
        with self.adapters.turn:  # slots change between steps only
            self._stepper = threading.get_ident()
            try:
                finished = self._step()
            except Exception as error:  # a mistake of ours: nobody shall wait for ever because of it
                finished = self._fail_all(reason_of(error))
            finally:
                self._stepper = None
        if finished is None:
            # everyone waits: for an adapter to be read, a grammar, another thread
            self.adapters.wait(_READ_WAIT_S)
            time.sleep(_IDLE_S)
        return finished or []

    def _step(self) -> list[Request] | None:
        """Run one forward and return who finished; None when nobody could run and nobody finished."""
        with held_interrupts():
            batch = self.scheduler.next_batch()
        if batch.spans:
            return self._forward(batch)
        return self._finished(self.scheduler.sweep()) or None

    def _fail_all(self, reason: str) -> list[Request]:
        self.meters.failed()
        with held_interrupts():
            for request in list(self.scheduler.requests()):
                self.scheduler.end(request, "error", reason)
            return self._finished(self.scheduler.sweep())

    def _forward(self, batch: StepBatch) -> list[Request]:
        self.meters.begin()
        try:
            with self.recording.watching(batch) as watched:
                hidden = self.model.hidden(batch)
                batch.attention.keep_hidden(hidden)
                scalings = self.classifier(hidden, batch)
                logits = self.model.logits(hidden, batch)
                watched.answered(hidden, logits)
                answers = self.sampler(logits, batch)
        except Exception as error:
            self.meters.failed()
            with held_interrupts():
                return self._finished(self.scheduler.failed(batch, reason_of(error)))
        with held_interrupts():
            self.recording.commit(batch)
            finished = self._finished(self.scheduler.commit(batch, answers, scalings))
            self.meters.end(batch)
            self.recording.stepped(batch)
            for request in batch.requests:
                if request.finish_reason is None and request.on_progress is not None:
                    request.on_progress(request)
            return finished

    def counters(self) -> dict[str, float]:
        """Return everything counted since the engine was made, as plain numbers; `stats` explains them."""
        return self.meters.counters(self)

    def stats(self) -> pd.DataFrame:
        """Return the counters as a table: name, value, unit and meaning."""
        return self.meters.to_frame(self)

    def close(self) -> None:
        """Cancel what runs, end the engine's threads and drop its KV; no error if it is closed."""
        self.require_outside()
        with self._door:
            self._is_closed = True
        self._driver.close()
        with self.adapters.turn:
            for request in list(self.scheduler.requests()):
                self.cancel(request)
            self.memory.pool.clear()
        self.grammars.close()
        self.adapters.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_outside(self) -> None:
        """Raise inside a callback of a request: there a step is running, which cannot wait for another one."""
        if self._stepper == threading.get_ident():
            raise UserError("a request's callback runs inside a step of the engine: it may cancel and submit, not wait")

    def require_open(self) -> None:
        """Raise once the engine is closed."""
        if self._is_closed:
            raise UserError("this engine is closed; make a new one")

    def _one(self, prompt: Any, options: dict[str, Any]) -> Request:
        sampling, options = split_options(options)
        if sampling.num_answers > 1:
            raise UserError("n and best_of make several requests of one: ask generate for them, or submit each")
        return self.submissions.make(prompt, sampling=sampling, **options)

    def _queue(self, requests: Sequence[Request]) -> None:
        with self._door:
            if not self._is_closed:
                return self.scheduler.add(requests)
        self.submissions.discard(requests)
        self.require_open()

    def _step_or_wait(self) -> None:
        if not self.step() and not self.scheduler.has_work():
            time.sleep(_IDLE_S)

    def _finished(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self.library.leave(request)
            self.submissions.ended(request.id)
            self.meters.ended(request)
            self.recording.ended(request)
            if request.on_progress is not None:
                request.on_progress(request)
        return requests

    def _admit(self, request: Request) -> bool:
        if request.grammar is not None and request.matcher is None:
            request.matcher = request.grammar.result().matcher()
        request.may_be_edited = self.editing.concerns(request)
        return self.library.lease(request)
