"""A run from config to result: the round loop, the session around it, the folder it leaves.

Start reading the library in `federation`. `preparation` turns a config into what it stands for,
`session` opens and closes a run, `folder` is what is written and in which order; `preview` says
what a run would do; `deployment` hands over a model. Imports `engines`, `methods`, `config` and
below.
"""
