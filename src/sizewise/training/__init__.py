"""A device's local training, and how models are scored.

`loop` takes the steps, `working` is the copy of a model that device after device uses, `buffering`
keeps what frozen blocks make of the data, `evaluation` scores a model, `frugal` within given bytes,
`task` is what a method is given to work on. Imports `memory`, `models` and below.
"""
