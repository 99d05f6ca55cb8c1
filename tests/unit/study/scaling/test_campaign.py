"""A study as a whole: its book, what it refuses, what it tells; interrupted, it goes on."""

import json
import re

import pytest

from stretto.cli.main import main
from stretto.errors import ConfigError
from stretto.study.scaling.book import Book
from stretto.study.scaling.campaign import Study, carry_out
from stretto.study.scaling.cells import Basis
from stretto.study.scaling.sweep import Cell, Done, Point, Sweep
from stretto.study.words import strategy_word

SMALL = ("data.samples=32", "data.test_samples=8", "data.size=8", "train.steps=2", "model.width=2")
RUN = "[train]\nbatch = 8\n"


@pytest.fixture
def basis(tmp_path):
    run = tmp_path / "small.toml"
    run.write_text(RUN, encoding="utf-8")
    return Basis(str(run), SMALL)


def study_of(basis, *strategies, sweep=None):
    points = tuple(Point(word, 2, 8) for word in strategies)
    return Study(basis, points, sweep or Sweep((1.0, 2.0), seeds=1, most=2))


def test_runs_are_kept_and_an_interrupted_study_goes_on(tmp_path, basis):
    study = study_of(basis, "crossover")
    told = []

    def interrupt(line):
        told.append(line)
        raise KeyboardInterrupt

    book = Book(tmp_path / "out", study.about())
    with pytest.raises(KeyboardInterrupt):
        carry_out(study, book, jobs=1, say=interrupt)
    again = Book(tmp_path / "out", study.about())
    assert again.done == book.done
    assert len(again.done) == 1
    carry_out(study, again, jobs=1, say=told.append)
    assert len(told) == 2
    assert all("crossover, 2 workers, batch 8, rate x" in line for line in told)
    assert not study.wanted(Book(tmp_path / "out", study.about()).done)


def test_a_torn_line_is_cut_off_and_its_run_is_made_again(tmp_path, basis):
    about = study_of(basis, "sgp").about()
    book = Book(tmp_path, about)
    one, two = (Cell(Point("sgp", 2, 8), factor, 0) for factor in (1.0, 2.0))
    book.write(one, Done(0.5, 0.25, 1.0, ((2, 0.1),), 3.0, 4.0))
    book.write(two, Done(0.0, diverged="the loss of step 1 is not finite"))
    runs = tmp_path / "runs.jsonl"
    runs.write_text(runs.read_text()[:-9])
    again = Book(tmp_path, about)
    assert again.done == {one: book.done[one]}
    again.write(two, book.done[two])
    assert Book(tmp_path, about).done == book.done


def test_a_folder_with_another_study_is_refused_with_what_differs(tmp_path, basis):
    Book(tmp_path / "out", study_of(basis, "sgp").about())
    Book(tmp_path / "out", study_of(basis, "crossover").about())  # more points are welcome
    other = study_of(Basis(basis.run, (*SMALL, "optim.lr=3.0")), "sgp")
    with pytest.raises(ConfigError, match=re.escape("another optim.lr")):
        Book(tmp_path / "out", other.about())


def test_a_rate_is_a_factor_of_the_run_s_own(basis):
    own, double = (
        basis.config(Cell(Point("crossover:delay=1", 2, 4), factor, 5)) for factor in (1.0, 2.0)
    )
    assert double.optim.lr == 2 * own.optim.lr
    assert (double.train.batch, double.run.seed, double.strategy.delay) == (4, 5, 1)


def test_strategies_are_words_with_settings():
    assert strategy_word("sgp:delay=1:every=2") == ("sgp", ["strategy.delay=1", "strategy.every=2"])
    with pytest.raises(ConfigError, match='did you mean "sgp"'):
        strategy_word("sgq")
    with pytest.raises(ConfigError, match="expected sgp:key=value"):
        strategy_word("sgp:delay")


def test_what_cannot_be_run_is_found_before_the_first_run(basis):
    study = Study(basis, (Point("crossover:topology=hypercube", 6, 8),), Sweep())
    with pytest.raises(ConfigError, match="4 or 8"):
        study.check()


def test_a_study_may_lose_messages_and_a_book_knows_how_many(tmp_path, basis, capsys):
    asked = ["study", "workers", basis.run, *SMALL, "--workers", "4", "--factors", "1"]
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
def test_the_verbs_print_a_row_a_point_and_write_a_page(tmp_path, basis, capsys, verb, more):
    how = ["--strategies", "allreduce,sgp", "--seeds", "1", "--factors", "1", "--out"]
    asked = ["study", verb, basis.run, *SMALL, *more, *how, str(tmp_path / "out")]
    assert main(asked) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[:4] == ["strategy", "workers", "batch", "accuracy"]
    assert [row.split()[0] for row in rows[1:]] == ["allreduce"] * 2 + ["sgp"] * 2
    page = (tmp_path / "out" / "study.html").read_text()
    assert page.count("<figure>") == 3
    assert "Stretto study" in page
    assert main([*asked, "--json"]) == 0  # nothing is run again
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["strategy"] for row in told] == ["allreduce"] * 2 + ["sgp"] * 2
    assert all(isinstance(row["interior"], bool) for row in told)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--workers", "2,x"], "expected numbers as 8,16,32"),
        (["--workers", "2", "--factors", "0,1"], "above 0"),
        (["--workers", "2", "--device", "tpu"], "expected cpu or cuda"),
        (["--workers", "2", "--seeds", "0"], "at least 1"),
        (["--workers", "2", "--strategies", "nobody"], "no strategy 'nobody'"),
        (["--workers", "64"], "at most 8 workers"),
    ],
)
def test_bad_words_are_refused_in_one_line(basis, tmp_path, capsys, more, says):
    out = ["--out", str(tmp_path / "out")]
    assert main(["study", "workers", basis.run, *SMALL, *out, *more]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
