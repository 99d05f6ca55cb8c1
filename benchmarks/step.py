"""Step time of the 25 MB GPT against tuned DDP, in a cluster in a box; ``make bench``."""

import sys

from record import record

LAB = ["stretto", "lab", "--hosts", "4", "--rate", "400mbit", "--"]
BENCH = ["stretto", "bench", "step", "--runs", "9", "--json"]
ALLOWED = 1.03
"""How much slower than tuned DDP a step may be."""


def main() -> int:
    """Measure, keep the record, say whether the claim holds."""
    code, rows = record("step_4x1_400mbit", LAB + BENCH)
    if code:
        return code
    tuned = next(row for row in rows if str(row["peer"]).endswith("(tuned)"))
    ratio = float(str(tuned["ours_s"])) / float(str(tuned["peer_s"]))
    held = ratio <= ALLOWED
    print(f"allreduce / {tuned['peer']}: {ratio:.3f} ({'holds' if held else 'BROKEN'}: {ALLOWED})")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
