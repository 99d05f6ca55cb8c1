"""Settings of every strategy, with the mesh they run on, for the laws of step programs."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.planner.model_units import called_modules
from stretto.program.lowering import ProgramInputs
from stretto.program.step_program import StepProgram
from stretto.strategies import STRATEGIES
from stretto.strategies.programs import lower


@dataclass(frozen=True)
class Setting:
    """A strategy with its settings, and how its loop uses it."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = (1, 1, 1, 1)
    reads_gradients: bool = False
    weighs_samples: bool = False

    @property
    def name(self) -> str:
        values = ",".join(f"{key}={value}" for key, value in self.values.items())
        hosts = "x".join(map(str, self.mesh))
        flags = "r" * self.reads_gradients + "w" * self.weighs_samples
        return f"{self.kind}[{values}]{hosts}{flags}"

    def config(self):
        return STRATEGIES[self.kind](**self.values)

    def program(self) -> StepProgram:
        net = model()
        inputs = ProgramInputs(
            net, Mesh(self.mesh), calls_of(net), self.reads_gradients, self.weighs_samples
        )
        return lower(self.config(), inputs)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 30), nn.Linear(30, 12), nn.Linear(12, 5)
        )


def calls_of(net: nn.Module) -> tuple[str, ...]:
    return called_modules(net, lambda: net(torch.ones(2, 10)))


TWO_BY_TWO, FOUR, THREE, TWO = (2, 2), (1, 1, 1, 1), (1, 1, 1), (1, 1)
ONE_HOST = (4,)


def _allreduce() -> list[Setting]:
    small = {"bucket_bytes": 1000}
    return [
        *(
            Setting("allreduce", {"algorithm": name, **small}, mesh)
            for name, mesh in [
                ("ring", FOUR),
                ("ring/2", THREE),
                ("doubling", THREE),
                ("halving-doubling", FOUR),
                ("hierarchical/2", TWO_BY_TWO),
                ("hierarchical", TWO_BY_TWO),
                ("native", TWO),
                ("ring, doubling from 2KB", FOUR),
            ]
        ),
        Setting("allreduce", {}, FOUR),
        Setting("allreduce", {}, ONE_HOST),
        Setting("allreduce", {"bucket_bytes": 0}, TWO),
        Setting("allreduce", {"wire": "bf16", **small}, FOUR),
        Setting("allreduce", {"wire": "fp8", "algorithm": "ring", **small}, FOUR),
        Setting("allreduce", {"wire": "topk 10%", **small}, THREE),
        Setting("allreduce", {"algorithm": "ring", **small}, FOUR, reads_gradients=True),
        Setting("allreduce", {"algorithm": "ring", **small}, FOUR, weighs_samples=True),
    ]


def _sharded() -> list[Setting]:
    plans = [
        Setting("sharded", {"plan": plan, "unit": 0}, FOUR)
        for plan in ("ddp", "zero1", "zero2", "zero3", "dear")
    ]
    more = [
        ({"plan": "zero2", "block": 400}, FOUR),
        ({"plan": "zero3", "block": 400, "prefetch": 2}, THREE),
        ({"plan": "zero2", "reduce_slots": 0}, FOUR),
        ({"plan": "zero2", "in_host": True}, TWO_BY_TWO),
        ({"plan": "zero3", "in_host": True}, TWO_BY_TWO),
        ({"plan": "dear"}, TWO_BY_TWO),
        ({"plan": "zero2", "algorithm": "ring/2"}, FOUR),
        ({"plan": "zero2", "wire": "bf16"}, FOUR),
        ({"plan": "zero3", "parameters": "bf16"}, FOUR),
        *(({"plan": f"random {seed}"}, FOUR if seed % 2 else TWO_BY_TWO) for seed in range(6)),
    ]
    plans += [Setting("sharded", {"unit": 0, **values}, mesh) for values, mesh in more]
    plans += [
        Setting("sharded", {"plan": plan, "unit": 0}, FOUR, reads_gradients=True)
        for plan in ("ddp", "zero2", "zero3", "random 3")
    ]
    plans.append(Setting("sharded", {"plan": "zero2", "unit": 0}, THREE, weighs_samples=True))
    return plans


def _gossip() -> list[Setting]:
    fine = {"segments": "fine"}
    return [
        Setting("crossover", {}),
        Setting("crossover", {"delay": 1}),
        Setting("crossover", {"delay": 2, "every": 2}),
        Setting("crossover", {"every": 3}),
        Setting("crossover", {"lanes": 3, "delay": 1}),
        Setting("crossover", {"topology": "ring", "segments": "whole"}),
        Setting("crossover", {"topology": "complete", "segments": "balanced 3"}, THREE),
        Setting("crossover", {"wire": "bf16"}),
        Setting("crossover", {"wire": "fp8", "delay": 1}),
        Setting("crossover", {"wire": "fp8", "groups": 2}, TWO_BY_TWO),
        Setting("crossover", {"groups": 2, "delay": 1}, TWO_BY_TWO),
        Setting("crossover", {"groups": "hosts", "lanes": 2}, TWO_BY_TWO),
        Setting("crossover", {"groups": 1}, TWO_BY_TWO),
        Setting("crossover", {"mix": "gradients"}),
        Setting("crossover", {"mix": "gradients", "topology": "complete"}, THREE),
        Setting("crossover", {"mix": "gradients", "groups": 2}, TWO_BY_TWO),
        Setting("crossover", {"exact_every": 3}),
        Setting("crossover", {"exact_every": 2, "delay": 1, "groups": 2}, TWO_BY_TWO),
        Setting("crossover", {"consensus_every": 2, "consensus_sample": 0.5}),
        Setting("crossover", {}, reads_gradients=True),
        Setting("crossover", {"delay": 1}, reads_gradients=True),
        Setting("crossover", {"groups": 2}, TWO_BY_TWO, reads_gradients=True),
        Setting("dpsgd", {**fine}),
        Setting("dpsgd", {"topology": "one-peer-exponential", "delay": 2}),
        Setting("sgp", {**fine}),
        Setting("sgp", {"delay": 1, **fine}),
        Setting("sgp", {"topology": "static-exponential", "every": 2}),
        Setting("sgp", {"groups": 2, "delay": 1}, TWO_BY_TWO),
        Setting("sgp", {"exact_every": 4, "consensus_every": 2, "delay": 1}),
    ]


def _local() -> list[Setting]:
    return [
        Setting("local_sgd", {"every": 2}),
        Setting("local_sgd", {"every": 3, "algorithm": "doubling", "wire": "bf16"}, THREE),
        Setting("local_sgd", {"every": 2}, TWO_BY_TWO),
        Setting("local_sgd", {"every": 2}, ONE_HOST),
        Setting("post_local", {"every": 2, "from_step": 3}),
        Setting("slowmo", {"every": 3}),
        Setting("diloco", {"every": 2}),
        Setting("diloco", {"every": 6, "fragments": 3, "delay": 1, "mix": 0.5}),
        Setting("diloco", {"every": 4, "fragments": 2, "algorithm": "ring"}, TWO_BY_TWO),
        Setting("noloco", {"every": 2}),
        Setting("noloco", {"every": 3}, THREE),
        Setting("adpsgd", {}),
        Setting("adpsgd", {"seed": 5}, THREE),
    ]


SETTINGS = [*_allreduce(), *_sharded(), *_gossip(), *_local()]
