"""Virtual workers: many workers' training in one process, to see its accuracy before renting."""

from stretto.virtual.training import Outcome, Told, check_virtual, find_device, train_virtually

__all__ = ["Outcome", "Told", "check_virtual", "find_device", "train_virtually"]
