import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stretto.lab.namespaces import open_lab
from stretto.lab.run_in_lab import run_in_lab
from stretto.lab.spec import LabSpec, address
from tests.multi.needs import require

pytestmark = [pytest.mark.multi, pytest.mark.lab]

KILLS = Path(__file__).parents[2] / "benchmarks" / "lab_kills.py"

STORE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def plain_store(host):
    """Listen instead of the store if no rank uses it: the real one takes seconds to import
    torch.
    """
    return [sys.executable, "-c", STORE, host]


@pytest.fixture(scope="module", autouse=True)
def _lab_is_possible_here():
    require("ip", "tc", "nft", "setpriv", root=True)


@pytest.fixture(autouse=True)
def _logs_in_a_folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(spec, program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return run_in_lab(spec, command, log_line=lambda _: None, store=plain_store)


def namespaces(lab_id):
    return [path.name for path in Path("/run/netns").glob(f"stretto-{lab_id}-*")]


def own_links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


SHOW = 'import os; print(*(os.environ[n] for n in ("RANK", "GROUP_RANK", "LOCAL_RANK")))'


def test_every_rank_runs_on_its_host_and_rank_zero_writes_to_our_output(capfd):
    result = run(LabSpec(hosts=2, ranks_per_host=2), SHOW)
    logged = [(result.logs / f"rank-{rank}.log").read_text() for rank in (1, 2, 3)]
    assert [capfd.readouterr().out, *logged] == ["0 0 0\n", "1 0 1\n", "2 1 0\n", "3 1 1\n"]


TCP = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip())"


def test_tcp_congestion_control_is_independent_of_the_machine(capfd):
    result = run(LabSpec(hosts=2), TCP)
    algorithms = [capfd.readouterr().out, (result.logs / "rank-1.log").read_text()]
    assert algorithms in (["cubic\n"] * 2, ["reno\n"] * 2)


SEND = """
import os, socket, sys, time
from stretto.lab.spec import address
rank, num_bytes = int(os.environ["RANK"]), int(sys.argv[1])
if rank == 0:
    with socket.create_server((address(0), 5000)) as listener:
        peer, _ = listener.accept()
        peer.recv(1, socket.MSG_WAITALL)
        began_s, got = time.monotonic(), 0
        while part := peer.recv(1 << 20):
            got += len(part)
        print(got / (time.monotonic() - began_s))
else:
    while True:
        try:
            peer = socket.create_connection((address(0), 5000), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    with peer:
        peer.sendall(bytes(num_bytes + 1))
"""
SENT_BYTES = 6_000_000


def test_a_transfer_runs_at_the_link_s_rate(capfd):
    run(LabSpec(hosts=2, bits_per_s=100_000_000), SEND, SENT_BYTES)
    bits_per_s = 8 * float(capfd.readouterr().out)
    assert 0.70 <= bits_per_s / 100e6 <= 1.05


def test_a_transfer_is_counted_on_both_hosts():
    result = run(LabSpec(hosts=2), SEND, SENT_BYTES)
    receiver, sender = result.hosts
    assert sender.sent_bytes == pytest.approx(SENT_BYTES, rel=0.1)
    assert receiver.received_bytes == pytest.approx(SENT_BYTES, rel=0.1)


DATAGRAMS = """
import os, socket, sys, time
from pathlib import Path
from stretto.lab.spec import address
ready, sent = (Path(sys.argv[1]) / name for name in ("ready", "sent"))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    if os.environ["RANK"] == "0":
        end.bind((address(0), 5000))
        ready.touch()
        while not sent.exists():
            time.sleep(0.01)
        end.settimeout(0.2)
        got = 0
        try:
            while end.recv(100):
                got += 1
        except TimeoutError:
            print(got)
    else:
        while not ready.exists():
            time.sleep(0.01)
        for _ in range(200):
            end.sendto(b"x", (address(0), 5000))
            time.sleep(0.0005)
        sent.touch()
"""


