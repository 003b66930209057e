"""A causal model from scratch, then adapters of three ranks on other texts, and what they hand out.

    SIZEWISE_DATA=path/to/data python papers/lora/causal.py [--out FOLDER] [--rounds 12]

A small Llama learns the sentences of CoLA by fedavg. Frozen, it is then fine-tuned on the film
reviews of SST-2 by flexlora, on devices whose bytes hold rank 1, 4 and 16. It prints perplexities
on the reviews, what was sent, and how far the exported models are from that of the run.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sizewise import config as configs
from sizewise.families.lora.adapters import Rank
from sizewise.runs import deployment, preparation, session

RANKS = (1, 4, 16)
SHAPE = {
    **{"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def tokenizer(out: Path) -> str:
    """Learn 2,000 pieces of words from the sentences of CoLA; return where they are."""
    files = Path(os.environ["SIZEWISE_DATA"], "glue/cola").glob("train-*.parquet")
    texts = pyarrow.parquet.read_table(next(files))["sentence"]
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106  (no secret)
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<unk>"]
    pieces.train_from_iterator(
        texts.to_pylist(), trainers.BpeTrainer(vocab_size=2000, special_tokens=special)
    )
    pieces.save(str(out / "tokenizer.json"))
    return str(out / "tokenizer.json")


def run(tables: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run a config; return its result."""
    with session.started(configs.from_dict(tables), out) as federation:
        return federation.run()


def main() -> None:
    """Train the base, then the adapters, export, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/papers/lora-causal"))
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    out: Path = chosen.out
    out.mkdir(parents=True)
    data = {
        **{"target": "next", "max_tokens": 24, "train_limit": 3000, "test_limit": 300},
        "tokenizer": tokenizer(out),
    }
    tables: dict[str, Any] = {
        "rounds": chosen.rounds,
        "model": {"name": "transformers:LlamaForCausalLM", "args": SHAPE},
        "data": {"name": "glue/cola", **data},
        "fleet": {"devices": 12, "per_round": 6},
        "recipe": {"optimizer": "adamw", "lr": 5e-3, "batch": 16, "eval_batch": 50},
    }
    run(tables, out / "base-run")
    deployment.export(out / "base-run", out / "base.transformers", size="full")
    tables["model"] = {"name": tables["model"]["name"], "weights": str(out / "base.transformers")}
    tables["data"]["name"] = "glue/sst2"
    tables["method"] = {"name": "flexlora", "ranks": list(RANKS)}
    method = preparation.prepare(configs.from_dict(tables)).method
    tables["fleet"]["budgets"] = [method.peak(Rank(rank)) for rank in RANKS]
    result = run(tables, out / "adapters")
    lines = (out / "adapters" / "history.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        shown = ", ".join(f"{size} {value:.1f}" for size, value in line["perplexity"].items())
        print(f"round {line['round']}: {shown}")
    print(f"sent: {result['bytes_up']:,} bytes up, {result['bytes_down']:,} down")
    print(f"peaks: {result['peak_bytes']}, budgets: {result['budget_bytes']}")
    for rank in RANKS:
        for ending in ("peft", "transformers"):
            place = out / f"rank-{rank}.{ending}"
            facts = deployment.export(out / "adapters", place, size=f"rank {rank}")
            print(f"{place.name}: logits within {facts['difference']:.1e} of the run's")


if __name__ == "__main__":
    main()
