"""Ranks from bytes, with the base counted once: predicted is metered, for models of all kinds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.families.lora.adapters import Rank, block_of
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


@pytest.mark.parametrize(
    ("base", "levers"), [("float32", NONE), ("bf16", EVERYTHING), ("int8", NONE)]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_predicted_is_metered(name: str, base: Stored, levers: Levers) -> None:
    task = ARCHITECTURES[name]
    method = FlexLoRA(task, FlexLoRA.Options(base=base))
    for submodel in (Rank(1), Rank(8, 2)) if base == "float32" else (Rank(4),):
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


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers.3"),
        ("blocks.0.layer.attention.self.query", "blocks.0"),
        ("layer1.0.conv1", "layer1.0"),
        ("classifier.dense2", ""),
    ],
)
def test_the_first_number_in_a_name_is_that_of_the_block(name: str, block: str) -> None:
    assert block_of(name) == block


def test_where_adapters_go() -> None:
    places = FlexLoRA(ARCHITECTURES["bert"]).submodels.places
    assert [len(block) for block in places.blocks] == [6, 6, 6]
    assert places.head == ("model.classifier",)
    assert places.targets(1)[0] == "model.bert.encoder.layer.2.attention.self.query"
    assert FlexLoRA(ARCHITECTURES["llama"]).submodels.places.head == ()
    some = FlexLoRA.Options(targets=("q_proj", "v_proj"), head=("lm_head",))
    places = FlexLoRA(ARCHITECTURES["llama"], some).submodels.places
    assert [len(block) for block in places.blocks] == [2, 2, 2]
    assert places.head == ("model.lm_head",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": ("q_pro",)}, "method.targets names 'q_pro', which no layer is; did you mean"),
        ({"head": ("score",)}, "method.head names 'score'"),
        ({"depths": (4,)}, "method.depths has 4, and the model has layers to adapt in 3 blocks"),
        ({"ranks": ()}, "method.ranks must be whole numbers from 1 on"),
    ],
)
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FlexLoRA(ARCHITECTURES["llama"], FlexLoRA.Options(**options)).trained()


def test_the_largest_rank_that_fits() -> None:
    method = FlexLoRA(ARCHITECTURES["llama"], FlexLoRA.Options(ranks=(1, 4, 9)))
    one, four, nine = (method.peak(Rank(rank)) for rank in (1, 4, 9))
    budgets = (one, four - 1, four, nine, None)
    assert [method.largest(memory).rank for memory in budgets] == [1, 1, 4, 9, 9]
    with pytest.raises(BudgetTooSmall, match=f"adapters of rank 1 needs {one:,} bytes"):
        method.largest(one - 1)


def test_all_ranks_share_one_base() -> None:
    submodels = FlexLoRA(ARCHITECTURES["llama"]).submodels
    name = "model.model.embed_tokens.weight"
    base = submodels.base.get_parameter(name)
    for rank in (1, 4):
        for module in (submodels.pattern(Rank(rank)), submodels.module(Rank(rank))):
            assert module.get_parameter(name).data_ptr() == base.data_ptr()
    loaded = {key: tensor.clone() for key, tensor in submodels.base_tensors().items()}
    submodels.hold(loaded)
    assert submodels.module(Rank(1)).get_parameter(name).data_ptr() == loaded[name].data_ptr()
