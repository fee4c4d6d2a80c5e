"""A Llama of 70 billion parameters on a cluster that is not there, for ``lowtide plan --mesh``::

lowtide plan --mesh dp=8,tp=8 --link tp=nvlink,dp=infiniband --device H100-80GB benchmarks.on_paper:build
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 4096


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    """The model in bfloat16, without memory, and a row of tokens as a rank is given it."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    return model, (), {"input_ids": tokens, "labels": tokens}
