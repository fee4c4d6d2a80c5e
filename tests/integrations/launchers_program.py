"""What ``test_launchers`` runs under torchrun: trainers that shard a model by FSDP2 themselves, with and without plans."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import accelerate
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.demo.gpt2 import build_model, draw_batches, load_corpus
from lowtide.integrations import pytorch_lightning as for_lightning
from lowtide.integrations import transformers as for_transformers
from tests.integrations.collectives import recorded
from tests.integrations.fsdp_program import SHAPE, batches, of_all_ranks
from tests.integrations.launch import say
from tests.integrations.scenarios import local, perform
from tests.integrations.sharding import forget, on_cpus
from tests.integrations.trainers import Rows

_STEPS = 4
_SHARE = 0.5  # of what a rank takes without lowtide
_LOSS_BYTES = 64  # of what trainers compute with a loss
Plan = Callable[[Any], Any]


@dataclass(slots=True)
class Run:
    """A training of a rank. ``collectives``: of a step, the same on all ranks."""

    model: Any
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)

    @property
    def budget(self) -> int:
        """For another one, the same on all ranks."""
        return int(_SHARE * of_all_ranks(self.peaks[1:]))


def planned(budget: int) -> Plan:
    return lambda model: lowtide.rematerialize(model, budget=budget, reserve=_LOSS_BYTES, planner="auto{effort=1}")


def assert_same(ours: Run, reference: Run) -> None:
    """Equal to the bit, each pass within the budget, each gradient reduced once."""
    assert ours.losses
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    mine, theirs = (
        {name: local(tensor) for name, tensor in run.model.state_dict().items()} for run in (ours, reference)
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert _reductions(ours) == _reductions(reference)
    (plan,) = lowtide.plans(ours.model)
    assert plan.overhead > 0
    assert plan.peak_bytes <= plan.budget_bytes
    assert 0 < max(ours.peaks[1:]) <= plan.peak_bytes + _LOSS_BYTES, (ours.peaks, plan.peak_bytes)
    say(f"peaks {ours.peaks}, predicted {plan.peak_bytes} of {plan.budget_bytes}, alone {reference.peaks}")


def _reductions(run: Run) -> list[str]:
    return sorted(each for each in run.collectives if "reduce" in each)


def data(steps: int) -> Rows:
    """Rows of so many ``steps`` of all ranks."""
    rows = torch.cat(draw_batches(load_corpus(200_000), SHAPE, steps * dist.get_world_size()))
    return Rows(input_ids=rows, labels=rows)


def prepared(plan: Plan | None, *, before: bool, given: Mapping[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """An accelerator, and what it made of a model and its optimizer: planned after that, or ``before``."""
    forget()
    torch.manual_seed(0)
    model: Any = build_model(SHAPE)
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy, **options)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, **given)
    if plan and before:
        plan(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert accelerator.is_fsdp2
    if plan and not before:
        plan(model)
    return accelerator, model, optimizer


def steps(run: Run, accelerator: Any, optimizer: Any, rows: Sequence[torch.Tensor]) -> None:
    for batch in rows:

        def compute(batch: torch.Tensor = batch) -> None:
            outputs = run.model(input_ids=batch, labels=batch)
            accelerator.backward(outputs.loss)
            run.losses.append(outputs.loss.item())

        with accelerator.accumulate(run.model):
            run.peaks.append(lowtide.measure(compute).peak_bytes)
            if accelerator.sync_gradients:
                run.losses.append(float(local(accelerator.clip_grad_norm_(run.model.parameters(), 1.0))))
            optimizer.step()
            optimizer.zero_grad()


def by_accelerate(plan: Plan | None = None, *, before: bool = False, given: Any = None, **options: Any) -> Run:
    """A loop of one's own."""
    accelerator, model, optimizer = prepared(plan, before=before, given=given or {}, **options)
    run = Run(model)
    torch.manual_seed(dist.get_rank())
    steps(run, accelerator, optimizer, batches(_STEPS))
    with recorded() as run.collectives:
        steps(run, accelerator, optimizer, batches(2))
    return run


