"""What every room uses: derived random numbers, plain structures, widths, the environment.

`rng` makes generators named by (seed, purpose, round, device); `structure` turns dataclasses into
plain values and back, and bytes into words; `widths` turns a ratio into a number of channels;
`threads` holds torch to one, `cores` counts them; `environment` says where a run happened. Imports
only `errors`.
"""
