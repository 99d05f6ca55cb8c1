"""``stretto study``: how training holds up as workers, batches or hosts grow."""

from cyclopts import App

from stretto.cli.nodes import nodes
from stretto.cli.scaling import batch, workers

study = App(name="study", help="Compare strategies as workers, batches or hosts grow.")
for verb in (workers, batch, nodes):
    study.command(verb)
