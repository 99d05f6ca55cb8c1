"""Runs of ``strategy.kind = "auto"``: rank 0 chooses, all ranks train with it, and resume."""

import pytest

from tests.multi.small_run import stretto

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]

RUN = """
[data]
samples = 64
test_samples = 16
[train]
batch = 16
steps = 4
save_every = 2
[strategy]
kind = "auto"
cluster = "ethernet 10gbit"
device = "4e9,1e9"
"""


def test_ranks_train_with_the_strategy_that_rank_0_chose_and_resume(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    first = stretto(tmp_path, "train", "run.toml", "--workers", "2")
    assert first.returncode == 0, first.stderr
    (said,) = [line for line in first.stderr.splitlines() if "auto takes " in line]
    assert "is predicted on ethernet 10gbit" in said
    (resolved,) = (tmp_path / "runs").glob("*/resolved.toml")
    text = resolved.read_text()
    assert 'kind = "auto"' not in text
    assert "# auto" in text
    more = stretto(tmp_path, "train", "run.toml", "train.steps=6", "--workers", "2", "--resume")
    assert more.returncode == 0, more.stderr
    assert "resumed at step 4" in more.stderr
    again = stretto(
        tmp_path, "train", str(resolved), "run.name=again", "train.steps=4", "--workers", "2"
    )
    assert again.returncode == 0, again.stderr
    assert "auto takes" not in again.stderr


def test_a_limit_that_nothing_fits_ends_all_ranks_with_one_message(tmp_path):
    (tmp_path / "run.toml").write_text(RUN + 'memory = "1MB"\n')
    done = stretto(tmp_path, "train", "run.toml", "--workers", "2")
    assert done.returncode != 0
    assert "no exact strategy fits" in done.stderr
    assert "Traceback" not in done.stderr
