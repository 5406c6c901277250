"""Layers with adapters that come and go, rows that want any of them, and what each must get by definition."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_kernels.segments import segments
from workbench.adapters import AdapterConfig, LoRAModel
from workbench.adapters.embedding import LoRAEmbedding
from workbench.adapters.linear import EVERY_SITE, LoRALinear, MixtureSegment, Routing, RowWeights
from workbench.adapters.slots import SlotTable

WIDTHS = {"wide": (6, 11), "same": (6, 11), "narrow": (7, 3), "tokens": (13, 5)}  # site -> in, out
TOKENS = "tokens"  # an embedding; its factor is 2
SITES = tuple(WIDTHS)
RANKS = st.sampled_from([3, 3, 3, 1, 2, 9, 17])  # often alike
SOME_SITES = st.sets(st.sampled_from(SITES), min_size=1).map(lambda chosen: tuple(s for s in SITES if s in chosen))


class Layers:
    """A linear layer per site and an embedding, all on one table, and what they must give by definition."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.table = SlotTable(dtype, torch.device("cpu"))
        self.routing = Routing()
        self.layers = {}
        self.loaded: dict[int, LoRAModel] = {}
        for site, (width_in, width_out) in WIDTHS.items():
            if site == TOKENS:
                base = nn.Embedding(width_in, width_out)
                base.embed_scale = 2.0
            else:
                base = nn.Linear(width_in, width_out)
            base.requires_grad_(False)
            for parameter in base.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            wrapper = LoRAEmbedding if site == TOKENS else LoRALinear
            self.layers[site] = wrapper(base, site, self.table.site(site, width_in, width_out), self.routing)

    def put(self, adapter: LoRAModel) -> int:
        slot = self.table.put(adapter)
        self.loaded[slot] = adapter
        return slot

    def drop(self, slot: int) -> None:
        self.table.drop(slot)
        del self.loaded[slot]

    def input(self, site: str, num_rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(num_rows)
        if site == TOKENS:
            return torch.randint(WIDTHS[site][0], (1, num_rows), generator=generator)
        return torch.randn(1, num_rows, WIDTHS[site][0], generator=generator)

    def run(self, site: str, rows: RowWeights, x: Tensor | None = None) -> Tensor:
        """Return `[row, out]` of one forward."""
        self.routing.rows = rows
        try:
            return self.layers[site](self.input(site, rows.num_rows) if x is None else x)[0]
        finally:
            self.routing.rows = None

    def by_definition(self, site: str, weights: list[dict[int, float]]) -> Tensor:
        """Return float64 `[row, out]`: the base plus w B A x, row by row and adapter by adapter."""
        x = self.input(site, len(weights))
        found = self.layers[site].base_layer(x)[0].double()
        for row, own in enumerate(weights):
            for slot, weight in own.items():
                adapter = self.loaded[slot]
                if site in adapter.a:
                    a, b = adapter.a[site].double(), adapter.b[site].double()
                    shrunk = 2 * a[:, x[0, row]] if site == TOKENS else a @ x[0, row].double()
                    found[row] += weight * (shrunk @ b)
        return found


def adapter_of(rank: int, seed: int, sites: tuple[str, ...], scale: float = 1.0) -> LoRAModel:
    generator = torch.Generator().manual_seed(seed)
    a = {site: scale * torch.randn(rank, WIDTHS[site][0], generator=generator) for site in sites}
    b = {site: torch.randn(rank, WIDTHS[site][1], generator=generator) for site in sites}
    return LoRAModel(f"{seed}", AdapterConfig(rank, 1.0), a, b, f"{seed}")


@dataclass
class Rows:
    """Rows of a forward as the engine describes them, and each row's weights by definition, site by site."""

    weights: RowWeights
    by_row: dict[str, list[dict[int, float]]] = field(repr=False)


# a mixture's site axis: two orders, one that lacks a site, and that of constant weights
SITE_INDEXES = [
    {site: index for index, site in enumerate(SITES)},
    {"narrow": 1, "wide": 0},
    EVERY_SITE,
]  # fmt: skip


@st.composite
def rows_over(draw, loaded: list[int], fixed_shape: bool = False) -> Rows:
    """Draw runs of rows: of the base, of one adapter, of constant weights, or of a mixture."""
    sorts = ["base", "one", "one", "mixture", "merged"] if loaded else ["base"]
    runs = draw(st.lists(st.tuples(st.sampled_from(sorts), st.integers(1, 5)), min_size=1, max_size=7))
    slots, mixtures = [], []
    by_row: dict[str, list[dict[int, float]]] = {site: [] for site in SITES}
    for sort, count in runs:
        start = len(slots)
        slots += [draw(st.sampled_from(loaded)) if sort == "one" else -1] * count
        own: dict[str, list[dict[int, float]]] = {site: [{} for _ in range(count)] for site in SITES}
        if sort == "one":
            own = {site: [{slots[-1]: 1.0}] * count for site in SITES}
        elif sort != "base":
            chosen = tuple(draw(st.permutations(loaded)))[: draw(st.integers(1, 4))]
            generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
            if sort == "merged":
                index, weights = EVERY_SITE, torch.randn(1, 1, len(chosen), generator=generator)
            else:
                index = draw(st.sampled_from(SITE_INDEXES[:-1]))
                axis = draw(st.sampled_from([1, len(index)]))
                weights = torch.rand(draw(st.sampled_from([1, count])), axis, len(chosen), generator=generator)
            mixtures.append(MixtureSegment(start, start + count, chosen, weights, index))
            for site in SITES:
                if site in index:
                    at = mixtures[-1].weights_at(site)
                    own[site] = [dict(zip(chosen, row.tolist(), strict=True)) for row in at]
        for site in SITES:
            by_row[site] += own[site]
    return Rows(RowWeights(len(slots), segments(slots), tuple(mixtures), fixed_shape), by_row)


def check(layers: Layers, rows: Rows) -> None:
    for site in SITES:
        found = layers.run(site, rows.weights)
        wanted = layers.by_definition(site, rows.by_row[site])
        assert (found.double() - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())), site
        if rows.weights.is_base:
            assert torch.equal(found.double(), wanted)


def scene() -> tuple[Layers, Rows]:
    """Three adapters, each with rows of its own, and one with none."""
    layers = Layers()
    for seed in range(4):
        layers.put(adapter_of(seed + 1, seed, SITES))
    slots = [-1, 0, 0, 1, 3]
    own = {site: [{slot: 1.0} if slot >= 0 else {} for slot in slots] for site in SITES}
    return layers, Rows(RowWeights(len(slots), segments(slots)), own)
