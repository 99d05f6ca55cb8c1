"""``stretto export``: write a trained backbone as one file that another run can start from."""

import sys
from pathlib import Path


def export(run: Path, /, *, backbone: Path) -> int:
    """Write the weights of RUN without its last layer.

    A run with ``init.checkpoint`` set to the file starts from them, with a last layer of its own.

    Parameters
    ----------
    run
        A run's folder (its newest valid checkpoint is taken), or one checkpoint.
    backbone
        The file to write, NAME.safetensors.
    """
    from stretto.train.finetune import export_backbone
    from stretto.units import format_bytes

    # model.target may name a module in the working directory.
    sys.path[:0] = [str(Path.cwd())]
    done = export_backbone(run, backbone, log=_say)
    head = ", ".join(done.head)
    _say(
        f"wrote {done.path}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}, of step "
        f"{done.step} of {done.source}, without {head}; start from it with "
        f"init.checkpoint={done.path}"
    )
    return 0


def _say(line: str) -> None:
    print(f"stretto export: {line}", file=sys.stderr)
