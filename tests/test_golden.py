"""Continuations recorded from independent programs, row by row: `pytest tests/test_golden.py`.

mistral.rs counts a one-token prompt as the first generated token, so its k is k - 1 here.
"""

import json
import re
from pathlib import Path

import pytest

from workbench import Engine

FOLDER = Path(__file__).parent / "data" / "xlora-tiny"
ROWS = json.loads((FOLDER / "golden.json").read_text())["rows"]
# the fixture's base goes by its folder's name here
pytestmark = pytest.mark.filterwarnings("ignore:the ordering was made for base")
LOGPROB_TOLERANCE = 1e-4  # the file rounds to 5 decimals


def label(row: dict) -> str:
    settings = ",".join(f"{key}={value}" for key, value in row.get("config", {}).items())
    return f"{len(row['prompt'].split())}tokens-k={row.get('tgt_non_granular_index')}-{settings or 'plain'}"


def run(engine: Engine, row: dict, **settings):
    ids = [int(word[1:]) for word in row["prompt"].split()]
    k = row.get("tgt_non_granular_index")
    if k is not None and len(ids) == 1:
        k -= 1
    engine.load_mixture(FOLDER / "xlora", "m", FOLDER / "ordering.json", {**row.get("config", {}), **settings})
    try:
        return engine.generate(ids, mixture="m", max_tokens=6, tgt_non_granular_index=k, ignore_eos=True), k, len(ids)
    finally:
        engine.unload("m")


@pytest.fixture(scope="module", params=[True, False], ids=["drafting", "plain"])
def engine(request) -> Engine:
    return Engine(FOLDER / "base", drafting=request.param)


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_row_of_the_golden_file(engine, row):
    topk_everywhere = "peft semantics" in row["source"][0]
    out, k, prompt = run(engine, row, topk_on_scaling_pass=topk_everywhere)
    assert {"tokens", "logprobs", "logprob_at"} & set(row), "a row that claims nothing tests nothing"
    if "tokens" in row:
        assert list(out.token_ids) == row["tokens"]
    if "logprobs" in row:
        assert list(out.logprobs) == pytest.approx(row["logprobs"], abs=LOGPROB_TOLERANCE)
    for at, value in row.get("logprob_at", {}).items():
        assert out.logprobs[int(at)] == pytest.approx(value, abs=LOGPROB_TOLERANCE)
    assert out.scalings_computed == prompt + (5 if k is None else min(k, 5))
    assert out.scalings_computed + out.scalings_reused == prompt + 5


def test_without_topk_on_the_scaling_pass_mistral_rs_numbers_come_out(engine):
    (row,) = [row for row in ROWS if "mistral.rs gives" in row.get("note", "") and "top_k_lora" in row["config"]]
    theirs = [int(word) for word in re.search(r"gives ((?:\d+ ?)+)", row["note"])[1].split()]
    out, _, _ = run(engine, row)
    assert list(out.token_ids) == theirs != row["tokens"]
