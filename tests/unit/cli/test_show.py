import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from stretto.cli.main import main
from stretto.cli.show import show


def test_a_ring_is_drawn(capsys):
    assert main(["show", "ring", "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "ring allreduce for 3 ranks" in out
    assert "|-- +2 ->|-- +0 ->|" in out
    assert "each rank: 4 messages (1.333 x the tensor) out, as much in" in out


def test_hosts_with_several_ranks_are_drawn_with_what_goes_over_their_links(capsys):
    assert main(["show", "hierarchical", "--hosts", "2", "--ranks-per-host", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks on 2 hosts" in out
    assert "each host's link: 1 x the tensor each way" in out


def test_json_is_one_object_a_message(capsys):
    assert main(["show", "ring", "--ranks", "2", "--parts", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 8
    assert rows[0] == {
        "step": 1,
        "source": 0,
        "target": 1,
        "start": 2,
        "stop": 3,
        "action": "add",
        "lane": 0,
    }


@pytest.mark.parametrize(
    ("collective", "adds", "copies"),
    [("allreduce", 6, 6), ("reduce-scatter", 6, 0), ("all-gather", 0, 6)],
)
def test_each_collective_has_its_table(collective, adds, copies, capsys):
    assert main(["show", "ring", "--ranks", "3", "--collective", collective, "--json"]) == 0
    actions = [json.loads(line)["action"] for line in capsys.readouterr().out.splitlines()]
    assert (actions.count("add"), actions.count("copy")) == (adds, copies)


def test_an_svg_is_written_and_standard_output_left_alone(tmp_path, capsys):
    file = tmp_path / "ring.svg"
    assert main(["show", "ring", "--svg", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert str(file) in said.err
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rign"], ["no allreduce algorithm 'rign'", "did you mean 'ring'?", "hierarchical"]),
        (["halving"], ["halving is no allreduce: add --collective reduce-scatter"]),
        (["zzz"], ["no allreduce algorithm 'zzz'", "known: "]),
        (["ring", "--collective", "allgather"], ["'allgather'", "did you mean 'all-gather'?"]),
        (["ring", "--ranks", "0"], ["--ranks 0: expected at least 1"]),
        (["ring", "--ranks", "-3"], ["--ranks -3: expected at least 1"]),
        (["ring", "--hosts", "0"], ["--hosts 0: expected at least 1"]),
        (["ring", "--hosts", "2", "--ranks-per-host", "0"], ["--ranks-per-host 0"]),
        (["ring", "--ranks-per-host", "2"], ["--ranks-per-host needs --hosts"]),
        (["ring", "--ranks", "4", "--hosts", "2"], ["--ranks and --hosts exclude each other"]),
        (["ring", "--ranks", "4", "--parts", "0"], ["--parts 0: expected 1 to 1,024"]),
        (["ring", "--ranks", "4", "--parts", "1025"], ["--parts 1025: expected 1 to 1,024"]),
        (["native", "--parts", "2"], ["--parts 2: native takes the tensor whole"]),
        (["halving", "--collective", "reduce-scatter", "--parts", "2"], ["halving takes the"]),
        (["ring", "--ranks", "5000"], ["5,000 ranks: at most 4,096"]),
        (["ring", "--ranks", "33", "--svg", "x.svg"], ["33 ranks are too many for one picture"]),
        (["ring", "--svg", "missing/x.svg"], ["--svg missing/x.svg: there is no folder missing"]),
        (["ring", "--svg", "."], ["--svg . is a folder"]),
        (["ring", "--ranks", "many"], ["many"]),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    said = capsys.readouterr()
    assert all(text in said.err + said.out for text in expected)
    assert not list(tmp_path.iterdir())


def test_a_schedule_too_long_to_list_is_refused_at_once(capsys):
    assert main(["show", "ring", "--ranks", "1000"]) == 2
    assert "too many to list" in capsys.readouterr().err


def test_showing_imports_no_torch():
    code = (
        "import sys; from stretto.cli.main import main; main(['show', 'ring']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_called_without_numbers_it_shows_four_ranks(capsys):
    assert show("ring") == 0
    assert "for 4 ranks" in capsys.readouterr().out


def test_a_topology_is_told_round_by_round_and_what_it_is_worth(capsys):
    assert main(["show", "hypercube", "--collective", "gossip", "--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["round 0: 0-1 2-3", "round 1: 0-2 1-3"]
    assert "exactly equal after 2 rounds" in lines[2]
    assert main(["show", "ring", "--collective", "gossip", "--ranks", "3", "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [0, 1, pytest.approx(1 / 3)] in found["messages"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hypercube", "--ranks", "6"], "power of two: 4 or 8"),
        (["hypercubes"], "did you mean hypercube"),
        (["ring", "--parts", "2"], "--parts are for schedules"),
    ],
)
def test_a_topology_that_cannot_be_shown_is_refused_in_words(arguments, said, capsys):
    assert main(["show", *arguments, "--collective", "gossip"]) == 2
    assert said in capsys.readouterr().err


def test_a_step_of_a_strategy_is_drawn(capsys):
    assert main(["show", "crossover:delay=1", "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    assert "crossover:delay=1, 4 ranks: step 1" in out
    assert "exchange parameter 0" in out
    assert "update" in out


def test_a_plan_is_drawn_for_the_model_of_a_run_file(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text('[model]\nkind = "cnn"\n')
    file = tmp_path / "zero3.svg"
    assert main(["show", "zero3:unit=0", "--run", str(run), "--svg", str(file)]) == 0
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    capsys.readouterr()
    assert main(["show", "zero3:unit=0", "--run", str(run), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any("all-gather" in row["label"] for row in rows)
    assert all(row["due"] >= row["gate"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["crossover:delai=1"], "delai"),
        (["crossover:delay"], "expected crossover:key=value"),
        (["sgp:topology=hypercube", "--ranks", "6"], "power of two"),
        (["ring", "--run", "run.toml"], "--run is for strategies"),
        (["zero2", "--ranks", "300"], "300 ranks: at most 256"),
        (["zero2", "--run", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_step_that_cannot_be_drawn_is_refused(arguments, said, capsys):
    assert main(["show", *arguments]) == 2
    assert said in capsys.readouterr().err
