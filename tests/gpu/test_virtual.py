"""Virtual workers on a GPU: a recorded step trains as workers one by one on a CPU do."""

import pytest
import torch

from stretto.data import open_sample_source
from stretto.run import PreparedRun
from stretto.virtual import train_virtually
from tests.laws.test_virtual import WORKERS, initial, loaded_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(
    "more",
    [
        ["strategy.kind=allreduce", "optim.momentum=0.9"],
        ["strategy.kind=crossover", "strategy.groups=2", "strategy.delay=1"],
        ["strategy.kind=crossover", "strategy.wire=fp8", "strategy.exact_every=4"],
        ["strategy.kind=sgp", "train.statistics=reestimate", "train.statistics_batches=2"],
        ["strategy.kind=noloco", "strategy.every=3"],
        ["strategy.kind=adpsgd"],
    ],
    ids=" ".join,
)
def test_training_on_a_gpu_equals_training_on_a_cpu(tmp_path, more):
    loaded = loaded_run(tmp_path, *more)

    def trained(device):
        sources = [open_sample_source(loaded.config.data, train=part) for part in (True, False)]
        prepared = PreparedRun(*sources, initial())
        return train_virtually(loaded.config, prepared, WORKERS, device=device)

    here, there = trained("cpu"), trained("cuda")
    assert there.losses == pytest.approx(here.losses, rel=1e-6)
    for one, other in zip(there.evaluations, here.evaluations, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
