"""The examples run: two PyTorch scripts that differ in a few lines, and run files that load."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from stretto.config import load
from stretto.errors import ConfigError
from stretto.run import RunConfig, prepare

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLAIN, DISTRIBUTED = EXAMPLES / "plain_pytorch.py", EXAMPLES / "distributed_pytorch.py"
RUN_FILES = sorted(EXAMPLES.glob("*.toml"))
MOST_LINES = 4
LARGEST_LOSS = 0.1


def lines_that_differ(before: list[str], after: list[str]) -> int:
    """Count added and removed lines; a changed line counts once."""
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    return sum(
        max(old_stop - old_start, new_stop - new_start)
        for tag, old_start, old_stop, new_start, new_stop in matcher.get_opcodes()
        if tag != "equal"
    )


def test_the_distributed_script_differs_from_the_plain_one_in_at_most_4_lines():
    before, after = (path.read_text().splitlines() for path in (PLAIN, DISTRIBUTED))
    count = lines_that_differ(before, after)
    diff = "\n".join(difflib.unified_diff(before, after, lineterm="", n=0))
    assert count <= MOST_LINES, f"{count} lines differ:\n{diff}"
    assert count > 0, "the scripts are equal"


@pytest.mark.parametrize(
    ("after", "count"),
    [("abc", 0), ("xabc", 1), ("axc", 1), ("axxc", 2), ("ac", 1), ("xabcx", 2), ("", 3)],
)
def test_a_changed_line_counts_once_and_so_do_added_and_removed_ones(after, count):
    assert lines_that_differ(list("abc"), list(after)) == count


def test_every_kind_of_data_has_an_example_run():
    assert {path.name for path in RUN_FILES} >= {"shapes.toml", "text.toml", "images.toml"}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_run_file_loads_and_its_model_fits_its_data(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    overrides = [f"data.path={pictures(tmp_path)}"] if path.name == "images.toml" else []
    prepare(load(RunConfig, path, [*overrides, "train.batch=20"]).config)


def pictures(folder):
    """Return a folder of two pictures in each of ten classes; the example's own are not ours."""
    for name in [f"{split}/{label}" for split in ("train", "test") for label in range(10)]:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / name / f"{number}.jpg")
    return folder


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_run_file_explains_every_setting_it_makes(path):
    settings = [line for line in path.read_text().splitlines() if re.match(r"\w+ *=", line)]
    assert [line for line in settings if "#" not in line] == []


@pytest.mark.multi
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ([PLAIN], 1),
        ([DISTRIBUTED], 1),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2", DISTRIBUTED], 2),
    ],
    ids=["plain", "distributed alone", "distributed by torchrun"],
)
def test_an_example_learns_the_spirals(command, ranks, tmp_path):
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # One thread each: the ranks share a few cores, and waiting threads would spin.
    settings = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Ranks share one pipe: their lines may run into each other.
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d{4})", done.stdout)]
    assert len(losses) == ranks
    assert max(losses) < LARGEST_LOSS


def test_a_wrong_number_of_classes_is_refused_with_the_right_one(tmp_path):
    overrides = [f"data.path={pictures(tmp_path)}", "model.classes=12", "train.batch=20"]
    with pytest.raises(ConfigError, match=r"set model\.classes=10"):
        prepare(load(RunConfig, EXAMPLES / "images.toml", overrides).config)
