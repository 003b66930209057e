"""Data: where images come from, who holds which of them, and how a batch is made.

Three steps, one module each; import the one you need:

* ``sources.load(name)`` gives a ``Dataset``: uint8 tensors in memory.
* ``partitions.make(name, labels, ...)`` says which device holds which samples.
* ``augment.Transform`` turns a uint8 batch into what the model sees.

This package itself imports nothing heavy, so that the command line lists names without torch.
"""

from sizewise.data.catalog import AUGMENTATIONS, DATASETS, PARTITIONS

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS"]
