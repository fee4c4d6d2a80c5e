"""A byte-level GPT-2 from ``transformers``, and real text that every machine has: the standard library's sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lowtide.extras import require

_CORPUS_BYTES = 4_000_000
_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and its batches. The vocabulary is the 256 byte values."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 256
    batch: int = 4
    dropout: float = 0.1


def build_model(shape: Shape, seed: int = 0) -> nn.Module:
    """GPT-2 in training mode with random weights from ``seed``. The caller's generator is not touched."""
    transformers = require("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=_BYTE_VALUES,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


def load_corpus(limit: int = _CORPUS_BYTES) -> torch.Tensor:
    """The first ``limit`` bytes of the standard library's modules in alphabetical order, as int64."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def draw_batches(corpus: torch.Tensor, shape: Shape, steps: int, seed: int = 0) -> list[torch.Tensor]:
    """``steps`` batches of windows at random positions, each of shape (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(corpus) - shape.context, (steps, shape.batch), generator=generator)
    windows = starts[:, :, None] + torch.arange(shape.context)
    return list(corpus[windows])
