"""Sound: filters, transforms, recurrences, separation, codecs, losses over alignments."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample


def sound(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length) / 8


@outside("transformers")
def wav2vec2() -> Sample:
    """Layers dropped by random numbers."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    convolutions = {"conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = Wav2Vec2Config(vocab_size=32, layerdrop=0.1, mask_time_prob=0.0, **convolutions, **sizes, **positions)
    return Wav2Vec2ForCTC(config), (torch.randn(2, 4000),), {"labels": torch.randint(1, 32, (2, 10))}


@outside("speechbrain")
def crdnn() -> Sample:
    """Recurrent layers that draw masks ahead and count through them."""
    from speechbrain.lobes.models.CRDNN import CRDNN

    model = CRDNN(
        input_shape=[None, None, 40], cnn_blocks=1, cnn_channels=(16,), rnn_layers=1, rnn_neurons=64, dnn_neurons=64
    )
    return model, (torch.randn(4, 60, 40),), {}


@outside("speechbrain")
def ecapa() -> Sample:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    sizes = {"channels": [32, 32, 32, 32, 96], "kernel_sizes": [5, 3, 3, 3, 1], "dilations": [1, 2, 3, 4, 1]}
    model = ECAPA_TDNN(40, lin_neurons=32, **sizes, attention_channels=16, res2net_scale=4, se_channels=16)
    return model, (torch.randn(4, 100, 40), torch.tensor([1.0, 0.7, 0.9, 1.0])), {}


@outside("speechbrain")
def speech_conformer() -> Sample:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    sizes = {
        "input_size": 40,
        "d_model": 64,
        "nhead": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 1,
        "d_ffn": 128,
    }
    model = TransformerASR(
        tgt_vocab=50, **sizes, encoder_module="conformer", attention_type="RelPosMHAXL", normalize_before=True
    )
    return model, (torch.randn(2, 60, 40), torch.randint(1, 50, (2, 12))), {}


@outside("speechbrain")
def transducer() -> Sample:
    """A light recurrence with batch norm, over packed lengths."""
    from speechbrain.nnet.RNN import LiGRU

    return (
        LiGRU(hidden_size=64, input_shape=(4, 60, 40), num_layers=2, bidirectional=True),
        (torch.randn(4, 60, 40),),
        {},
    )


