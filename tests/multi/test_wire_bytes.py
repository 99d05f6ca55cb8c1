"""A 16-bit wire halves the bytes on the links, as counted by the lab."""

import re
import subprocess

import pytest

from stretto.units import parse_bytes
from tests.multi.needs import require
from tests.multi.small_run import STRETTO, write_run

pytestmark = [pytest.mark.multi, pytest.mark.lab]

STEPS = 30
"""Enough steps that other messages (initial weights, step consensus) hardly count."""


def bytes_sent(folder, wire):
    """Train on two hosts; return the bytes that host 0 sent."""
    lab = [*STRETTO, "lab", "--hosts", "2", "--rate", "400mbit", "--", *STRETTO]
    settings = [f"run.name={wire}", f"strategy.wire={wire}", f"train.steps={STEPS}"]
    settings += ["model.width=64", "strategy.bucket_bytes=4MB", "strategy.algorithm=ring"]
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
