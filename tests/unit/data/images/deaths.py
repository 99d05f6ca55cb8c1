"""Decoders that die of chosen files, at a chosen moment."""

import os
import select
import signal

from stretto.data.images import process
from stretto.data.images.pool import Pool


def kill_when_asked(monkeypatch, is_deadly):
    """Let decoders die of chosen files, as they would of a bug in a codec."""
    ask = process.Decoder.ask

    def deadly_ask(decoder, ticket, path):
        if is_deadly(path):
            os.kill(decoder.pid, signal.SIGSTOP)
            ask(decoder, ticket, path)
            os.kill(decoder.pid, signal.SIGKILL)
        else:
            ask(decoder, ticket, path)

    monkeypatch.setattr(process.Decoder, "ask", deadly_ask)


def ask_when_ready(monkeypatch):
    """Let a new decoder say that it is ready before it is asked, as chance decides otherwise."""
    hand_out = Pool._hand_out

    def patient(pool, work):
        if not pool._decoders:
            decoder = pool._spawner.submit(process.Decoder, *pool._settings).result()
            pool._decoders.append(decoder)
            poller = select.poll()
            decoder.watch(poller)
            poller.poll(20_000)
            pool._listen(decoder, work)
        hand_out(pool, work)

    monkeypatch.setattr(Pool, "_hand_out", patient)
