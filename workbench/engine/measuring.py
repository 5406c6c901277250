"""Measuring: what one forward tells a recorder of chosen rows of adapted streams, in buffers sized from its batch.

Contract: everything is copied out of the forward, nothing into it; no row gets logits that would have had none. A
mistake in here ends the recording, not the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.adapters.delta_norms import DeltaNorms, as_index
from workbench.adapters.linear import LoRALinear
from workbench.adapters.rows import RowWeights
from workbench.engine.ranking import likeliest, rows_of
from workbench.errors import UserError
from workbench.instrument.wanted import Wanted

if TYPE_CHECKING:
    from workbench.engine.batch import StepBatch
    from workbench.engine.hf import BaseModel

_SPARE = 16  # more of the likeliest are looked at than are kept, so that equal ones come by rising id
_ROWS = 64  # rows of logits looked at at once: a prompt's would be copied several times over


@dataclass(frozen=True, slots=True)
class Measured:
    """One forward's values on the host, by row of the measurement; None for what was not asked for.

    Attributes:
        hidden_norm: float32 `[layer + 1, row]`.
        delta_norm: float32 `[site, row, adapter]`; NaN where a row has none.
        with_logits: which rows the next three are of, int64 `[answer]`.
        entropy: float32 `[answer]`, nats.
        top_ids, top_logprobs: int64 and float32 `[answer, rank]`.
    """

    hidden_norm: np.ndarray | None
    delta_norm: np.ndarray | None
    with_logits: np.ndarray
    entropy: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class Measurement:
    """Takes the values of some rows of one forward.

    Args:
        batch: the forward's.
        rows: the rows to look at, rising.
        wanted: what to take.
        sites: site -> index, of the sites to measure.
        width: most adapters a row can have.
        num_layers: of the model.
    """

    def __init__(
        self, batch: StepBatch, rows: list[int], wanted: Wanted, sites: Mapping[str, int], width: int, num_layers: int
    ):
        self.error: Exception | None = None
        device = batch.token_ids.device
        self._rows, self._index, self._wanted = rows, as_index(rows, device), wanted
        self._hidden: Tensor | None = None
        if "hidden_norm" in wanted.kinds:
            self._hidden = torch.full((num_layers + 1, len(rows)), float("nan"), device=device)
        logit_rows = batch.logit_rows
        self._deltas: DeltaNorms | None = None
        if sites and width:
            self._deltas = DeltaNorms(rows, sites, width, batch.weights, device, logit_rows)
        place = {row: at for at, row in enumerate(logit_rows)}
        self._answering = [at for at, row in enumerate(rows) if row in place]
        self._answers = [place[rows[at]] for at in self._answering]
        self._entropy: Tensor | None = None
        self._top: tuple[Tensor, Tensor] | None = None

    def take_layer(self, index: int, output: Any) -> None:
        """Take a decoder layer's output, `[1, row, hidden]` or a tuple that begins with it."""
        if self._hidden is not None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._guarded(self._take_hidden, index, hidden.view(-1, hidden.shape[-1]))

    def take_site(self, layer: LoRALinear, y: Tensor, x: Tensor, weights: RowWeights) -> None:
        """Take a site's base output and input; a watcher of `Routing`."""
        if self._deltas is not None:
            self._guarded(self._deltas.take, layer, y, x, weights)

    def take_answer(self, hidden: Tensor, logits: Tensor) -> None:
        """Take the forward's results: hidden state `[row, hidden]` after the final norm, float32 `[answer, vocab]`."""
        if self._hidden is not None:
            self._guarded(self._take_hidden, len(self._hidden) - 1, hidden)
        if self._answers and {"entropy", "logits:top"} & set(self._wanted.kinds):
            self._guarded(self._take_logits, logits)

    def drain(self) -> Measured:
        """Return everything on the host."""
        return Measured(
            _on_host(self._hidden), _on_host(self._deltas and self._deltas.ratios()),
            np.asarray(self._answering, dtype=np.int64), _on_host(self._entropy),
            _on_host(self._top and self._top[0]), _on_host(self._top and self._top[1]),
        )  # fmt: skip

    def _take_hidden(self, index: int, hidden: Tensor) -> None:
        self._hidden[index] = torch.linalg.vector_norm(hidden[self._index].float(), dim=-1)

    def _take_logits(self, logits: Tensor) -> None:
        entropies, ids, values = [], [], []
        for first in range(0, len(self._answers), _ROWS):
            logprobs = torch.log_softmax(rows_of(logits, self._answers[first : first + _ROWS]), dim=-1)
            if self._wanted.top:
                found = likeliest(logprobs, min(self._wanted.top + _SPARE, logprobs.shape[1]))
                values.append(found[0][:, : self._wanted.top])
                ids.append(found[1][:, : self._wanted.top])
            if "entropy" in self._wanted.kinds:
                entropies.append(torch.special.entr(logprobs.exp()).sum(-1))
        self._entropy = torch.cat(entropies) if entropies else None
        self._top = (torch.cat(ids), torch.cat(values)) if ids else None

    def _guarded(self, take: Callable, *given: Any) -> None:
        if self.error is None:
            try:
                take(*given)
            except Exception as error:
                self.error = error


def decoder_layers(model: BaseModel) -> list[nn.Module]:
    """Return the base's decoder layers in order: its one list of as many modules as its config has layers.

    Raises:
        UserError: the base has no such list.
    """
    count = model.config.num_hidden_layers
    for module in model.model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UserError(f"record: base {model.name!r} has no list of {count} decoder layers, so it has no 'hidden_norm'")


def _on_host(values: Tensor | None) -> np.ndarray | None:
    return None if values is None else values.cpu().numpy()
