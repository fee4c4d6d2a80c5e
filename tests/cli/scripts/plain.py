"""A plain loop with dropout, worker processes, a short last batch, and a model that is saved whole and copied."""

import copy
import sys
import tempfile

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x))) + x
        return self.last(x)


def main() -> None:
    torch.manual_seed(int(sys.argv[1]))
    data = torch.utils.data.TensorDataset(torch.randn(1200, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=512, shuffle=True, num_workers=1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    for epoch in range(2):
        model.train()
        for (x,) in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), x[:, :1])
            loss.backward()
            optimizer.step()
            print(epoch, loss.item().hex())
        model.eval()
        with torch.no_grad():
            print(epoch, "evaluated", criterion(model(x), x[:, :1]).item().hex())
    assert "forward" not in copy.deepcopy(model).__dict__
    with tempfile.TemporaryFile() as file:
        torch.save(model, file)
        file.seek(0)
        assert vars(torch.load(file, weights_only=False)).keys() == vars(Net()).keys()


if __name__ == "__main__":
    main()
    sys.exit(int(sys.argv[2]))
