"""Optimizers start without torch's compiler, whose import takes every rank 0.8 s."""

import subprocess
import sys

SCRIPT = """
import sys, torch
from stretto.optim import AdamWConfig, LAMBConfig, LARSConfig, SGDConfig, make_optimizer

for config in (SGDConfig(), LARSConfig(), AdamWConfig(), LAMBConfig()):
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(config)(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print("torch._dynamo" in sys.modules)
"""


def test_no_method_of_our_optimizers_imports_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
