"""The model card of an exported model: what it is, how good, for what, and how to run it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sizewise.common.structure import format_bytes


def markdown(facts: Mapping[str, Any]) -> str:
    """Return the card from what `deployment.export` knows."""
    task, data = facts["task"], facts["data"]
    score = f"{facts['accuracy']:.2%}"
    peak, budget = format_bytes(facts["peak_bytes"]), facts["budget_bytes"]
    asked = f" (asked for: at most {format_bytes(budget)})" if budget else ""
    return f"""# {task["model"]["name"]}, {facts["size"]}, trained with {facts["method"]["name"]}

| | |
|---|---|
| {facts["metric"]} | {score} on the test set of {data["name"]}, measured on this model |
| inference | {peak} at the peak for {_samples(facts["batch"])}{asked} |
| parameters | {facts["parameters"]:,} |
| file | `{Path(facts["file"]).name}`, {format_bytes(facts["file_bytes"])} |
| input | {_input(facts)} |
| output | {len(facts["class_names"])} logits, in the order of the classes below |

The peak counts the bytes of live tensors: weights, input and activations. What a runtime needs
besides them is not in it.

## Run it

{_how(facts)}

{_preparation(facts)}Classes: {", ".join(facts["class_names"][:50])}{_more(facts)}.

## How it was trained

By federated learning: {task["devices"]:,} devices, {facts["round"]} rounds, {data["samples"]:,}
samples of {data["name"]} divided by `{data["partition"]}`. Devices disclosed to the server:
{", ".join(facts["discloses"]) or "nothing"}. The run folder, `{facts["run_dir"]}`, has the config
that repeats it.

## Limits

It is as good as its test set says, on data like it, and no more is known. {_hidden(facts)}
"""


def _hidden(facts: Mapping[str, Any]) -> str:
    """Return what the model may tell of devices and their samples."""
    return _privacy(facts) + _samples_privacy(facts)


def _privacy(facts: Mapping[str, Any]) -> str:
    """Return what the model may tell of a device."""
    spent = facts["privacy"]
    if spent is None:
        return "The model can tell about the\ndata of devices: nothing was done here to hide that."
    who = spent["accountant"]
    each = ", ".join(f"{name} {found[who]:.3g}" for name, found in spent["classes"].items())
    simulated = (
        "\nIts noise follows from `privacy.seed`, so this was a simulation: whoever knows that "
        "number can take it off."
    )
    return f"""It is

- differentially private for devices: **epsilon {spent["epsilon"]:.4g}, delta {spent["delta"]:g}**,
- by device class: {each},
- from {spent["releases"]} releases with a noise multiplier of {spent["noise"]:.4g}, added up by the
  accountant {who.upper()} of dp-accounting.

That is so of the model and of all rounds before it, not of the logs in the run folder.\
{simulated if spent["repeatable"] else ""}"""


def _samples_privacy(facts: Mapping[str, Any]) -> str:
    """Return what devices hid of their single samples."""
    spent = facts["sample_privacy"]
    if spent is None:
        return ""
    each = ", ".join(f"{name} {found:.3g}" for name, found in spent["epsilon"].items())
    simulated = ", in a simulation whose noise follows from `recipe.sample_seed`"
    return f"""

Devices clipped gradients sample by sample and added noise: **epsilon of a sample, by device class:
{each}, delta {spent["delta"]:g}**{simulated if spent["repeatable"] else ""}."""


def _samples(batch: int) -> str:
    return "one sample" if batch == 1 else f"a batch of {batch}"


def _input(facts: Mapping[str, Any]) -> str:
    batch = "batch" if facts["any_batch"] else facts["batch"]
    shape = ", ".join(map(str, (batch, *facts["task"]["input_shape"])))
    if not facts["task"].get("vocabulary"):
        return f"float32, ({shape})"
    if facts["tokenizer"] is None:
        maker = "by a tokenizer that is not known: the data was given as token ids"
    else:
        maker = f"by the tokenizer `{Path(facts['tokenizer']).name}`, which cuts and pads texts"
    return f"token ids, int64, ({shape}), {maker}"


def _preparation(facts: Mapping[str, Any]) -> str:
    if facts["tokenizer"] is not None:
        words = ", is_pretokenized=True" if facts["task"].get("target") == "tags" else ""
        return (
            f'`tokens = tokenizers.Tokenizer.from_file("{Path(facts["tokenizer"]).name}")` makes '
            f"the inputs: `[each.ids for each in tokens.encode_batch(texts{words})]`. "
        )
    if not facts["mean"]:
        return ""
    images = facts["dtype"] == "torch.uint8"
    what = "Bytes of an image are divided by 255, then" if images else "Inputs are"
    return (
        f"{what} normalised for each {'channel' if images else 'channel or feature'}: mean "
        f"{_numbers(facts['mean'])}, deviation {_numbers(facts['std'])}. "
    )


def _more(facts: Mapping[str, Any]) -> str:
    left = len(facts["class_names"]) - 50
    return f" and {left} more" if left > 0 else ""


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _how(facts: Mapping[str, Any]) -> str:
    name = Path(facts["file"]).name
    code = {
        ".safetensors": f"""from pathlib import Path
from sizewise import deployment

model = deployment.load(Path("{name}"))  # with {Path(name).stem}.json beside it
logits = model(inputs)""",
        ".onnx": f"""import onnxruntime

model = onnxruntime.InferenceSession("{name}")
(logits,) = model.run(None, {{"inputs": inputs}})""",
        ".pt2": f"""import torch

model = torch.export.load("{name}").module()  # only open files of people you trust
logits = model(inputs)""",
        ".peft": f"""from peft import PeftModel

model = PeftModel.from_pretrained(base, "{name}")  # base: the model that was fine-tuned
logits = model(inputs).logits""",
        ".transformers": f"""import transformers

model = transformers.{facts["task"]["model"]["name"].partition(":")[2]}.from_pretrained("{name}")
logits = model(inputs).logits""",
    }[Path(name).suffix]
    return f"```\n{code}\n```"
