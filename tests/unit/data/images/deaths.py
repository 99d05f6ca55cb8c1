"""Decoders that are killed by chosen files."""

import os
import select
import signal

import psutil

from stretto.data.images import decoder_pool as process


def kill_when_asked(monkeypatch, is_deadly):
    """Kill decoders that get a chosen file, as a bug in a codec would."""
    send_request = process.DecoderProcess.send_request

    def deadly_ask(decoder, ticket, path):
        if is_deadly(path):
            os.kill(decoder.pid, signal.SIGSTOP)
            send_request(decoder, ticket, path)
            os.kill(decoder.pid, signal.SIGKILL)
        else:
            send_request(decoder, ticket, path)

    monkeypatch.setattr(process.DecoderProcess, "send_request", deadly_ask)


def ask_when_ready(monkeypatch):
    """Make a new decoder ready before its first request; without this the order is random."""
    create = process.DecoderProcess.__init__

    def create_and_wait(decoder, *settings):
        create(decoder, *settings)
        poller = select.poll()
        decoder.register_with(poller)
        assert poller.poll(20_000), "the decoder has not said that it is ready"

    monkeypatch.setattr(process.DecoderProcess, "__init__", create_and_wait)


def decoder_pids():
    """Return the ids of the decoders that this process has started and that run."""
    running = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in running if str(process.SCRIPT) in child.cmdline()]
