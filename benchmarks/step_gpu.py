"""Measure the step time of a 210 M parameter GPT in bf16 against peers, on one shared GPU.

    python benchmarks/step_gpu.py [2:dear 2:zero2 2:zero3 4:zero2 4:zero3 1:dear]

A case is a number of ranks and a plan; each keeps a record. It needs a GPU, and MPS for several
ranks on it (`one_gpu.py`).
"""

import argparse
import sys

from record import record

CASES = ["2:dear", "2:zero2", "2:zero3", "4:zero2", "4:zero3", "1:dear"]
BATCH = 64
"""Samples of all ranks together; a single rank takes the share of one of two ranks."""
MODEL = ["model.width=1024", "model.blocks=16", "model.context=512", "model.heads=16"]
HALF = ["train.precision=bf16", "strategy.parameters=bf16", "strategy.wire=bf16"]
BENCH = ["python3", "-m", "stretto", "bench", "step", "--device", "cuda", "--runs", "5"]


def main() -> int:
    """Measure each case, keep its record; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, metavar="ranks:plan")
    codes = [run(*case.split(":")) for case in parser.parse_args().cases]
    return next((code for code in codes if code), 0)


def run(ranks: str, plan: str) -> int:
    """Measure one case; return its exit code."""
    batch = BATCH if int(ranks) > 1 else BATCH // 2
    sharded = ["strategy.kind=sharded", f"strategy.plan={plan}", "strategy.unit=4MB"]
    launcher = ["python3", "benchmarks/one_gpu.py", "--hosts", ranks, "--"]
    settings = [*MODEL, f"train.batch={batch}", *HALF, *sharded]
    code, rows = record(f"gpu_{plan}_{ranks}x1", [*launcher, *BENCH, "--json", *settings])
    for row in rows:
        ours, peer = float(str(row["ours_s"])), float(str(row["peer_s"]))
        print(f"{ranks} ranks, {plan}: {ours / peer:.3f} of the time of {row['peer']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
