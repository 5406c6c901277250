"""Advice: the cheapest reuse policy that loses no more than one allows, measured on one's own mixture and texts.

Every candidate is compared with exact scalings on the same passages (see `fidelity`). One is good enough if the upper
end of its KL's 95 % interval keeps the limit; of those, the one with the fewest forwards per token is advised, and of
those alike the closest to exact, unless another is faster beyond what repeats differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.fidelity import compared, num_that_fit, reference_of, summary
from workbench.sweep.passages import Passage, pieces_of, spread
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import FEW_TEXTS, estimate
from workbench.xlora.policy import exact, policy_named

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine import Engine

POLICIES = (
    "exact", "non_granular(0)", "non_granular(4)", "non_granular(16)", "non_granular(64)", "periodic(2)", "periodic(4)",
    "periodic(8)", "periodic(16)", "lagged(1)", "lagged(2)", "lagged(4)",
)  # fmt: skip
PASSAGES = 20
FEW = 8  # passages below which an interval is no wider than chance
_REPEATS = 3  # of a speed, from which their interval says something
_KEPT = ("kl", "kl_low", "kl_high", "top1", "perplexity", "scalings_l1", "same_tokens", "forwards_per_token", "tok_s")


@dataclass(frozen=True)
class Candidate:
    """What one policy loses and costs.

    Attributes:
        policy: its name.
        kl, kl_low, kl_high: nats per token against exact scalings, with the 95 % interval of the mean over passages.
        top1: share of tokens with the same likeliest next token.
        perplexity: of the texts.
        scalings_l1: mean distance of the scalings.
        same_tokens: generated tokens before free-running texts part, mean.
        forwards_per_token, tok_s: of generating, all passages together.
        tok_s_low, tok_s_high: the speed's interval; None where it was measured too seldom to have one.
    """

    policy: str
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    perplexity: float
    scalings_l1: float
    same_tokens: float
    forwards_per_token: float
    tok_s: float
    tok_s_low: float | None = None
    tok_s_high: float | None = None


@dataclass(frozen=True)
class Advice:
    """What was found.

    Attributes:
        max_kl: the limit, nats per token.
        texts: which were used.
        passages, tokens: how many were scored.
        candidates: in the order asked for, "exact" (the null pair) among them.
        chosen: the policy that is advised; None where none keeps the limit.
        notes: what makes it unsure, in sentences; empty where nothing does.
        distinct_texts: how many texts the passages were cut from.
    """

    max_kl: float
    texts: str
    passages: int
    tokens: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    notes: tuple[str, ...]
    distinct_texts: int | None = None

    @property
    def floor(self) -> Candidate:
        """Exact scalings against themselves: what another batch shape alone changes."""
        return next(each for each in self.candidates if each.policy == exact().name)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "max_kl": self.max_kl, "texts": self.texts, "passages": self.passages, "tokens": self.tokens,
            "distinct_texts": self.distinct_texts,
            "advice": None if self.chosen is None else self.chosen.policy, "is_sure": not self.notes,
            "notes": list(self.notes), "policies": [asdict(each) for each in self.candidates],
        }  # fmt: skip

    def to_frame(self) -> pd.DataFrame:
        """Return a row per policy, as figures take them."""
        import pandas as pd

        facts = {"texts": self.texts, "num_texts": self.distinct_texts}
        return pd.DataFrame([{**asdict(each), **facts} for each in self.candidates])


def point_for(given: dict[str, Any]) -> PointSettings:
    """Return the point that a user's settings make.

    Raises:
        UserError: one that means nothing.
    """
    settings = {key: value for key, value in given.items() if value is not None}
    return PointSettings.of({"task": "fidelity", "mode": "xlora", "passages": PASSAGES, **settings}, "advise")


def policies_of(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the candidates, exact first if nobody named it.

    Raises:
        UserError: no such policy, or one named twice.
    """
    found = [policy_named(name).name for name in given or POLICIES]
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise UserError(f"--policies names {names(twice)} twice")
    return tuple(found if exact().name in found else [exact().name, *found])


def advise(
    engine: Engine, mixture: str, point: PointSettings, max_kl: float, policies: Sequence[str] = POLICIES, *,
    at_most: bool = False, progress: Callable[[str, int], None] = lambda policy, total: None,
) -> Advice:
    """Measure policies on a point's texts and return the advice.

    Args:
        engine: with the mixture loaded.
        mixture: its name.
        point: texts, passages and their lengths.
        max_kl: the limit, nats per token.
        policies: the candidates, exact among them.
        at_most: texts that make fewer passages than the point asks for will do.
        progress: called with each policy that has been measured on a block of passages, and how many that will be.

    Raises:
        UserError: texts that are not there, too short or too few, or a limit that is none.
    """
    if not 0 < max_kl < float("inf"):
        raise UserError(f"--max-kl must be a number of nats per token above 0, not {max_kl}")
    pieces = pieces_of(point, engine)
    if len(pieces) < point.passages and not at_most:
        raise UserError(f"texts {point.texts!r} make {len(pieces)} passages of {point.passage_tokens} tokens, fewer "
                        f"than the {point.passages} asked for; lower --passages or --passage-tokens")
    chosen = spread(pieces, min(point.passages, len(pieces)))
    candidates = tuple(_measured(engine, mixture, chosen, policies, progress))
    best = cheapest(candidates, max_kl)
    tokens = sum(len(each.continuation) for each in chosen)
    texts = len({source for each in chosen for source in each.sources})
    notes = doubts(candidates, best, max_kl, len(chosen), texts)
    return Advice(max_kl, point.texts, len(chosen), tokens, candidates, best, tuple(notes), texts)


