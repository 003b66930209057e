"""What methods share: `base.Method`, which is FedAvg, its helpers, and a base for each family.

`submodels` builds models and says where their tensors live, `costs` predicts what a step takes,
`trainer` trains a plan's stages. `widthwise` cuts channels, `nested` has narrower models inside
one, `prefixwise` keeps the first blocks, `own_models` leaves models with their devices. What a
single method needs is in `methods`. Imports all rooms below.
"""
