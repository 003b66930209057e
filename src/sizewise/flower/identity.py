"""Who a node is, and what it runs: compared with the server's own when it joins.

Two versions of a library, or of a model's code, can give other bits, or tensors that mean something
else, and nobody would notice. A number can be claimed by anybody; a key cannot.
"""

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sizewise import __version__
from sizewise.errors import ConfigError

OWN_MODELS = "sizewise.models"


@dataclass(frozen=True)
class Software:
    """What a process runs.

    Attributes:
        sizewise: Its version.
        torch: Its version, without how it was built.
        model: The hash of the source of the run's model; "" if there is none here.
        weights: The hash of frozen weights that never travel; "" if there are none, or none here.
    """

    sizewise: str = ""
    torch: str = ""
    model: str = ""
    weights: str = ""


def software(model: str, weights: str = "") -> Software:
    """Return what this process runs, for a model by its name; torch is not imported for it.

    Args:
        model: The name of the run's model.
        weights: What it starts from, if a method holds that on every machine.
    """
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = ""
    module = model.partition(":")[0] if ":" in model else OWN_MODELS
    return Software(__version__, torch, source_hash(module), weights_hash(weights))


def weights_hash(weights: str) -> str:
    """Return the hash of a file of weights; "": there is none, or it is not here."""
    if not weights:
        return ""
    from sizewise.data import pretrained

    try:
        with pretrained.file_of(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (ConfigError, OSError):
        return ""


def source_hash(module: str) -> str:
    """Return the hash of a module's source, of all files if it is a package; "": it is not here."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return ""
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    digest = hashlib.sha256()
    for path in files:
        # Not the folder: it may be installed anywhere. Not the end of lines: git may change it.
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name}:{len(text)};".encode() + text)
    return digest.hexdigest()


def mismatch(node: Software, server: Software) -> str | None:
    """Return how a node differs from the server; None if they run the same."""
    for name in ("sizewise", "torch"):
        theirs, ours = getattr(node, name), getattr(server, name)
        if theirs != ours:
            return (
                f"it runs {name} {theirs or 'of an unknown version'!s:.40}, and the server runs "
                f"{name} {ours}; install the same version on both"
            )
    if node.model != server.model:
        return (
            f"the source of its model has the hash {node.model[:12] or '(there is none)'!s}, and "
            f"the server's has {server.model[:12]}; install the same code on both"
        )
    if node.weights != server.weights:
        return (
            f"its base model's weights have the hash {node.weights[:12] or '(there are none)'!s}, "
            f"and the server's have {server.weights[:12]}; put the same file where "
            "model.weights says"
        )
    return None


def read_keys(folder: str | None) -> dict[int, bytes] | None:
    """Return the public keys of a folder, by the number of the device: `3.pub` is of device 3.

    Raises:
        ConfigError: There are none, or one cannot be read.
    """
    if folder is None:
        return None
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    keys: dict[int, bytes] = {}
    for path in sorted(Path(folder).expanduser().glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(path)!r} holds no public key: {error}") from None
        if not path.stem.isdecimal() or not isinstance(key, EllipticCurvePublicKey):
            raise ConfigError(
                f"{str(path)!r} is not the key of a device; expected names such as 3.pub, for "
                f"device 3, and keys by `ssh-keygen -t ecdsa -b 384`"
            )
        keys[int(path.stem)] = public_key_to_bytes(key)
    if not keys:
        raise ConfigError(f"engine.flower.keys is {folder!r}, where no file ends in .pub")
    return keys
