"""Adapters over frozen weights, tagging, experts with as many rows as there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.outside_models.language import tokens
from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample


@outside("peft")
def lora() -> Sample:
    """Adapters over frozen weights, with dropout."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes))
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=True)
    read = tokens(4, 64)
    return get_peft_model(base, config), (), {"input_ids": read, "labels": read}


@outside("peft")
def adalora() -> Sample:
    """Adapters by singular values, with a regularisation."""
    from peft import AdaLoraConfig, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    base = T5ForConditionalGeneration(T5Config(vocab_size=200, **sizes))
    config = AdaLoraConfig(init_r=6, target_r=4, total_step=100, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    read = tokens(4, 32)
    return get_peft_model(base, config), (), {"input_ids": read, "labels": read}


@outside("peft")
def prefix_tuning() -> Sample:
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=64, n_layer=3, n_head=4, n_positions=64))
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, prefix_projection=True)
    read = tokens(4, 48)
    return (
        get_peft_model(base, config),
        (),
        {"input_ids": read, "labels": read, "attention_mask": torch.ones_like(read)},
    )


@outside("pytorch-crf")
def conditional_random_field() -> Sample:
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.crf = nn.Embedding(200, 64), CRF(9, batch_first=True)
            self.recurrent, self.last = nn.LSTM(64, 64, batch_first=True, bidirectional=True), nn.Linear(128, 9)

        def forward(self, words: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = -self.crf(
                self.last(self.recurrent(self.embedding(words))[0]), tags, mask, reduction="mean"
            )
            return loss

    mask = torch.arange(32) < torch.tensor([32, 20, 11, 5]).unsqueeze(1)
    return Tagger(), (tokens(4, 32), tokens(4, 32, 9), mask), {}


@outside("tensordict")
def tensor_dictionary() -> Sample:
    """Modules that read and write named tensors of an object that they are called with."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    first = TensorDictModule(nn.Sequential(nn.Linear(32, 256), nn.Tanh()), in_keys=["seen"], out_keys=["hidden"])
    last = TensorDictModule(nn.Linear(256, 8), in_keys=["hidden"], out_keys=["action"])

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = TensorDictSequential(first, last)

        def forward(self, given: Any) -> Any:
            return self.net(given)["action"]

    return Network(), (TensorDict({"seen": torch.randn(128, 32)}, batch_size=[128]),), {}


@outside("transformers")
def ibert() -> Sample:
    """transformers: checks every activation for NaN."""
    from transformers import IBertConfig, IBertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    tokens = torch.randint(0, 256, (2, 64))
    return IBertForMaskedLM(IBertConfig(vocab_size=256, quant_mode=True, **sizes)), (tokens,), {"labels": tokens}


@outside("transformers")
def jetmoe() -> Sample:
    """transformers: as many rows per expert as there are."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "kv_channels": 16}
    config = JetMoeConfig(vocab_size=256, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, **sizes)
    tokens = torch.randint(0, 256, (2, 64))
    return JetMoeForCausalLM(config), (tokens,), {"labels": tokens, "use_cache": False}


@outside("transformers")
def mixtral_loop() -> Sample:
    """transformers: as many rows per expert as there are, in a loop."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=256, intermediate_size=128, num_local_experts=4, **sizes)
    config._experts_implementation = "eager"
    tokens = torch.randint(0, 256, (2, 128))
    return MixtralForCausalLM(config), (tokens,), {"labels": tokens, "use_cache": False}


@outside("minGRU-pytorch")
def parallel_recurrence() -> Sample:
    """Gates of tokens alone, by a scan of logarithms, behind convolutions."""
    from minGRU_pytorch.minLM import minLM

    model = minLM(num_tokens=200, dim=64, depth=3, enable_conv=True, dropout=0.1)
    return model, (tokens(4, 129),), {"return_loss": True}


@outside("stable-baselines3")
def clipped_policy() -> Sample:
    """A policy and a value by distributions, with the loss of PPO."""
    import gymnasium
    import numpy as np
    from stable_baselines3.common.policies import ActorCriticPolicy

    seen, acts = (gymnasium.spaces.Box(-1, 1, (size,), np.float32) for size in (8, 2))
    policy = ActorCriticPolicy(seen, acts, lambda _: 1e-3, net_arch=[256, 256])

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy

        def forward(self, state: torch.Tensor, action: torch.Tensor, old: torch.Tensor, gain: torch.Tensor) -> Any:
            value, probability, entropy = self.policy.evaluate_actions(state, action)
            ratio = (probability - old).exp()
            clipped = torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
            return nn.functional.mse_loss(value.flatten(), gain) - clipped - 0.01 * entropy.mean()

    return Step(), (torch.randn(512, 8), torch.randn(512, 2), torch.randn(512), torch.randn(512)), {}


@outside("higher")
def learning_to_learn() -> Sample:
    """MAML: gradients through steps of an optimizer, which is called in the forward pass."""
    import higher

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, seen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
            losses = []
            for x, y in zip(seen, known, strict=True):
                inner = torch.optim.SGD(self.net.parameters(), lr=1e-2)
                with higher.innerloop_ctx(self.net, inner, copy_initial_weights=False) as (net, steps):
                    for _ in range(3):
                        steps.step(nn.functional.mse_loss(net(x), y))
                    losses.append(nn.functional.mse_loss(net(-x), y))
            return torch.stack(losses).mean()

    return Tasks(), (torch.randn(4, 64, 1), torch.randn(4, 64, 1)), {}
