"""Where tensors are: what trains is on the run's device, all else is in host memory.

A working copy of a model lives on the device. Its tensors are copied in when it is loaded and out
when it has learned, and each batch goes to where the model is. So methods, merging, data and files
only ever see host memory.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sizewise.errors import ConfigError
from sizewise.torch_tools.remaking import remade

T = TypeVar("T")

HOST = torch.device("cpu")

BLOCKS = {"cuda": 512}
"""Bytes of which an accelerator's allocator hands out whole multiples, as its source says."""


def find(name: str) -> torch.device:
    """Return the device that a config names: "cpu", "auto", "cuda", "cuda:1", "mps", "xpu", ...

    "auto" is the machine's accelerator, or its CPU if it has none.

    Raises:
        ConfigError: There is no such device here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return HOST if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device == HOST:
        return HOST
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if accelerator is None or device.type != accelerator.type or (device.index or 0) >= count:
        raise ConfigError(
            f"engine.device is {name!r}, and this machine has {_listed(accelerator, count)}; "
            f"choose one of these, or 'auto'"
        )
    return torch.device(device.type, device.index or 0)


def every(name: str) -> list[torch.device]:
    """Return all devices that a config's name stands for: a kind without a number, all of them."""
    first = find(name)
    if first == HOST or ":" in name:
        return [first]
    return [torch.device(first.type, number) for number in range(torch.accelerator.device_count())]


def settled(name: str) -> str:
    """Return a config's name of a device that is here, with "auto" replaced by what it is."""
    device = find(name)
    return device.type if name == "auto" else name


def _listed(accelerator: torch.device | None, count: int) -> str:
    numbered = [f"{accelerator.type}:{n}" for n in range(count)] if accelerator is not None else []
    return ", ".join(["cpu", *numbered])


def device_of(module: nn.Module) -> torch.device:
    """Return where a model is; without any tensor, it is on the host."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device
    return HOST


def moved(tree: T, device: torch.device) -> T:
    """Return a nest of containers with its tensors on a device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, tree)  # type: ignore[no-any-return]


def taken_out(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, without history, in the usual layout.

    A tensor without data stays one.
    """
    if tensor.is_meta:
        return tensor.detach()
    return tensor.detach().to(HOST, copy=True).contiguous()


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device, also the tensors that are plain attributes.

    On its own device it is the model itself, else a copy.
    """
    if device_of(module) == device:
        return module
    return remade(module, lambda tensor: tensor.detach().to(device))
