"""Random numbers of forward differ by rank, step and micro-batch, and depend on nothing else."""

from dataclasses import replace

import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.run import RunConfig, assemble, prepare
from stretto.train.loop import train

SETTINGS = ["data.samples=24", "data.test_samples=4", "data.size=8", "model.width=2"]
SETTINGS += ["train.batch=12", "train.steps=2", "train.accumulation=2", "train.eval_every=99"]


class Drawing(nn.Module):
    """A model that keeps the random numbers which a dropout in its place would draw."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.drawn: list[tuple[float, ...]] = []

    def forward(self, inputs):
        if self.training:
            self.drawn.append(tuple(torch.rand(3).tolist()))
        return self.model(inputs)


def drawn_by_ranks(folder):
    def work(transport):
        loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}"])
        world = World(transport.rank, Mesh((transport.size,)))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
        model = Drawing(parts.model)
        train(replace(parts, model=model, checkpoints=None))
        parts.strategy.close()
        return model.drawn

    return run_threads(2, work)


def test_no_two_forwards_of_a_run_draw_the_same(tmp_path, monkeypatch):
    # Threads share torch's generator: one forward at a time, from its seed to its last number.
    import threading

    import stretto.train.step as step_module

    turn, seed = threading.RLock(), step_module.seed_randomness
    original = Drawing.forward

    def seed_alone(*where):
        turn.acquire()
        seed(*where)

    def draw_alone(self, inputs):
        try:
            return original(self, inputs)
        finally:
            if self.training:
                turn.release()

    monkeypatch.setattr(step_module, "seed_randomness", seed_alone)
    monkeypatch.setattr(Drawing, "forward", draw_alone)
    first, second = drawn_by_ranks(tmp_path / "a"), drawn_by_ranks(tmp_path / "b")
    assert [len(drawn) for drawn in first] == [4, 4]  # 2 steps of 2 micro-batches, on each rank
    assert len({numbers for drawn in first for numbers in drawn}) == 8
    assert first == second
