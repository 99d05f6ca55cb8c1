"""A small network learns which of two spirals a point is on."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
angle = torch.rand(3000) * 9
sign = torch.randint(0, 2, (3000,))
points = torch.stack([angle.cos(), angle.sin()], dim=1) * (angle * (1 - 2 * sign))[:, None] / 5
data = TensorDataset(points + 0.02 * torch.randn(3000, 2), sign)

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
loader = DataLoader(data, batch_size=100, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for _epoch in range(15):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

print(f"loss {nn.functional.cross_entropy(model(points), sign):.4f}")