def in_two_halves(plan: Plan | None = None) -> Run:
    """Half of a training, its state saved and loaded into another model, the other half."""
    run, rows = Run(None), batches(2 * _STEPS)
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    for half in (rows[:_STEPS], rows[_STEPS:]):
        accelerator, run.model, optimizer = prepared(plan, before=False, given={})
        torch.manual_seed(dist.get_rank())
        if run.losses:
            accelerator.load_state(names[0])
        steps(run, accelerator, optimizer, half)
        run.peaks.pop(-_STEPS)  # of a model's first call
        if half[0] is rows[0]:
            accelerator.save_state(names[0])
    return run


@on_cpus()
def accelerate_with_fsdp2() -> None:
    """Planned before ``prepare`` and after it; each rank's reductions and their order are FSDP2's."""
    reference = by_accelerate()
    for before in (True, False):
        assert_same(by_accelerate(planned(reference.budget), before=before), reference)
    # accelerate's own checkpointing draws other numbers for dropout when it runs a block again: a plan does not
    assert_same(by_accelerate(planned(reference.budget), before=True, activation_checkpointing=True), reference)


@on_cpus()
def accelerate_with_options() -> None:
    """Mixed precision, accumulation, parameters that one process has loaded, saved states."""
    cases: tuple[dict[str, Any], ...] = (
        {"given": {"mixed_precision": "bf16"}},
        {"given": {"gradient_accumulation_steps": 2}},
        {"cpu_ram_efficient_loading": True},
    )
    for case in cases:
        reference = by_accelerate(**case)
        assert_same(by_accelerate(planned(reference.budget), before=True, **case), reference)
    reference = in_two_halves()
    assert_same(in_two_halves(planned(reference.budget)), reference)


def by_trainer(plan: Plan | None = None, **arguments: Any) -> Run:
    """Hugging Face's Trainer, which gives the model to accelerate: planned before, as there is no later."""
    forget()
    torch.manual_seed(0)
    model: Any = build_model(SHAPE)
    if plan:
        plan(model)
    callback = for_transformers.LowtideCallback()
    settings = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=_STEPS, per_device_train_batch_size=SHAPE.batch, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, dataloader_pin_memory=False,
        fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]}, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data(_STEPS * 2), callbacks=[callback])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    logged = trainer.state.log_history
    if plan:
        measured = [entry["lowtide_measured_peak_mib"] for entry in logged if "lowtide_measured_peak_mib" in entry]
        assert len(measured) == len(callback.history) == _STEPS - 1
    losses = [entry[name] for entry in logged for name in ("loss", "grad_norm") if name in entry]
    return Run(model, losses, [peak for _, peak in callback.history])


@on_cpus()
def trainer_with_fsdp() -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"bf16": True}, {"gradient_accumulation_steps": 2})
    for arguments in cases:
        reference = by_trainer(**arguments)
        assert_same(by_trainer(planned(reference.budget), **arguments), reference)


class Language(pl.LightningModule):
    """Sharded where Lightning wants it, and planned after that, or ``before``."""

    def __init__(self, plan: Plan | None, *, before: bool) -> None:
        super().__init__()
        self.plan, self.before = plan, before
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = build_model(SHAPE)
        if self.plan and self.before:
            self.plan(self.model)
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if self.plan and not self.before:
            self.plan(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def by_lightning(plan: Plan | None = None, *, before: bool = False, **options: Any) -> Run:
    """Lightning's ``ModelParallelStrategy``."""
    torch.manual_seed(0)
    module, callback = Language(plan, before=before), for_lightning.LowtideCallback()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=_STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[callback], **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data(2 * _STEPS), batch_size=SHAPE.batch))
    return Run(module.model, module.losses, [peak for _, peak in callback.history])


def lightning_with_fsdp2() -> None:
    warnings.simplefilter("ignore")
    cases: tuple[dict[str, Any], ...] = ({}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"})
    for before, options in zip((False, True, True), cases, strict=True):
        reference = by_lightning(**options)
        assert_same(by_lightning(planned(reference.budget), before=before, **options), reference)


if __name__ == "__main__":
    perform(accelerate_with_fsdp2, accelerate_with_options, trainer_with_fsdp, lightning_with_fsdp2)