@pytest.mark.parametrize(("loss", "fewest", "most"), [(0.0, 200, 200), (0.3, 100, 175)])
def test_packets_are_lost_at_the_requested_rate(capfd, tmp_path, loss, fewest, most):
    run(LabSpec(hosts=2, loss=loss), DATAGRAMS, tmp_path)
    assert fewest <= int(capfd.readouterr().out) <= most


FAIL_ON_TWO = """
import os, sys, time
if os.environ["RANK"] == "2":
    sys.exit("no such thing as rank 2")
time.sleep(60)
"""


def test_the_failed_rank_is_named_with_its_host_and_last_output():
    result = run(LabSpec(hosts=2, ranks_per_host=2), FAIL_ON_TWO)
    assert (result.exit_code, result.failed_rank) == (1, 2)
    assert "rank 2 on host 1 ended with exit code 1" in result.reason
    assert result.reason.endswith("no such thing as rank 2")


ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.item())
dist.destroy_process_group()
"""


def test_ranks_find_each_other_through_the_store_on_the_head(capfd):
    command = [sys.executable, "-c", ALL_REDUCE]
    result = run_in_lab(LabSpec(hosts=2), command, log_line=lambda _: None)
    assert (result.exit_code, result.reason) == (0, "")
    assert capfd.readouterr().out == "3.0\n"


LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)):
    print(flush=True)
    sys.stdin.read()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=5)"


def can_connect(lab):
    command = lab.command_in(1, [sys.executable, "-c", CONNECT, address(0)])
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_two_simultaneous_labs_are_isolated():
    spec = LabSpec(hosts=2)
    with (
        open_lab(spec, log_line=lambda _: None) as one,
        open_lab(spec, log_line=lambda _: None) as other,
    ):
        command = one.command_in(0, [sys.executable, "-c", LISTEN, address(0)])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as listener:
            listener.stdout.readline()
            assert (can_connect(one), can_connect(other)) == (True, False)
            listener.stdin.close()


def test_a_lab_adds_nothing_to_the_machine_s_network_and_has_no_route_out():
    before = own_links()
    with open_lab(LabSpec(hosts=2), log_line=lambda _: None) as lab:
        assert own_links() == before
        routes = lab.command_in(0, ["ip", "route"])
        shown = subprocess.run(routes, capture_output=True, text=True, check=True).stdout
    assert shown.split()[0] == "198.18.0.0/24"
    assert len(shown.splitlines()) == 1


def test_an_exception_inside_leaves_no_namespace_and_no_lock():
    seen = {}

    def fail_inside():
        with open_lab(LabSpec(hosts=2), log_line=lambda _: None) as lab:
            seen[lab.names.lab_id] = namespaces(lab.names.lab_id)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    ((lab_id, inside),) = seen.items()
    assert len(inside) == 4
    assert namespaces(lab_id) == []
    assert not Path(f"/run/stretto/lab-{lab_id}.lock").exists()


LAB = """
import sys
from stretto.lab.spec import LabSpec
from stretto.lab.run_in_lab import run_in_lab
store = lambda host: [sys.executable, "-c", sys.argv[1], host]
say = lambda line: print(line, file=sys.stderr, flush=True)
command = ["sh", "-c", "setsid sleep 300 & echo $!; exec sleep 300"]
sys.exit(run_in_lab(LabSpec(hosts=2), command, log_line=say, store=store).exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_lab_and_leaves_nothing(number):
    command = [sys.executable, "-c", LAB, STORE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as lab:
        escaped = int(lab.stdout.readline())
        lab.send_signal(number)
        said = lab.communicate(timeout=60)[1]
    assert lab.returncode == 128 + number
    (lab_id,) = re.findall(r"^lab ([0-9a-f]{6}):", said, flags=re.MULTILINE)
    assert namespaces(lab_id) == []
    assert not Path(f"/proc/{escaped}/environ").exists() or not environment_of(escaped)


def environment_of(pid):
    """Return an empty result for a process that is dead but not yet reaped."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_after_a_kill_the_next_lab_works_and_clears_everything():
    command = [sys.executable, str(KILLS), "--count", "3", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("3 passed, 0 failed\n"), done.stdout + done.stderr
