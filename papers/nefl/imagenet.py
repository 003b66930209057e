"""Keep of a pre-trained ResNet what NeFL starts from, under our names, for `model.weights`.

    python papers/nefl/imagenet.py resnet18.safetensors TARGET.safetensors

Takes the state dict of torchvision's `resnet18`, `resnet34` or `wide_resnet101_2` as safetensors
(its `.pth` files can run code when they are read, so convert them where you trust them), and writes
the convolutions of the residual blocks. As in NeFL, stem and classifier are left out and start
fresh, and so do the norms. Of a ResNet that was trained here it keeps the same.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sizewise.data import pretrained

OURS = re.compile(r"blocks\.\d+\.(projection\.conv|conv\d)\.weight")


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the convolutions of the blocks, the blocks counted through all stages."""
    if ours := {name: weight for name, weight in weights.items() if OURS.fullmatch(name)}:
        return ours
    found: dict[str, Tensor] = {}
    blocks: dict[tuple[int, int], int] = {}
    pattern = re.compile(r"layer(\d+)\.(\d+)\.(conv\d|downsample\.0)\.weight")
    matches = [match for name in weights if (match := pattern.fullmatch(name))]
    for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2]))):
        number = blocks.setdefault((int(match[1]), int(match[2])), len(blocks))
        part = "projection.conv" if match[3].startswith("downsample") else match[3]
        found[f"blocks.{number}.{part}.weight"] = weights[match[0]].contiguous()
    return found


def main() -> None:
    """Read, rename and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    chosen = parser.parse_args()
    found = renamed(pretrained.load(chosen.source))
    if not found:
        raise SystemExit(
            f"{chosen.source} has no tensor called like 'layer1.0.conv1.weight' (torchvision) or "
            "'blocks.0.conv1.weight' (ours)"
        )
    chosen.target.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, chosen.target)
    print(f"{len(found)} convolutions: {chosen.target}")


if __name__ == "__main__":
    main()
