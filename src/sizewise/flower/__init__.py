"""The same run across machines, with Flower: the engine, the server app and the node app.

`engine` is the remote engine, `server` and `node` are what Flower starts, `wire` and `replies`
check every byte that comes in, `roster` knows who is there. Imports `runs` and below; only the
command line imports it.
"""
