"""A door to be knocked at, and the knocking: can one rank open a connection to another?

A visitor says the token it found on the store; the door answers with its rank and the token. So
a stranger that happens to listen at the same address is not taken for the peer.
"""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.doctor.records import Door

CONNECT_S = 2.0
"""Time for two lost packets: the kernel tries again after one second."""
ANSWER_S = 1.0

CONNECTED = "connected"
"""How a failure begins that is not the network's."""

_LONGEST = 200


@contextmanager
def opened(address: str, rank: int, token: str) -> Iterator[Door | None]:
    """Listen on a free port of ``address`` while the context lasts; None without an address."""
    if not address:
        yield None
        return

    class Greet(socketserver.StreamRequestHandler):
        timeout = ANSWER_S

        def handle(self) -> None:
            if self.rfile.readline(_LONGEST) == _request(token):
                self.wfile.write(_reply(rank, token))

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        request_queue_size = 1024
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: a visitor that went away in the middle is no news here."""

    with Server((address, 0), Greet) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield Door(address, server.server_address[1], token)
        finally:
            server.shutdown()
            serving.join()


def knock(door: Door, rank: int) -> str:
    """Return why the peer ``rank`` behind ``door`` cannot be reached; nothing when it answered."""
    try:
        with socket.create_connection((door.address, door.port), timeout=CONNECT_S) as visit:
            return _talk(visit, _request(door.token), _reply(rank, door.token))
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "refused"
    except OSError as failure:
        return (failure.strerror or str(failure)).lower()


def _talk(visit: socket.socket, request: bytes, expected: bytes) -> str:
    visit.settimeout(ANSWER_S)
    try:
        visit.sendall(request)
        answer = visit.makefile("rb").readline(_LONGEST)
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
