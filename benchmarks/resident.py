"""Compare the resident set of a rank under zero3 and DDP, for a model of 400 MB on 4 ranks.

    python benchmarks/resident.py          keeps records; exit status 1 if the claim is broken

Each strategy trains in its own processes, in a lab. The result is the largest resident set of any
rank in steady steps, minus that of the process before the model was built.
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

from stretto.bench.peers import PeerProcessGroup
from stretto.cluster.detect import detect_world
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.config import load
from stretto.models import GPTConfig, build_model, per_sample_loss
from stretto.optim import make_optimizer
from stretto.planner.model_units import called_modules
from stretto.profiler.interleaved_timing import all_reduce_max
from stretto.recipes.small_runs import gpt_25mb
from stretto.run import RunConfig
from stretto.strategies import build_strategy

RANKS, ALLOWED = 4, 0.45
LAB = ["stretto", "lab", "--hosts", str(RANKS), "--rate", "10gbit", "--"]
MODEL = ["model.width=1024", "model.heads=8", "optim.momentum=0.9", f"train.batch={RANKS}"]
DDP = "ddp"
STRATEGIES = (DDP, "zero2", "zero3")
_STEPS = 3

Loss = Callable[[nn.Module], Tensor]
Steps = tuple[Callable[[], None], Callable[[], None]]
"""A function that makes one step, and one that ends the run."""


def main() -> int:
    """Measure all strategies and check the claim; or run one rank of a strategy."""
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
    """Make steps as one rank; rank 0 prints the largest resident set of all ranks."""
    torch.set_num_threads(1)
    world = detect_world()
    transport = connect(world)
    process = psutil.Process()
    bare = process.memory_info().rss
    with PeerProcessGroup(world) as peers:
        step, end = _ddp(transport, peers) if name == DDP else _sharded(transport, name)
        for _ in range(2):
            step()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the largest value
        for _ in range(_STEPS):
            step()
        most = all_reduce_max(float(_largest_resident_set() - bare), transport)
        end()
    if world.rank == 0:
        print(json.dumps({"strategy": name, "above_import_bytes": int(most), "bare_bytes": bare}))
    transport.close()


def _ddp(transport: Transport, peers: PeerProcessGroup) -> Steps:
    config, model, loss = _build_run(transport, [])
    optimizer = make_optimizer(config.optim, model)(model.parameters())
    wrapped = peers.ddp(model, 25)

    def step() -> None:
        loss(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, lambda: None


def _sharded(transport: Transport, plan: str) -> Steps:
    settings = ["strategy.kind=sharded", f"strategy.plan={plan}"]
    config, model, loss = _build_run(transport, settings)
    with torch.no_grad():
        calls = called_modules(model, lambda: loss(model))
    strategy = build_strategy(config.strategy, transport, calls=calls)
    strategy.attach(model, make_optimizer(config.optim, model))

    def step() -> None:
        strategy.begin(0, 0, True, 0.01)
        loss(model).backward()
        strategy.after_backward()
        strategy.after_update()

    def end() -> None:
        strategy.consolidate()
        strategy.close()

    return step, end


def _build_run(transport: Transport, settings: list[str]) -> tuple[RunConfig, nn.Module, Loss]:
    config = load(RunConfig, None, [*MODEL, *settings], recipe=gpt_25mb(transport.size)).config
    assert isinstance(config.model, GPTConfig)
    tokens = torch.randint(config.model.vocab, (1, config.model.context + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = build_model(config.model, 0)
    return config, model, lambda whole: per_sample_loss(whole(inputs), targets).mean()


def _largest_resident_set() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM")]
    return int(peak.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
