"""Virtual workers: train as many workers would, in one process, to predict the accuracy."""

from stretto.virtual.training import (
    ProgressCallback,
    VirtualTrainingResult,
    check_virtual,
    find_device,
    train_virtually,
)

__all__ = [
    "ProgressCallback",
    "VirtualTrainingResult",
    "check_virtual",
    "find_device",
    "train_virtually",
]
