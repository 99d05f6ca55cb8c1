"""Every byte that the sharded strategy keeps, by what it is, and the most in each slot."""

import threading
from collections import Counter


class Ledger:
    """Told of everything that comes and goes, from whichever thread."""

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._total = 0
        self._slot = 0
        self.peaks = [0] * num_slots
        """The most in each slot of the cycle, since `forget`."""

    @property
    def total(self) -> int:
        """Bytes kept now."""
        return self._total

    def held(self) -> dict[str, int]:
        """Return the bytes kept now, by what they are."""
        with self._lock:
            return {what: num_bytes for what, num_bytes in self._held.items() if num_bytes}

    def take(self, what: str, num_bytes: int) -> None:
        """Note that so much more is kept; less, where it is negative."""
        with self._lock:
            self._held[what] += num_bytes
            self._total += num_bytes
            self.peaks[self._slot] = max(self.peaks[self._slot], self._total)

    def enter(self, slot: int) -> None:
        """Note that another slot begins."""
        with self._lock:
            self._slot = slot
            self.peaks[slot] = max(self.peaks[slot], self._total)

    def forget(self) -> None:
        """Begin to look for the most anew."""
        with self._lock:
            self.peaks = [0] * len(self.peaks)
            self.peaks[self._slot] = self._total
