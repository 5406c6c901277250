"""Memory: which KV blocks each request has, what it finds in the prefix cache, and what it leaves there.

Contract: an adapted block is published only if every token in it used its own exact scalings, unedited; a block's key
says what made its KV (the base model, an adapter's content, a mixture's content and settings), never a name. A scaling
pass that adds nothing is the base model, so its stream shares blocks with base requests. Blocks keep their tokens'
hidden rows: what is found still yields scalings, for any mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from workbench.adapters.slots import SlotTable
from workbench.config import EngineConfig
from workbench.engine.batch import ADAPTED, SCALING, SpanPlan
from workbench.engine.blocks import BLOCK_TOKENS, BlockPool
from workbench.engine.hf import BaseModel
from workbench.engine.paged import PagedStream
from workbench.engine.request import Request
from workbench.errors import UserError

_BASE = b"base"


class Memory:
    """The KV pool of one engine, and who has what in it.

    Args:
        pool: the blocks.
        slots: what is in each slot, for the keys.
        classify: hidden rows and a mixture -> scalings, for tokens whose KV was found.
        prefix_cache: look for blocks of other requests, and leave blocks to them.
        window: a row sees at most this many positions, in every layer; None sees all.
    """

    def __init__(
        self, pool: BlockPool, slots: SlotTable, classify: Callable[[Request, Tensor], Tensor],
        prefix_cache: bool = True, window: int | None = None,
    ):
        self.pool, self.slots, self.prefix_cache, self.window = pool, slots, prefix_cache, window
        self._classify = classify
        self.counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "cached_scaling_tokens": 0}

    def require_room(self, num_tokens: int, num_streams: int) -> None:
        """Raise unless the whole pool could hold a request of `num_tokens` tokens in each of its streams."""
        room = self.pool.num_blocks // num_streams * BLOCK_TOKENS
        if num_tokens > room:
            streams = "" if num_streams == 1 else " twice (a mixture keeps the scaling pass's KV too)"
            raise UserError(
                f"prompt and max_tokens are {num_tokens} tokens, but the KV pool of {self.pool.num_bytes / 1e6:.0f} MB "
                f"holds {room}{streams}; lower max_tokens or raise kv_bytes"
            )

    def admits(self, request: Request, running: int) -> bool:
        """Whether there is room for a request's known tokens, and a block each for those that run."""
        if not running:
            return True
        streams = 1 + (request.mixture is not None and request.needs_scaling_rows)
        blocks = streams * -(-(len(request.tokens) + 1) // BLOCK_TOKENS)
        return blocks + running <= self.pool.num_free

    def attach(self, request: Request) -> None:
        """Give a request that starts its streams, with what the cache has of its tokens."""
        limit = min(len(request.tokens) - 1, request.first_unanswered)
        request.streams = {ADAPTED: PagedStream(self.pool, self._producer(request, ADAPTED))}
        if request.needs_scaling_rows:
            request.streams[SCALING] = PagedStream(self.pool, self._producer(request, SCALING))
        # the scaling stream first: an adapted token counts as found only if its scalings are known
        found = {kind: self._look_up(request, kind, limit) for kind in reversed(request.streams)}
        # what it made itself and finds again, after a preemption, was not saved
        request.cached |= {kind: count for kind, count in found.items() if kind not in request.ran}
        if not request.num_preemptions:
            self.counts["prompt_tokens"] += len(request.prompt_ids)
            self.counts["cached_prompt_tokens"] += found[ADAPTED]
            self.counts["cached_scaling_tokens"] += found.get(SCALING, 0)

    def reserve(self, plan: SpanPlan) -> bool:
        """Make sure of blocks for a plan's rows; False, with nothing changed, when there are too few."""
        return plan.stream.reserve(plan.stop, plan.request.max_length)

    def committed(self, request: Request, kind: str) -> None:
        """Publish what a stream has completed, and free what no later row will see."""
        stream = request.streams[kind]
        if self.prefix_cache and stream.length:
            until = stream.length
            if kind == ADAPTED and request.mixture is not None:
                until = min(request.num_own(until), request.first_edited)
            stream.publish(request.tokens, until)
        if self.window is not None:
            stream.drop_before(stream.length - self.window + 1)

    def _look_up(self, request: Request, kind: str, limit: int) -> int:
        if not self.prefix_cache:
            return 0
        stream = request.streams[kind]
        if kind == ADAPTED and request.mixture is not None:
            limit = min(request.num_own(limit), request.num_scaled, request.first_edited)
        found = stream.lookup(request.tokens, limit)
        if kind == SCALING and found > request.num_scaled:
            hidden = self.pool.hidden[stream.rows(request.num_scaled, found)]
            request.take_scalings(request.num_scaled, self._classify(request, hidden))
            request.num_scaled = found
        elif kind == ADAPTED and request.mixture is not None:
            request.sources += range(len(request.sources), found)
        return found

    def _producer(self, request: Request, kind: str) -> bytes | None:
        """Return what makes a stream's KV, as the root of its blocks' keys."""
        if request.merged is not None:
            hashes = [self.slots.adapters[slot].content_hash for slot in request.merged_slots]
            # the merge's names are of no account, its weights are
            facts = {**asdict(request.merged), "ids": hashes}
            return b"merged:" + hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
        if request.adapter is not None:
            return b"adapter:" + self.slots.adapters[request.slot].content_hash.encode()
        if request.mixture is None or (kind == SCALING and request.mixture.scaling_pass_weights() is None):
            return _BASE
        return kind.encode() + b":" + request.mixture.content_key.encode()


def memory_for(
    model: BaseModel, slots: SlotTable, config: EngineConfig, classify: Callable[[Request, Tensor], Tensor]
) -> Memory:
    """Return the KV memory of an engine, as large as its config says, or as the machine allows."""
    probe, shape = model.probe()
    most = 2 * config.max_requests * -(-model.max_len // BLOCK_TOKENS)
    given = _default_bytes(model.device) if config.kv_bytes is None else config.kv_bytes
    num_blocks = min(given // shape.block_bytes, most)
    if num_blocks < 1:
        raise UserError(
            f"engine: 'kv_bytes' is {given}, but one block of {BLOCK_TOKENS} tokens takes {shape.block_bytes} bytes "
            f"on base {model.name!r}"
        )
    pool = BlockPool(shape, int(num_blocks), model.device)
    return Memory(pool, slots, classify, config.prefix_cache, probe.window)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.6)
    # pages that no token was written to take no memory
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4, 4 << 30)
