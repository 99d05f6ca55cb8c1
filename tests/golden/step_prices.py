"""Step prices of many settings, to compare with those of an earlier version.

``python -m tests.golden.step_prices`` writes ``step_prices.json``. The file was made when each kind
of strategy had a price function of its own; prices by step programs must equal it.
"""

import json
import sys
import tempfile
from pathlib import Path

from stretto.cluster.detect import detect_world
from stretto.cluster.world import Mesh
from stretto.simulator.cluster import Cluster, Cpu, LinkCosts
from stretto.studies.priced_run import CostSource, find_variants
from stretto.studies.strategy_prices import Predictor

GPT = """
[model]
kind = "gpt"
blocks = 4
width = 32
heads = 2
context = 16
vocab = 64
[optim]
kind = "sgd"
lr = 0.1
[train]
batch = 48
"""
FILE = Path(__file__).with_name("step_prices.json")
MESHES = {
    "1": (1,),
    "4": (1,) * 4,
    "2x2": (2, 2),
    "one host": (4,),
    "8": (1,) * 8,
    "4x4": (4,) * 4,
    "16x8": (8,) * 16,
}
SPECS = [
    "allreduce",
    "allreduce:algorithm=ring",
    "allreduce:algorithm=ring:bucket_bytes=20KB",
    "allreduce:algorithm=doubling:bucket_bytes=0",
    "allreduce:algorithm=hierarchical/2",
    "allreduce:algorithm=ring:wire=bf16",
    "allreduce:algorithm=ring:wire=fp8:bucket_bytes=20KB",
    "allreduce:algorithm=native",
    "sharded:plan=ddp:unit=10KB",
    "sharded:plan=zero1:unit=10KB",
    "sharded:plan=zero2:unit=10KB",
    "sharded:plan=zero3:unit=10KB",
    "sharded:plan=dear:unit=10KB",
    "crossover",
    "crossover:delay=1",
    "crossover:delay=2:every=3",
    "crossover:segments=whole:wire=bf16",
    "crossover:segments=balanced 5:lanes=3",
    "crossover:topology=ring:delay=1",
    "crossover:groups=2",
    "crossover:groups=2:delay=1:every=2",
    "crossover:groups=1",
    "crossover:groups=hosts:delay=1",
    "dpsgd",
    "dpsgd:segments=fine:delay=2",
    "sgp",
    "sgp:delay=1:segments=fine",
    "sgp:groups=2:delay=1",
    "adpsgd",
    "adpsgd:seed=3",
    "local_sgd",
    "local_sgd:every=2:algorithm=ring:wire=bf16",
    "post_local:every=4:from_step=6",
    "slowmo",
    "diloco:every=8",
    "diloco:every=8:fragments=4:delay=1",
    "noloco:every=4",
]
RUNS = {"plain": (), "clipped": ("train.clip_norm=1.0",), "micro": ("train.accumulation=2",)}
FEW = (
    "allreduce:algorithm=ring:bucket_bytes=20KB",
    "crossover:delay=1",
    "sgp",
    "crossover:groups=2",
)


def cluster() -> Cluster:
    return Cluster(
        ranks_per_host=(1,),
        between=LinkCosts(latency_s=1e-4, bytes_per_s=200_000.0),
        inside=LinkCosts(latency_s=1e-5, bytes_per_s=2e7),
        cpu=Cpu(cores=2, s_per_byte_between=1e-9, s_per_byte_inside=1e-9, s_per_message=1e-5),
    )


def prices() -> dict[str, dict[str, object]]:
    """Return the price, or the reason that there is none, by name."""
    predictor = Predictor(CostSource(cluster(), "links", device="4e7,1e10"), detect_world())
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "gpt.toml"
        run.write_text(GPT)
        for kind, overrides in RUNS.items():
            for spec in SPECS if kind == "plain" else FEW:
                (variant,) = find_variants(run, overrides, spec)
                for name, hosts in MESHES.items():
                    found[f"{kind} | {spec} | {name}"] = price(predictor, variant, Mesh(hosts))
    return found


def price(predictor, variant, mesh):
    try:
        priced = predictor.price(variant.config, mesh)
    except Exception as reason:  # noqa: BLE001 - the kind of refusal is what is kept
        return {"refused": type(reason).__name__}
    return {**priced.facts(), "breakdown_s": dict(priced.breakdown_s)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(prices(), indent=1) + "\n")
    sys.stdout.write(f"{FILE}\n")
