"""Many short requests with everything among them that can go wrong: what each must give, and what must not stay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from byte_engine import MODEL, SPEC
from models import GREEDY_GAP, Adapter, byte_tokenizer, save_base

from workbench import Completion, Engine, LoRAConfig, UserError

POISON, PASSING, OWN = "a poisoned row", "a fault that passes", "the reader has had enough"
LOST, MOVING = "lost", "moving"  # an adapter whose files go away, and one that is unloaded and loaded all the time
ADAPTERS = ("a", "c", "d", "e", LOST, MOVING)
PROMPTS = ("tell me", "tell me more of the long road", "tell me more of the long road that winds on", "x", "why?")
WHO: tuple[dict[str, Any], ...] = (
    {}, {}, {"adapter": "a"}, {"adapter": "c"}, {"adapter": "d"}, {"adapter": "e"}, {"mixture": "mix"},
    {"mixture": "mix"}, {"mixture": "mix", "tgt_non_granular_index": 1},
    {"merged_adapters": {"ids": ["a", "d"], "weights": [0.5, 0.5]}},
)  # fmt: skip
MOST_TOKENS, STUCK_S = 12, 100
FORMATS = ("[ab]{1,5}", "(yes|no)")

# fault -> what is asked with, and what the error must say
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such adapter": ({"adapter": "nobody"}, "no adapter 'nobody' is loaded"),
    "two of them": ({"adapter": "a", "mixture": "mix"}, "not both"),
    "too long": ({"max_tokens": 500}, "has room for"),
    "not a number": ({"temperature": float("nan")}, "temperature"),
    "no such token": ({"prompt": [5, 99_999]}, "99999"),
    "bad pattern": ({"response_format": {"type": "regex", "regex": "(["}}, "regular expression"),
    "bad schema": ({"response_format": {"type": "json_schema", "schema": {"type": "nonsense"}}}, "nonsense"),
    "no such format": ({"response_format": {"type": "yaml"}}, "yaml"),
    "reader raises": ({"on_text": None}, OWN),
    "poisoned": ({"prompt": "~ this prompt breaks the forward"}, POISON),
}
ENDED = {"cancelled": "cancelled", "late": "deadline", "left": "cancelled"}
FAULTS = (*[None] * 24, *REFUSED, "cancelled", "cancelled", "late", "late", "left", LOST, MOVING, MOVING)
WAYS = ("result", "tokens", "text", "nobody reads", "await", "async for", "generate", "list", "stream", "score")


@dataclass(frozen=True)
class Job:
    """A request: what, by whom, how it is waited for, and what is wrong with it, if anything."""

    number: int
    prompt: Any
    who: dict[str, Any]
    way: str
    fault: str | None
    options: dict[str, Any]
    delay_s: float = 0.0

    @classmethod
    def of(cls, number: int, seed: int) -> Job:
        """Return the job of a number: the same for the same seed."""
        chance = random.Random(f"{seed}/{number}")
        fault, way, who = chance.choice(FAULTS), chance.choice(WAYS), chance.choice(WHO)
        prompt, options = chance.choice(PROMPTS), {"max_tokens": chance.randint(1, MOST_TOKENS), "ignore_eos": True}
        if fault in REFUSED:
            options |= REFUSED[fault][0]
            prompt = options.pop("prompt", prompt)
            who = {} if "adapter" in options else who
        if fault in (LOST, MOVING):
            who = {"adapter": fault}
        elif fault == "late":
            options["deadline_s"] = chance.choice([1e-6, 0.003, 0.03])
        elif fault == "left":
            way = chance.choice(["tokens", "async for", "stream"])
        elif fault is None and chance.random() < 0.2:
            options |= {"temperature": 1.0, "top_p": 0.9, "seed": number, "repetition_penalty": 1.1}
            if way in ("generate", "list"):
                options["n"] = chance.choice([1, 2, 3])
        elif fault is None and way != "score" and chance.random() < 0.15:
            options |= {"response_format": {"type": "regex", "regex": chance.choice(FORMATS)}, "ignore_eos": False}
        if "response_format" in options:
            way, options["ignore_eos"] = "result" if way == "score" else way, False
        if fault in ("cancelled", "reader raises") or (fault and way == "score"):
            way = "result"
        options["priority"] = chance.choice([0, 0, 0, -1, 1])
        return cls(number, prompt, who, way, fault, options, chance.choice([0.0, 0.001, 0.01]))

    def asked(self) -> dict[str, Any]:
        """Return the options to submit with."""
        options = {**self.who, **self.options}
        if "on_text" in options:
            options["on_text"] = _raise
        return options

    def complaint(self, got: Completion | UserError | None, known: dict[str, list[int]]) -> str | None:
        """Return what is wrong with the outcome, or None."""
        if got is None:  # a stream that was left gives no result
            return None if self.fault == "left" else f"{self} has no result"
        error = str(got) if isinstance(got, UserError) else got.error
        reason = "error" if isinstance(got, UserError) else got.finish_reason
        if reason == "error":
            return None if self._may_say(error or "") else f"{self} failed: {error}"
        if self.fault in REFUSED and not (self.fault == "reader raises" and not got.text):
            return f"{self} did not fail, but ended with {reason!r}"
        if reason not in ("stop", "length", ENDED.get(self.fault)):
            return f"{self} ended with {reason!r}"
        if reason == "length" and len(got.token_ids) != (3 if self.way == "score" else self.options["max_tokens"]):
            return f"{self} has {len(got.token_ids)} tokens"
        if "response_format" in self.options:
            pattern = self.options["response_format"]["regex"]
            return None if reason != "stop" or re.fullmatch(pattern, got.text) else f"{self} said {got.text!r}"
        expected = known.get(self.key, []) if "temperature" not in self.options and self.way != "score" else []
        both = min(len(expected), len(got.token_ids))
        same = list(got.token_ids[:both]) == expected[:both]
        return None if same else f"{self} said {got.token_ids}, alone {expected}"

    @property
    def key(self) -> str:
        """What decides its tokens, if they are the likeliest."""
        return json.dumps([self.prompt, self.who])

    def _may_say(self, error: str) -> bool:
        allowed = [PASSING]
        if self.fault in REFUSED:
            allowed.append(REFUSED[self.fault][1])
        if self.fault == LOST:
            allowed += ["folder not found"]
        if self.fault == MOVING:
            allowed += ["no adapter 'moving' is loaded", "is being unloaded"]
        return any(text in error for text in allowed)


def _raise(_: str) -> None:
    raise ValueError(OWN)


def write_shelf(folder: Path) -> Path:
    """Write a base, its mixture, and adapters to fight for slots."""
    byte_tokenizer(save_base(MODEL, folder / "tiny"))
    SPEC.write(folder / "mix", MODEL)
    for number, name in enumerate([*ADAPTERS, "broken"]):
        Adapter(("q_proj", "down_proj"), rank=2 + number, seed=10 + number).write(folder / name, MODEL)
    (folder / "broken" / "adapter_model.safetensors").write_bytes(b"not an adapter")
    return folder


def engine_on(shelf: Path, **options: Any) -> Engine:
    """Return an engine with everything loaded: two slots for six adapters, one of which the host keeps."""
    engine = Engine(shelf / "tiny", lora=LoRAConfig(max_num_loras=2, max_host_bytes=20_000), **options)
    for name in ADAPTERS:
        engine.load_adapter(shelf / name, name)
    engine.load_mixture(shelf / "mix", "mix")
    return engine


def known_tokens(engine: Engine) -> dict[str, list[int]]:
    """Return what each job without sampling says, up to the first token that rounding may change."""
    known = {}
    for prompt in PROMPTS:
        for who in WHO:
            done = engine.generate(prompt, max_tokens=MOST_TOKENS, ignore_eos=True, top_logprobs=2, **who)
            gaps = [top[0][1] - top[1][1] for top in done.top_logprobs]
            sure = next((i for i, gap in enumerate(gaps) if gap < GREEDY_GAP), len(gaps))
            known[json.dumps([prompt, who])] = list(done.token_ids[:sure])
    return known


class FaultyForward:
    """Stands for a model's forward, and raises now and then; always for a poisoned request."""

    def __init__(self, engine: Engine, seed: int, chance: float):
        self._inner, self._chance, self._odds = engine.model.hidden, random.Random(seed), chance
        engine.model.hidden = self

    def __call__(self, batch):
        if any(request.prompt_ids[0] == ord("~") + 3 for request in batch.requests):
            raise RuntimeError(POISON)
        if self._chance.random() < self._odds:
            raise RuntimeError(PASSING)
        return self._inner(batch)


