"""Data: where images come from, who holds which of them, and how a batch is made.

Import the module you need:

* ``sources.load(name)`` and ``memory.understood(data)`` give a ``Dataset``: tensors in memory. On
  the way lie ``tables`` (anything with rows), ``columns`` (what they hold), ``reading`` (rows to
  numbers) and ``samples`` (a test set, classes, statistics).
* ``partitions.make(name, labels, ...)`` says which device holds which samples.
* ``augment.Transform`` turns a batch into what the model sees.

This package itself imports nothing heavy, so that the command line lists names without torch.
"""

from sizewise.data.catalog import AUGMENTATIONS, DATASETS, PARTITIONS

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS"]
