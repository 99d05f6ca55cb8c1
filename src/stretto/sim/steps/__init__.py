"""What a training step takes, before anybody runs it: computation as a line, messages along it."""

from stretto.sim.steps.price import StepPrice, price_sums, price_talks, price_visits
from stretto.sim.steps.rhythm import Exchange, Rhythm
from stretto.sim.steps.talks import of_groups, of_topology

__all__ = [
    "Exchange",
    "Rhythm",
    "StepPrice",
    "of_groups",
    "of_topology",
    "price_sums",
    "price_talks",
    "price_visits",
]
