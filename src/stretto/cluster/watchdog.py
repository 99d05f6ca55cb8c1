"""PyTorch's own NCCL watchdog, told to leave the talking to ours."""

import os


def quiet_watchdog() -> None:
    """Have lost peers reported by `stretto.comm.watchman`, which knows the collective's name.

    PyTorch's watchdog would end the process first, with a number instead of a name. A person who
    has set the variables is obeyed.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
