"""Settings of ``strategy.kind = "auto"``: an exact strategy is chosen before the run."""

from typing import Literal, Self

from pydantic import model_validator

from stretto.config import Config
from stretto.units import Bytes


class AutoConfig(Config):
    """The ``[strategy]`` table of a run whose ``kind`` is ``"auto"``.

    Before the run, ``stretto train`` predicts a step of each exact synchronous strategy on the
    described cluster: allreduce, and sharded with each preset, or with a plan for ``memory``. It
    takes the fastest that fits, says why, and writes it to ``resolved.toml``.
    """

    kind: Literal["auto"] = "auto"
    cluster: str | None = None
    """The links: a file of stretto calibrate, or a name, such as "ethernet 10gbit". Required."""
    memory: Bytes | None = None
    """Memory limit of a rank, activations included. When not set, what fits is not looked at."""
    profile: str | None = None
    """File written by stretto profile, with measured compute times; without it they are estimated
    for ``device``."""
    device: str = "cpu"
    """The device to estimate for, as cpu, h200, or operations and bytes per second such as
    "3e14,2e12"."""

    wire: Literal["own"] = "own"
    """The type that gradients are sent as; another would not be exact."""

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.cluster is None:
            raise ValueError(
                'kind = "auto" chooses by a description of the links and measures nothing: set '
                'cluster to a file of stretto calibrate, or to a name such as "ethernet 10gbit"'
            )
        if self.profile is not None and self.device != type(self).model_fields["device"].default:
            raise ValueError(
                f"device would be ignored: {self.profile} has the compute times; leave device out"
            )
        return self
