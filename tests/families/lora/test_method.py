"""Ranks from bytes, with the base counted once: predicted is metered, for models of all kinds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sizewise.families.lora.adapters import Rank
from sizewise.memory.meter import Meter
from sizewise.methods.flexlora import FlexLoRA
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.torch_tools.stored import Stored
from sizewise.training.loop import make_step
from sizewise.training.task import ModelConfig, Task

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA: dict[str, Any] = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 1}
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 8}


def texts(name: str, args: dict[str, Any], **rest: Any) -> Task:
    recipe = Recipe(optimizer="adamw", batch=4, eval_batch=4)
    return replace(Task(ModelConfig(name, args), recipe, (8,), 40, vocabulary=40), **rest)


ARCHITECTURES = {
    "bert": texts(
        "transformers:BertForSequenceClassification", {**SMALL, "intermediate_size": 24}, classes=3
    ),
    "encoder": texts("encoder", {"layers": 3, "hidden": 16, "heads": 2}, classes=3),
    "llama": texts("transformers:LlamaForCausalLM", LLAMA, target="next"),
    "gpt2": texts("transformers:GPT2LMHeadModel", GPT2, target="next"),
    "resnet": replace(texts("preresnet8", {}, classes=3, vocabulary=0), input_shape=(3, 8, 8)),
}
EVERYTHING = Levers(micro_batch=2, checkpoint=True)


@pytest.mark.parametrize("base", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("levers", [NONE, EVERYTHING], ids=["plain", "levers"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_predicted_is_metered(name: str, base: Stored, levers: Levers) -> None:
    task = ARCHITECTURES[name]
    method = FlexLoRA(task, FlexLoRA.Options(base=base))
    for submodel in (Rank(1), Rank(8, 2)):
        stage = replace(task.stage(), levers=levers)
        predicted = method.peak(submodel, stage)
        copy = method.submodels.copy(submodel)
        parameters = copy.ready(copy.actual(stage))
        optimizer = make_optimizer(task.recipe, parameters, 0.01, levers)
        step = make_step(task.recipe, method.loss(submodel, stage, None), levers)
        inputs, targets = task.drawn(4), torch.zeros(task.targets(4).shape, dtype=torch.int64)
        for _ in range(2):
            with Meter() as meter:
                meter.track(copy.module, optimizer, inputs, targets)
                step(copy.module, optimizer, inputs, targets)
        assert meter.peak == predicted
        with Meter(predicted) as meter:
            meter.track(copy.module, optimizer, inputs, targets)
            step(copy.module, optimizer, inputs, targets)
