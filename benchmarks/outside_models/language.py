"""Text: kinds of attention, memories, recurrences, experts, adapters, and losses over sequences."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample


def tokens(batch: int, length: int, vocabulary: int = 200) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


@outside("g-mlp-pytorch")
def gmlp() -> Sample:
    """Layers dropped by random numbers."""
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=200, dim=128, depth=6, seq_len=64, prob_survival=0.9), (tokens(8, 64),), {}


@outside("st-moe-pytorch")
def st_moe() -> Sample:
    """Routes by values, with a capacity per expert."""
    from st_moe_pytorch import MoE, SparseMoEBlock

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            moe = MoE(dim=64, num_experts=4, gating_top_n=2)
            self.block = SparseMoEBlock(moe, add_ff_before=True, add_ff_after=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.block(x)
            loss: torch.Tensor = found.outputs.square().mean() + found.total_aux_loss
            return loss

    return Routed(), (torch.randn(4, 128, 64),), {}


@outside("mixture-of-experts")
def mixture_of_experts() -> Sample:
    """Routes by values; most of the memory is in the routing."""
    from mixture_of_experts import MoE

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MoE(dim=64, num_experts=8, hidden_dim=256) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.zeros(())
            for layer in self.layers:
                y, own = layer(x)
                x, loss = x + y, loss + own
            return loss + x.square().mean()

    return Routed(), (torch.randn(4, 128, 64),), {}


@outside("soft-moe-pytorch")
def soft_moe() -> Sample:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=64, seq_len=64, num_experts=4), (torch.randn(4, 64, 64),), {}


@outside("mambapy")
def mamba() -> Sample:
    """The parallel scan in Python."""
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=64, n_layers=3)), (torch.randn(4, 64, 64),), {}


@outside("mambapy")
def jamba() -> Sample:
    from mambapy.jamba import Jamba, JambaLM, JambaLMConfig

    sizes = {"d_model": 64, "n_layers": 4, "mlp_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = JambaLMConfig(vocab_size=200, **sizes, num_experts=4, num_experts_per_tok=2, attn_layer_offset=1)
    assert Jamba
    return JambaLM(config), (tokens(2, 32),), {}


@outside("x-transformers")
def x_decoder() -> Sample:
    """Rotary positions, normalised keys, memories, layers dropped at random, tied embedding."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    switches = {
        "rotary_pos_emb": True,
        "attn_qk_norm": True,
        "attn_num_mem_kv": 4,
        "layer_dropout": 0.1,
        "ff_glu": True,
    }
    layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, **switches)
    net = TransformerWrapper(
        num_tokens=200, max_seq_len=64, attn_layers=layers, tie_embedding=True, num_memory_tokens=4
    )
    return AutoregressiveWrapper(net), (tokens(4, 65),), {}


