"""The same run across machines, with Flower: the engine, the server app and the node app.

`engine` is the remote engine, `server` and `node` are what Flower starts, `wire` and `replies`
check every byte that comes in, `roster` knows who is there, `identity` what they run. `runner` is a
resident node and `box` many of them, each on a `connection`; `usage` counts what a process takes,
`metrics` and `status` tell what a server does. Imports `runs` and below; only the command line
imports it.
"""
