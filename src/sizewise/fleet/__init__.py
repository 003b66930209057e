"""Devices: their bytes, speeds and events, who is asked in a round, and when a round ends.

`devices` makes the fleet of a config and samples it; `profiles` are known boards; `clock` adds up
simulated seconds; `round_policy` says when a real round is over. Imports `common`.
"""