@outside("x-transformers")
def x_recurrent() -> Sample:
    """Returns memories of all layers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=3, heads=4, rel_pos_bias=True)
    net = TransformerWrapper(num_tokens=200, max_seq_len=32, max_mem_len=32, attn_layers=layers)
    return net, (tokens(4, 32),), {"return_mems": True}


@outside("x-transformers")
def x_nonautoregressive() -> Sample:
    """Masks a random share of the tokens, by random schedules."""
    from x_transformers import Encoder, NonAutoregressiveWrapper, TransformerWrapper

    net = TransformerWrapper(num_tokens=201, max_seq_len=64, attn_layers=Encoder(dim=64, depth=3, heads=4))
    return NonAutoregressiveWrapper(net, mask_id=200), (tokens(4, 64),), {}


@outside("reformer-pytorch")
def reformer() -> Sample:
    """Reversible layers, random hashes, sorted buckets."""
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=200, dim=64, depth=2, max_seq_len=128, heads=4, bucket_size=16, n_hashes=2, causal=True
    )
    return model, (tokens(2, 128),), {}


@outside("routing-transformer")
def routing_transformer() -> Sample:
    """Means of clusters that are updated while it runs, made from the first batch."""
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(num_tokens=200, dim=64, depth=2, max_seq_len=128, heads=4, window_size=32, causal=True)
    return model, (tokens(2, 128),), {}


@outside("sinkhorn-transformer")
def sinkhorn_transformer() -> Sample:
    from sinkhorn_transformer import SinkhornTransformerLM

    sizes = {"num_tokens": 200, "dim": 64, "heads": 4, "depth": 2, "max_seq_len": 128, "bucket_size": 32}
    return SinkhornTransformerLM(**sizes), (tokens(2, 128),), {}


@outside("linformer")
def linformer() -> Sample:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=200, dim=64, seq_len=128, depth=3, heads=4, k=32), (tokens(4, 128),), {}


@outside("performer-pytorch")
def performer() -> Sample:
    """Projections in buffers that are drawn again every few calls, counted in a buffer."""
    from performer_pytorch import PerformerLM

    sizes = {
        "num_tokens": 200,
        "max_seq_len": 128,
        "dim": 64,
        "depth": 3,
        "heads": 4,
        "dim_head": 16,
        "nb_features": 32,
    }
    return PerformerLM(**sizes, feature_redraw_interval=3, causal=False), (tokens(2, 128),), {}


@outside("nystrom-attention")
def nystromformer() -> Sample:
    from nystrom_attention import Nystromformer

    model = Nystromformer(dim=64, dim_head=16, heads=4, depth=3, num_landmarks=32, pinv_iterations=4)
    return model, (torch.randn(2, 128, 64),), {"mask": torch.ones(2, 128).bool()}


@outside("CoLT5-attention")
def conditional_attention() -> Sample:
    """Routes a number of tokens by coordinate descent."""
    from colt5_attention import ConditionalRoutedTransformerBlock

    sizes = {"num_heavy_ff_tokens": 16, "num_heavy_attn_tokens_kv": 16, "num_heavy_attn_tokens_q": 16}
    model = ConditionalRoutedTransformerBlock(64, light_dim_head=16, light_heads=2, light_window_size=16, **sizes)
    return model, (torch.randn(2, 64, 64),), {}


@outside("h-transformer-1d")
def hierarchical_transformer() -> Sample:
    from h_transformer_1d import HTransformer1D

    sizes = {"num_tokens": 200, "dim": 64, "depth": 2, "max_seq_len": 128, "heads": 4, "block_size": 16}
    return HTransformer1D(**sizes, causal=False), (tokens(2, 128),), {"mask": torch.ones(2, 128).bool()}


@outside("recurrent-memory-transformer-pytorch")
def recurrent_memory() -> Sample:
    """Segments in a loop."""
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    sizes = {"num_tokens": 200, "num_memory_tokens": 8, "dim": 64, "depth": 2, "heads": 4, "seq_len": 32}
    model = RecurrentMemoryTransformerWrapper(RecurrentMemoryTransformer(**sizes, causal=True))
    return model, (tokens(2, 96),), {"return_loss": True}


@outside("block-recurrent-transformer-pytorch")
def block_recurrent() -> Sample:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer, RecurrentTrainerWrapper

    sizes = {
        "num_tokens": 200,
        "dim": 64,
        "depth": 3,
        "dim_head": 16,
        "heads": 4,
        "max_seq_len": 128,
        "block_width": 32,
    }
    model = BlockRecurrentTransformer(**sizes, num_state_vectors=32, recurrent_layers=(2,))
    return RecurrentTrainerWrapper(model, xl_memories_dropout=0.1, state_dropout=0.1), (tokens(2, 129),), {}


@outside("MEGABYTE-pytorch")
def megabyte() -> Sample:
    from MEGABYTE_pytorch import MEGABYTE

    model = MEGABYTE(num_tokens=200, dim=(64, 32), depth=(2, 2), max_seq_len=(16, 4), dim_head=16, heads=4)
    return model, (tokens(4, 64),), {"return_loss": True}


@outside("titans-pytorch")
def neural_memory() -> Sample:
    """Learns in its forward pass: gradients of a small network for each chunk, by torch.func."""
    from titans_pytorch import NeuralMemory

    return NeuralMemory(dim=32, chunk_size=8, dim_head=16, heads=2), (torch.randn(2, 32, 32),), {}


@outside("titans-pytorch")
def memory_as_context() -> Sample:
    from titans_pytorch import MemoryAsContextTransformer

    sizes = {"num_tokens": 200, "dim": 32, "depth": 2, "segment_len": 16, "num_persist_mem_tokens": 2, "dim_head": 16}
    model = MemoryAsContextTransformer(**sizes, heads=2, num_longterm_mem_tokens=4, neural_memory_segment_len=8)
    return model, (tokens(2, 48),), {"return_loss": True}


@outside("PaLM-rlhf-pytorch")
def palm() -> Sample:
    from palm_rlhf_pytorch import PaLM

    return PaLM(num_tokens=200, dim=64, depth=3, heads=4, dim_head=16), (tokens(4, 65),), {"return_loss": True}


@outside("linear-attention-transformer")
def linear_attention() -> Sample:
    from linear_attention_transformer import LinearAttentionTransformerLM

    sizes = {"num_tokens": 200, "dim": 64, "heads": 4, "depth": 2, "max_seq_len": 128, "n_local_attn_heads": 2}
    model = LinearAttentionTransformerLM(
        **sizes, causal=True, local_attn_window_size=32, blindspot_size=16, reversible=True
    )
    return model, (tokens(2, 128),), {}


@outside("product-key-memory")
def product_keys() -> Sample:
    from product_key_memory import PKM

    return (
        nn.Sequential(PKM(dim=64, heads=2, num_keys=32, topk=8), PKM(64, heads=2, num_keys=32)),
        (torch.randn(4, 64, 64),),
        {},
    )


@outside("memorizing-transformers-pytorch")
def block_of_memory() -> Sample:
    """Attention by nearest neighbours among past tokens, without an index."""
    from memorizing_transformers_pytorch.memorizing_transformers_pytorch import Attention, FeedForward

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList((Attention(dim=64, heads=4, dim_head=16), FeedForward(64))) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for attention, feed in self.layers:
                x = x + attention(x)[0]
                x = x + feed(x)
            return x

    return Network(), (torch.randn(2, 64, 64),), {}


@outside("mega-pytorch")
def mega() -> Sample:
    """Moving averages by Fourier transforms."""
    from mega_pytorch import Mega

    sizes = {"num_tokens": 200, "dim": 64, "depth": 3, "ema_heads": 8, "attn_dim_qk": 16, "attn_dim_value": 64}
    return Mega(**sizes, laplacian_attn_fn=True), (tokens(2, 128),), {}


@outside("hourglass-transformer-pytorch")
def hourglass() -> Sample:
    """Sequences that are shortened and lengthened again."""
    from hourglass_transformer_pytorch import HourglassTransformerLM

    sizes = {"num_tokens": 200, "dim": 64, "max_seq_len": 128, "heads": 4, "dim_head": 16, "depth": (2, 2, 2)}
    kind = {"shorten_factor": 2, "attn_resampling": True, "updown_sample_type": "linear", "causal": True}
    return HourglassTransformerLM(**sizes, **kind), (tokens(2, 128),), {}


@outside("infini-transformer-pytorch")
def infini_transformer() -> Sample:
    """Segments that hand memories on, detached every other time; positions that are cached."""
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    sizes = {"num_tokens": 200, "dim": 64, "depth": 2, "dim_head": 16, "heads": 4}
    model = InfiniTransformer(**sizes, use_mem_delta_rule=True)
    wrapper = InfiniTransformerWrapper(model, segment_length=32, detach_mems_every_num_segments=2)
    return wrapper, (tokens(2, 128),), {}


@outside("coconut-pytorch")
def continuous_thoughts() -> Sample:
    """Hidden states are read again in place of tokens, with keys and values that grow."""
    from coconut_pytorch import Coconut

    model = Coconut(
        num_reasoning_steps=3, transformer={"num_tokens": 200, "dim": 64, "depth": 2, "heads": 4, "dim_head": 16}
    )
    return model, (tokens(4, 32), tokens(4, 16)), {}
