"""One price that is asked for: a strategy, a run's computation, a cluster of so many ranks."""

from dataclasses import dataclass

from stretto.sim.cluster import Cluster
from stretto.strategy import AnyStrategyConfig
from stretto.study.predicted.line import Line
from stretto.study.predicted.subject import Known, Subject


@dataclass(frozen=True, slots=True)
class Setting:
    """What a strategy's price follows from."""

    strategy: AnyStrategyConfig
    subject: Subject
    known: Known
    cluster: Cluster
    """With the hosts and ranks that are asked for."""
    longer: float = 1.0
    """How many times as long computation takes as is known of it."""

    @property
    def line(self) -> Line:
        """A rank's computation."""
        return self.known.line

    @property
    def reads_gradients(self) -> bool:
        """Whether somebody looks at all gradients before the update."""
        return self.subject.config.train.reads_gradients
