"""Hugging Face ``Trainer`` on rematerialized models: as without lowtide to the bit, and within the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import lowtide
from tests.integrations.trainers import SHAPE, Rows, assert_same_state, assert_same_training, gpt2, text, train


def test_twenty_steps_of_gpt2(tmp_path: Path) -> None:
    """With dropout, at 40 % of the peak; the last batch of every epoch is short."""
    data = text(30)
    ours = train(gpt2, tmp_path, data, planned=True)
    assert_same_training(ours, train(gpt2, tmp_path, data, planned=False))
    assert len(ours.losses) == 20
    assert len(lowtide.plans(ours.model)) == 2
    log = [entry for entry in ours.trainer.state.log_history if "lowtide_measured_peak_mib" in entry][-1]
    assert 0 < log["lowtide_measured_peak_mib"] <= log["lowtide_budget_mib"]
    assert log["lowtide_predicted_peak_mib"] <= log["lowtide_budget_mib"]
    assert log["lowtide_predicted_overhead"] > 0
    assert "lowtide_measured_overhead" in log


def test_activation_checkpointing_is_left_to_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = train(gpt2, tmp_path, text(8), planned=True, steps=2, activation_checkpointing=True)
    assert_same_training(ours, train(gpt2, tmp_path, text(8), planned=False, steps=2))
    assert len(lowtide.plans(ours.model)) == 1
    assert "is left to the plan" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{"gradient_accumulation_steps": 3}, {"bf16": True}], ids=["accumulation", "bf16"]
)
def test_arguments(tmp_path: Path, arguments: dict[str, Any]) -> None:
    data = text(30)
    ours = train(gpt2, tmp_path, data, planned=True, steps=6, **arguments)
    assert_same_training(ours, train(gpt2, tmp_path, data, planned=False, steps=6, **arguments))


@pytest.mark.slow
def test_evaluating_saving_and_resuming(tmp_path: Path) -> None:
    """Stopped after six steps and resumed by a new model from the checkpoint: the same as never stopped."""
    data, held_out = text(30), text(8)
    every: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "data_for_evaluation": held_out,
    }  # fmt: skip
    reference = train(gpt2, tmp_path / "plain", data, planned=False, steps=12, **every)
    whole = train(gpt2, tmp_path / "whole", data, planned=True, steps=12, **every)
    checkpoint = str(tmp_path / "whole" / "checkpoint-6")
    resumed = train(gpt2, tmp_path / "resumed", data, planned=True, steps=12, resume=checkpoint, **every)
    assert_same_training(whole, reference)
    assert_same_training(resumed, reference)
    for run in (whole, resumed):
        assert _evaluations(run.trainer) == _evaluations(reference.trainer)
    whole.trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same_state(loaded, reference.model)


def _evaluations(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def _with_lora() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model: nn.Module = peft.get_peft_model(gpt2(), config)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_lora_over_a_frozen_base(tmp_path: Path) -> None:
    data = text(30)
    ours = train(_with_lora, tmp_path, data, planned=True, steps=6)
    assert_same_training(ours, train(_with_lora, tmp_path, data, planned=False, steps=6))
    ours.trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    assert_same_state(again, ours.model)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=256,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).train()


@pytest.mark.slow
def test_sequence_to_sequence(tmp_path: Path) -> None:
    windows = text(22)
    data = Rows(input_ids=windows.columns["input_ids"][:, :40], labels=windows.columns["labels"][:, 40:])
    arguments: dict[str, Any] = {
        "steps": 6, "trainer_class": transformers.Seq2SeqTrainer, "arguments_class": transformers.Seq2SeqTrainingArguments,
    }  # fmt: skip
    arguments["predict_with_generate"] = True
    ours = train(_t5, tmp_path, data, planned=True, **arguments)
    assert_same_training(ours, train(_t5, tmp_path, data, planned=False, **arguments))
    generated = ours.trainer.predict(Rows(input_ids=data.columns["input_ids"][:2]), max_length=8).predictions
    assert len(generated) > 0


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config).train()


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).train()


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [_resnet, _vit])
def test_vision(tmp_path: Path, make_model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = Rows(
        pixel_values=torch.randn(22, 3, 32, 32, generator=generator),
        labels=torch.randint(0, 4, (22,), generator=generator),
    )
    ours = train(make_model, tmp_path, data, planned=True, steps=8, budget="60%")
    assert_same_training(ours, train(make_model, tmp_path, data, planned=False, steps=8))
    assert SHAPE.batch * 8 > len(data)
