"""The accelerator ``hosted`` for tests: built once from ``hosted.cpp``, and registered with PyTorch under that name.

It belongs into a process of its own: an accelerator stays for as long as its process does.
"""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import torch

NAME = "hosted"
_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / f"hosted-{torch.__version__}"


def missing() -> str | None:
    """What the device cannot be built without, and is not there."""
    tools = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)} to build its device" if tools else None


def build() -> Path:
    """The library, compiled where it is not yet; processes wait for each other."""
    from torch.utils import cpp_extension

    _BUILD.mkdir(parents=True, exist_ok=True)
    return Path(
        cpp_extension.load(
            NAME, str(_HERE / "hosted.cpp"), build_directory=str(_BUILD), extra_cflags=["-O1"], is_python_module=False
        )
    )


def register() -> None:
    """Load the library, and give the device its name and its module, ``torch.hosted``."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(build())
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> types.ModuleType:
    """The least that PyTorch and lowtide ask of a device's module; memory and time are ``torch.accelerator``'s."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.default_generators = tuple(torch.ops.hosted.default_generator(index) for index in range(2))
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return module.default_generators[module.current_device() if index is None else index]

    def manual_seed_all(seed: int) -> None:
        for each in module.default_generators:
            each.manual_seed(seed)

    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    return module
