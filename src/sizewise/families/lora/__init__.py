"""Low-rank adapters: what methods share that fine-tune a frozen model by LoRA.

`adapters` puts peft's layers into a model, `submodels` holds the frozen base once and builds models
of any rank around it, `method` finds a rank, or a depth, from bytes, and `products` are the merges
that need both factors of an adapter at once.
"""
