"""Predict the time of collectives and training steps on a described cluster."""

from stretto.simulator.algorithm_choice import (
    AlgorithmRecommendation,
    price_all_algorithms,
    recommend_algorithms,
)
from stretto.simulator.closed_forms import closed_form, serial_steps
from stretto.simulator.cluster import PRESETS, Cluster, Cpu, LinkCosts, load_cluster, preset
from stretto.simulator.price import CollectivePrice, predict_timelines, price
from stretto.simulator.price_cache import AlgorithmPrice, PriceList

__all__ = [
    "PRESETS",
    "AlgorithmPrice",
    "AlgorithmRecommendation",
    "Cluster",
    "CollectivePrice",
    "Cpu",
    "LinkCosts",
    "PriceList",
    "closed_form",
    "load_cluster",
    "predict_timelines",
    "preset",
    "price",
    "price_all_algorithms",
    "recommend_algorithms",
    "serial_steps",
]
