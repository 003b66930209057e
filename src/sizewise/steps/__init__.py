"""One training step: loss, optimisers, levers, the recipe that chooses them, and the metrics.

The same `step` is trained, metered and predicted, which is why predicted bytes are metered bytes.
`recipe` holds the choices that papers mix up with the algorithm. Imports `common` and
`torch_tools`.
"""
