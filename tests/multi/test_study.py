"""``stretto study nodes --measure`` measures in a real lab of two hosts and keeps a record."""

import json
import subprocess
import sys

import pytest

from tests.multi.needs import require

pytestmark = [pytest.mark.multi, pytest.mark.lab, pytest.mark.timeout(200)]

GPT = """
[model]
kind = "gpt"
blocks = 2
width = 128
context = 32
[optim]
kind = "sgd"
lr = 0.1
"""


@pytest.fixture(scope="module", autouse=True)
def _lab_is_possible_here():
    require("ip", "tc", "setpriv", root=True)


def test_a_step_is_predicted_and_measured_on_two_hosts(tmp_path):
    (tmp_path / "gpt.toml").write_text(GPT)
    command = [sys.executable, "-m", "stretto", "study", "nodes", "gpt.toml", "--hosts", "2"]
    more = ["--rate", "50mbit", "--samples", "2", "--strategies", "crossover:delay=1"]
    asked = [*command, *more, "--measure", "--runs", "1", "--json"]

    def run() -> tuple[dict, str]:
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    cell, _ = run()
    # The step waits for the link, so its bytes bound the time however busy the machine is.
    assert cell["timed"]["step_s"] > 0.9 * cell["predicted"]["bytes_per_link"] * 8 / 50e6
    assert 0.4 < cell["given"]["step_s"] / cell["timed"]["step_s"] < 1.3
    again, stderr = run()
    assert again == cell
    assert "in the record" in stderr
    assert json.loads((tmp_path / "nodes.json").read_text())["cells"] == [cell]
