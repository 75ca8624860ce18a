"""Places for labels beside points, so that they cover neither each other nor what is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[float, float, float, float]
"""(left, bottom, right, top) in pixels."""
RADII = (10.0, 18.0, 28.0, 40.0, 54.0)
"""Distances in pixels from a point's middle to the nearest edge of its label."""
DIRECTIONS = 16
LEADER_FROM = 14.0
"""Distance in pixels from which on a line has to tell whose label it is."""
PASSES = 4
_LABEL, _MARK, _LINE, _OUTSIDE, _DISTANCE = 6.0, 3.0, 1.5, 30.0, 0.6
"""What a pixel costs that a label covers of another label, of a mark, of a line; that lies outside; of distance."""


@dataclass(frozen=True)
class Obstacles:
    """What a label should not cover: boxes of other labels, of marks and of other strokes; and the frame around all."""

    labels: Sequence[Box]
    marks: Sequence[Box]
    lines: Sequence[Box]
    frame: Box

    def cost(self, box: Box) -> float:
        """Return what covering these costs a label in this box."""
        left, bottom, right, top = self.frame
        outside = sum(max(0.0, gap) for gap in (left - box[0], bottom - box[1], box[2] - right, box[3] - top))
        covered = (
            _LABEL * _shared(box, self.labels) + _MARK * _shared(box, self.marks) + _LINE * _shared(box, self.lines)
        )
        return covered + _OUTSIDE * outside


@dataclass(frozen=True)
class PlacedLabel:
    """The place of a label.

    Attributes:
        box: that it fills.
        leader: (start, end) of the line from its point, where it is far from it.
    """

    box: Box
    leader: tuple[tuple[float, float], tuple[float, float]] | None


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    *,
    marks: Sequence[Box],
    lines: Sequence[Box],
    inside: Box,
) -> list[PlacedLabel]:
    """Place a label beside every point.

    Each label takes the cheapest of a fixed set of places, in turn, until none moves.

    Args:
        points: (x, y) of what is labeled, in pixels, y upwards.
        sizes: (width, height) of the labels.
        marks: boxes around all marks.
        lines: boxes around other strokes, such as intervals.
        inside: that labels should not leave.
    """
    boxes: dict[int, Box] = {}
    for _ in range(PASSES):
        before = dict(boxes)
        for i, (point, size) in enumerate(zip(points, sizes, strict=True)):
            others = [box for j, box in boxes.items() if j != i]
            boxes[i] = _cheapest(point, size, Obstacles(others, marks, lines, inside))
        if boxes == before:
            break
    return [PlacedLabel(boxes[i], _leader(point, boxes[i])) for i, point in enumerate(points)]


def overlap(a: Box, b: Box) -> float:
    """Return the area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _candidates(point: tuple[float, float], size: tuple[float, float]) -> list[Box]:
    """Return boxes around a point, the nearest first; to the upper right first among equals."""
    found = []
    for radius in RADII:
        for step in range(DIRECTIONS):
            angle = 2 * math.pi * ((step + 2) % DIRECTIONS) / DIRECTIONS
            x = point[0] + (radius + size[0] / 2) * math.cos(angle)
            y = point[1] + (radius + size[1] / 2) * math.sin(angle)
            found.append((x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2))
    return found


def _cheapest(point: tuple[float, float], size: tuple[float, float], drawn: Obstacles) -> Box:
    """Return the candidate that costs least, the nearest of equals."""
    best, least = None, math.inf
    for box in _candidates(point, size):
        distance = _DISTANCE * math.dist(point, _nearest(point, box))
        if distance < least and (cost := distance + drawn.cost(box)) < least:
            best, least = box, cost
    assert best is not None
    return best


def _shared(box: Box, others: Sequence[Box]) -> float:
    return sum(overlap(box, other) for other in others)


def _nearest(point: tuple[float, float], box: Box) -> tuple[float, float]:
    """Return the place of a box that is nearest to a point."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _leader(point: tuple[float, float], box: Box) -> tuple[tuple[float, float], tuple[float, float]] | None:
    end = _nearest(point, box)
    return (point, end) if math.dist(point, end) > LEADER_FROM else None
