"""Engine: one base model, its adapters and mixtures, and the requests that run on them together.

`step` is the whole architecture: which rows run, one forward, the classifier on scaling rows, the next tokens, the
commit. Everything a step changes, it changes in the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.adapters.manager import LoRAManager
from workbench.adapters.merge import MergedAdapters
from workbench.adapters.merging import check_merge, load_merged, merged_of
from workbench.adapters.model import LoRAModel
from workbench.adapters.slots import SlotTable
from workbench.adapters.types import LoRAConfig, split_spec
from workbench.config import EngineConfig
from workbench.engine.base import BaseInfo
from workbench.engine.batch import SCALING, StepBatch
from workbench.engine.hf import BaseModel
from workbench.engine.options import per_prompt, policy_of, require_loaded, require_one, sampling_of
from workbench.engine.outcome import choose_tokens, classify
from workbench.engine.request import Request
from workbench.engine.result import Completion, TraceLabels, completion_of, failed, trace_of
from workbench.engine.sampling import Sampling
from workbench.engine.scheduler import Scheduler
from workbench.engine.sources import base_setting, check_adapter, named_base, read_mixture, read_ordering
from workbench.engine.text import Detokenizer
from workbench.errors import UserError, names
from workbench.instrument.recorder import Recorder
from workbench.ordering import Ordering
from workbench.xlora import Mixture, ReusePolicy

_READ_WAIT_S = 0.05  # how long a step without rows waits for an adapter to be read
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Runs base, single-adapter and X-LoRA requests of one base model in one batch.

    Args:
        base: "demo", a folder, or a Hub id.
        lora: how adapters are held: slots, ranks, bytes; its `lora_paths` are loaded at once.
        config: every setting; keyword `options` override it.
        info: a base already looked at (`BaseInfo.read`), instead of `base`, `config` and `options`.
        **options: fields of `EngineConfig`, for instance `dtype="bfloat16"`.

    Raises:
        UserError: the base cannot be found, loaded or supported, or a setting is wrong.
    """

    def __init__(
        self, base: str | Path | None = None, *, config: EngineConfig | None = None, info: BaseInfo | None = None,
        lora: LoRAConfig | None = None, **options: Any,
    ):
        if info is None:
            info = BaseInfo.read((config or EngineConfig()).change(**base_setting(base), **options))
        self.config = cfg = info.config
        self.base_id, self.prompts, self.eos_ids = info.label, info.prompts, info.eos_ids
        self.tokenizer = info.prompts.tokenizer
        self.device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = BaseModel.load(
            info.folder, info.label, _DTYPES[cfg.dtype], self.device, cfg.max_len, cfg.trust_remote_code,
            packed=not cfg.row_padding,
        )
        self.slots = SlotTable(self.model.dtype, self.device)
        self.adapters = LoRAManager(self.slots, self.model.targets, self.base_id, lora or LoRAConfig(), self._wrap)
        self.mixtures: dict[str, Mixture] = {}
        self.scheduler = Scheduler(
            cfg.max_rows_per_step, cfg.max_requests, self.device, cfg.row_padding, cfg.attention == "reference",
            self._admit,
        )
        self.classifier, self.sampler = classify, choose_tokens
        self.num_steps = self.num_rows = self.num_scaling_rows = 0
        self._recorders: list[Recorder] = []
        self._num_requests = 0
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
        given = read_ordering(ordering)
        if info is None:
            base = named_base(mixture, given, options) if base is None else base
            info = BaseInfo.read(EngineConfig().change(base=str(base), **options))
        where = {"token": info.config.token, "offline": info.config.offline}
        targets = info.targets()
        read = read_mixture(
            mixture, name, targets, info.label, info.hf_config.hidden_size, given, settings, where
        )
        for entry in given.preload_adapters if given is not None else ():
            check_adapter(entry["adapter_model_id"], entry["name"], targets, info.label, where)
        engine = cls(info=info, lora=lora)
        engine._install(read)
        engine._preload(given)
        return engine

    def load_adapter(self, source: str | Path, name: str | None = None, *, pinned: bool = False, **where: Any) -> str:
        """Load a LoRA adapter and return its name; `adapters` has the manager with everything else.

        Args:
            source: folder, Hub id, demo/NAME, or `name=` one of them.
            name: what requests call it; by default the folder's name.
            pinned: keep it in a slot for good.
            **where: `revision`, `token`, `offline` of a Hub id.
        """
        if name is None:
            name, source = split_spec(str(source))
        if name in self.mixtures:
            raise UserError(f"{name!r} is a mixture that is loaded; load the adapter under another name")
        self.adapters.load(source, name, pinned=pinned, **where).raise_for_status()
        return name

    def load_mixture(
        self, source: str | Path = "demo", name: str | None = None, ordering: Ordering | str | Path | None = None,
        settings: dict[str, Any] | None = None, **where: Any,
    ) -> str:
        """Load an X-LoRA mixture and return its name.

        Args:
            source: "demo", folder or Hub id of an X-LoRA repository.
            name: what requests call it; by default the folder's name.
            ordering: fixes the adapter and site axes; an `Ordering` or its file. Made from the model when None. The
                adapters it says to preload are loaded too.
            settings: X-LoRA settings that override the repository's, such as `{"top_k_lora": 2}`.
            **where: `revision`, `token`, `offline` of a Hub id.
        """
        given = read_ordering(ordering)
        mixture = read_mixture(
            source, name, self.model.targets, self.base_id, self.model.hidden_size, given, settings, where
        )
        self._check_new(mixture.name)
        self._install(mixture)
        self._preload(given)
        return mixture.name

    def unload(self, name: str) -> None:
        """Unload an adapter or mixture that no unfinished request uses."""
        require_loaded(name, "adapter or mixture", [*self.adapters.names(), *self.mixtures])
        users = [r.id for r in self.scheduler.requests() if name in r.names or (r.mixture and r.mixture.name == name)]
        if users:
            raise UserError(f"{name!r} is in use by requests {names(users)}; wait for them or cancel them first")
        if name in self.adapters:
            self.adapters.unload(name).raise_for_status()
            return
        with self.adapters.turn:
            for slot in self.mixtures.pop(name).slots:
                self.slots.drop(slot)

    def submit(
        self, prompt: Any, *, adapter: str | None = None, mixture: str | None = None,
        merged_adapters: MergedAdapters | Mapping[str, Any] | None = None,
        tgt_non_granular_index: int | None = None, policy: ReusePolicy | None = None,
        sampling: Sampling | None = None, on_text: Callable[[str], None] | None = None,
        request_id: str | None = None, continuation: Any = None, **options: Any,
    ) -> Request:
        """Queue a request; `step` until its `finish_reason` is set.

        Args:
            prompt: text, token ids, or chat messages (dicts with role and content).
            adapter: run with this one adapter.
            mixture: run with this X-LoRA mixture.
            merged_adapters: run with these adapters merged: `{"ids": [...], "weights": [...], "merge_strategy": ...}`.
            tgt_non_granular_index: compute scalings for the prompt and the first k generated tokens, then reuse.
            policy: any other reuse policy.
            sampling: how tokens are chosen; keyword `options` override its fields.
            on_text: called with each piece of text.
            request_id: a name of your own; "req-1", "req-2", ... otherwise.
            continuation: text or token ids to score instead of generating.

        Raises:
            UserError: a prompt, name or setting that does not fit.
        """
        sampling, merged = sampling_of(sampling, options), merged_of(merged_adapters)
        chosen = policy_of(tgt_non_granular_index, policy, mixture)
        require_one(adapter=adapter, mixture=mixture, merged_adapters=merged and merged.ids)
        require_loaded(adapter, "adapter", self.adapters)
        require_loaded(mixture, "mixture", self.mixtures)
        if merged is not None:
            check_merge(self.adapters, merged)
        given = () if continuation is None else self.prompts.continuation(continuation)
        ids = self.prompts.encode(prompt, len(given) or sampling.max_tokens)
        if merged is not None and not merged.is_constant_row:
            adapter, merged = load_merged(self.adapters, merged), None
        request_id = self._new_id(request_id)
        seed = sampling.seed if sampling.seed is not None else self.config.seed * 1_000_003 + self._num_requests
        request = Request(
            id=request_id, prompt_ids=tuple(ids), sampling=sampling, seed=seed,
            detokenizer=Detokenizer(self.tokenizer, skip_special=True), eos_ids=self.eos_ids,
            adapter=adapter, merged=merged,
            mixture=self.mixtures[mixture] if mixture is not None else None,
            policy=chosen, drafting=self.config.drafting and not given, on_text=on_text, continuation=tuple(given),
        )
        request.tickets = tuple(self.adapters.enter(name) for name in request.names)
        self.scheduler.add(request)
        return request

    def generate(self, prompts: Any, **options: Any) -> Completion | list[Completion]:
        """Generate to the end: one `Completion` for one prompt, a list for a list of prompts.

        Takes the arguments of `submit`; `adapter`, `mixture`, `merged_adapters`, `tgt_non_granular_index`, `policy` and
        `seed` may be lists with one entry per prompt. In a list, a prompt that cannot run gives a `Completion` with its
        `error` and the others run; what is wrong with all of them alike is raised.
        """
        if not self.prompts.is_batch(prompts):
            return self._run([self.submit(prompts, **options)])[0]
        each = per_prompt(options, len(prompts))
        requests: list[Request | Completion] = []
        for prompt, own in zip(prompts, each, strict=True):
            try:
                requests.append(self.submit(prompt, **own))
            except UserError as error:
                requests.append(failed(self._new_id(None), str(error)))
        errors = {r.error for r in requests if isinstance(r, Completion)}
        if len(errors) == 1 and all(isinstance(r, Completion) for r in requests):
            raise UserError(errors.pop())
        done = iter(self._run([r for r in requests if isinstance(r, Request)]))
        return [next(done) if isinstance(r, Request) else r for r in requests]

    def score(self, prompt: Any, continuation: Any, **options: Any) -> Completion:
        """Return the log-probabilities of a given continuation, as if it had been generated, reuse policy included.

        Args:
            prompt: as for `submit`.
            continuation: text (encoded without special tokens) or token ids, at least one token.
            **options: `adapter`, `mixture`, `merged_adapters`, `tgt_non_granular_index` or `policy`.

        Returns:
            a `Completion` whose `logprobs` are those of the continuation's tokens (natural log).
        """
        return self._run([self.submit(prompt, continuation=continuation, **options)])[0]

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Yield pieces of text as they become certain; the generator returns the `Completion`.

        Takes the arguments of `submit`. Leaving the loop early cancels the request.
        """
        pieces: list[str] = []
        request = self.submit(prompt, on_text=pieces.append, **options)
        try:
            while request.finish_reason is None:
                self.step()
                while pieces:
                    yield pieces.pop(0)
        finally:
            self.cancel(request)
        return completion_of(request)

    def record(self, *what: str) -> Recorder:
        """Record the requests that finish while the returned context is open; `what` is "scalings"."""
        recorder = Recorder(what or ("scalings",), self._recorders.remove)
        self._recorders.append(recorder)
        return recorder

    def cancel(self, request: Request) -> None:
        """End a request now; no error if it has ended."""
        if request.finish_reason is None:
            request.finish("cancelled")
            self._finished(self.scheduler.sweep())

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one forward and return the requests that finished in it; nothing to run is no error."""
        if not self.scheduler.has_work():
            return []
        with self.adapters.turn:  # slots change between steps only
            batch = self.scheduler.next_batch()
            if batch.spans:
                hidden = self.model.hidden(batch)
                scalings = self.classifier(hidden, batch)
                chosen = self.sampler(self.model.logits(hidden, batch), batch)
                finished = self.scheduler.commit(batch, chosen, scalings)
                self._count(batch)
                return self._finished(finished)
            # everyone waits for an adapter to be read, or has failed to get one
            finished = self._finished(self.scheduler.sweep())
        if not finished:
            self.adapters.wait(_READ_WAIT_S)
        return finished

    def counters(self) -> dict[str, int]:
        """Return counts since the engine was made: steps (one forward each), rows, scaling rows, requests, KV bytes."""
        kv_bytes = sum(stream.num_bytes for r in self.scheduler.requests() for stream in r.streams.values())
        return {
            "steps": self.num_steps, "forwards": self.num_steps, "rows": self.num_rows,
            "scaling_rows": self.num_scaling_rows, "requests": self._num_requests, "kv_bytes": kv_bytes,
        }

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [completion_of(request) for request in requests]

    def _count(self, batch: StepBatch) -> None:
        self.num_steps += 1
        self.num_rows += sum(span.stop - span.start for span in batch.spans)
        self.num_scaling_rows += sum(span.stop - span.start for span in batch.spans_of(SCALING))

    def _finished(self, requests: list[Request]) -> list[Request]:
        labels = TraceLabels(self.base_id, self.config.dtype)
        for request in requests:
            for name, ticket in zip(request.names, request.tickets, strict=True):
                if request.has_lease:
                    self.adapters.release(name)
                self.adapters.leave(name, ticket)
            request.has_lease = False
            for recorder in self._recorders:
                recorder.add(request.id, lambda request=request: trace_of(request, self.tokenizer, labels))
        return requests

    def _install(self, mixture: Mixture) -> None:
        slots: list[int] = []
        with self.adapters.turn:
            try:
                for adapter in mixture.adapters:
                    self._wrap(adapter)
                    slots.append(self.slots.put(adapter))
            except BaseException:
                for slot in slots:
                    self.slots.drop(slot)
                raise
        self.mixtures[mixture.name] = mixture.placed(tuple(slots), self.model.dtype, self.device)

    def _preload(self, ordering: Ordering | None) -> None:
        for entry in ordering.preload_adapters if ordering is not None else ():
            self.load_adapter(entry["adapter_model_id"], entry["name"])

    def _wrap(self, adapter: LoRAModel) -> None:
        for site in adapter.sites:
            self.model.wrap(site, self.slots)

    def _admit(self, request: Request) -> bool:
        slots: list[int] = []
        if len(request.names) > 1:
            self.adapters.require_slots(request.names)
        for name, ticket in zip(request.names, request.tickets, strict=True):
            slot = self._acquire(name, ticket, held=request.names[: len(slots)])
            if slot is None:
                # a slow disk holds up its own requests only; want of a slot, in the end, those behind it too
                request.times_passed += not self.adapters.is_reading(name)
                return False
            slots.append(slot)
        request.has_lease = bool(slots)
        if request.merged is not None:
            request.merged_slots = tuple(slots)
            for slot in slots:
                if self.slots.adapters[slot].is_dora:
                    name = self.slots.adapters[slot].name
                    raise UserError(f"merged_adapters: {name!r} uses DoRA, which rescales the base; it runs alone")
        elif slots:
            request.slot = slots[0]
        return True

    def _acquire(self, name: str, ticket: int, held: Sequence[str]) -> int | None:
        """Lease one more adapter, or give back those held: a request that waits with leases could wait for ever."""
        slot = None
        try:
            slot = self.adapters.acquire(name, ticket)
        finally:
            if slot is None:
                for other in held:
                    self.adapters.release(other)
        return slot

    def _check_new(self, name: str) -> None:
        if name in self.adapters or name in self.mixtures:
            raise UserError(f"{name!r} is loaded already; unload it first, or load this one under another name")

    def _new_id(self, wanted: str | None) -> str:
        if wanted is not None and any(r.id == wanted for r in self.scheduler.requests()):
            raise UserError(f"request id {wanted!r} is taken by a request that is still running")
        self._num_requests += 1
        return wanted or f"req-{self._num_requests}"
