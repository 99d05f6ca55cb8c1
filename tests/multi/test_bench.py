"""``stretto bench`` on two ranks with small models: the rows of every benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.two_ranks import on_two_ranks

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

KEYS = {"case", "ours_s", "peer", "peer_s", "bound_s", "runs", "spread"}
KEYS |= {"ours_bytes", "peer_bytes"}


def bench(*arguments: str) -> list[dict]:
    """Run the benchmark on two ranks; return its rows."""
    done = on_two_ranks(Path.cwd(), ["bench", *arguments, "--json"])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows
    assert all(set(row) == KEYS for row in rows)
    assert all(row["ours_s"] > 0 and row["peer_s"] > 0 and row["spread"] >= 0 for row in rows)
    return rows


def test_a_step_is_timed_against_ddp_at_every_bucket_size():
    rows = bench("step", "model.blocks=1", "model.width=32", "--runs", "2")
    without_communication = next(row for row in rows if row["peer"] == "no communication")
    # DDP and Stretto keep buckets besides the parameters; nothing else is large.
    assert all(row["ours_bytes"] > without_communication["peer_bytes"] > 1e6 for row in rows)
    ddp_bytes = {row["peer_bytes"] for row in rows if row["peer"].startswith("ddp")}
    assert max(ddp_bytes) < 1.01 * min(ddp_bytes) < 1.02 * without_communication["ours_bytes"]
    assert all(row["runs"] == 2 for row in rows)
    assert len([row for row in rows if row["peer"].startswith("ddp")]) == 5
    tuned = [row for row in rows if row["peer"].endswith("(tuned)")]
    assert tuned[0]["peer_s"] == min(r["peer_s"] for r in rows if r["peer"].startswith("ddp"))


def test_a_step_of_a_run_file_is_timed_without_peers(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\nkind = "gpt"\nblocks = 1\nwidth = 32\n[train]\nbatch = 4\n'
        '[strategy]\nkind = "local_sgd"\nevery = 3\n'
    )
    more = ["--run-file", str(run), "--peers", "none", "--runs", "1", "--steps", "3"]
    (row,) = bench("step", *more)
    assert row["peer"] == "no communication"


def test_a_sharded_step_is_timed_against_fsdp2_with_and_without_resharding():
    settings = ["strategy.kind=sharded", "strategy.plan=zero3", "strategy.unit=10KB"]
    small = ["model.blocks=6", "model.width=64", "model.context=8"]
    rows = bench("step", *settings, *small, "--peers", "fsdp2", "--runs", "1")
    by_peer = {row["peer"]: row for row in rows}
    assert set(by_peer) == {"no communication", "fsdp2 resharding", "fsdp2 keeping"}
    assert all(row["case"].endswith("1x2, zero3") for row in rows)
    resharded = by_peer["fsdp2 resharding"]["peer_bytes"]
    kept = by_peer["fsdp2 keeping"]["peer_bytes"]
    assert resharded < kept
    assert rows[0]["ours_bytes"] < kept


def test_a_single_rank_gets_a_hint_how_to_start_more():
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "bench", "step"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "stretto lab --hosts 4" in done.stderr


def test_all_reduces_are_timed_against_gloo_at_every_size():
    rows = bench("collectives", "--sizes", "1KB,64KB", "--runs", "2")
    assert all(row["runs"] == 2 and row["peer"] == "gloo" for row in rows)
    assert all(row["bound_s"] is None for row in rows)  # one host: there is no link between hosts
    for size in ("1 KB", "64 KB"):
        of_size = [row for row in rows if row["case"].startswith(f"allreduce {size}, 1x2, ")]
        assert len({row["peer_s"] for row in of_size}) == 1
        assert f"allreduce {size}, 1x2, native" in {row["case"] for row in of_size}
        assert len(of_size) >= 2


@pytest.mark.parametrize(
    ("arguments", "case", "labels"),
    [
        (
            ["--collective", "reduce-scatter", "--algorithms", "all"],
            "reduce-scatter 4 B",
            {"ring", "halving", "hierarchical"},
        ),
        (
            ["--collective", "all-gather", "--wire", "bf16", "--algorithms", "doubling,ring/2"],
            "all-gather 4 B as bf16",
            {"doubling", "ring/2"},
        ),
        (["--collective", "broadcast"], "broadcast 4 B", {"binomial", "scatter-gather"}),
        (["--wire", "fp8"], "allreduce 4 B as fp8", {"doubling"}),
    ],
)
def test_other_collectives_and_wires_are_timed_down_to_one_element(arguments, case, labels):
    rows = bench("collectives", "--sizes", "4", "--runs", "1", *arguments)
    assert {f"{case}, 1x2, {label}" for label in labels} <= {row["case"] for row in rows}
    assert all(row["peer"] == "gloo" and row["runs"] == 1 for row in rows)
