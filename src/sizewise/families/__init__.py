"""What methods share: `base.Method`, which is FedAvg, and a base for each family.

`widthwise` cuts channels, `scalewise` channels and blocks, `stepwise` widens layer by layer,
`depthwise` trains some blocks at a time, `prefixwise` the first blocks, `architectures` lets
devices have models of their own. A single method is a file in `methods`. Imports all rooms below.
"""
