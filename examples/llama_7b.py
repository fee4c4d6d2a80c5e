"""Fine-tuning a Llama of 7 billion parameters on a GPU that is not there: ``python examples/llama_7b.py``.

The model lies on the ``meta`` device, so nothing of its size is allocated, and operators cost what their arithmetic and
their bytes take on the device that is asked for. In bfloat16 the parameters are 12.6 GiB; a pass allocates as much again for
the gradients, and the activations. On a card of 40 GiB with a stateless optimizer, 26 GiB are left for a pass.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.capture import capture
from lowtide.cost import analytical_costs
from lowtide.planning import make_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="a100")
    parser.add_argument("--budget", default="26GiB")
    options = parser.parse_args()

    start = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, use_cache=False)).to(torch.bfloat16)
        tokens = torch.zeros(options.batch, options.length, dtype=torch.long)
    program = capture(model.train(), (), {"input_ids": tokens, "labels": tokens}).program
    print(f"{len(program.graph.ops)} operators captured in {time.perf_counter() - start:.0f} s")
    plan = make_plan(program.graph, analytical_costs(program, options.device), budget=options.budget)
    print(plan)
    print(f"{time.perf_counter() - start:.0f} s in all, {time.process_time():.0f} s of one core")


if __name__ == "__main__":
    main()
