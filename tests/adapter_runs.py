"""A small Llama, from scratch: trained whole, then by adapters of three ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.config import Config
from sizewise.families.lora.adapters import Rank
from sizewise.runs import deployment, preparation, session

ARGS = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16},
}
WHO, DOES, WHAT = ("the cat", "a dog", "my owl"), ("sees", "likes", "hears"), ("it", "you", "us")
RANKS = (1, 4, 8)


def tables(folder: Path) -> dict[str, Any]:
    """Write texts and a tokenizer into a folder; return the config of a run that learns them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = " ".join((*WHO, *DOES, *WHAT)).split()
    names = ["[PAD]", "[UNK]", *dict.fromkeys(words)]
    tokens = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.save(str(folder / "tokenizer.json"))
    rows = [f"{who} {does} {what}" for who in WHO for does in DOES for what in WHAT] * 3
    lines = [json.dumps({"text": f"{row} {row}"}) for row in rows]
    for split, some in (("train", lines[:60]), ("test", lines[60:])):
        (folder / f"{split}.jsonl").write_text("\n".join(some))
    return {
        "rounds": 3,
        "model": {"name": "transformers:LlamaForCausalLM", "args": ARGS},
        "data": {
            **{"name": str(folder), "target": "next", "max_tokens": 10},
            "tokenizer": str(folder / "tokenizer.json"),
        },
        "fleet": {"devices": 3, "per_round": 3},
        "method": {"name": "fedavg"},
        "recipe": {"optimizer": "adamw", "lr": 0.01, "batch": 5, "eval_batch": 20},
    }


def run(config: Config, path: Path) -> dict[str, Any]:
    with session.started(config, path) as federation:
        return federation.run()


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Train a base, then adapters whose ranks the budgets hold; return the config and the run."""
    home = tmp_path_factory.mktemp("adapted")
    (home / "texts").mkdir()
    chosen = tables(home / "texts")
    run(configs.from_dict(chosen), home / "whole")
    deployment.export(home / "whole", home / "base.transformers", size="full")
    chosen["model"] = {"name": chosen["model"]["name"], "weights": str(home / "base.transformers")}
    chosen["method"] = {"name": "flexlora", "ranks": list(RANKS)}
    method = preparation.prepare(configs.from_dict(chosen)).method
    chosen["fleet"]["budgets"] = [method.peak(Rank(rank)) for rank in RANKS]
    config = configs.from_dict(chosen)
    run(config, home / "run")
    return config, home / "run"
