"""Resident set of a rank, zero3 against DDP: a model of 400 MB on 4 ranks.

    python benchmarks/resident.py          keeps records; exit status 1 if the claim is broken

Each strategy trains in processes of its own, in a cluster in a box. What is told is the largest
resident set of any rank in steady steps, above that of the process before a model was built.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from record import record
from torch import Tensor, nn

from stretto.cluster.detect import detect
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.config import load
from stretto.measure.ddp import Peers
from stretto.measure.interleave import largest
from stretto.model import GPTConfig, build_model, per_sample_loss
from stretto.optim import make_optimizer
from stretto.plan.units import called_modules
from stretto.recipes.benchmarks import gpt_25mb
from stretto.run import RunConfig
from stretto.strategy import build_strategy

RANKS, ALLOWED = 4, 0.45
LAB = ["stretto", "lab", "--hosts", str(RANKS), "--rate", "10gbit", "--"]
MODEL = ["model.width=1024", "model.heads=8", "optim.momentum=0.9", f"train.batch={RANKS}"]
DDP = "ddp"
STRATEGIES = (DDP, "zero2", "zero3")
_STEPS = 3

Loss = Callable[[nn.Module], Tensor]
Steps = tuple[Callable[[], None], Callable[[], None]]
"""What takes a step, and what ends it all."""


def main() -> int:
    """Measure all, keep the record, say whether the claim holds; or be a rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank-of", choices=STRATEGIES)
    rank_of = parser.parse_args().rank_of
    if rank_of is not None:
        train(rank_of)
        return 0
    above: dict[str, float] = {}
    for name in STRATEGIES:
        me = ["python", "benchmarks/resident.py", "--rank-of", name]
        code, rows = record(f"resident_{name}_{RANKS}x1", [*LAB, *me])
        if code:
            return code
        above[name] = float(str(rows[0]["above_import_bytes"]))
    ratio = above["zero3"] / above[DDP]
    held = ratio <= ALLOWED
    print(f"zero3 / {DDP}: {ratio:.3f}: {'holds' if held else 'BROKEN'}: {ALLOWED}")
    return 0 if held else 1


def train(name: str) -> None:
    """Take steps as one rank; rank 0 tells what the largest of all kept."""
    torch.set_num_threads(1)
    world = detect()
    channel = connect(world)
    process = psutil.Process()
    bare = process.memory_info().rss
    with Peers(world) as peers:
        step, end = _ddp(channel, peers) if name == DDP else _sharded(channel, name)
        for _ in range(2):
            step()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the largest so far
        for _ in range(_STEPS):
            step()
        most = largest(float(_largest_resident_set() - bare), channel)
        end()
    if world.rank == 0:
        print(json.dumps({"strategy": name, "above_import_bytes": int(most), "bare_bytes": bare}))
    channel.close()


def _ddp(channel: Channel, peers: Peers) -> Steps:
    config, model, loss = _beginning(channel, [])
    optimizer = make_optimizer(config.optim, model)(model.parameters())
    wrapped = peers.ddp(model, 25)

    def step() -> None:
        loss(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, lambda: None


def _sharded(channel: Channel, plan: str) -> Steps:
    words = ["strategy.kind=sharded", f"strategy.plan={plan}"]
    config, model, loss = _beginning(channel, words)
    with torch.no_grad():
        calls = called_modules(model, lambda: loss(model))
    strategy = build_strategy(config.strategy, channel, calls=calls)
    strategy.attach(model, make_optimizer(config.optim, model))

    def step() -> None:
        strategy.begin(0, 0, True, 0.01)
        loss(model).backward()
        strategy.after_backward()
        strategy.after_update()

    def end() -> None:
        strategy.settle()
        strategy.close()

    return step, end


def _beginning(channel: Channel, words: list[str]) -> tuple[RunConfig, nn.Module, Loss]:
    config = load(RunConfig, None, [*MODEL, *words], recipe=gpt_25mb(channel.size)).config
    assert isinstance(config.model, GPTConfig)
    tokens = torch.randint(config.model.vocab, (1, config.model.context + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = build_model(config.model, 0)
    return config, model, lambda whole: per_sample_loss(whole(inputs), targets).mean()


def _largest_resident_set() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (told,) = [line for line in lines if line.startswith("VmHWM")]
    return int(told.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
