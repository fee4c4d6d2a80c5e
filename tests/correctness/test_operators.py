"""Row: LSTM, ``TransformerEncoderLayer``, scaled dot-product attention, embeddings, complex FFT operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.torch_version import TorchVersion

from tests.support.networks import WithLoss, generator, perceptron, rows
from tests.support.training import MINIMUM, compare_training


def _sequences(iteration: int, batch: int = 16, length: int = 16) -> Any:
    return (torch.randn(batch, length, 32, generator=generator(iteration)),), {}


def _images(iteration: int) -> Any:
    return (torch.randn(4, 3, 16, 16, generator=generator(iteration)),), {}


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.cell = kind(32, 24, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0])


def _short_sequences(iteration: int) -> Any:
    """Recurrent cells are unrolled operator by operator."""
    return _sequences(iteration, batch=64, length=4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent(kind: Callable[..., nn.Module]) -> None:
    compare_training(lambda: WithLoss(_Recurrent(kind, dropout=0.2)), _short_sequences, budgets=("80%", "70%"))


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell], ids=lambda kind: kind.__name__)
def test_gated_recurrent_unit(kind: Callable[..., nn.Module]) -> None:
    """Eager writes the gates in place into rows that are apart in memory, of a length that no vector register divides."""

    class OfCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(32, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.new_zeros(len(x), 20)
            for step in x.unbind(1):
                h = self.cell(step, h)
            return h

    model = OfCell if kind is nn.GRUCell else lambda: _Recurrent(kind, dropout=0.2)
    compare_training(lambda: WithLoss(model()), _short_sequences, budgets=("100%", "85%"), planner="auto")


def test_bidirectional_lstm_with_state() -> None:
    class WithState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(32, 24, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            y, (hidden, cell) = self.cell(x)
            return {"y": y, "hidden": hidden, "cell": cell}

    # The workspace of the operator's backward is measured a little larger than it is in the step.
    compare_training(WithState, _sequences, budgets=("70%", MINIMUM), quick=0, unmet_bytes=512)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first: bool) -> None:
    def network() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first)
        return WithLoss(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    compare_training(network, _sequences, budgets=("70%", "45%") if norm_first else ("55%",))


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(32, 96), nn.Linear(32, 32), options

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(3):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"dropout_p": 0.2}, {"scale": 0.3}],
    ids=["plain", "causal", "dropout", "scale"],
)
def test_scaled_dot_product_attention(options: dict[str, Any]) -> None:
    compare_training(
        lambda: WithLoss(_Attention(**options)), _sequences, budgets=("70%", MINIMUM) if not options else ("55%",)
    )


def test_attention_with_boolean_mask() -> None:
    def inputs(iteration: int) -> Any:
        mask = torch.rand(16, 1, 16, 16, generator=generator(iteration)) > 0.3
        return _sequences(iteration)[0], {"mask": mask | torch.eye(16, dtype=torch.bool)}

    compare_training(lambda: WithLoss(_Attention()), inputs, budgets=("70%", MINIMUM), quick=0)


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 32, padding_idx=0)
        self.bag = nn.EmbeddingBag(40, 32, mode="mean")
        self.scaled = nn.Embedding(40, 32, scale_grad_by_freq=True)
        self.body = perceptron(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.tokens(ids) + self.bag(ids)[:, None] + self.scaled(ids))


def test_embeddings() -> None:
    def inputs(iteration: int) -> Any:
        return (torch.randint(0, 40, (32, 16), generator=generator(iteration)),), {}

    compare_training(lambda: WithLoss(_Embeddings()), inputs)


class _Fourier(nn.Module):
    """Token mixing in the frequency domain with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(9, 32, dtype=torch.complex64)) for _ in range(3))
        self.body = perceptron(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = self.body(torch.fft.irfft(torch.fft.rfft(x, dim=1) * weight, n=x.shape[1], dim=1))
        y = torch.fft.fft2(x)
        return torch.view_as_real(y).sum(-1) + y.conj().imag + torch.complex(x, x).angle()


def test_complex_fourier_operators() -> None:
    compare_training(lambda: WithLoss(_Fourier()), _sequences)


def test_complex_output() -> None:
    class Complex(_Fourier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(self.body(x), dim=1) * self.weights[0].conj()

    compare_training(Complex, _sequences, budgets=(MINIMUM,))


_IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "max pool": lambda: nn.MaxPool2d(2),
    "average pool": lambda: nn.AdaptiveAvgPool2d(5),
    "transposed convolution": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "grouped dilated": lambda: nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": lambda: nn.Upsample(size=(21, 19), mode="bicubic", align_corners=True),
    "nearest": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "pixel shuffle": lambda: nn.Sequential(nn.Conv2d(8, 32, 1), nn.PixelShuffle(2)),
    "reflection": lambda: nn.ReflectionPad2d(2),
    "prelu": lambda: nn.PReLU(8),
    "local response": lambda: nn.LocalResponseNorm(3),
    "channels last": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", _IMAGE_LAYERS)
def test_image_layers(name: str) -> None:
    """Hardly anything can be recomputed in most of them: the backward of the last convolution is the peak."""

    def network() -> nn.Module:
        before = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU())
        return WithLoss(nn.Sequential(before, _IMAGE_LAYERS[name](), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU()))

    compare_training(network, _images, budgets=("50%" if name == "local response" else MINIMUM,))


_MATRIX_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sort": lambda x: x.sort(dim=-1).values,
    "topk and gather": lambda x: x.gather(-1, x.topk(4, dim=-1).indices),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "linear algebra": lambda x: torch.linalg.solve(x @ x.mT + 5 * torch.eye(16), x),
    "singular values": lambda x: torch.linalg.svdvals(x[:, :4]),
    "cumulative": lambda x: x.cumsum(1).logcumsumexp(1),
    "cumulative product": lambda x: x.sigmoid().cumprod(2),
    "product of a row": lambda x: x.sigmoid().prod(-1, keepdim=True) + x,
    "product of a column": lambda x: torch.prod(x.sigmoid() + 0.5, dim=1),
    "product with zeros": lambda x: x.relu().prod(-1) + x.flatten(1)[:, :16],
    "product of all": lambda x: (x.sigmoid() / 1e3 + 1).prod() + x,
    "product of all with a zero": lambda x: (x.relu() * (x == x.max()) + (x != x.max()) * (x != x.min())).prod() + x,
    "filled with a number": lambda x: x.masked_fill(x > 0, x.tanh().mean()),
    "filled with a number in place": lambda x: (x * 2).masked_fill_(x > 0, x.mean()),
    "data filled with a number": lambda x: torch.masked_fill(torch.ones(32), x > 0, x.mean()) * x,
    "a row filled with a number": lambda x: x[:, :1].masked_fill(x.abs() > 0.5, value=x.mean()) + x,
    "where and nan": lambda x: torch.where(x > 0, x, x * 2).nan_to_num(),
    "scatter": lambda x: torch.zeros(16, 16, 40).scatter_add(2, (x.abs() * 9).long().clamp(max=39), x),
    "softmax losses": lambda x: functional.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="none"),
    "roll, flip, repeat": lambda x: x.roll(3, 1).flip(2).repeat(1, 2, 1),
    "ctc": lambda x: functional.ctc_loss(
        x.log_softmax(-1).transpose(0, 1),
        torch.ones(16, 4, dtype=torch.long),
        torch.full((16,), 16),
        torch.full((16,), 4),
    ),
}


