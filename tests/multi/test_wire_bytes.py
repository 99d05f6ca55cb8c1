"""Half as wide on the wire is half the bytes on the links: counted by the lab, not by us."""

import re
import subprocess

import pytest

from stretto.units import parse_bytes
from tests.multi.needs import require
from tests.multi.small_run import STRETTO, write_run

pytestmark = [pytest.mark.multi, pytest.mark.lab]

STEPS = 30
"""So many that what else is sent, the weights at first and the agreements, hardly counts."""


def bytes_sent(folder, wire):
    """Train on two hosts; return what the link out of host 0 carried."""
    lab = [*STRETTO, "lab", "--hosts", "2", "--rate", "400mbit", "--", *STRETTO]
    settings = [f"run.name={wire}", f"strategy.wire={wire}", f"train.steps={STEPS}"]
    settings += ["model.width=64", "strategy.fusion=4MB", "strategy.algorithm=ring"]
    done = subprocess.run(
        [*lab, "train", "run.toml", *settings],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (sent,) = re.findall(r"host 0: sent ([\d.]+ \w+)", done.stderr)
    return parse_bytes(sent.replace(" ", ""))


def test_16_bits_on_the_wire_halve_the_bytes_on_the_links(tmp_path):
    require("ip", "tc", "setpriv", root=True)
    write_run(tmp_path)
    wide = bytes_sent(tmp_path, "own")
    for wire in ("bf16", "fp16"):
        assert bytes_sent(tmp_path, wire) / wide == pytest.approx(0.5, abs=0.04)
