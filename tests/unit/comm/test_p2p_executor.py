"""Exchanges and their callbacks run in submission order; failures are raised by `wait`."""

import pytest
import torch

from stretto.comm.in_process_transports import run_threads, thread_transports
from stretto.comm.p2p_executor import P2PExecutor
from stretto.comm.transport import P2POp


def test_on_complete_sees_the_received_tensors_and_runs_before_the_next_exchange():
    def on_rank(transport):
        p2p_executor, seen = P2PExecutor(transport), []
        buffers = [torch.zeros(1), torch.zeros(1)]
        for number, buffer in enumerate(buffers):
            message = torch.tensor([float(10 * number + transport.rank)])
            p2p_ops = (
                [P2POp(1 - transport.rank, message, 1)],
                [P2POp(1 - transport.rank, buffer, 1)],
            )
            work = p2p_executor.start(*p2p_ops, 1, lambda: seen.append([float(b) for b in buffers]))
        work.wait()
        p2p_executor.close()
        return seen

    assert run_threads(2, on_rank) == [[[1.0, 0.0], [1.0, 11.0]], [[0.0, 0.0], [0.0, 10.0]]]


def test_an_empty_exchange_still_runs_on_complete_and_raises_its_failure():
    p2p_executor = P2PExecutor(thread_transports(1)[0])
    p2p_executor.start([], [], 1).wait()
    work = p2p_executor.start([], [], 1, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    p2p_executor.close()
