"""Devices: their bytes, speeds and events, who is asked in a round, and when a round ends.

`devices` describes a fleet and samples it; `making` makes the one of a config; `profiles` are known
boards; `attacks` and `attackers` are devices that lie; `clock` adds up simulated seconds;
`round_policy` says when a real round is over. Imports `common` and `exchange`.
"""
