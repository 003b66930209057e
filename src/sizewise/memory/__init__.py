"""Bytes and operations of a training step: predicted without running it, metered while it runs.

`prediction` runs the step on hollow tensors, never twice for equal `fingerprints`; `meter` counts
live storages and can raise a simulated out-of-memory; `ledger` explains a peak; `packing` finds the
largest that fits; `accounting` has the papers' own counts. Imports `steps`, `torch_tools` and
`surgery`.
"""
