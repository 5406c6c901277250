"""Where the labels of a figure's points go, so that none covers another, a point, or an error bar.

Everything is in inches from the lower left corner of a panel; a box is (left, bottom, width, height).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ANGLES = np.deg2rad([0, 25, -25, 180, 155, -155, 55, -55, 90, -90, 125, -125])
_DISTANCES = (0.09, 0.16, 0.26, 0.38, 0.52, 0.7, 0.95)
_ROUNDS = 3
# a label that covers another or leaves the panel is wrong; one that crosses a line is only less good
_WRONG, _LESS_GOOD = 1000.0, 40.0
_CONFUSING = 8.0  # a label that lies nearer to another point than to its own, for every inch of it


def label_boxes(
    points: np.ndarray, sizes: np.ndarray, room: tuple[float, float], *, hard: Sequence[tuple] = (),
    soft: Sequence[tuple] = (),
) -> np.ndarray:
    """Return float64 `[point, 2]`: the lower left corner of each point's label.

    Args:
        points: float64 `[point, 2]`.
        sizes: float64 `[point, 2]`: width and height of each label.
        room: width and height of the panel.
        hard: boxes that no label may cover: markers, error bars, words.
        soft: boxes that labels had better not cover: lines.
    """
    hard_boxes, soft_boxes = (np.array(list(boxes), dtype=np.float64).reshape(-1, 4) for boxes in (hard, soft))
    corners = points + 0.05
    placed = np.zeros(len(points), bool)
    # the most crowded first: the others have more places to go to
    near = (np.abs(points[:, None] - points[None]).max(-1) < 0.5).sum(1)
    for _ in range(_ROUNDS):
        for number in np.argsort(-near, kind="stable"):
            others = placed.copy()
            others[number] = False
            taken = np.concatenate([hard_boxes, np.concatenate([corners, sizes], 1)[others]])
            rest = np.delete(points, number, 0)
            corners[number] = _best(points[number], sizes[number], room, taken, soft_boxes, rest)
            placed[number] = True
    return corners


def _best(
    point: np.ndarray, size: np.ndarray, room: tuple[float, float], taken: np.ndarray, soft: np.ndarray,
    rest: np.ndarray,
) -> np.ndarray:
    best, least = point, np.inf
    for distance in _DISTANCES:
        for angle in _ANGLES:
            towards = np.array([np.cos(angle), np.sin(angle)])
            # the label's nearest edge or corner lies at that distance
            corner = point + towards * distance + np.minimum(np.sign(np.round(towards, 6)), 0) * size
            corner = corner - (np.abs(towards) < 1e-6) * size / 2
            if abs(towards[1]) < 0.5:
                corner[1] = point[1] + towards[1] * distance - size[1] / 2
            cost = distance + _WRONG * (_covered(corner, size, taken) + _outside(corner, size, room))
            cost += _LESS_GOOD * _covered(corner, size, soft) + _CONFUSING * _nearer(corner, size, point, rest)
            if cost < least:
                best, least = corner, cost
        if least < distance + 0.05:
            break
    return best


def _covered(corner: np.ndarray, size: np.ndarray, boxes: np.ndarray) -> float:
    """Return the area of a box that others cover, square inches, a little more where it only touches them."""
    if not len(boxes):
        return 0.0
    low = np.maximum(corner, boxes[:, :2])
    high = np.minimum(corner + size, boxes[:, :2] + boxes[:, 2:])
    shared = np.maximum(high - low, 0).prod(1)
    return float(shared.sum() + 0.001 * (shared > 0).sum())


def _nearer(corner: np.ndarray, size: np.ndarray, point: np.ndarray, rest: np.ndarray) -> float:
    """Return by how many inches a box is nearer to another point than to its own, or nearly so."""
    if not len(rest):
        return 0.0

    def away(places: np.ndarray) -> np.ndarray:
        beyond = np.maximum(0, np.maximum(corner - places, places - corner - size))
        return np.hypot(beyond[..., 0], beyond[..., 1])

    return float(np.maximum(0, away(point) + 0.03 - away(rest)).sum())


def _outside(corner: np.ndarray, size: np.ndarray, room: tuple[float, float]) -> float:
    beyond = np.maximum(-corner, 0) + np.maximum(corner + size - np.array(room), 0)
    return float(beyond.sum())


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places in the same order, moved apart to at least `gap`, as little as that takes, between two ends.

    Places that do not fit between the ends go on above the upper one.
    """
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    # with the gaps taken out, neighbours that are too near are runs that fall: each takes its mean
    runs: list[tuple[float, int]] = []
    for number, place in enumerate(np.asarray(places, dtype=np.float64)[order]):
        total, count = place - number * gap, 1
        while runs and runs[-1][0] / runs[-1][1] > total / count:
            total, count = total + runs[-1][0], count + runs.pop()[1]
        runs.append((total, count))
    flat = np.array([total / count for total, count in runs for _ in range(count)])
    last = max(low, high - gap * (len(places) - 1))
    found = np.empty(len(places))
    found[order] = np.clip(flat, low, last) + gap * np.arange(len(places))
    return found.tolist()
