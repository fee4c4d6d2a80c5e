"""Every architecture of ``transformers`` for common tasks, made small by its configuration's own fields.

``architectures()`` names them as ``task/type``; ``build(name)`` returns ``(model, args, kwargs)`` with random weights. Sizes
are shrunk by the names of the fields (``hidden_size``, ``num_hidden_layers`` ..); random layer drop and time masking are off,
because they change the program from call to call; everything else is the library's default.
Some configurations do not survive that: ``build`` raises whatever they raise, or ``TooLargeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.zoo import Sample, classes, image, seeded, tokens

MOST_PARAMETERS = 30_000_000
VOCABULARY = 128
_BATCH, _LENGTH, _PIXELS, _SAMPLES = 4, 48, 64, 4000

_SIZES: dict[int, tuple[str, ...]] = {
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
        "num_encoder_layers", "depth", "num_experts_per_tok", "num_key_value_heads", "decoder_num_layers",
        "encoder_num_layers", "moe_topk", "moe_top_k", "num_experts_per_token", "n_group", "topk_group", "num_kv_heads",
        "mlp_num_layers", "num_block_records", "num_hidden_groups", "moe_num_active_primary_experts"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_num_experts"),
    8: ("axial_rope_dim", "conv_dim_small"),
    16: ("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "state_size",
         "attention_head_size", "time_step_rank", "mamba_d_state"),
    32: ("q_lora_rank", "mamba_d_head"),
    64: ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "attention_hidden_size",
         "embed_dim", "emb_dim", "model_dim", "hidden_dim_model", "d_embed"),
    128: ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner", "hidden_dim",
          "ffn_hidden_size", "d_inner", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
          "ffn_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions",
          "max_target_positions", "shared_intermediate_size", "dense_intermediate_size", "vocab_size_per_layer_input"),
}  # fmt: skip
_OFF = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
_FIELDS = {name: size for size, names in _SIZES.items() for name in names}


class TooLargeError(Exception):
    """The model is larger than ``MOST_PARAMETERS`` after all."""


def architectures() -> list[str]:
    """``task/type`` of every model type that has a class for the task."""
    return [f"{task}/{kind}" for task in _TASKS for kind in _classes(task)]


def build(name: str) -> Sample:
    """The small model in training mode, and its inputs with labels."""
    task, _, kind = name.partition("/")
    return seeded(lambda: _sample(task, kind))()


def _sample(task: str, kind: str) -> Sample:
    import transformers

    cls = getattr(transformers, _classes(task)[kind])
    config = cls.config_class(**_small(cls.config_class()))
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    model = cls(config)
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        raise TooLargeError(f"more than {MOST_PARAMETERS:,} parameters")
    return model, (), _TASKS[task][1](config)


def _classes(task: str) -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    names: dict[str, str | tuple[str, ...]] = getattr(modeling_auto, _TASKS[task][0])
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}


def _small(config: Any, part: bool = False) -> dict[str, Any]:
    """What to make ``config`` with: its fields that are sizes, and its parts, shrunk."""
    from transformers import PretrainedConfig

    chosen: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            chosen[name] = _small(value, part=True)
        elif name in _FIELDS and isinstance(value, int) and not isinstance(value, bool):
            chosen[name] = min(value, _FIELDS[name])
        elif name in _OFF:
            chosen[name] = 0.0
        elif name.endswith("token_id") and isinstance(value, int):
            chosen[name] = min(value, 2)
        elif name in ("image_size", "input_size") and isinstance(value, int):
            chosen[name] = _PIXELS
    if hasattr(config, "use_cache"):
        chosen["use_cache"] = False
    if isinstance(getattr(config, "num_heads", None), (list, tuple)):  # per stage, as the width is
        chosen.pop("embed_dim", None)
    chosen.update(_lists(config, chosen))
    return chosen if part else {**chosen, "num_labels": 10}


def _lists(config: Any, chosen: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists with an entry per layer follow the number of layers; depths of stages become 1."""
    layers = chosen.get("num_hidden_layers")
    for name, value in vars(config).items():
        if name in ("depths", "stage_depths", "num_blocks") and isinstance(value, (list, tuple)):
            yield name, [1] * len(value)
        elif name.endswith(("layer_types", "layers_block_type")) and isinstance(value, list) and layers:
            yield name, value[:layers]


def _words(config: Any) -> dict[str, Any]:
    ids = tokens(_BATCH, _LENGTH, VOCABULARY)
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures(config: Any) -> dict[str, Any]:
    size = getattr(config, "image_size", _PIXELS)
    pixels = size if isinstance(size, int) else size[0]
    return {"pixel_values": image(_BATCH, pixels, getattr(config, "num_channels", 3)), "labels": classes(_BATCH, 10)}


def _maps(config: Any) -> dict[str, Any]:
    inputs = _pictures(config)
    return {**inputs, "labels": torch.randint(0, 10, (_BATCH, *inputs["pixel_values"].shape[2:]))}


def _sounds(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(_BATCH, _SAMPLES), "labels": classes(_BATCH, 10)}


def _questions(config: Any) -> dict[str, Any]:
    ids, ends = tokens(_BATCH, _LENGTH, VOCABULARY), torch.randint(0, _LENGTH, (_BATCH,))
    return {"input_ids": ids, "start_positions": ends, "end_positions": ends.clone()}


def _texts(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(_BATCH, _LENGTH, VOCABULARY), "labels": classes(_BATCH, 10)}


_TASKS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _words),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _words),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _words),
    "text": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _texts),
    "question": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", _questions),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _pictures),
    "map": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _maps),
    "sound": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _sounds),
}
