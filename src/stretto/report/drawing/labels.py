"""Where on its arrow a label can be read: beside the others, not on top of them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle by its centre and half its sides."""

    x: float
    y: float
    half_width: float
    half_height: float

    def overlap(self, other: "Box") -> float:
        """Return the area that two boxes share."""
        wide = self.half_width + other.half_width - abs(self.x - other.x)
        high = self.half_height + other.half_height - abs(self.y - other.y)
        return max(0.0, wide) * max(0.0, high)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A straight line from where a message leaves to where it arrives."""

    x0: float
    y0: float
    x1: float
    y1: float

    def at(self, fraction: float) -> tuple[float, float]:
        """Return the point that lies ``fraction`` of the way along."""
        return (
            self.x0 + fraction * (self.x1 - self.x0),
            self.y0 + fraction * (self.y1 - self.y0),
        )


def place(arrow: Arrow, near: float, size: tuple[float, float], taken: Iterable[Box]) -> Box:
    """Return the box for a label of ``size`` on ``arrow`` that hides the least of ``taken``.

    It stands ``near`` the source, measured along x, if it can: there one sees who sends it.
    """
    others = list(taken)
    length = abs(arrow.x1 - arrow.x0)
    beside = near / length
    tried = (beside, 1 - beside, 0.5, 2 * beside, 1 - 2 * beside, 0.25, 0.75, 0.4, 0.6)
    boxes = [
        Box(*arrow.at(fraction), size[0] / 2, size[1] / 2) for fraction in tried if 0 < fraction < 1
    ]
    return min(boxes, key=lambda box: sum(box.overlap(other) for other in others))
