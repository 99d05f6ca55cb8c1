"""The cycle of a training step, in slots: one for each unit's backward and forward.

A cycle begins with backward, so that whatever follows from a gradient (its reduction, the update,
the gather of what was updated) happens in one cycle, and every window is one interval::

    slot      0       1      ...   L-1     L        L+1     ...    2L
              b(L-1)  b(L-2)       b(0)    update   f(0)           f(L-1)

The backward of a step is followed by the forward of the next one. Moments are counted in half
slots: the start of slot t is 2t, its end 2t + 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slots:
    """The cycle of a model of ``units`` units."""

    units: int

    @property
    def count(self) -> int:
        """Slots of one cycle."""
        return 2 * self.units + 1

    @property
    def update(self) -> int:
        """The slot of the optimizer, for whoever waits for all gradients."""
        return self.units

    def backward(self, unit: int) -> int:
        """Return the slot of a unit's backward."""
        return self.units - 1 - unit

    def forward(self, unit: int) -> int:
        """Return the slot of a unit's forward."""
        return self.units + 1 + unit

    def is_forward(self, slot: int) -> bool:
        """Say whether ``slot`` belongs to the forward that ends the cycle."""
        return slot > self.units

    def name(self, slot: int) -> str:
        """Return what people call ``slot``: b3, update, f0."""
        cycle, slot = divmod(slot, self.count)
        later = "" if not cycle else f" of the cycle {'after' if cycle > 0 else 'before'}"
        if slot == self.update:
            return f"update{later}"
        if slot < self.update:
            return f"b{self.units - 1 - slot}{later}"
        return f"f{slot - self.units - 1}{later}"
