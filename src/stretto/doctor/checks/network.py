"""How ranks reach one another: interfaces, ports, and every pair that was tried."""

from stretto.doctor.checks.problems import Problem, each, finding, per_rank
from stretto.doctor.door import CONNECTED
from stretto.doctor.network import is_loopback
from stretto.doctor.records import Examination, Facts, Finding, Status, Visit
from stretto.doctor.rounds import NOT_TRIED
from stretto.telemetry.wording import ranks_in_words

FEW_PORTS = 1000
NAMED_BY = "STRETTO_INTERFACE or GLOO_SOCKET_IFNAME"
_OPEN = (
    "open TCP ports 1024-65535 between the hosts, or name another interface in STRETTO_INTERFACE"
)

_WAKE = "look whether that process is stopped (state T in `ps`) or another one took its port"


def roll_call(seen: Examination) -> Finding:
    """Tell who did not come, or why nobody could be met."""
    name = "roll call"
    if seen.trouble:
        what, _, to_do = seen.trouble.partition("; ")
        advice = to_do or "look into the launcher's log, and start all ranks again together"
        return Finding(name, "FAIL", (seen.speaker,), what, advice)
    missing = tuple(sorted(set(range(seen.size)) - set(seen.came)))
    meeting = seen.own.place.meeting
    if missing:
        return Finding(
            name,
            "FAIL",
            missing,
            f"{ranks_in_words(missing)} of {seen.size} never came to the meeting at {meeting}",
            "look whether these processes run and what their logs say; the others must find "
            "MASTER_ADDR and MASTER_PORT alike; slow starters need a larger --patience",
        )
    if not meeting:
        return Finding(name, "ok", (), "one rank, nobody to wait for")
    return Finding(name, "ok", (), f"all {seen.size} ranks came to {meeting}")


def interfaces(seen: Examination) -> Finding:
    """Look for an interface that is not there, is down, or leads elsewhere."""
    hosts = {facts.place.card.host_name for facts in seen.facts.values()}

    def look(facts: Facts) -> Problem | None:
        return _wrong_interface(facts, several_hosts=len(hosts) > 1)

    if not seen.own.place.meeting:
        return Finding("interfaces", "ok", (), "none needed by one rank")
    fine = each(
        f"{facts.network.asked or facts.network.towards} ({facts.network.address})"
        for facts in seen.facts.values()
    )
    return finding("interfaces", seen, per_rank(seen, look), fine)


def _wrong_interface(facts: Facts, *, several_hosts: bool) -> Problem | None:
    """Return the first that holds, from what is certainly wrong to what may be meant."""
    net, rank = facts.network, facts.place.card.rank
    if not net.address:
        text = f"no interface leads to the meeting point {facts.place.meeting}"
        return Problem(rank, text, "check this host's routes, and MASTER_ADDR")
    if not net.asked:
        return None
    instead = f"name {net.towards or 'the one that `ip route get` shows'} there, or unset it"
    # A fast fabric beside the network that jobs are started over is no mistake.
    elsewhere = f"is not the one towards the meeting point ({net.towards})"
    may_be_meant = f"unless that is meant, {instead}"
    table: tuple[tuple[bool, str, str, Status], ...] = (
        (
            net.asked not in net.known,
            f"does not exist; there are {each(net.known)}",
            instead,
            "FAIL",
        ),
        (not net.asked_is_up, "is down", f"`ip link set {net.asked} up`, or {instead}", "FAIL"),
        (not net.asked_address, "has no address", instead, "FAIL"),
        (
            several_hosts and is_loopback(net.asked_address),
            "is loopback, and there are peers on other hosts",
            instead,
            "FAIL",
        ),
        (net.towards not in ("", net.asked), elsewhere, may_be_meant, "warn"),
    )
    for holds, text, advice, status in table:
        if holds:
            return Problem(
                rank, f"interface {net.asked}, named by {NAMED_BY}, {text}", advice, status
            )
    return None


def peers(seen: Examination) -> Finding:
    """Tell which ordered pairs of ranks cannot open a connection."""
    silent = [
        Problem(
            rank,
            "came, then never told whom it reached",
            "look whether this process was stopped or ended, and what its log says",
        )
        for rank in seen.came
        if rank not in seen.rounds
    ]
    failed = [
        _failed_visit(rank, visit)
        for rank, round_ in sorted(seen.rounds.items())
        for visit in round_.visits
        if visit.failure
    ]
    tried = sum(len(round_.visits) for round_ in seen.rounds.values())
    if seen.size > 1 and not tried and not silent:
        return Finding("peers", "warn", (), "none came that could be tried", "see the roll call")
    fine = f"all {tried} ways between {seen.size} ranks are open" if tried else "one rank, none"
    return finding("peers", seen, [*silent, *failed], fine)


def _failed_visit(rank: int, visit: Visit) -> Problem:
    where = f" at {visit.address}" if visit.address else ""
    text = f"cannot connect to rank {visit.peer}{where}: {visit.failure}"
    advice = _WAKE if visit.failure.startswith(CONNECTED) else _OPEN
    return Problem(rank, text, advice, "warn" if visit.failure == NOT_TRIED else "FAIL")


def ports(seen: Examination) -> Finding:
    """Ask for enough ports that outgoing connections and groups can take."""
    need = 2 * seen.size + 64

    def look(facts: Facts) -> Problem | None:
        rank, network = facts.place.card.rank, facts.network
        total = network.ports_high - network.ports_low + 1
        span = f"{network.ports_low}-{network.ports_high}"
        advice = "`sysctl -w net.ipv4.ip_local_port_range='32768 60999'`"
        if total - network.ports_used < need:
            text = f"{network.ports_used} of {total} ports {span} are taken, {need} are needed"
            return Problem(rank, text, f"end what holds them (`ss -tan`), or {advice}")
        if total < FEW_PORTS:
            return Problem(rank, f"only {total} ports for connections ({span})", advice, "warn")
        return None

    own = seen.own.network
    free = own.ports_high - own.ports_low + 1 - own.ports_used
    fine = f"{free} ports free for connections, at most {need} needed"
    return finding("ports", seen, per_rank(seen, look), fine)
