"""Adapter folders as PEFT up to 0.19 writes them when it saves a whole X-LoRA model.

Such a file holds more than its adapter: copies of frozen base weights, factors of other adapters, parts of the
classifier, all under `base_model.lora_model.`. Older PEFT also strips the adapter's number from every name, so that
adapter 1 has `layers.self_attn` for block 1 and `layers0.self_attn` for block 10. What is not the adapter's is left
out here on purpose; what cannot be told apart stays in, to be refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_WRAPPER = "base_model.lora_model."
_OWN = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$")
_OF_OTHERS = re.compile(r"\.lora_([AB]\d*(\.\d+)?\.weight|embedding_[AB]\d*(\.\d+)?)$")
# the lists of blocks of the supported architectures, not followed by a block's number
_BLOCKS_WITHOUT_NUMBER = re.compile(r"\.(layers|h)(\d*)\.(?!\d)")


def own_factors(tensors: Mapping[str, Tensor], number: str) -> dict[str, Tensor]:
    """Return the tensors of the adapter that PEFT called `number`; files of any other sort come back as they are."""
    if not any(key.startswith(_WRAPPER) for key in tensors):
        return dict(tensors)
    return {_whole_name(key, number): tensor for key, tensor in tensors.items() if not _is_foreign(key)}


def _is_foreign(key: str) -> bool:
    if "internal_xlora_classifier" in key:
        return True
    base_weight = key.startswith(_WRAPPER) and ".lora_" not in key.removeprefix(_WRAPPER)
    return base_weight or (_OWN.search(key) is None and _OF_OTHERS.search(key) is not None)


def _whole_name(key: str, number: str) -> str:
    key = key.replace(_WRAPPER, "base_model.", 1)
    return _BLOCKS_WITHOUT_NUMBER.sub(rf".\g<1>.{number}\g<2>.", key) if number.isdigit() else key
