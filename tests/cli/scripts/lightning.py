"""Lightning on a small perceptron whose layers are the module's own."""

import pytorch_lightning as pl
import torch
from torch import nn


class Perceptron(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Tanh()) for _ in range(5)))
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x)).squeeze(-1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        loss = (self(x) - x.sum(-1)).square().mean()
        self.log("loss", loss)
        print(index, loss.item().hex())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        (x,) = batch
        print("validated", (self(x) - x.sum(-1)).square().mean().item().hex())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(1100, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=256, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Perceptron(), loader, torch.utils.data.DataLoader(data, batch_size=550))


if __name__ == "__main__":
    main()
