"""All checks of the doctor; here those that compare ranks: code, mesh, clocks, network."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

from stretto.cluster.heartbeats import HEARTBEAT_INTERVAL_S, SILENCE_WARNING_S
from stretto.cluster.rendezvous import mesh_from_rank_infos
from stretto.doctor.local_facts import is_loopback
from stretto.doctor.machine_checks import (
    RankProblem,
    check_disk_space,
    check_file_limit,
    check_folder,
    check_hardware,
    check_shared_memory,
    check_threads,
    check_torch_build,
    find_rank_problems,
    join_distinct,
    make_finding,
)
from stretto.doctor.port_probe import CONNECTED, NOT_TRIED
from stretto.doctor.records import (
    ClockOffset,
    Code,
    Examination,
    Facts,
    Finding,
    ProbeResult,
    Status,
)
from stretto.errors import LaunchError
from stretto.telemetry.event_text import ranks_text
from stretto.units import format_s

CLOCK_WARNING_S = 2.0
CLOCK_FAILURE_S = 30.0
SHORT_KILL_WAIT_S = 30.0
"""Slurm's default time between TERM and KILL, in which a run must save a checkpoint."""


def check_code(examination: Examination) -> Finding:
    """Find ranks that run other code than the majority, and what differs."""
    counts = Counter(_comparison_key(facts.code) for facts in examination.facts.values())
    # On a tie the code of the lowest rank comes first.
    common = counts.most_common(1)[0][0]
    majority = next(f.code for f in examination.facts.values() if _comparison_key(f.code) == common)
    advice = "install the same stretto and the same packages on every host, or share one folder"
    unreadable = [
        RankProblem(rank, "sends its facts in a form this version cannot read: other code", advice)
        for rank in examination.present_ranks
        if rank not in examination.facts
    ]

    def find_problem(facts: Facts) -> RankProblem | None:
        if _comparison_key(facts.code) == common:
            return None
        text = f"other code than most: {describe_code_differences(facts.code, majority)}"
        return RankProblem(facts.identity.rank_info.rank, text, advice)

    versions = ", ".join(f"{name} {number}" for name, number in majority.versions.items())
    ok_text = f"the same {len(majority.files)} files of stretto everywhere, {versions}"
    return make_finding(
        "code", examination, [*find_rank_problems(examination, find_problem), *unreadable], ok_text
    )


def describe_code_differences(actual: Code, majority: Code) -> str:
    """Return up to four differences between two ranks' code: versions first, then files."""
    versions = [
        f"{name} {actual.versions.get(name)}"
        for name in _differing_keys(actual.versions, majority.versions)
    ]
    files = _differing_keys(actual.files, majority.files)
    reported = [*versions, *files]
    more = f" and {len(reported) - 4} more" if len(reported) > 4 else ""
    return ", ".join(reported[:4]) + more


def _differing_keys(actual: Mapping[str, str], majority: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*actual, *majority} if actual.get(name) != majority.get(name))


def _comparison_key(code: Code) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(sorted(code.versions.items())), tuple(sorted(code.files.items()))


def check_launcher(examination: Examination) -> Finding:
    """Report the launcher that was detected, and from which variables."""
    return Finding(
        "launcher",
        "ok",
        (),
        join_distinct(f.identity.detected_by for f in examination.facts.values()),
    )


def check_mesh(examination: Examination) -> Finding:
    """Check that ranks and hosts, as each rank reports them, form one mesh."""
    advice = "start all ranks with one command of one launcher, host after host"
    duplicate_ranks = [
        RankProblem(
            rank, f"claimed by a second process ({where})", "give each process its own rank"
        )
        for rank, where in examination.duplicate_ranks.items()
    ]
    rank_infos = [examination.facts[rank].identity.rank_info for rank in sorted(examination.facts)]
    try:
        counts = mesh_from_rank_infos(rank_infos).ranks_per_host
    except LaunchError as wrong:
        return Finding("mesh", "FAIL", (), str(wrong), advice)
    problems = [
        *duplicate_ranks,
        *find_rank_problems(examination, lambda facts: _shared_machine_problem(examination, facts)),
    ]
    shape = f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
    hosts = join_distinct(facts.identity.host for facts in examination.facts.values())
    return make_finding("mesh", examination, problems, f"hosts x ranks: {shape} ({hosts})")


def _shared_machine_problem(examination: Examination, facts: Facts) -> RankProblem | None:
    """Warn if two hosts are one machine, except in a lab, which emulates hosts."""
    identity = facts.identity
    same_machine_hosts = [
        other.identity.host
        for other in examination.facts.values()
        if other.identity.machine_id == identity.machine_id
        and other.identity.rank_info.host_name != identity.rank_info.host_name
    ]
    if not same_machine_hosts or identity.rank_info.launcher == "stretto lab":
        return None
    text = (
        f"the launcher takes it for another host than {join_distinct(same_machine_hosts)}, and "
        "they are one machine"
    )
    advice = "let the launcher count the machine once, or its cores and GPUs are given out twice"
    return RankProblem(identity.rank_info.rank, text, advice, "warn")