@outside("speechbrain")
def sinc_filters() -> Sample:
    """Filters made of cut-off frequencies in every call."""
    from speechbrain.nnet.CNN import SincConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = SincConv(input_shape=(None, 4000), out_channels=16, kernel_size=65, stride=4)
            self.rest = nn.Sequential(nn.Conv1d(16, 32, 5), nn.PReLU(), nn.Conv1d(32, 32, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.rest(self.first(x).transpose(1, 2))
            return result

    return Network(), (sound(4, 4000),), {}


@outside("speechbrain")
def quaternion_network() -> Sample:
    """Custom autograd functions over quaternions."""
    from speechbrain.nnet.quaternion_networks.q_RNN import QLSTM

    return QLSTM(hidden_size=16, input_shape=(4, 30, 40), num_layers=1), (torch.randn(4, 30, 40),), {}


@outside("conformer")
def conformer() -> Sample:
    from conformer import Conformer

    return (
        Conformer(dim=64, depth=3, dim_head=16, heads=4, conv_kernel_size=15, conv_dropout=0.1),
        (torch.randn(2, 64, 64),),
        {},
    )


@outside("asteroid")
def conv_tasnet() -> Sample:
    from asteroid.models import ConvTasNet

    sizes = {"n_blocks": 3, "n_repeats": 1, "bn_chan": 16, "hid_chan": 32, "skip_chan": 16, "n_filters": 32}
    return ConvTasNet(n_src=2, **sizes), (sound(2, 4000),), {}


@outside("asteroid")
def dual_path() -> Sample:
    """Folds and unfolds around recurrences; the loss is over permutations of sources."""
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import DPRNNTasNet

    class Separation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_repeats": 1, "bn_chan": 16, "hid_size": 16, "chunk_size": 40, "n_filters": 16}
            self.net, self.loss = DPRNNTasNet(n_src=2, **sizes), PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")

        def forward(self, mixture: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.loss(self.net(mixture), sources)
            return loss

    return Separation(), (sound(2, 2000), torch.randn(2, 2, 2000)), {}


@outside("asteroid")
def complex_unet() -> Sample:
    """Complex numbers: convolutions over a short-time Fourier transform."""
    from asteroid.models import DCUNet

    return (
        DCUNet("DCUNet-10", stft_n_filters=128, stft_kernel_size=128, stft_stride=32, fix_length_mode="pad"),
        (sound(1, 4000),),
        {},
    )


@outside("demucs")
def demucs() -> Sample:
    from demucs.demucs import Demucs

    return Demucs(["a", "b"], channels=8, depth=3, dconv_mode=3, lstm_layers=1), (torch.randn(1, 2, 4000) / 8,), {}


@outside("demucs")
def hybrid_demucs() -> Sample:
    """A spectrum and a wave, joined."""
    from demucs.hdemucs import HDemucs

    return HDemucs(["a", "b"], channels=8, depth=4, nfft=256, hybrid_old=False), (torch.randn(1, 2, 4096) / 8,), {}


@outside("encodec")
def encodec() -> Sample:
    """Weight norms, and residual codebooks that learn while they run, made from the first batch."""
    from encodec.modules import SEANetDecoder, SEANetEncoder
    from encodec.quantization import ResidualVectorQuantizer

    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"channels": 1, "dimension": 32, "n_filters": 8, "ratios": [4, 2], "lstm": 1, "norm": "weight_norm"}
            self.encoder, self.decoder = SEANetEncoder(**sizes), SEANetDecoder(**sizes)
            self.quantizer = ResidualVectorQuantizer(dimension=32, n_q=3, bins=16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.quantizer(self.encoder(x), 50)
            loss: torch.Tensor = nn.functional.l1_loss(self.decoder(found.quantized), x) + found.penalty
            return loss

    return Codec(), (torch.randn(2, 1, 1600) / 8,), {}


@outside("openai-whisper")
def whisper() -> Sample:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(20, 50, 64, 4, 2, 100, 24, 64, 4, 2))
    nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # it is left as it comes from memory
    return model, (torch.randn(2, 20, 100), torch.randint(0, 100, (2, 24))), {}


@outside("torchlibrosa")
def spectrogram_network() -> Sample:
    from torchlibrosa.stft import LogmelFilterBank, Spectrogram

    spectrum = Spectrogram(n_fft=256, hop_length=64, freeze_parameters=False)
    bank = LogmelFilterBank(sr=8000, n_fft=256, n_mels=32, freeze_parameters=False)
    return nn.Sequential(spectrum, bank, nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), (sound(2, 8000),), {}


@outside("nnAudio")
def constant_q() -> Sample:
    from nnAudio.features import CQT1992v2

    transform = CQT1992v2(sr=8000, hop_length=64, fmin=220, n_bins=24, trainable=True, verbose=False)
    return nn.Sequential(transform, nn.Conv1d(24, 32, 3), nn.ReLU()), (sound(2, 8000),), {}


@outside("julius")
def filter_bank() -> Sample:
    import julius

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bands = nn.Conv1d(1, 4, 9, padding=4), julius.SplitBands(8000, n_bands=4)
            self.resample, self.last = julius.ResampleFrac(8000, 4000), nn.Conv1d(4, 2, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bands = self.bands(self.first(x)).tanh().sum(0)
            result: torch.Tensor = self.last(self.resample(bands))
            return result

    return Network(), (torch.randn(2, 1, 4000),), {}


@outside("bs-roformer")
def band_split() -> Sample:
    """Attention over time and over bands of a spectrum, several residual streams, losses of several transforms."""
    from bs_roformer import BSRoformer

    transform = {"dim_freqs_in": 65, "stft_n_fft": 128, "stft_hop_length": 64, "stft_win_length": 128}
    sizes = {"depth": 1, "dim_head": 16, "heads": 2, "multi_stft_resolutions_window_sizes": (256, 128)}
    model = BSRoformer(32, freqs_per_bands=(4,) * 8 + (33,), flash_attn=False, **transform, **sizes)
    return model, (sound(4, 2048),), {"target": sound(4, 2048)}


@outside("snac")
def multiscale_codec() -> Sample:
    """Codes of several rates, noise in the decoder, weights by norms."""
    from snac import SNAC

    rates = {"encoder_rates": [2, 4], "decoder_rates": [4, 2], "vq_strides": [4, 2, 1]}
    sizes = {"encoder_dim": 8, "decoder_dim": 64, "codebook_size": 64, "codebook_dim": 4}
    return SNAC(**sizes, **rates, attn_window_size=None), (sound(4, 2048).unsqueeze(1),), {}
