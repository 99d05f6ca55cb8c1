"""Eight real problems are found, each with advice; a healthy world has no finding."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import stretto
from stretto.cluster.store import serve_store
from stretto.lab.run_in_lab import run_in_lab
from stretto.lab.spec import LabSpec
from tests.multi.needs import require

pytestmark = [pytest.mark.multi, pytest.mark.lab]

DOCTOR = [sys.executable, "-m", "stretto", "doctor", "--json"]
SOURCE = Path(stretto.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _problems_can_be_planted_here():
    require("ip", "tc", "nft", "setpriv", "unshare", "mount", "faketime", root=True)


@pytest.fixture(autouse=True)
def _logs_in_a_folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def findings(text):
    return {found["check"]: found for found in map(json.loads, text.splitlines())}


def failed(found):
    return {check for check, finding in found.items() if finding["status"] == "FAIL"}


def run_one_rank(*prelude, arguments=()):
    """Run the doctor as one rank behind a shell prelude; return its findings."""
    script = " && ".join([*prelude, 'exec "$@"'])
    command = ["unshare", "-m", "sh", "-c", script, "sh", *DOCTOR, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = findings(done.stdout)
    assert done.returncode == int(bool(failed(found))), done.stderr
    return found


def run_ranks(size, *wrappers, patience=20):
    """Run the doctor as ranks on loopback, each behind its own wrapper (command, environment)."""
    server = serve_store()
    ranks = []
    for rank, (wrapper, changes) in enumerate(wrappers):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
            "MASTER_ADDR": server.host,
            "MASTER_PORT": server.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
            **changes,
        }
        command = [*wrapper, *DOCTOR, "--patience", str(patience)]
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))
    said = [process.communicate(timeout=60) for process in ranks]
    found = findings(said[0][0])
    codes = [process.returncode for process in ranks]
    assert codes == [int(bool(failed(found))), *[0] * (len(ranks) - 1)], said
    assert [out for out, _ in said[1:]] == [""] * (len(ranks) - 1), "only rank 0 prints"
    return found


def in_lab(capfd, prelude=":"):
    """Run the doctor in a lab of two hosts; rank 1 goes through a shell prelude first."""
    script = f'if [ "$RANK" = 1 ]; then {prelude}; fi; exec "$@"'
    command = ["sh", "-c", script, "sh", *DOCTOR]
    result = run_in_lab(LabSpec(hosts=2), command, log_line=lambda _: None)
    found = findings(capfd.readouterr().out)
    assert result.exit_code == int(bool(failed(found))), result.reason
    return found


def test_a_healthy_world_has_nothing_to_find(capfd):
    found = in_lab(capfd)
    assert {check for check, finding in found.items() if finding["status"] != "ok"} == set()
    assert "all 2 ways between 2 ranks are open" in found["peers"]["finding"]


def test_a_closed_port_is_the_pair_that_cannot_connect(capfd):
    rules = (
        "add table inet wall",
        "add chain inet wall arriving { type filter hook input priority 0; }",
        # Only new connections: those that rank 1 opens to the store and to rank 0 are answered.
        "add rule inet wall arriving tcp flags syn / syn,ack drop",
    )
    found = in_lab(capfd, f"nft '{'; '.join(rules)}'")
    assert failed(found) == {"peers"}
    assert found["peers"]["ranks"] == [0]
    assert "cannot connect to rank 1 at 198.18.0." in found["peers"]["finding"]
    assert found["peers"]["finding"].endswith(": timed out")
    assert "open TCP ports" in found["peers"]["advice"]


def test_loopback_is_the_wrong_interface_between_hosts(capfd):
    found = in_lab(capfd, "export STRETTO_INTERFACE=lo")
    assert failed(found) == {"interfaces", "peers"}
    assert found["interfaces"]["ranks"] == [1]
    assert "interface lo, named by STRETTO_INTERFACE" in found["interfaces"]["finding"]
    assert "is loopback" in found["interfaces"]["finding"]
    assert "name ste-" in found["interfaces"]["advice"]
    assert "cannot connect to rank 1 at 127.0.0.1" in found["peers"]["finding"]


def test_an_interface_that_does_not_exist_is_reported_by_the_rank_that_names_it(capfd):
    found = in_lab(capfd, "export STRETTO_INTERFACE=ib7")
    assert failed(found) == {"interfaces"}
    assert found["interfaces"]["ranks"] == [1]
    assert "ib7" in found["interfaces"]["finding"]
    assert "does not exist" in found["interfaces"]["finding"]


def test_a_full_disk_is_found(tmp_path):
    found = run_one_rank(
        f"mount -t tmpfs -o size=1m none {tmp_path}", arguments=[f"run.folder={tmp_path}"]
    )
    assert failed(found) == {"disk"}
    assert "1.05 MB free" in found["disk"]["finding"]
    assert "run.folder" in found["disk"]["advice"]


def test_a_read_only_folder_is_found(tmp_path):
    found = run_one_rank(
        f"mount -t tmpfs -o ro,size=2g none {tmp_path}", arguments=[f"run.folder={tmp_path}"]
    )
    assert failed(found) == {"folder"}
    assert "read-only file system" in found["folder"]["finding"]
    assert "writable" in found["folder"]["advice"]


def test_a_low_file_limit_is_found():
    found = run_one_rank("ulimit -n 64")
    assert failed(found) == {"file limit"}
    assert "may open 64 files" in found["file limit"]["finding"]
    assert "ulimit -n 4096" in found["file limit"]["advice"]


def test_a_missing_peer_is_named_and_the_others_are_checked_without_it():
    began_s = time.monotonic()
    found = run_ranks(3, ([], {}), ([], {}), patience=8)
    assert failed(found) == {"rendezvous"}
    assert found["rendezvous"]["ranks"] == [2]
    assert "rank 2 of 3 never came" in found["rendezvous"]["finding"]
    assert "--patience" in found["rendezvous"]["advice"]
    assert "all 2 ways" in found["peers"]["finding"]
    assert time.monotonic() - began_s < 30


def test_one_rank_with_other_code_is_named_with_the_file(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "other" / "stretto")
    changed = tmp_path / "other" / "stretto" / "units.py"
    changed.write_text(changed.read_text() + "\nCHANGED = True\n")
    found = run_ranks(2, ([], {}), ([], {"PYTHONPATH": tmp_path / "other"}))
    assert failed(found) == {"code"}
    assert found["code"]["ranks"] == [1]
    assert "units.py" in found["code"]["finding"]
    assert "same stretto" in found["code"]["advice"]


def test_a_clock_that_is_off_is_named():
    real_monotonic = {"DONT_FAKE_MONOTONIC": 1, "FAKETIME_DONT_FAKE_MONOTONIC": 1}
    found = run_ranks(2, ([], {}), (["faketime", "-f", "+1h"], real_monotonic))
    assert failed(found) == {"clock"}
    assert found["clock"]["ranks"] == [1]
    assert "ahead of that of rank 0" in found["clock"]["finding"]
    assert "NTP" in found["clock"]["advice"]


def test_workers_that_find_something_end_with_1_and_say_it_once():
    command = [*DOCTOR, "--workers", "2", "run.heartbeat_timeout_s=400"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = findings(done.stdout)
    assert (done.returncode, failed(found), done.stderr) == (1, {"time-outs"}, "")
    assert "all 2 ranks came" in found["rendezvous"]["finding"]