def check_clocks(examination: Examination) -> Finding:
    """Compare every rank's wall clock with the coordinator's."""
    others = {
        rank: reported
        for rank, reported in sorted(examination.probe_reports.items())
        if rank != examination.coordinator
    }
    clock_problems = [
        _clock_problem(rank, reported.clock, examination.coordinator)
        for rank, reported in others.items()
    ]
    at_most_s = [
        abs(reported.clock.ahead_s) + reported.clock.uncertainty_s
        for reported in others.values()
        if reported.clock is not None
    ]
    ok_text = (
        f"within {format_s(max(at_most_s))} of rank {examination.coordinator}'s"
        if at_most_s
        else "one only"
    )
    return make_finding(
        "clock", examination, [problem for problem in clock_problems if problem], ok_text
    )


def _clock_problem(rank: int, measured: ClockOffset | None, coordinator: int) -> RankProblem | None:
    if measured is None:
        return RankProblem(rank, "its clock could not be read", "run the doctor once more", "warn")
    off_s = _min_offset_s(measured)
    if off_s <= CLOCK_WARNING_S:
        return None
    side = "ahead of" if measured.ahead_s > 0 else "behind"
    text = f"its clock is {format_s(off_s)} {side} that of rank {coordinator}"
    advice = "set clocks by NTP (`timedatectl set-ntp true`): times in logs and requeues are wrong"
    return RankProblem(rank, text, advice, "FAIL" if off_s > CLOCK_FAILURE_S else "warn")


def _min_offset_s(measured: ClockOffset) -> float:
    """Return the least offset that a measurement proves."""
    return max(0.0, abs(measured.ahead_s) - measured.uncertainty_s)


def check_timeouts(examination: Examination) -> Finding:
    """Check that time-outs are in increasing order, and compare with Slurm's kill wait."""
    ladder = {
        "heartbeat every": HEARTBEAT_INTERVAL_S,
        "named after": SILENCE_WARNING_S,
        "given up after run.heartbeat_timeout_s": examination.requirements.heartbeat_timeout_s,
        "collective ends after run.timeout_s": examination.requirements.timeout_s,
    }
    line = " < ".join(f"{name} {format_s(value)}" for name, value in ladder.items())
    for (lower, low_s), (upper, high_s) in pairwise(ladder.items()):
        if high_s <= low_s:
            found = f"{upper} {format_s(high_s)} is not above {lower} {format_s(low_s)}"
            setting = upper.split()[-1]
            return Finding("time-outs", "FAIL", (), found, f"raise {setting} above {low_s:g}")
    kill_wait_s = examination.coordinator_facts.machine.kill_wait_s
    if kill_wait_s is None:
        return Finding("time-outs", "ok", (), line)
    line += f"; Slurm leaves {format_s(kill_wait_s)} between TERM and KILL"
    if kill_wait_s >= SHORT_KILL_WAIT_S:
        return Finding("time-outs", "ok", (), line)
    advice = "have Slurm warn earlier (sbatch --signal=USR1@120), so that a checkpoint gets done"
    return Finding("time-outs", "warn", (), line, advice)


# --- Rendezvous, interfaces, ports and connections between ranks ---

FEW_PORTS = 1000
INTERFACE_VARIABLES = "STRETTO_INTERFACE or GLOO_SOCKET_IFNAME"
_OPEN_PORTS_ADVICE = (
    "open TCP ports 1024-65535 between the hosts, or name another interface in STRETTO_INTERFACE"
)

_STOPPED_PROCESS_ADVICE = (
    "look whether that process is stopped (state T in `ps`) or another one took its port"
)


def check_rendezvous(examination: Examination) -> Finding:
    """Report ranks that did not join, or why the rendezvous failed."""
    name = "rendezvous"
    if examination.rendezvous_error:
        what, _, to_do = examination.rendezvous_error.partition("; ")
        advice = to_do or "look into the launcher's log, and start all ranks again together"
        return Finding(name, "FAIL", (examination.coordinator,), what, advice)
    missing = tuple(sorted(set(range(examination.size)) - set(examination.present_ranks)))
    store_address = examination.coordinator_facts.identity.store_address
    if missing:
        return Finding(
            name,
            "FAIL",
            missing,
            f"{ranks_text(missing)} of {examination.size} never came to the store at "
            f"{store_address}",
            "check whether these processes run and read their logs; MASTER_ADDR and MASTER_PORT "
            "must be equal on all ranks; ranks that start slowly need a larger --patience",
        )
    if not store_address:
        return Finding(name, "ok", (), "one rank, nobody to wait for")
    return Finding(name, "ok", (), f"all {examination.size} ranks came to {store_address}")


def check_interfaces(examination: Examination) -> Finding:
    """Find ranks whose interface does not exist, is down, or does not lead to the store."""
    hosts = {facts.identity.rank_info.host_name for facts in examination.facts.values()}

    def find_problem(facts: Facts) -> RankProblem | None:
        return _interface_problem(facts, several_hosts=len(hosts) > 1)

    if not examination.coordinator_facts.identity.store_address:
        return Finding("interfaces", "ok", (), "none needed by one rank")
    ok_text = join_distinct(
        f"{network.requested_interface or network.route_interface} ({network.address})"
        for network in (facts.network for facts in examination.facts.values())
    )
    return make_finding(
        "interfaces", examination, find_rank_problems(examination, find_problem), ok_text
    )


