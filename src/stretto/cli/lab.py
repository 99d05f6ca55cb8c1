"""``stretto lab``: run a command on an emulated cluster on this machine."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from stretto.errors import ConfigError
from stretto.lab.run_in_lab import LabResult, run_in_lab
from stretto.lab.spec import LabSpec
from stretto.units import format_bytes, format_s, parse_bits_per_s, parse_fraction

T = TypeVar("T")


def lab(
    *command: str,
    hosts: int = 4,
    ranks_per_host: int = 1,
    rate: str | None = None,
    loss: str = "0%",
    json_: bool = False,
) -> int:
    """Run COMMAND as every rank of an emulated cluster: hosts are namespaces, links are shaped.

    Example: stretto lab --hosts 4 --rate 400mbit -- stretto bench step

    Parameters
    ----------
    command
        The command of each rank, after --; it gets torchrun's environment variables.
    hosts
        Number of hosts: network namespaces with one link each.
    ranks_per_host
        Ranks that share a host and its link.
    rate
        Rate of each link in each direction, as 400mbit; unshaped when left out.
    loss
        Share of packets that each host drops on arrival, as 0.1%.
    json_
        Print the result as one object on the last line of standard output.
    """
    bits_per_s = _parse_option("--rate", parse_bits_per_s, rate) if rate else None
    spec = LabSpec(hosts, ranks_per_host, bits_per_s, _parse_option("--loss", parse_fraction, loss))
    result = run_in_lab(spec, _use_this_interpreter(command), log_line=_say)
    _print_result(result, as_json=json_)
    return result.exit_code


def _parse_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """Parse an option's text; errors name the option."""
    try:
        return parse(text)
    except ConfigError as wrong:
        raise ConfigError(f"{option}: {wrong}") from None


def _use_this_interpreter(command: tuple[str, ...]) -> list[str]:
    """Replace a leading ``stretto`` with this interpreter's, which may not be on PATH."""
    if command[:1] == ("stretto",):
        return [sys.executable, "-m", "stretto", *command[1:]]
    return list(command)


def _print_result(result: LabResult, *, as_json: bool) -> None:
    if result.reason:
        _say(result.reason)
    if as_json:
        record = {
            "exit_code": result.exit_code,
            "seconds": result.seconds,
            "hosts": [asdict(host) for host in result.hosts],
            "failed_rank": result.failed_rank,
        }
        print(json.dumps(record))
        return
    _say(f"ended with {result.exit_code} after {format_s(result.seconds)}; over the links went:")
    for host in result.hosts:
        sent, received = format_bytes(host.sent_bytes), format_bytes(host.received_bytes)
        _say(f"  host {host.host}: sent {sent}, received {received}")


def _say(line: str) -> None:
    print(f"stretto lab: {line}", file=sys.stderr)
