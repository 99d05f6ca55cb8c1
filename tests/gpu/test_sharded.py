"""Sharded plans on a GPU: NCCL ranks train as one rank does, within the planned memory."""

import sys

import pytest
import torch

from stretto.planner.presets import PLAN_PRESETS
from tests.gpu.test_nccl import on_one_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

RANK = [sys.executable, "tests/gpu/sharded_rank.py"]


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (4, 1)])
def test_every_plan_trains_as_one_rank(hosts, per_host):
    code, out, said = on_one_gpu(hosts, per_host, [*RANK, "check_plans"], limit_s=300)
    assert code == 0, said
    assert out.splitlines()[-1] == "check_plans held"


@pytest.mark.parametrize("plan", PLAN_PRESETS)
def test_the_allocators_peak_is_that_of_the_plan(plan):
    code, out, said = on_one_gpu(2, 1, [*RANK, f"check_allocator:{plan}"], limit_s=100)
    assert code == 0, out + said
    assert out.splitlines()[-1] == f"check_allocator:{plan} held"
