"""What a training step takes, before anybody runs it: computation as a line, messages along it."""

from stretto.sim.steps.price import StepPrice, price_sums, price_talks, price_visits
from stretto.sim.steps.rhythm import Exchange, Rhythm

__all__ = ["Exchange", "Rhythm", "StepPrice", "price_sums", "price_talks", "price_visits"]
