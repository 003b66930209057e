"""What travels between server and devices, and what the server makes of it.

A `plan` says what a device does, a `view` which of the server's tensors it holds, an update what it
sends back. `coverage_mean` is the one merge (`merging`: what every merge has), `server_optimizers`
the step that follows, `state` what a round turns into the next, `checkpoint` how that rests on
disk. Imports `steps` for the recipe.
"""