def _measured(
    engine: Engine, mixture: str, passages: Sequence[Passage], policies: Sequence[str],
    progress: Callable[[str, int], None],
) -> list[Candidate]:
    """Compare block by block: the distributions of a block are all that is kept at once."""
    import pandas as pd

    rows: dict[str, list[pd.DataFrame]] = {policy: [] for policy in policies}
    costs: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    size = num_that_fit(engine, passages)
    for first in range(0, len(passages), size):
        block = passages[first : first + size]
        reference = reference_of(engine, mixture, block)
        for policy in policies:
            own, _, cost = compared(engine, mixture, policy, block, reference)
            rows[policy].append(own)
            costs[policy].append({**cost, "passages": len(block)})
            progress(policy, len(policies) * -(-len(passages) // size))
    found = []
    for policy in policies:
        figures = {**summary(pd.concat(rows[policy], ignore_index=True)), **_together(costs[policy])}
        found.append(Candidate(policy, **{key: float(figures[key]) for key in _KEPT}))
    return found


def _together(costs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the costs of blocks that ran one after another: passages are alike, so their number weighs them."""
    total = sum(each["passages"] for each in costs)
    seconds = sum(each["passages"] / each["tok_s"] for each in costs)
    forwards = sum(each["passages"] * each["forwards_per_token"] for each in costs)
    return {"tok_s": total / seconds, "forwards_per_token": forwards / total}


def candidates_of(frame: pd.DataFrame) -> tuple[Candidate, ...]:
    """Return the candidates of a sweep's fidelity rows of one kind of text: what they lose, and the medians of costs.

    Raises:
        UserError: columns that are missing.
    """
    if lacking := [key for key in ("policy", *_KEPT) if key not in frame]:
        raise UserError(f"advice needs the columns {names(['policy', *_KEPT])}; {names(lacking)} are missing")
    first = frame.drop_duplicates("policy").set_index("policy")[list(_KEPT)]
    found = []
    for policy, row in first.to_dict("index").items():
        own = frame[frame["policy"] == policy]
        speeds = own["tok_s"].dropna().tolist()
        speed = estimate(speeds) if len(speeds) >= _REPEATS else None
        ends = (None, None) if speed is None else (speed.low, speed.high)
        figures = {**row, **own[["forwards_per_token", "tok_s"]].median()}
        found.append(Candidate(policy, **{key: float(value) for key, value in figures.items()},
                               tok_s_low=ends[0], tok_s_high=ends[1]))
    return tuple(found)


def cheapest(candidates: Sequence[Candidate], max_kl: float) -> Candidate | None:
    """Return the candidate that keeps the limit at the least cost; None where none does.

    Fewest forwards per token, to two digits; of those alike the closest to exact, unless another is so much faster
    that the intervals of their speeds lie apart.
    """
    kept = [each for each in candidates if each.kl_high <= max_kl]
    if not kept:
        return None
    least = min(cost_of(each) for each in kept)
    alike = [each for each in kept if cost_of(each) == least]
    best = min(alike, key=lambda each: each.kl)
    while alike:
        best = min(alike, key=lambda each: each.kl)
        alike = [each for each in alike if _is_faster(each, best)]
    return best


def cost_of(candidate: Candidate) -> float:
    """Return the forwards per token as they are compared: to two digits."""
    return round(candidate.forwards_per_token, 2)


def _is_faster(one: Candidate, other: Candidate) -> bool:
    """Return whether one's whole interval of speeds lies above the other's; one run alone has none, and is not."""
    return one.tok_s_low is not None and other.tok_s_high is not None and one.tok_s_low > other.tok_s_high


def doubts(
    candidates: Sequence[Candidate], best: Candidate | None, max_kl: float, num_passages: int,
    num_texts: int | None = None,
) -> list[str]:
    """Return what makes the advice unsure, in sentences.

    Args:
        candidates: all of them.
        best: the one that is advised; None for none.
        max_kl: the limit, nats per token.
        num_passages: how many were scored.
        num_texts: distinct texts that they were cut from; None if that is not known.
    """
    found = []
    if num_passages < FEW:
        found.append(f"{num_passages} passage{'s' * (num_passages != 1)}: too few for an interval that can be relied "
                     f"on; give at least {FEW}")
    elif num_texts is not None and num_texts < FEW_TEXTS:
        found.append(f"the {num_passages} passages are of {num_texts} distinct text{'s' * (num_texts != 1)}: too few "
                     f"to stand for others; give at least {FEW_TEXTS}")
    floor = next((each for each in candidates if each.policy == exact().name), None)
    if floor is not None and floor.kl_high > max_kl:
        found.append(f"the limit lies below the null floor: exact scalings against themselves differ by {floor.kl:.2g} "
                     f"(up to {floor.kl_high:.2g}), by another batch shape alone")
    cost = float("inf") if best is None else cost_of(best)
    maybe = [each for each in candidates
             if each.kl <= max_kl < each.kl_high and cost_of(each) < cost and each is not floor]
    more = "passages" if num_texts is None or num_texts >= FEW_TEXTS else "texts"
    for each in sorted(maybe, key=lambda each: each.forwards_per_token)[:2]:
        found.append(f"{each.policy} is cheaper ({each.forwards_per_token:.2f} forwards per token) and keeps the limit "
                     f"on average ({each.kl:.2g}), but its interval reaches {each.kl_high:.2g}: more {more} may tell")
    return found
