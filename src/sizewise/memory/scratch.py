"""What CPU kernels take for themselves: scratch space while they run, code that they keep.

Measured one kernel at a time below malloc (`benchmarks/heap.c`), on Linux, with torch 2.13 and one
thread, on CPUs with AVX-512: all on one of AMD, convolutions in two dimensions and products on one
of another make. Others run other kernels: with AVX2 alone, a 3x3 convolution on 2x2 maps takes four
times its weights, and bfloat16 is computed in another way. So nothing is said about them, nor about
kernels that were not measured.
"""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COMPILED = 65_000  # what oneDNN keeps of each convolution that it compiles,
_COMPILED_PRODUCT = 565_000  # and of each product of bfloat16
# MKL packs the matrices of a product into panels of about this size,
_PANELS = {"GenuineIntel": 5_000_000, "AuthenticAMD": 1_000_000}
_PACKED = 192  # if the product has so many columns, and as many rows or a transposed factor
_CHANNELS = 16  # oneDNN computes in blocks of so many channels
_FEW = 8
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
_NOT_MEASURED = ("aten::_fft_", "aten::linalg_", "aten::_linalg_", "aten::_sparse_", "mkldnn::")


class NotMeasured(Exception):
    """Nobody knows what this kernel takes; its text says which one it is."""


def unknown_cpu() -> str | None:
    """Return what this CPU is if it is none of those that were measured."""
    found = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    wide = found == "AVX512" and limit.startswith(("ALL", "DEFAULT", "AVX512", "AVX10"))
    if wide and _vendor() in _PANELS:
        return None
    return f"this CPU ({_vendor() or platform.machine()}, {found if limit == 'ALL' else limit})"


@cache
def _vendor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return next((vendor for vendor in _PANELS if vendor in facts), "")


def of(name: str, args: Any, out: Any) -> int:
    """Return the bytes that a kernel takes for itself while it runs.

    oneDNN copies what a convolution reads or writes into a layout of its own: forward the larger of
    input and output, and the weights; backward both, or the weights, of which it has two copies if
    they are bfloat16. Few channels need no copy of their own. An LSTM has its gates and weights,
    these twice when it goes backward.

    Raises:
        NotMeasured: It is not known.
    """
    if name == "aten::convolution":
        inputs, weights = args[:2]
        copied = _checked(inputs, weights, transposed=args[6])
        return max(_blocked(inputs), _blocked(out)) + _bytes(weights) + copied
    if name == "aten::convolution_backward":
        gradient, inputs, weights = args[:3]
        copied = _checked(inputs, weights, transposed=args[7])
        maps = _blocked(gradient) + _blocked(inputs)
        if inputs.shape[1] <= _FEW:
            maps -= _bytes(inputs) if args[10][0] else _blocked(inputs)
        if weights.dtype == torch.bfloat16:
            return maps + 2 * _bytes(weights) + copied
        sides = zip(inputs.shape[2:], weights.shape[2:], strict=True)
        beyond = inputs.ndim == 5 and any(side < kernel for side, kernel in sides)
        return max(maps, (4 if beyond else 1) * _bytes(weights)) + copied
    if name in _PRODUCTS:
        return _product(name, args, out)
    if name.startswith("aten::mkldnn_rnn_layer") and args[0].dtype != torch.float32:
        raise NotMeasured(f"an LSTM of {str(args[0].dtype).removeprefix('torch.')}")
    if name == "aten::mkldnn_rnn_layer":
        return 4 * _bytes(out[0]) + sum(map(_bytes, args[1:3]))
    if name == "aten::mkldnn_rnn_layer_backward":
        return 5 * _bytes(args[7]) + 2 * sum(map(_bytes, args[1:3]))
    if name.startswith(_NOT_MEASURED):
        raise NotMeasured(name)
    return 0


def kept(name: str, args: Any) -> int:
    """Return the bytes that stay when a kernel has run for the first time on such shapes."""
    if name.startswith("aten::convolution"):
        return _COMPILED
    if name in ("aten::mm", "aten::addmm") and args[1].dtype == torch.bfloat16:
        return _COMPILED_PRODUCT
    return 0


def _checked(inputs: Tensor, weights: Tensor, transposed: bool) -> int:
    """Refuse convolutions that were not measured; return the bytes of a copy in order of others."""
    what = "a transposed convolution" if transposed else "a convolution"
    if transposed or not _measured(inputs.dtype):
        raise NotMeasured(f"{what} of {str(inputs.dtype).removeprefix('torch.')}")
    if inputs.is_contiguous() and weights.is_contiguous():
        return 0
    last = torch.channels_last if inputs.ndim == 4 else torch.channels_last_3d
    if inputs.ndim > 3 and any(
        tensor.is_contiguous(memory_format=last) for tensor in (inputs, weights)
    ):
        raise NotMeasured(f"{what} with channels last")
    return _bytes(inputs)


def _measured(dtype: torch.dtype) -> bool:
    # AMX computes bfloat16 in its own way.
    amx = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return dtype in (torch.float32, torch.bfloat16) and not amx


def _product(name: str, args: Any, out: Tensor) -> int:
    if not _measured(out.dtype):
        raise NotMeasured(f"a product of {str(out.dtype).removeprefix('torch.')}")
    rows, columns = out.shape[-2:]
    transposed = args[2 if "add" in name else 1].stride(-1) != 1
    packs = columns >= _PACKED and (rows >= _PACKED or transposed)
    return _PANELS[_vendor()] if packs and out.dtype == torch.float32 else 0


def _blocked(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    return _bytes(tensor) // channels * (-(-channels // _CHANNELS) * _CHANNELS)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
