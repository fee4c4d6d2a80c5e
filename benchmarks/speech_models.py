"""Speech models of the zoo."""

from __future__ import annotations

import torch

from benchmarks.zoo import Sample, classes, tokens, zoo

__all__ = ["audio_spectrogram", "hubert", "wav2vec2", "whisper"]


@zoo
def whisper() -> Sample:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=512,
        d_model=128,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=100,
        max_target_positions=64,
        num_mel_bins=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    kwargs = {"input_features": torch.randn(8, 40, 200), "labels": tokens(8, 32, 512)}
    return WhisperForConditionalGeneration(config), (), kwargs


@zoo
def wav2vec2() -> Sample:
    """Trained with connectionist temporal classification."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(**_SPEECH, vocab_size=32)
    return Wav2Vec2ForCTC(config), (), {"input_values": torch.randn(8, 4000), "labels": tokens(8, 6, 32)}


@zoo
def hubert() -> Sample:
    from transformers import HubertConfig, HubertForSequenceClassification

    config = HubertConfig(**_SPEECH, vocab_size=32, num_labels=4, classifier_proj_size=32)
    kwargs = {"input_values": torch.randn(8, 4000), "labels": classes(8, 4)}
    return HubertForSequenceClassification(config), (), kwargs


@zoo
def audio_spectrogram() -> Sample:
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_length=96,
        num_mel_bins=64,
        num_labels=10,
    )
    kwargs = {"input_values": torch.randn(16, 96, 64), "labels": classes(16, 10)}
    return ASTForAudioClassification(config), (), kwargs


_SPEECH = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": (48, 48, 48, 48),
    "conv_kernel": (10, 3, 3, 2),
    "conv_stride": (5, 2, 2, 2),
    "num_feat_extract_layers": 4,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}
