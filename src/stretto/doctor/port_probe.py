"""Probe TCP connections between ranks: listen on a port, and connect to those of peers.

A client sends the token that the server has published on the store; the server answers with its
rank and the token. Another program that listens at the same address is thus not taken for the peer.
"""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from stretto.cluster.world import Mesh
from stretto.doctor.records import ProbeEndpoint, ProbeResult

CONNECT_TIMEOUT_S = 2.0
"""Long enough for a lost SYN packet, which the kernel sends again after one second."""
ANSWER_TIMEOUT_S = 1.0

CONNECTED = "connected"
"""Prefix of failures after the connection was made, which are not due to the network."""

_MAX_LINE_BYTES = 200


@contextmanager
def serve_probes(address: str, rank: int, token: str) -> Iterator[ProbeEndpoint | None]:
    """Listen on a free port of ``address`` while the context lasts; None without an address."""
    if not address:
        yield None
        return

    class ProbeHandler(socketserver.StreamRequestHandler):
        timeout = ANSWER_TIMEOUT_S

        def handle(self) -> None:
            if self.rfile.readline(_MAX_LINE_BYTES) == _request(token):
                self.wfile.write(_reply(rank, token))

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        request_queue_size = 1024
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that disconnect early."""

    with Server((address, 0), ProbeHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield ProbeEndpoint(address, server.server_address[1], token)
        finally:
            server.shutdown()
            serving.join()


def probe_port(endpoint: ProbeEndpoint, rank: int) -> str:
    """Return "" if peer ``rank`` answers at ``endpoint``, otherwise the reason it does not."""
    try:
        with socket.create_connection(
            (endpoint.address, endpoint.port), timeout=CONNECT_TIMEOUT_S
        ) as connection:
            return _exchange_lines(
                connection, _request(endpoint.token), _reply(rank, endpoint.token)
            )
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "refused"
    except OSError as failure:
        return (failure.strerror or str(failure)).lower()


def _exchange_lines(connection: socket.socket, request: bytes, expected: bytes) -> str:
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        connection.sendall(request)
        answer = connection.makefile("rb").readline(_MAX_LINE_BYTES)
    except TimeoutError:
        return f"{CONNECTED}, but nobody answers"
    except ConnectionResetError:
        return f"{CONNECTED}, then reset"
    if not answer:
        return f"{CONNECTED}, then closed without an answer"
    return "" if answer == expected else f"{CONNECTED}, but another program answers there"


def _request(token: str) -> bytes:
    return f"stretto doctor {token}\n".encode()


def _reply(rank: int, token: str) -> bytes:
    return f"rank {rank} {token}\n".encode()


ALL_PAIRS_MAX_RANKS = 32
"""Most ranks for which every pair is probed."""
MAX_CONCURRENT_PROBES = 32
START_WITHIN_S = 2.0
"""A probe that could not start within this time is skipped."""
PROBE_ROUND_S = START_WITHIN_S + CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S
"""Most seconds that `probe_peers` takes."""

NOT_TRIED = "not tried, too many other peers did not answer in time"


def peers_to_probe(rank: int, mesh: Mesh, present_ranks: Sequence[int]) -> list[int]:
    """Return the peers that ``rank`` probes: all of them in a small world.

    In a large world the first rank of each host probes the first rank of every other host, and each
    rank probes its two neighbours. Every host is thus probed from every other host, and every rank
    from both sides.
    """
    others = [other for other in present_ranks if other != rank]
    if len(present_ranks) <= ALL_PAIRS_MAX_RANKS:
        return others
    first_ranks = {mesh.host_of(other): other for other in sorted(present_ranks, reverse=True)}
    index = sorted(present_ranks).index(rank)
    neighbours = {
        sorted(present_ranks)[(index + offset) % len(present_ranks)] for offset in (-1, 1)
    }
    probed = neighbours | (set(first_ranks.values()) if rank in first_ranks.values() else set())
    return sorted(probed - {rank})


def probe_peers(endpoints: Mapping[int, ProbeEndpoint | None]) -> tuple[ProbeResult, ...]:
    """Probe all endpoints concurrently; return within `PROBE_ROUND_S` even if none answers."""
    start_by_s = time.monotonic() + START_WITHIN_S

    def probe(peer: int) -> ProbeResult:
        endpoint = endpoints[peer]
        if endpoint is None:
            return ProbeResult(peer, "", "it has no address to listen on")
        if time.monotonic() > start_by_s:
            return ProbeResult(peer, f"{endpoint.address}:{endpoint.port}", NOT_TRIED)
        return ProbeResult(peer, f"{endpoint.address}:{endpoint.port}", probe_port(endpoint, peer))

    with ThreadPoolExecutor(MAX_CONCURRENT_PROBES, thread_name_prefix="stretto-doctor") as pool:
        return tuple(pool.map(probe, endpoints))
