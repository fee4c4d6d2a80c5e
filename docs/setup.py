"""What pages take for granted: every page that is executed begins with these names (``docs/execute.py``)."""

import torch
from torch import nn
from torch.nn import functional as F

import lowtide

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)), nn.Linear(64, 1)
)
x, y = torch.randn(256, 64), torch.randn(256, 1)
batches = [(torch.randn(256, 64), torch.randn(256, 1)) for _ in range(3)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plan = lowtide.plan(model, (x,), budget="60%", planner="auto{effort=1}")


def train_step() -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
