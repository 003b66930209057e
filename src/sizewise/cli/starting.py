"""A config to start from, with a comment beside what one changes first."""

import json
from dataclasses import dataclass

from sizewise.common.structure import nearest, parse_bytes
from sizewise.data.catalog import DATASETS
from sizewise.errors import ConfigError

TEXTS = ("glue/", "ner/")


@dataclass(frozen=True)
class Answers:
    """What somebody wants to train, on what, and with which bytes.

    Attributes:
        data: A listed data set, a folder, a file, or "owner/name" on the hub.
        model: A model of the zoo, or "package.module:factory".
        budgets: Bytes of each device class, such as "20MB".
        method: A method's name.
    """

    data: str
    model: str
    budgets: tuple[str, ...]
    method: str

    def __post_init__(self) -> None:
        # A misspelt name; a folder or file has a slash or a dot, and may come to be later.
        if self.data not in DATASETS and not {"/", "\\", "."} & set(self.data):
            raise ConfigError(
                f"no data set is called {self.data!r}; {nearest(self.data, DATASETS)} "
                "(a folder or file is a path with a slash, such as ./photos)"
            )
        for budget in self.budgets:
            parse_bytes(budget, "a budget")
        if not self.budgets:
            raise ConfigError("name the bytes of at least one device class, such as 20MB,58MB")


def usual_model(data: str) -> str:
    """Return the model that most people would begin with."""
    if data.startswith(TEXTS):
        return "encoder"
    return "mlp" if data.endswith((".csv", ".jsonl")) else "preresnet20"


def usual_budgets(data: str) -> tuple[str, ...]:
    """Return budgets of which some are too small for the whole of the usual model."""
    if data == "digits":
        return ("2MB", "3MB", "4.5MB", "7MB")
    if data.startswith(TEXTS):
        return ("150MB", "185MB", "240MB")
    return ("20MB", "39MB", "58MB", "116MB")


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def config(answers: Answers) -> str:
    """Return the text of a config file."""
    kind = _TEXTS if answers.data.startswith(TEXTS) else _OTHERS
    return TEMPLATE.format(
        **kind,
        data=_quoted(answers.data),
        model=_quoted(answers.model),
        budgets=", ".join(map(_quoted, answers.budgets)),
        method=_quoted(answers.method),
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


TEMPLATE = """\
# `sizewise plan` says what fits, `sizewise run` trains. What is left out has a default.
seed = 0
rounds = 20

[model]
# One of `sizewise list models`, "package.module:factory" for your own, or "timm:resnet18".
name = {model}{weights}

[data]
# One of `sizewise list datasets`, a folder of images, a CSV file, or owner/name on the hub.
name = {data}{tokens}
partition = "balanced-dirichlet"   # who holds what; see `sizewise list partitions`
alpha = 1.0                        # small: devices hold few classes each
# label = "species"                # the column of labels, where its name does not tell
# validation = 0.2                 # the share that each device keeps to validate on

[fleet]
devices = 20
per_round = 5                      # asked in each round
# Bytes for a training step, dealt evenly over the devices. MB is 10^6 bytes, MiB 2^20.
budgets = [{budgets}]

[method]
# One of `sizewise list methods`, and its options; `sizewise compare` trains several.
name = {method}

[recipe]
optimizer = {optimizer}
lr = {lr}
batch = {batch}
epochs = 1                         # passes over a device's samples in a round
# augment = "crop-flip"            # of images
# levers = "auto"                  # first the same model in fewer bytes, then less of it

[engine]
workers = 2                        # processes that train
# device = "auto"                  # a GPU, if there is one
"""

_TEXTS = {
    "weights": '\nweights = "sentence-transformers/all-MiniLM-L6-v2"   # and its tokenizer',
    "tokens": "\nmax_tokens = 64",
    "optimizer": '"adamw"',
    "lr": "1e-4",
    "batch": "16",
}
_OTHERS = {"weights": "", "tokens": "", "optimizer": '"sgd"', "lr": "0.1", "batch": "32"}
