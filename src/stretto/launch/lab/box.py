"""A lab that exists: built on entry, gone on exit, with byte counters in between."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stretto.launch.lab.leftovers import clear, clear_leftovers
from stretto.launch.lab.locks import forget, lock_folder, new_id
from stretto.launch.lab.plan import LabNames, LabSpec, Place, build_commands
from stretto.launch.lab.shell import require_tools, run_tool


@dataclass(frozen=True, slots=True)
class HostBytes:
    """What one host's link carried, counted at the host's end: retransmissions count too."""

    host: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """The handle on a lab that exists; made by `open_box`."""

    spec: LabSpec
    names: LabNames

    def command_in(self, place: Place, argv: Sequence[str]) -> list[str]:
        """Return ``argv`` changed so that it runs on that host, or the head."""
        return ["ip", "netns", "exec", self.names.namespace(place), *argv]

    def counters(self) -> tuple[HostBytes, ...]:
        """Return what each host has sent and received since the lab was built."""
        return tuple(self._count(host) for host in range(self.spec.hosts))

    def _count(self, host: int) -> HostBytes:
        inside = self.names.namespace(host)
        shown = run_tool(("ip", "-n", inside, "-s", "-j", "link", "show", "dev", self.names.link))
        counted = json.loads(shown)[0]["stats64"]
        return HostBytes(host, counted["tx"]["bytes"], counted["rx"]["bytes"])


@contextmanager
def open_box(spec: LabSpec, *, say: Callable[[str], None]) -> Iterator[Box]:
    """Clear what dead labs left, build this one, yield it, and leave nothing of it behind.

    Raises:
        LabError: something is missing here, or a command of the system failed.
    """
    require_tools(spec)
    folder = lock_folder()
    for dead in clear_leftovers(folder):
        say(f"cleared what lab {dead} had left")
    with new_id(folder) as (lab_id, lock_fd):
        try:
            for command in build_commands(spec, lab_id):
                run_tool(command, lock_fd=lock_fd)
            yield Box(spec, LabNames(lab_id))
        finally:
            clear(lab_id)
            forget(folder, lab_id)
