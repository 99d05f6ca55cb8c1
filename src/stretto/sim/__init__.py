"""Prices before anything is sent: clusters as numbers, an event engine, the cheapest algorithm."""

from stretto.sim.book import PriceList, Row
from stretto.sim.catalogue import Choice, choose, price_all
from stretto.sim.closed import closed_form
from stretto.sim.cluster import Cluster, Cpu, Transport, load_cluster
from stretto.sim.presets import PRESETS, preset
from stretto.sim.price import Price, predict, price
from stretto.sim.serial import serial_steps

__all__ = [
    "PRESETS",
    "Choice",
    "Cluster",
    "Cpu",
    "Price",
    "PriceList",
    "Row",
    "Transport",
    "choose",
    "closed_form",
    "load_cluster",
    "predict",
    "preset",
    "price",
    "price_all",
    "serial_steps",
]
