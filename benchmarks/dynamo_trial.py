"""Whether Dynamo's guards could carry the Python half of a capture: what they notice, and whether its graphs are eager's bits.

``python -m benchmarks.dynamo_trial`` changes what a model's Python code reads, in the ways of ``tests/fuzz``, between two steps
of ``torch.compile(model, backend="eager")``, whose graphs run eager's own operators; trains small models that way for three
steps, with ``is_compiling`` folded to ``False`` and without; and times the guards of both on a GPT-2 with 12 layers.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

import lowtide
from lowtide.capture import capture
from tests.fuzz.test_python_changes import CASES, UNCOPIED, Model

_STEPS = 3
_QUESTIONS = ("is_compiling", "is_dynamo_compiling", "is_exporting")


def changes() -> dict[str, list[str]]:
    """The kinds of change, by what becomes of them: ``noticed``, ``stale`` (the graph of before ran), or ``refused``."""
    found: dict[str, list[str]] = {"noticed": [], "stale": [], "refused": []}
    for name, (make, read, change) in CASES.items():
        if name not in UNCOPIED:
            found[_after(make, read, change)].append(name)
    return found


def _after(make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]) -> str:
    torch._dynamo.reset()
    model, x = Model(make(), read), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager")
    try:
        compiled(x)
        change(model.state)
        found = compiled(x)
    except Exception:  # noqa: BLE001  # whatever Dynamo says
        return "refused"
    return "noticed" if torch.equal(found, model(x)) else "stale"


def _small_models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    small = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    small |= {"intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = {}
    for name in (
        "gpt2",
        "llama",
        "qwen2",
        "mistral",
        "gemma",
        "phi",
        "opt",
        "gpt_neox",
        "bloom",
        "mamba",
        "falcon",
        "stablelm",
    ):
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **small)).train()
        except Exception as error:  # noqa: BLE001  # a configuration that does not take these names
            print(f"  {name} cannot be made this small: {type(error).__name__}")
            continue
        made[name] = model, {"input_ids": tokens, "labels": tokens}
    return made


def _gradients(run: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for step in range(_STEPS):
        torch.manual_seed(step)
        model.zero_grad()
        run(**inputs).loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def bits() -> dict[str, str]:
    """Per model: equal to eager to the bit, or not; graphs that Dynamo made of it."""
    found = {}
    for name, (model, inputs) in _small_models().items():
        torch._dynamo.reset()
        graphs: list[Any] = []

        def counting(module: Any, example: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(module)
            return module.forward

        plain = _gradients(model, model, inputs)
        try:
            compiled = _gradients(torch.compile(model, backend=counting), model, inputs)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001
            found[name] = f"refused: {type(error).__name__}"
            continue
        same = len(plain) == len(compiled) and all(map(torch.equal, plain, compiled))
        found[name] = f"{'equal' if same else 'differs'}, {len(graphs)} graph{'s' if len(graphs) > 1 else ''}"
    return found


def _fold_is_compiling() -> None:
    """Have models take the path that they take in eager: Dynamo folds these questions to constants."""
    from torch._dynamo.variables.torch import tracing_state_functions

    constants = tracing_state_functions()
    for function in [function for function in constants if getattr(function, "__name__", "") in _QUESTIONS]:
        constants[function] = False


def guard_times() -> tuple[float, float, float]:
    """Microseconds that the guards of a call take, ours and those of Dynamo's first entry, and the number of entries."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=128)).train()
    tokens = torch.randint(0, 128, (2, 16))
    guards = capture(model, (), {"input_ids": tokens, "labels": tokens}).contract.conditions.guards[0]
    modules = list(model.modules())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=tokens, labels=tokens)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(model.forward.__func__)  # type: ignore[attr-defined]
    manager = entries[0].guard_manager if entries else None
    local = {"self": model, "input_ids": tokens, "labels": tokens}
    check = (lambda: manager.check(local)) if manager is not None else (lambda: None)
    return _best(lambda: guards.hold(modules)), _best(check), float(len(entries))


def _best(run: Callable[[], Any], times: int = 200) -> float:
    run()
    found = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - start) / times * 1e6)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, lowtide {lowtide.__version__}")
    found = changes()
    for outcome, names in found.items():
        print(f"{outcome}: {len(names)}" + (f" ({', '.join(names)})" if outcome != "noticed" else ""))
    for fold in (False, True):
        if fold:
            _fold_is_compiling()
        results = bits()
        kinds = Counter(text.split(",")[0] for text in results.values())
        print(f"is_compiling {'folded to False' if fold else 'as it is'}: {dict(kinds)}")
        for name, text in results.items():
            print(f"  {name}: {text}")
    ours, theirs, entries = guard_times()
    print(f"guards of GPT-2, 12 layers: lowtide {ours:.0f} us, Dynamo {theirs:.0f} us ({entries:.0f} entries)")


if __name__ == "__main__":
    main()
