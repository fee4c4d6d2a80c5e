"""Language models of the zoo: decoders, encoders, encoder-decoders, state space models."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo import Sample, classes, tokens, zoo

__all__ = [
    "albert",
    "bart",
    "bert",
    "bloom",
    "deberta",
    "distilbert",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "llama",
    "mamba",
    "mixtral",
    "opt",
    "phi",
    "qwen2",
    "roberta",
    "t5",
]

_VOCABULARY = 512
_BATCH = 8
_LENGTH = 128


def _causal(model: Any, batch: int = _BATCH, length: int = _LENGTH) -> Sample:
    ids = tokens(batch, length, _VOCABULARY)
    return model, (), {"input_ids": ids, "labels": ids}


@zoo
def gpt2() -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _causal(GPT2LMHeadModel(config))


@zoo
def llama() -> Sample:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(LlamaForCausalLM(config))


@zoo
def qwen2() -> Sample:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(Qwen2ForCausalLM(config))


@zoo
def gemma2() -> Sample:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(Gemma2ForCausalLM(config))


@zoo
def gpt_neox() -> Sample:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(GPTNeoXForCausalLM(config))


@zoo
def opt() -> Sample:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(OPTForCausalLM(config))


@zoo
def bloom() -> Sample:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=_VOCABULARY, hidden_size=128, n_layer=4, n_head=4, use_cache=False)
    return _causal(BloomForCausalLM(config))


@zoo
def phi() -> Sample:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(PhiForCausalLM(config))


@zoo
def mixtral() -> Sample:
    """Experts as grouped matrix products; which tokens go where is decided by the data, in tensors."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _causal(MixtralForCausalLM(config))


@zoo
def mamba() -> Sample:
    """The selective scan step by step in plain PyTorch, hence the short sequence."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=_VOCABULARY, hidden_size=128, num_hidden_layers=3, state_size=8, use_cache=False)
    return _causal(MambaForCausalLM(config), length=24)


@zoo
def bert() -> Sample:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return _masked(BertForMaskedLM(config))


@zoo
def roberta() -> Sample:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=130,
    )
    return _masked(RobertaForMaskedLM(config))


@zoo
def albert() -> Sample:
    """One set of layer weights used by every layer."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=_VOCABULARY,
        embedding_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return _masked(AlbertForMaskedLM(config))


@zoo
def deberta() -> Sample:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        type_vocab_size=0,
    )
    return _masked(DebertaV2ForMaskedLM(config))


@zoo
def distilbert() -> Sample:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=_VOCABULARY, dim=128, hidden_dim=256, n_layers=3, n_heads=4, max_position_embeddings=128
    )
    model = DistilBertForSequenceClassification(config)
    return model, (), {**_with_padding(_BATCH, _LENGTH), "labels": classes(_BATCH, 2)}


@zoo
def t5() -> Sample:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _sequence_to_sequence(T5ForConditionalGeneration(config))


@zoo
def bart() -> Sample:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=_VOCABULARY,
        d_model=128,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _sequence_to_sequence(BartForConditionalGeneration(config))


def _with_padding(batch: int, length: int) -> dict[str, Any]:
    """Token ids and a mask under which the last row is padded by a quarter."""
    ids = tokens(batch, length, _VOCABULARY)
    mask = ids.new_ones(ids.shape)
    mask[-1, -length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _masked(model: Any) -> Sample:
    inputs = _with_padding(_BATCH, _LENGTH)
    return model, (), {**inputs, "labels": tokens(_BATCH, _LENGTH, _VOCABULARY)}


def _sequence_to_sequence(model: Any) -> Sample:
    inputs = _with_padding(_BATCH, _LENGTH)
    return model, (), {**inputs, "labels": tokens(_BATCH, _LENGTH // 2, _VOCABULARY)}
