"""Torch, seen from below: operations as they run, tensors without data, copies of modules.

`dispatch` is the base of what watches operations; `results` knows what operations return, but for
values; `hollow` tensors have shapes but no data; `dry_run` runs a model on meta tensors; `remaking`
copies modules tensor by tensor; blocks that are `checkpointing` run twice, and `keeping` says how
tensors wait for the backward pass; `placement` says what is on a device, `layout` how images lie
there. Nothing here knows of federated learning.
"""
