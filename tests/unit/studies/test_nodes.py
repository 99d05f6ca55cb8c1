"""A study of nodes: cells are predicted, measured and recorded; it continues after a stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.bench.peers import NO_COMMUNICATION
from stretto.cli.main import main
from stretto.errors import LaunchError
from stretto.studies import node_cells as lab
from stretto.studies.node_cells import MeasuredStep, MeasurementJob, measure_in_lab
from stretto.studies.nodes import lab_cluster, steps_timed_as_one
from stretto.studies.priced_run import find_variants
from tests.unit.studies.test_strategy_prices import GPT

STRATEGIES = "allreduce,crossover:delay=1,local_sgd:every=4"


class StubLab:
    """Stands in for the lab's child process: remembers jobs, may fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.jobs: list[MeasurementJob] = []
        self._fail_at = fail_at

    def __call__(self, job: MeasurementJob) -> MeasuredStep:
        if len(self.jobs) == self._fail_at:
            raise LaunchError("measuring failed with 1")
        self.jobs.append(job)
        return MeasuredStep(step_s=2.0, compute_s=0.5, spread=0.01, runs=job.runs)


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    run = tmp_path / "gpt.toml"
    run.write_text(GPT)
    out = tmp_path / "nodes.json"

    def start(*arguments: str, stub: StubLab | None = None) -> tuple[int, str, str]:
        if stub is not None:
            monkeypatch.setattr(lab, "measure_in_lab", stub)
        code = main(["study", "nodes", str(run), "--out", str(out), *arguments])
        return code, *capsys.readouterr()

    start.out = out
    return start


def cells_of(path: Path) -> dict:
    record = json.loads(path.read_text())
    return {(cell["strategy"], cell["hosts"]): cell for cell in record["cells"]}


def test_every_strategy_is_predicted_on_every_number_of_hosts(study):
    code, out, err = study("--hosts", "2,4", "--strategies", STRATEGIES)
    assert code == 0
    head, *lines = [line.split() for line in out.splitlines()]
    assert head[:3] == ["hosts", "strategy", "predicted"]
    assert [line[:2] for line in lines] == [
        [hosts, spec] for hosts in "24" for spec in STRATEGIES.split(",")
    ]
    assert "cell 6 of 6" in err
    cells = cells_of(study.out)
    assert len(cells) == 6
    assert all(cell["predicted"]["step_s"] > 0 and cell["timed"] is None for cell in cells.values())


def test_measurements_are_shown_beside_predictions(study):
    stub = StubLab()
    code, out, _ = study("--hosts", "2", "--strategies", STRATEGIES, "--measure", stub=stub)
    assert code == 0
    assert "measured" in out.splitlines()[0]
    assert all("2 s" in line and "25.0%" in line for line in out.splitlines()[1:])
    assert [job.hosts for job in stub.jobs] == [2, 2, 2]
    # Whole periods of local updates are timed.
    assert [job.steps for job in stub.jobs] == [2, 2, 4]
    for cell in cells_of(study.out).values():
        assert cell["given"]["compute_s"] == pytest.approx(0.5)
        assert cell["timed"]["step_s"] == 2.0


def test_an_interrupted_study_continues_where_it_stopped(study):
    asked = ["--hosts", "2,4", "--strategies", "allreduce,crossover", "--measure"]
    code, _, err = study(*asked, stub=StubLab(fail_at=2))
    assert code == 1
    assert "measuring failed with 1" in err
    assert len(cells_of(study.out)) == 2
    again = StubLab()
    code, out, err = study(*asked, stub=again)
    assert code == 0
    assert len(again.jobs) == 2
    assert {job.hosts for job in again.jobs} == {4}
    assert err.count("in the record") == 2
    assert len(out.splitlines()) == 5


def test_a_predicted_cell_is_measured_on_request(study):
    assert study("--hosts", "2")[0] == 0
    stub = StubLab()
    assert study("--hosts", "2", "--measure", stub=stub)[0] == 0
    assert len(stub.jobs) == 1
    assert cells_of(study.out)["allreduce", 2]["timed"] is not None


def test_hosts_and_strategies_may_be_added_later(study):
    assert study("--hosts", "2")[0] == 0
    code, out, err = study("--hosts", "2,4", "--strategies", "allreduce,sgp", "--json")
    assert code == 0
    assert err.count("in the record") == 1
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["strategy"], row["hosts"]) for row in rows] == [
        ("allreduce", 2),
        ("sgp", 2),
        ("allreduce", 4),
        ("sgp", 4),
    ]
    assert len(cells_of(study.out)) == 4


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["--rate", "400mbit"], "--rate was '200mbit' there and is '400mbit' here"),
        (["model.width=64"], "model.width was 32 there and is 64 here"),
        (["--samples", "3"], "--samples was None there and is 3 here"),
        (["strategy.bucket_bytes=1MB"], "another strategy.bucket_bytes"),
        (["--measure", "--runs", "3"], "was timed with --runs 5"),
    ],
)
def test_a_record_of_another_study_is_refused(study, changed, reason):
    assert study("--hosts", "2", "--measure", stub=StubLab())[0] == 0
    before = study.out.read_text()
    code, _, err = study("--hosts", "2", *changed, stub=StubLab())
    assert code == 2
    assert reason in err
    assert study.out.read_text() == before


