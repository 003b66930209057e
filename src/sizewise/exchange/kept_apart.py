"""Names of tensors that the server keeps once for each submodel: "norm.bias@width 0.5".

The only place where such a name is made or taken to pieces.
"""

MARK = "@"


def own_name(name: str, label: str) -> str:
    """Return the name of the copy of a tensor that belongs to the submodel of this label."""
    return f"{name}{MARK}{label}"


def shared_name(name: str) -> str:
    """Return what a tensor is called in all submodels: the name without an owner."""
    return name.partition(MARK)[0]


def is_own(name: str) -> bool:
    """Return whether a tensor belongs to one submodel alone."""
    return MARK in name
