"""Noise for sampling: a function of (request seed, position, token) and of nothing else.

Choosing argmax(p / e) with e standard exponential draws token i with probability p[i] / sum(p); with -log(e), which
is Gumbel noise, it reads argmax(log p + gumbel). The noise of a token is hashed from its id, so it is the same however
many tokens are looked at, on any device: integers are exact, and the logarithm is taken in float64 and then rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 2**32 - 1
# the golden ratio spreads ids; the two multipliers are those of the published mixer lowbias32
_GOLDEN = -1640531535
_FIRST, _SECOND = 2146121005, -2073254261


def exponential(token_ids: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Return standard exponential noise, float32 `[row, n]`, above 0 and below 23.

    Args:
        token_ids: int32 or int64 `[row, n]`, or `[n]` for all rows alike.
        keys: (seed, position) of each row.
    """
    words = [_words(seed, position) for seed, position in keys]
    start, turn = torch.tensor(words, dtype=torch.int32, device=token_ids.device).T[:, :, None]
    x = token_ids.to(torch.int32) * _GOLDEN + start
    shifted = torch.empty_like(x)
    _fold(x, 16, shifted)
    x.mul_(_FIRST).add_(turn)
    _fold(x, 15, shifted)
    x.mul_(_SECOND)
    _fold(x, 16, shifted)
    # the middle of each of 2**32 equal steps, so neither 0 nor 1: exact in float64
    return x.double().add_(2.0**31 + 0.5).mul_(2.0**-32).log_().neg_().float()


def _fold(x: Tensor, bits: int, shifted: Tensor) -> None:
    """x ^= x >> bits, the sign bit shifted like any other."""
    torch.bitwise_right_shift(x, bits, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(_WORD >> bits))


def _words(seed: int, position: int) -> tuple[int, int]:
    # splitmix64: neighbouring (seed, position) pairs must not give related noise
    z = ((seed + 1) * 0x9E3779B97F4A7C15 + position) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return _signed(z & _WORD), _signed(z >> 32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