def _interface_problem(facts: Facts, *, several_hosts: bool) -> RankProblem | None:
    """Return the worst problem of a rank's interface; the last ones may be intended."""
    net, rank = facts.network, facts.identity.rank_info.rank
    if not net.address:
        text = f"no interface leads to the store {facts.identity.store_address}"
        return RankProblem(rank, text, "check this host's routes, and MASTER_ADDR")
    if not net.requested_interface:
        return None
    instead = (
        f"name {net.route_interface or 'the one that `ip route get` shows'} there, or unset it"
    )
    # A fast fabric beside the network over which jobs are started is not an error.
    elsewhere = f"is not the one towards the store ({net.route_interface})"
    unless_intended = f"unless that is intended, {instead}"
    table: tuple[tuple[bool, str, str, Status], ...] = (
        (
            net.requested_interface not in net.interface_names,
            f"does not exist; there are {join_distinct(net.interface_names)}",
            instead,
            "FAIL",
        ),
        (
            not net.requested_is_up,
            "is down",
            f"`ip link set {net.requested_interface} up`, or {instead}",
            "FAIL",
        ),
        (not net.requested_address, "has no address", instead, "FAIL"),
        (
            several_hosts and is_loopback(net.requested_address),
            "is loopback, and there are peers on other hosts",
            instead,
            "FAIL",
        ),
        (
            net.route_interface not in ("", net.requested_interface),
            elsewhere,
            unless_intended,
            "warn",
        ),
    )
    for holds, text, advice, status in table:
        if holds:
            return RankProblem(
                rank,
                f"interface {net.requested_interface}, named by {INTERFACE_VARIABLES}, {text}",
                advice,
                status,
            )
    return None


def check_peers(examination: Examination) -> Finding:
    """Report the ordered pairs of ranks that cannot open a connection."""
    silent = [
        RankProblem(
            rank,
            "came, then never reported which peers it reached",
            "check whether this process was stopped or ended, and read its log",
        )
        for rank in examination.present_ranks
        if rank not in examination.probe_reports
    ]
    failed = [
        _probe_problem(rank, probe)
        for rank, report in sorted(examination.probe_reports.items())
        for probe in report.probes
        if probe.failure
    ]
    tried = sum(len(report.probes) for report in examination.probe_reports.values())
    if examination.size > 1 and not tried and not silent:
        return Finding("peers", "warn", (), "no other rank could be tried", "see rendezvous")
    ok_text = (
        f"all {tried} ways between {examination.size} ranks are open" if tried else "one rank, none"
    )
    return make_finding("peers", examination, [*silent, *failed], ok_text)


def _probe_problem(rank: int, probe: ProbeResult) -> RankProblem:
    where = f" at {probe.address}" if probe.address else ""
    text = f"cannot connect to rank {probe.peer}{where}: {probe.failure}"
    advice = _STOPPED_PROCESS_ADVICE if probe.failure.startswith(CONNECTED) else _OPEN_PORTS_ADVICE
    return RankProblem(rank, text, advice, "warn" if probe.failure == NOT_TRIED else "FAIL")


def check_ports(examination: Examination) -> Finding:
    """Check that enough ephemeral ports are free for outgoing connections and process groups."""
    required_count = 2 * examination.size + 64

    def find_problem(facts: Facts) -> RankProblem | None:
        rank, network = facts.identity.rank_info.rank, facts.network
        total = network.ports_high - network.ports_low + 1
        span = f"{network.ports_low}-{network.ports_high}"
        advice = "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'`"
        if total - network.ports_used < required_count:
            text = (
                f"{network.ports_used} of {total} ports {span} are taken, {required_count} are "
                "needed"
            )
            return RankProblem(rank, text, f"end what holds them (`ss -tan`), or {advice}")
        if total < FEW_PORTS:
            return RankProblem(rank, f"only {total} ports for connections ({span})", advice, "warn")
        return None

    network = examination.coordinator_facts.network
    free = network.ports_high - network.ports_low + 1 - network.ports_used
    ok_text = f"{free} ports free for connections, at most {required_count} needed"
    return make_finding(
        "ports", examination, find_rank_problems(examination, find_problem), ok_text
    )


CHECKS: tuple[Callable[[Examination], Finding], ...] = (
    check_hardware,
    check_torch_build,
    check_code,
    check_launcher,
    check_rendezvous,
    check_mesh,
    check_interfaces,
    check_peers,
    check_ports,
    check_disk_space,
    check_folder,
    check_clocks,
    check_file_limit,
    check_shared_memory,
    check_threads,
    check_timeouts,
)
"""All checks in the order of the report; each is a pure function of the examination."""


def run_checks(examination: Examination) -> list[Finding]:
    """Return the finding of every check."""
    return [check(examination) for check in CHECKS]
