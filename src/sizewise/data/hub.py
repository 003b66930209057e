"""Whether the Hugging Face hub can be asked at all.

Its client tries again for 23 seconds before it says that there is no network.
"""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

ADDRESS = "https://huggingface.co"


def reachable() -> bool:
    """Return whether the hub's name can be looked up; behind a proxy, that is the proxy's task."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or ADDRESS).hostname
    if getproxies() or host is None:
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
