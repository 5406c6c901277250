"""A thousand adapters over eight slots against eight adapters: `python thousand.py`; JSON on the last line.

The same requests, one by one, run on two engines: one knows a thousand adapters and may keep 32 of them in host memory
beside its eight slots, the other knows eight. Who asks for which adapter follows a zipf law (popularity of the k-th: k
to the power of -1.5); the eight take the thousand's places modulo eight. Eight requests are unfinished at any time.
Rounds alternate, each with the next stretch of the traffic, and medians are compared. No figure is printed unless every
checked result equals its adapter alone, every request ended, and memory stayed within its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench import Engine
from workbench.adapters import LoRAConfig

SLOTS, HOST = 8, 32  # adapters in slots, adapters that host memory has room for
CONCURRENCY, PROMPT, NEW = 8, 16, 32  # requests; tokens; tokens
GAP = 1e-4  # logits nearer to each other than this may change places with the batch
OPTIONS = {"max_tokens": NEW, "ignore_eos": True}


@dataclass
class Round:
    """What one round of traffic gave."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)  # steps from submission to the first token, by request
    steps_s: list[float] = field(default_factory=list)
    host_bytes: int = 0
    slot_bytes: int = 0


def base(folder: Path) -> LlamaForCausalLM:
    """Write a small random llama and return it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )).eval().requires_grad_(False)  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def adapter(folder: Path, model: LlamaForCausalLM, number: int) -> Path:
    """Write the random adapter of this number (rank 4 to 8, on q, v and down) and return its folder."""
    generator, rank = torch.Generator().manual_seed(number), 4 + number % 5
    folder.mkdir(parents=True)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            down = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            up = torch.randn(module.out_features, rank, generator=generator) * rank**-0.5
            tensors |= {f"base_model.model.{name}.lora_{half}.weight": t for half, t in (("A", down), ("B", up))}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    ))
    return folder


def traffic(num_requests: int, num_adapters: int, exponent: float) -> list[tuple[int, list[int]]]:
    """Return (adapter, prompt) of each request; which adapters are popular is drawn too."""
    draw = random.Random(0)
    order = list(range(num_adapters))
    draw.shuffle(order)
    shares = [(place + 1) ** -exponent for place in range(num_adapters)]
    chosen = draw.choices(order, shares, k=num_requests)
    return [(number, [draw.randrange(2, 512) for _ in range(PROMPT)]) for number in chosen]


def play(engine: Engine, given: list[tuple[str, list[int]]]) -> Round:
    """Run requests, eight at a time, the next as soon as one ends."""
    done, todo, all_requests, live = Round(), iter(given), [], []
    came, first = {}, {}
    started, used = time.perf_counter(), time.process_time()
    while len(all_requests) < len(given) or live:
        while len(live) < CONCURRENCY and (each := next(todo, None)):
            live.append(engine.enqueue(each[1], adapter=each[0], **OPTIONS))
            all_requests.append(live[-1])
            came[live[-1]] = len(done.steps_s)
        step_began = time.perf_counter()
        engine.step()
        done.steps_s.append(time.perf_counter() - step_began)
        done.host_bytes = max(done.host_bytes, engine.adapters.host_bytes)
        for request in live:
            if request.generated:
                first.setdefault(request, len(done.steps_s))
            if request.error:
                sys.exit(f"a request failed, no figures: {request.error}")
        live = [request for request in live if request.finish_reason is None]
    done.seconds, done.cpu_s = time.perf_counter() - started, time.process_time() - used
    done.tokens = [list(request.generated) for request in all_requests]
    done.waited = [first[request] - came[request] for request in all_requests]
    done.slot_bytes = engine.slots.num_bytes
    return done


def check(root: Path, given: list[tuple[str, list[int]]], tokens: list[list[int]], count: int) -> int:
    """Exit unless a sample of requests has the tokens of its adapter alone; return how many were compared."""
    engine = Engine(root / "base")
    places = random.Random(1).sample(range(len(given)), min(count, len(given)))
    for place in places:
        name, prompt = given[place]
        if name not in engine.adapters:
            engine.load_adapter(root / "adapters" / name)
        alone = list(engine.generate(prompt, adapter=name, **OPTIONS).token_ids)
        if alone != tokens[place] and not nearly_equal(engine, name, prompt, alone, tokens[place]):
            sys.exit(f"request {place} of {name} differs from its adapter alone: no figures")
    return len(places)


def nearly_equal(engine: Engine, name: str, prompt: list[int], alone: list[int], mixed: list[int]) -> bool:
    """Whether the first token that differs was a choice between two nearly equal logits."""
    at = next(index for index, pair in enumerate(zip(alone, mixed, strict=True)) if pair[0] != pair[1])
    rows, inner = [], engine.model.logits
    engine.model.logits = lambda *given: rows.append(inner(*given)) or rows[-1]
    engine.generate(prompt + alone[:at], adapter=name, max_tokens=1, ignore_eos=True)
    engine.model.logits = inner
    best = rows[-1][-1].topk(2).values
    return float(best[0] - best[1]) < GAP


def report(many: list[Round], few: list[Round], limit: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the figures."""
    tokens = len(many[0].tokens) * NEW
    rates = {name: [tokens / each.seconds for each in rounds] for name, rounds in (("many", many), ("few", few))}
    cpu = {name: [each.cpu_s / tokens for each in rounds] for name, rounds in (("many", many), ("few", few))}
    waited = sorted(steps for each in many for steps in each.waited)
    return {
        **extra, "slots": SLOTS, "concurrency": CONCURRENCY, "rounds": len(many),
        "requests_per_round": len(many[0].tokens), "tokens_per_round": tokens,
        "tok_s_many": statistics.median(rates["many"]), "tok_s_few": statistics.median(rates["few"]),
        "throughput_ratio": statistics.median(rates["many"]) / statistics.median(rates["few"]),
        "ratio_by_round": [a / b for a, b in zip(rates["many"], rates["few"], strict=True)],
        "cpu_ms_per_token_many": 1e3 * statistics.median(cpu["many"]),
        "cpu_ms_per_token_few": 1e3 * statistics.median(cpu["few"]),
        "cpu_ratio": statistics.median(cpu["few"]) / statistics.median(cpu["many"]),
        "steps_to_first_token_median": waited[len(waited) // 2], "steps_to_first_token_max": waited[-1],
        "step_ms_many": 1e3 * statistics.median(s for each in many for s in each.steps_s),
        "step_ms_few": 1e3 * statistics.median(s for each in few for s in each.steps_s),
        "steps_many": sum(len(each.steps_s) for each in many), "steps_few": sum(len(each.steps_s) for each in few),
        "steps_to_first_token_max_few": max(steps for each in few for steps in each.waited),
        "host_bytes_max": max(each.host_bytes for each in many), "host_bytes_limit": limit,
        "slot_bytes": many[-1].slot_bytes, "slot_bytes_few": few[-1].slot_bytes,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100, help="in one round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--exponent", type=float, default=1.5, help="of the zipf law; 0 is uniform traffic")
    parser.add_argument("--checked", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "adapters"
        model = base(Path(root) / "base")
        names = [f"adapter-{number}" for number in range(arguments.adapters)]
        sources = {name: adapter(folder / name, model, number) for number, name in enumerate(names)}
        bytes_each = 4 * 8 * sum(m.in_features + m.out_features for n, m in model.named_modules()
                                 if n.endswith(("q_proj", "v_proj", "down_proj")))
        limit = HOST * bytes_each
        many = Engine(Path(root) / "base", lora=LoRAConfig(max_num_loras=SLOTS, max_host_bytes=limit))
        few = Engine(Path(root) / "base", lora=LoRAConfig(max_num_loras=SLOTS))
        started = time.perf_counter()
        answers = many.adapters.load_all(sources)
        register_s = time.perf_counter() - started
        few.adapters.load_all({name: sources[name] for name in names[:SLOTS]})
        if not all(answer.ok for answer in answers.values()):
            sys.exit("an adapter was not loaded: no figures")
        drawn = traffic(arguments.requests * arguments.rounds, arguments.adapters, arguments.exponent)
        of_many = [(names[number], prompt) for number, prompt in drawn]
        of_few = [(names[number % SLOTS], prompt) for number, prompt in drawn]
        rounds: dict[str, list[Round]] = {"many": [], "few": []}
        play(few, of_few[:20])
        play(many, of_many[:20])
        for index in range(arguments.rounds):
            part = slice(index * arguments.requests, (index + 1) * arguments.requests)
            pair = [("many", many, of_many[part]), ("few", few, of_few[part])]
            for name, engine, given in pair if index % 2 else pair[::-1]:
                rounds[name].append(play(engine, given))
            rates = (f"{name}: {len(given) * NEW / done[-1].seconds:.0f} tok/s" for name, done in rounds.items())
            print(f"round {index + 1}:", *rates, file=sys.stderr)
        tokens = [each for done in rounds["many"] for each in done.tokens]
        checked = check(Path(root), of_many, tokens, arguments.checked)
        extra = {
            "adapters": arguments.adapters, "exponent": arguments.exponent,
            "adapters_asked_for": len({number for number, _ in drawn}),
            "checked_alone": checked, "register_s": register_s, "counts": many.adapters.counts,
        }
        result = report(rounds["many"], rounds["few"], limit, extra)
        if result["host_bytes_max"] > limit or any(len(t) != NEW for each in rounds["many"] for t in each.tokens):
            sys.exit("memory went beyond its limit, or a request did not end: no figures")
        print(json.dumps(result))


if __name__ == "__main__":
    main()
