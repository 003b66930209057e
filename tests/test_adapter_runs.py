"""What a run with adapters of three ranks learns, keeps, sends and hands out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_runs import RANKS
from sizewise.config import Config
from sizewise.families.lora.adapters import DOWN, UP
from sizewise.runs import deployment

pytest.importorskip("peft")
pytest.importorskip("tokenizers")


def test_perplexity_falls_with_three_ranks(adapted: tuple[Config, Path]) -> None:
    _, path = adapted
    history = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    result = json.loads((path / "result.json").read_text())
    updates = [json.loads(line) for line in (path / "updates.jsonl").read_text().splitlines()]
    assert {line["submodel"]["rank"] for line in updates} == set(RANKS)
    assert all(line["peak_bytes"] <= line["budget"] for line in updates)
    before = json.loads((path.parent / "whole" / "result.json").read_text())["perplexity"]["full"]
    first, *_, last = ([line["perplexity"][f"rank {r}"] for r in RANKS] for line in history)
    assert all(a > b for a, b in zip(first, last, strict=True))
    assert all(perplexity < before for perplexity in last)
    assert result["metric"] == "likelihood"
    assert result["accuracy"] == pytest.approx(1 / last[-1])


def test_only_adapters_rest_and_travel(adapted: tuple[Config, Path]) -> None:
    _, path = adapted
    tensors = load_file(path / "final.safetensors")
    assert all(name.endswith((DOWN, UP)) for name in tensors)
    # Of rank 1: for each of seven layers in two blocks, as many numbers as inputs and outputs.
    numbers = 2 * ((16 + 16) * 2 + (16 + 8) * 2 + (16 + 24) * 3)
    for line in map(json.loads, (path / "updates.jsonl").read_text().splitlines()):
        size = 4 * numbers * line["submodel"]["rank"]
        assert (line["bytes_up"], line["bytes_down"]) == (size, size)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("rank", [1, 8])
def test_exports_load_in_peft_and_in_transformers(
    adapted: tuple[Config, Path], rank: int, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    config, path = adapted
    ids = torch.randint(2, 10, (4, 10), generator=torch.Generator().manual_seed(0))
    ours = deployment.trained(path, f"rank {rank}")(ids)
    facts = deployment.export(path, tmp_path / "chat.peft", size=f"rank {rank}")
    assert facts["difference"] < 1e-5
    deployment.export(path, tmp_path / "chat.transformers", size=f"rank {rank}")
    base = LlamaForCausalLM.from_pretrained(str(config.model.weights))
    plain = base(ids).logits
    fine_tuned = PeftModel.from_pretrained(base, str(tmp_path / "chat.peft"))
    merged = LlamaForCausalLM.from_pretrained(str(tmp_path / "chat.transformers"))
    assert float((plain - ours).detach().abs().max()) > 1e-2
    for model in (fine_tuned, merged):
        assert float((model(ids).logits - ours).detach().abs().max()) < 1e-5
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    told = [model.generate(input_ids=ids[:1, :2], **options) for model in (fine_tuned, merged)]
    assert torch.equal(*told)
