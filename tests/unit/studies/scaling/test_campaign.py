"""A study as a whole: its book, what it refuses, what it tells; interrupted, it goes on."""

import json
import re

import pytest

from stretto.cli.main import main
from stretto.errors import ConfigError
from stretto.studies.priced_run import parse_strategy_spec
from stretto.studies.scaling_runs import ResultsStore, RunTemplate, ScalingStudy, run_scaling_study
from stretto.studies.scaling_sweep import FactorSweep, GridCell, RunResult, StudyPoint

SMALL = ("data.samples=32", "data.test_samples=8", "data.size=8", "train.steps=2", "model.width=2")
RUN = "[train]\nbatch = 8\n"


@pytest.fixture
def template(tmp_path):
    run = tmp_path / "small.toml"
    run.write_text(RUN, encoding="utf-8")
    return RunTemplate(str(run), SMALL)


def study_of(template, *strategies, sweep=None):
    points = tuple(StudyPoint(word, 2, 8) for word in strategies)
    return ScalingStudy(template, points, sweep or FactorSweep((1.0, 2.0), seeds=1, max_factors=2))


def test_results_are_kept_and_an_interrupted_study_continues(tmp_path, template):
    study = study_of(template, "crossover")
    lines = []

    def interrupt(line):
        lines.append(line)
        raise KeyboardInterrupt

    store = ResultsStore(tmp_path / "out", study.common_settings())
    with pytest.raises(KeyboardInterrupt):
        run_scaling_study(study, store, jobs=1, log_line=interrupt)
    again = ResultsStore(tmp_path / "out", study.common_settings())
    assert again.done == store.done
    assert len(again.done) == 1
    run_scaling_study(study, again, jobs=1, log_line=lines.append)
    assert len(lines) == 2
    assert all("crossover, 2 workers, batch 8, rate x" in line for line in lines)
    assert not study.next_runs(ResultsStore(tmp_path / "out", study.common_settings()).done)


def test_an_incomplete_line_is_removed_and_its_run_is_repeated(tmp_path, template):
    common_settings = study_of(template, "sgp").common_settings()
    store = ResultsStore(tmp_path, common_settings)
    one, two = (GridCell(StudyPoint("sgp", 2, 8), factor, 0) for factor in (1.0, 2.0))
    store.write(one, RunResult(0.5, 0.25, 1.0, ((2, 0.1),), 3.0, 4.0))
    store.write(two, RunResult(0.0, diverged="the loss of step 1 is not finite"))
    runs = tmp_path / "runs.jsonl"
    runs.write_text(runs.read_text()[:-9])
    again = ResultsStore(tmp_path, common_settings)
    assert again.done == {one: store.done[one]}
    again.write(two, store.done[two])
    assert ResultsStore(tmp_path, common_settings).done == store.done


def test_a_folder_with_another_study_is_refused_with_what_differs(tmp_path, template):
    ResultsStore(tmp_path / "out", study_of(template, "sgp").common_settings())
    ResultsStore(
        tmp_path / "out", study_of(template, "crossover").common_settings()
    )  # points may be added
    other = study_of(RunTemplate(template.run, (*SMALL, "optim.lr=3.0")), "sgp")
    with pytest.raises(ConfigError, match=re.escape("another optim.lr")):
        ResultsStore(tmp_path / "out", other.common_settings())


def test_a_rate_is_a_factor_of_the_run_s_own(template):
    own, double = (
        template.config(GridCell(StudyPoint("crossover:delay=1", 2, 4), factor, 5))
        for factor in (1.0, 2.0)
    )
    assert double.optim.lr == 2 * own.optim.lr
    assert (double.train.batch, double.run.seed, double.strategy.delay) == (4, 5, 1)


def test_strategies_are_kinds_with_settings():
    assert parse_strategy_spec("sgp:delay=1:every=2") == (
        "sgp",
        ["strategy.delay=1", "strategy.every=2"],
    )
    with pytest.raises(ConfigError, match='did you mean "sgp"'):
        parse_strategy_spec("sgq")
    with pytest.raises(ConfigError, match="expected sgp:key=value"):
        parse_strategy_spec("sgp:delay")


def test_an_impossible_point_is_found_before_the_first_run(template):
    study = ScalingStudy(
        template, (StudyPoint("crossover:topology=hypercube", 6, 8),), FactorSweep()
    )
    with pytest.raises(ConfigError, match="4 or 8"):
        study.check()


def test_a_study_may_lose_messages_and_its_store_records_the_share(tmp_path, template, capsys):
    asked = ["study", "workers", template.run, *SMALL, "--workers", "4", "--factors", "1"]
    asked += ["--strategies", "allreduce,sgp", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main([*asked, "--lost", "40%", "--json"]) == 0
    with_lost = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(asked) == 2
    assert "another --lost" in capsys.readouterr().err
    assert main([*asked[:-1], str(tmp_path / "none"), "--json"]) == 0
    without = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [with_lost[i]["apart"] == without[i]["apart"] for i in (0, 1)] == [True, False]
    assert main([*asked, "--lost", "2"]) == 2
    assert 'such as "0.1%"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "more"),
    [("workers", ["--workers", "2,4"]), ("batch", ["--batches", "8,16", "--workers", "2"])],
)
def test_the_commands_print_a_row_per_point_and_write_a_page(
    tmp_path, template, capsys, verb, more
):
    how = ["--strategies", "allreduce,sgp", "--seeds", "1", "--factors", "1", "--out"]
    asked = ["study", verb, template.run, *SMALL, *more, *how, str(tmp_path / "out")]
    assert main(asked) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[:4] == ["strategy", "workers", "batch", "accuracy"]
    assert [row.split()[0] for row in rows[1:]] == ["allreduce"] * 2 + ["sgp"] * 2
    page = (tmp_path / "out" / "study.html").read_text()
    assert page.count("<figure>") == 3
    assert "Stretto study" in page
    assert main([*asked, "--json"]) == 0  # no run is repeated
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["strategy"] for row in records] == ["allreduce"] * 2 + ["sgp"] * 2
    assert all(isinstance(row["interior"], bool) for row in records)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--workers", "2,x"], "expected numbers as 8,16,32"),
        (["--workers", "2", "--factors", "0,1"], "above 0"),
        (["--workers", "2", "--device", "tpu"], "expected cpu or cuda"),
        (["--workers", "2", "--seeds", "0"], "at least 1"),
        (["--workers", "2", "--strategies", "nobody"], "no strategy 'nobody'"),
        (["--workers", "64"], "at most 8 workers"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(template, tmp_path, capsys, more, reason):
    out = ["--out", str(tmp_path / "out")]
    assert main(["study", "workers", template.run, *SMALL, *out, *more]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
