"""``stretto simulate collectives``: prices and tables of clusters that are not here."""

import json

import pytest

from stretto.cli.main import main
from stretto.collectives.algorithm_table import parse_algorithm
from stretto.collectives.algorithms import ALLREDUCE
from stretto.simulator.cluster import preset

SIMULATE = ["simulate", "collectives"]


def rows_of(capsys, *arguments: str) -> list[dict]:
    assert main([*SIMULATE, *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_algorithm_is_priced_at_every_size(capsys):
    rows = rows_of(capsys, "--ranks", "64", "--ranks-per-host", "8")
    keys = {"bytes", "algorithm", "seconds", "serial_steps", "bytes_per_link", "bottleneck"}
    assert all(set(row) == keys and row["seconds"] > 0 for row in rows)
    for size in (1000, 10**6, 10**8):
        seconds = [row["seconds"] for row in rows if row["bytes"] == size]
        assert seconds == sorted(seconds)
        assert {row["algorithm"] for row in rows if row["bytes"] == size} == set(ALLREDUCE)


@pytest.mark.parametrize("per_host", [1, 8])
def test_serial_steps_at_1024_ranks_are_those_of_the_papers(per_host, capsys):
    more = ["--ranks", "1024", "--ranks-per-host", str(per_host), "--sizes", "1MB"]
    steps = {row["algorithm"]: row["serial_steps"] for row in rows_of(capsys, *more)}
    assert steps["ring"] == 2046
    assert steps["halving-doubling"] == 20
    assert steps["doubling"] == 10
    assert steps["masters"] == 4 * (per_host - 1) + 2 * (1024 // per_host - 1)


def test_every_host_may_have_fewer_ranks_than_the_others(capsys):
    rows = rows_of(capsys, "--ranks", "10", "--ranks-per-host", "4", "--sizes", "1KB")
    assert {row["algorithm"] for row in rows} == set(ALLREDUCE)
    assert [row["serial_steps"] for row in rows if row["algorithm"] == "ring"] == [18]


def test_one_rank_has_nothing_to_send(capsys):
    rows = rows_of(capsys, "--ranks", "1", "--sizes", "1KB")
    assert {row["serial_steps"] for row in rows} == {0}


def test_a_person_is_given_a_line_for_each(capsys):
    assert main([*SIMULATE, "--ranks", "4", "--sizes", "1MB"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "bytes algorithm time steps a link carries held up by"
    assert {line.split()[2] for line in lines} == set(ALLREDUCE)


def test_a_table_says_what_to_take_from_which_size_on_and_why(capsys):
    rows = rows_of(capsys, "--ranks", "16", "--ranks-per-host", "4", "--table")
    assert all(set(row) == {"from_bytes", "algorithm", "seconds", "reason"} for row in rows)
    sizes = [row["from_bytes"] for row in rows]
    assert sizes == sorted(set(sizes))
    assert all(row["reason"] and parse_algorithm(row["algorithm"]) for row in rows)
    assert main([*SIMULATE, "--ranks", "16", "--ranks-per-host", "4", "--table"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_the_description_that_calibrate_wrote_is_taken_as_it_is(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    preset("box 400mbit").write(path)
    named = rows_of(capsys, "--cluster", "box 400mbit", "--sizes", "1MB")
    assert rows_of(capsys, "--cluster", str(path), "--sizes", "1MB") == named


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cluster", "ethernet 10gb"], ["no cluster is called", "ethernet 10gbit"]),
        (["--cluster", "none.toml"], ["no cluster description none.toml", "stretto calibrate"]),
        (["--ranks", "0"], ["--ranks 0", "expected at least 1"]),
        (["--ranks", "4", "--ranks-per-host", "0"], ["--ranks-per-host 0"]),
        (["--ranks-per-host", "4"], ["--ranks-per-host 4 needs --ranks"]),
        (["--sizes", "1KB,"], ["a size such as"]),
        (["--sizes", "1 parsec"], ["a size such as", "parsec"]),
        (["--ranks", "many"], ["many"]),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SIMULATE, *arguments]) == 2
    said = capsys.readouterr()
    assert all(text in said.err + said.out for text in expected)


STEP = ["simulate", "step", "examples/text.toml", "--samples", "2"]


def test_a_step_is_priced_for_every_strategy_and_number_of_ranks(capsys):
    arguments = ["--strategies", "allreduce:algorithm=ring,crossover:delay=1", "--ranks", "1,6"]
    assert main([*STEP, *arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    keys = {"ranks", "hosts", "strategy", "step_s", "compute_s", "exposed_s", "bound_s"}
    assert all(set(row) == keys | {"efficiency", "bytes_per_link", "held_up_by"} for row in rows)
    assert [(row["ranks"], row["strategy"]) for row in rows] == [
        (1, "allreduce:algorithm=ring"),
        (1, "crossover:delay=1"),
        (6, "allreduce:algorithm=ring"),
        (6, "crossover:delay=1"),
    ]
    assert all(row["step_s"] >= row["bound_s"] * (1 - 1e-9) for row in rows)
    assert all(row["efficiency"] == pytest.approx(1) for row in rows[:2])


def test_a_person_is_given_a_line_for_each_step_and_the_reasons_of_others(capsys):
    arguments = ["--strategies", "sgp:topology=hypercube,noloco", "--ranks", "6"]
    assert main([*STEP, *arguments, "--ranks-per-host", "2"]) == 0
    out, err = capsys.readouterr()
    head, line = out.splitlines()
    assert head.split()[:6] == ["ranks", "strategy", "step", "compute", "exposed", "bound"]
    assert line.split()[:2] == ["6", "noloco"]
    assert "sgp:topology=hypercube on 6 ranks left out: hypercube" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ranks", "eight"], "expected numbers, as 8,64,1024"),
        (["--ranks", "0"], "expected at least 1 of each"),
        (["--ranks", "4", "--ranks-per-host", "0"], "expected at least 1 of each"),
        (["--ranks", "4", "--samples", "0"], "--samples 0"),
        (["--ranks", "4", "--strategies", "alreduce"], 'did you mean "allreduce"'),
        (["--ranks", "4", "--cluster", "ethernet"], "no cluster is called"),
        (["--ranks", "4", "--device", "tpu"], "--device tpu"),
        (["--ranks", "4", "--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_step_that_cannot_be_priced_is_refused(arguments, reason, capsys):
    assert main([*STEP[:3], *arguments]) == 2
    assert reason in capsys.readouterr().err