@pytest.mark.parametrize("name", _MATRIX_FUNCTIONS)
def test_functions(name: str) -> None:
    class Applied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _MATRIX_FUNCTIONS[name](self.body(x))

    other_formula = name == "cumulative product" and TorchVersion(torch.__version__) < "2.13"  # while it captures
    budget = MINIMUM if name in ("einsum", "linear algebra") else "55%"
    compare_training(
        lambda: WithLoss(Applied()), _sequences, budgets=(budget,), tolerance=1e-5 if other_formula else 0.0
    )


def test_custom_autograd_function() -> None:
    compare_training(lambda: WithLoss(nn.Sequential(perceptron(2), _Swish(), perceptron(2))), _sequences)


class _SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s))


class _Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SwishFunction.apply(x)


class _Experts(nn.Module):
    """Rows that are sorted by expert, and what each of these makes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 48) / 6), nn.Parameter(torch.randn(3, 48, 32) / 7)
        self.body = perceptron(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([len(x) // 4, len(x) // 2, len(x)], dtype=torch.int32)
        hidden = functional.gelu(torch._grouped_mm(self.body(x), self.up, offs=ends))
        return 1.5 * torch._grouped_mm(hidden, self.down, offs=ends)


def test_grouped_products_in_single_precision() -> None:
    """Of which PyTorch's own fake kernel knows nothing."""
    compare_training(lambda: WithLoss(_Experts()), rows(), budgets=("90%", MINIMUM))