def test_a_file_that_is_no_record_is_refused(study):
    study.out.write_text("[]")
    code, _, err = study("--hosts", "2")
    assert code == 2
    assert "no record of a study of nodes" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hosts", "2,x"], "expected numbers of hosts"),
        (["--hosts", "0"], "expected numbers of hosts"),
        (["--hosts", "1,2", "--measure"], "nobody to talk to"),
        (["--hosts", "2", "--rate", "fast"], "expected a rate"),
        (["--hosts", "2", "--rate", "0mbit"], "nothing could be sent"),
        (["--hosts", "2", "--runs", "0"], "--runs 0"),
        (["--hosts", "2", "--samples", "0"], "--samples 0"),
        (["--hosts", "2", "--strategies", "sgd"], "no strategy 'sgd'"),
        (["--hosts", "2", "--profile", "nowhere.json"], "nowhere.json"),
        (["--hosts", "2", "--cluster", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_invalid_arguments_are_refused(study, arguments, reason):
    code, _, err = study(*arguments)
    assert code == 2
    assert reason in err
    assert not study.out.exists()


def test_a_cell_without_a_price_is_recorded_with_the_reason_and_not_measured(study):
    stub = StubLab()
    code, out, err = study(
        "--hosts", "3", "--strategies", "sgp:topology=hypercube", "--measure", stub=stub
    )
    assert (code, stub.jobs) == (0, [])
    assert "left out: hypercube" in err
    assert len(out.splitlines()) == 1


def test_a_job_becomes_a_stretto_command(tmp_path):
    job = MeasurementJob(tmp_path / "a.toml", ("strategy.kind=sgp",), 2, 3, "50mbit", 4, 6)
    argv = job.argv()
    assert argv[:3] == [sys.executable, "-m", "stretto"]
    inside = argv.index("--")
    assert argv[3:inside] == ["lab", "--hosts", "2", "--ranks-per-host", "3", "--rate", "50mbit"]
    assert argv[inside + 1 : inside + 4] == ["stretto", "bench", "step"]
    assert {"strategy.kind=sgp", "--json", "none"} <= set(argv[inside:])


def fake(monkeypatch, program: str) -> MeasurementJob:
    monkeypatch.setattr(MeasurementJob, "argv", lambda _self: [sys.executable, "-c", program])
    return MeasurementJob(Path("a.toml"), (), 2, 1, "50mbit", 1, 2)


def test_the_step_time_is_read_from_the_labs_output(monkeypatch):
    row = {"peer": NO_COMMUNICATION, "ours_s": 3.0, "peer_s": 1.0, "spread": 0.1, "runs": 7}
    job = fake(monkeypatch, f"print('some text'); print('''{json.dumps(row)}''')")
    timed = measure_in_lab(job)
    assert timed == MeasuredStep(3.0, 1.0, 0.1, 7)
    assert timed.efficiency == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("exit(3)", "failed with 3"), ("print('nothing')", "printed no step time")],
)
def test_a_lab_that_fails_or_prints_nothing_is_a_failure(monkeypatch, program, reason):
    with pytest.raises(LaunchError, match=reason):
        measure_in_lab(fake(monkeypatch, program))


def test_a_lab_is_terminated_when_the_study_is_interrupted(monkeypatch, tmp_path):
    """The lab shuts down before the interrupt is raised again."""
    mark = tmp_path / "cleared"
    program = (
        "import pathlib, signal, sys, time\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (mark.touch(), exit(9)))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )

    def interrupted(child):
        assert child.stdout.readline() == "up\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_in_lab(fake(monkeypatch, program))
    assert mark.exists()


def test_whole_periods_are_timed(tmp_path):
    run = tmp_path / "gpt.toml"
    run.write_text(GPT)
    specs = "allreduce,crossover:every=3,local_sgd:every=1,diloco:every=8"
    steps = [steps_timed_as_one(v.config) for v in find_variants(run, (), specs)]
    assert steps == [2, 3, 2, 8]


def test_a_labs_links_are_as_shaped_and_its_cores_shared():
    cluster = lab_cluster(80_000_000, cores=3)
    assert cluster.between.bytes_per_s == pytest.approx(0.95 * 10_000_000)
    assert (cluster.cpu.pool, cluster.cpu.cores) == ("shared", 3)
