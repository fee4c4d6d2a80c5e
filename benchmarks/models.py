"""The model zoo: architectures from ``transformers`` and ``diffusers`` at small sizes with random weights.

``MODELS[name]()`` returns ``(model, args, kwargs)``; see ``benchmarks.zoo``. Caches of keys and values are off, as in every
training script; random layer drop and time masking (``wav2vec2``, ``whisper``, ``bart``) are off, because they change the
program from call to call; every other option is the library's default.
"""

from __future__ import annotations

from benchmarks.language_models import *
from benchmarks.speech_models import *
from benchmarks.vision_models import *
from benchmarks.zoo import Factory, factories

MODELS: dict[str, Factory] = factories()
# Small enough, and different enough, for every run of the tests.
QUICK = ("gpt2", "resnet", "unet2d")
