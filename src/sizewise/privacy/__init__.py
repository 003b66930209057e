"""Differential privacy for devices, where devices hold different pieces of the model.

`config` is the `[privacy]` table, `private_mean` the merge that clips and adds noise, `randomness`
where the noise comes from, `accounting` what all rounds together have spent. How a run uses them is
in `runs.private_rounds`; what is promised, and what not, on docs/privacy.md.
"""
