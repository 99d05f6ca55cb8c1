"""Evaluation of more samples than fit in one batch of 256, on one rank and on two."""

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.run import RunConfig, assemble, prepare
from stretto.train.evaluate import evaluate

NUM_SAMPLES = 700
SETTINGS = ["data.samples=12", f"data.test_samples={NUM_SAMPLES}", "data.size=8", "model.width=2"]
SETTINGS += ["train.batch=12"]


@pytest.mark.parametrize("size", [1, 2])
def test_every_sample_counts_once(size, tmp_path):
    def work(transport):
        loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={tmp_path}"])
        world = World(transport.rank, Mesh((transport.size,)))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
        result = evaluate(parts, steps_done=1)
        inputs, targets = parts.test_source.batch(np.arange(NUM_SAMPLES))
        parts.model.eval()
        with torch.no_grad():
            outputs = parts.model(inputs)
        parts.strategy.close()
        return result, outputs, targets

    for result, outputs, targets in run_threads(size, work):
        assert len(targets) == NUM_SAMPLES
        assert result.loss == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())
        assert result.accuracy == pytest.approx((outputs.argmax(1) == targets).double().mean())
