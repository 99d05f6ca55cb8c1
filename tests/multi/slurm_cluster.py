"""A real Slurm of two nodes on this machine, with its own munge, ports and folders.

Two partitions share the nodes: jobs in ``high`` preempt those in ``low``, which are requeued.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")
CPUS_PER_NODE = 4
"""Claimed, not real: the tests need ranks on nodes, not speed."""

CONFIG = """\
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n.spool
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=0
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
InactiveLimit=0
MinJobAge=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=60 PriorityTier=1 GraceTime=20
PartitionName=high Nodes=n[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running daemons, as a client sees them."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Return our environment without a launcher's variables, and with the path to this
        Slurm.
        """
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
        return {**ours, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run a client command; return its output, or raise with it if the command fails."""
        done = subprocess.run(
            command,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller reports about a job, as a dictionary."""
        fields = self.call("scontrol", "show", "job", "-o", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for(self, number: str, *states: str, timeout_s: float = 90.0) -> dict[str, str]:
        """Wait until the job is in one of ``states`` and return it."""
        deadline_s = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline_s, f"still {job['JobState']}: {job}\n{self.logs()}"
            time.sleep(0.2)
        return job

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for a failure message."""
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            for log in sorted(self.folder.glob("*.log"))
        )


def search_path() -> str:
    """Return a PATH with Slurm's programs; the daemons are often not on PATH."""
    return f"{os.environ['PATH']}:/usr/sbin"


@contextmanager
def running_slurm(folder: Path) -> Iterator[Cluster]:
    """Start munge, the controller and two nodes; stop all of them and their jobs afterwards."""
    cluster = Cluster(folder)
    (folder / "state").mkdir()
    ports = _free_ports(3)
    host = socket.gethostname().split(".")[0]
    config = CONFIG.format(folder=folder, host=host, ports=ports, cpus=CPUS_PER_NODE)
    (folder / "slurm.conf").write_text(config)
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_munge(folder))
        for command in (
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            daemons.append(_start(command, cluster.environ, folder / "start.log"))
        _await_idle(cluster)
        yield cluster
    finally:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.call("scancel", "--user=root", timeout_s=5)
            _await_no_jobs(cluster)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    command = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
    command.append(f"--log-file={folder / 'munge.log'}")
    daemon = _start(command, dict(os.environ), folder / "start.log")
    _await(lambda: (folder / "munge.socket").exists(), 20.0)
    return daemon


def _start(command: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**environ, "PATH": search_path()},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _await_idle(cluster: Cluster) -> None:
    def both_idle() -> bool:
        with suppress(AssertionError):
            return cluster.call("sinfo", "-h", "-o", "%T %D", "-p", "low").strip() == "idle 2"
        return False

    assert _await(both_idle, 60.0), cluster.logs()


def _await_no_jobs(cluster: Cluster) -> None:
    _await(lambda: not cluster.call("squeue", "-h", timeout_s=5).strip(), 20.0)


def _await(happened, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
