"""What every room uses: derived random numbers, plain structures, the environment.

`rng` makes generators named by (seed, purpose, round, device); `structure` turns dataclasses into
plain values and back, and bytes into words; `environment` says where a run happened. Imports only
`errors`.
"""