@dataclass
class Soak:
    """Runs jobs on an engine from several threads, and collects what each gave.

    Attributes:
        outcomes: by job number; a job without one has been lost.
        complaints: what went wrong.
    """

    engine: Engine
    shelf: Path
    known: dict[str, list[int]]
    count: int
    seed: int = 0
    outcomes: dict[int, Completion | UserError | None] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def run(self, num_threads: int = 4, limit_s: float = 170) -> None:
        """Run all jobs; complains of threads that have not ended after so many seconds."""
        numbers, until_s = iter(range(self.count)), time.monotonic() + limit_s
        threads = [
            threading.Thread(target=self._work, args=(numbers, i), name=f"soak-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if stuck := [thread.name for thread in threads if thread.is_alive()]:
            self.complaints.append(f"stuck: {stuck}; what every thread does:\n{_stacks()}")

    def _work(self, numbers: Iterator[int], index: int) -> None:
        chance = random.Random(f"{self.seed}/thread {index}")
        while jobs := [Job.of(n, self.seed) for _, n in zip(range(chance.randint(1, 12)), numbers, strict=False)]:
            started = [(job, self._start(job)) for job in jobs]
            chance.shuffle(started)
            for job, end in started:
                try:
                    got = end() if callable(end) else end
                except UserError as error:
                    got = error
                except Exception as error:
                    self.complaints.append(f"{job} raised {error!r}")
                    continue
                self.outcomes[job.number] = got
                if complaint := job.complaint(got, self.known):
                    self.complaints.append(complaint)
            if chance.random() < 0.3:
                self._move()

    def _start(self, job: Job) -> Callable[[], Completion] | UserError:
        """Submit a job, if it is waited for by a handle; return how to wait for it."""
        options = job.asked()
        if job.way in ("generate", "list", "stream", "score"):
            return lambda: getattr(self, f"_{job.way}")(job, options)
        try:
            handle = self.engine.submit(job.prompt, **options)
        except UserError as error:
            return error
        if job.fault == "cancelled":
            timer = threading.Timer(job.delay_s, handle.cancel)
            timer.start()
            return lambda: (timer.join(), handle.result(STUCK_S))[1]
        return lambda: self._wait(job, handle)

    def _wait(self, job: Job, handle) -> Completion:
        if job.way in ("tokens", "text"):
            for _ in handle.tokens() if job.way == "tokens" else handle.text():
                if job.fault == "left":
                    break
        elif job.way == "await":
            async def wait() -> Completion:
                return await handle

            return asyncio.run(asyncio.wait_for(wait(), STUCK_S))
        elif job.way == "async for":
            async def read() -> None:
                async for _ in handle:
                    if job.fault == "left":
                        break

            asyncio.run(asyncio.wait_for(read(), STUCK_S))
        elif job.way == "nobody reads":
            reader = handle.tokens()  # held, and never asked for a token
            return (handle.result(STUCK_S), reader)[0]
        return handle.result(STUCK_S)

    def _generate(self, job: Job, options: dict[str, Any]) -> Completion:
        return self.engine.generate(job.prompt, **options)

    def _list(self, job: Job, options: dict[str, Any]) -> Completion:
        beside = self.engine.generate(["beside it", job.prompt], **options)
        return beside[1]

    def _score(self, job: Job, options: dict[str, Any]) -> Completion:
        return self.engine.score(job.prompt, "abc", **job.who)

    def _stream(self, job: Job, options: dict[str, Any]) -> Completion | None:
        stream = self.engine.stream(job.prompt, **options)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value
            if job.fault == "left":
                stream.close()
                return None

    def _move(self) -> None:
        """Load an adapter that is none; unload one that others use, or load it again, which need not succeed."""
        try:
            self.engine.load_adapter(self.shelf / "broken")
            self.complaints.append("a broken adapter was loaded")
        except UserError:
            pass
        with contextlib.suppress(UserError):
            if MOVING in self.engine.adapters:
                self.engine.unload(MOVING)
            self.engine.load_adapter(self.shelf / MOVING, MOVING)


def leaks(engine: Engine) -> list[str]:
    """Return what requests that have ended left behind in an engine."""
    scheduler, pool, found = engine.scheduler, engine.memory.pool, []

    def require(is_so: bool, what: str) -> None:
        if not is_so:
            found.append(what)

    require(not scheduler.has_work(), "requests that never ended")
    require(not list(scheduler.requests()) and not scheduler._suspects and not scheduler._ended, "requests kept")
    queue = scheduler.waiting
    kept = (queue._entries, queue._by_arrival, queue._lines, queue._levels, queue._order)
    require(not any(kept), "places in the queue")
    require(pool.num_referenced == 0 and not any(pool._references), f"{pool.num_referenced} KV blocks")
    for entry in engine.adapters.entries():
        require(not entry.leases, f"{entry.leases} leases on {entry.name!r}")
        require(not entry.users, f"{entry.users} users of {entry.name!r}")
        require(not entry.waiting, f"tickets of {entry.name!r}")
    require(not engine.submissions._in_use, f"ids in use: {engine.submissions._in_use}")
    counters = engine.counters()
    require(counters["requests_running"] == counters["requests_waiting"] == 0, "requests counted as running")
    pool.clear()
    require(pool.num_free == pool.num_blocks and not pool._key_of, "cached blocks after clearing")
    return found


def _stacks() -> str:
    """Return the stack of every thread, innermost last."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(f"{known.get(ident)}\n{''.join(traceback.format_stack(frame)[-8:])}"
                     for ident, frame in sys._current_frames().items())
