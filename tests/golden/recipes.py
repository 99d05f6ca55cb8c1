"""The output of ``stretto recipe`` for published runs, stored in recipes.txt.

    python -m tests.golden.recipes

rewrites the file; review the difference.
"""

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("recipes.txt")

SHOWN = {
    "8,192": ["resnet50_1hour", "--workers", "256"],
    "86,016": ["resnet50_74s", "--workers", "2048"],
    "81,920": ["resnet50_74s", "train.batch=81920", "--workers", "2048"],
    "65,536": ["resnet50_4min", "--workers", "2048"],
    "65,536, AlexNet": ["alexnet_4min", "--workers", "1024"],
    "86,016, all-reduce": ["allreduce_86k", "--workers", "8"],
    "86,016, SGP": ["sgp_86k", "--workers", "8"],
    "86,016, crossover": ["crossover_86k", "--workers", "8"],
    "86,016, 4 groups": ["crossover_86k_groups4", "--workers", "16"],
    "CIFAR-10": ["cifar10", "--workers", "1"],
}
"""Case -> arguments of ``stretto recipe``."""

if __name__ == "__main__":
    pages = [
        subprocess.run(
            [sys.executable, "-m", "stretto", "recipe", *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for arguments in SHOWN.values()
    ]
    GOLDEN.write_text("\n".join(pages))
