"""What travels between server and devices, and what the server makes of it.

A `plan` says what a device does, a `view` which of the server's tensors it holds, an update what it
sends back. `merge_rules` chooses how updates are merged (`merging`: what every merge has):
`coverage_mean`, which streams, or one that stands liars. `server_optimizers` is the step that
follows, `state` what a round turns into the next, `checkpoint` how that rests on disk. Imports
`steps` for the recipe.
"""
