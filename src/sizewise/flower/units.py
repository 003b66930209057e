"""Files that start nodes and a SuperLink by themselves: systemd units, a container file.

They are beside the app, for people to copy and change; Flower does not pack them into the app.
"""

import sys
from importlib import metadata

from sizewise import __version__

_NODE = """\
# A node, started by systemd: one unit for each device of this machine.
#   cp sizewise-node@.service /etc/systemd/system/
#   cp node.env /etc/sizewise/node-3.env                # and say there what the device has
#   ssh-keygen -q -t ecdsa -b 384 -N "" -f /etc/sizewise/node-3
#   systemctl enable --now sizewise-node@3
[Unit]
Description=sizewise, device %i
After=network-online.target
Wants=network-online.target

[Service]
EnvironmentFile=/etc/sizewise/node-%i.env
# Freed memory goes back to the system at once; in large pages, that costs less time.
Environment=GLIBC_TUNABLES=glibc.malloc.hugetlb=1
LoadCredential=key:/etc/sizewise/node-%i
LoadCredential=ca.crt:/etc/sizewise/ca.crt
ExecStart={program} flower node --superlink ${{SUPERLINK}} --poll ${{POLL}} \\
    --root-certificates ${{CREDENTIALS_DIRECTORY}}/ca.crt \\
    --auth-supernode-private-key ${{CREDENTIALS_DIRECTORY}}/key \\
    --node-config "partition-id=%i memory='${{MEMORY}}' state-dir='/var/lib/sizewise'"
Restart=always
RestartSec=10
# A message that takes too much is killed; the node itself goes on.
OOMPolicy=continue
DynamicUser=yes
StateDirectory=sizewise
ProtectHome=yes
ProtectSystem=strict
PrivateTmp=yes
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""

_ENVIRONMENT = """\
# What sizewise-node@.service reads: one file for each device.
SUPERLINK=server.example.org:8000
MEMORY=20MB
POLL=5
"""

_SUPERLINK = """\
# The SuperLink, started by systemd, on the server; docs/flower.md makes the certificates.
[Unit]
Description=Flower SuperLink
After=network-online.target
Wants=network-online.target

[Service]
Environment=FLWR_HOME=/var/lib/flower FLWR_TELEMETRY_ENABLED=0
Environment=FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
LoadCredential=ca.crt:/etc/sizewise/ca.crt
LoadCredential=server.pem:/etc/sizewise/server.pem
LoadCredential=server.key:/etc/sizewise/server.key
ExecStart={superlink} --host 0.0.0.0 --database /var/lib/flower/superlink.db \\
    --enable-supernode-auth --ssl-ca-certfile ${{CREDENTIALS_DIRECTORY}}/ca.crt \\
    --ssl-certfile ${{CREDENTIALS_DIRECTORY}}/server.pem \\
    --ssl-keyfile ${{CREDENTIALS_DIRECTORY}}/server.key
Restart=always
RestartSec=5
DynamicUser=yes
StateDirectory=flower

[Install]
WantedBy=multi-user.target
"""

_CONTAINER = """\
# A node in a container:
#   docker build -f deploy/Containerfile -t sizewise-node deploy
#   docker run --memory 300m -v /etc/sizewise:/keys:ro sizewise-node --superlink SERVER:8000 \\
#       --root-certificates /keys/ca.crt --auth-supernode-private-key /keys/node-3 \\
#       --node-config "partition-id=3 memory='20MB'"
# The container needs what a waiting node takes, the budget, and a reserve; a node for which that is
# too little says how much it would be, and ends. The server asks for its own versions, as here.
FROM python:{python}-slim
# A wheel beside this file, as `make release` builds it, is taken before the index is asked.
COPY Containerfile sizewise-*.whl /wheels/
RUN pip install --no-cache-dir torch=={torch} --index-url https://download.pytorch.org/whl/cpu \\
    && pip install --no-cache-dir --find-links /wheels "sizewise[flower]=={version}"
ENV FLWR_TELEMETRY_ENABLED=0 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
USER nobody
ENTRYPOINT ["sizewise", "flower", "node"]
"""

_BIN = "/opt/sizewise/bin"


def files() -> dict[str, str]:
    """Return the files, by name."""
    return {
        "deploy/sizewise-node@.service": _NODE.format(program=f"{_BIN}/sizewise"),
        "deploy/node.env": _ENVIRONMENT,
        "deploy/sizewise-superlink.service": _SUPERLINK.format(
            superlink=f"{_BIN}/flower-superlink"
        ),
        "deploy/Containerfile": _CONTAINER.format(
            version=__version__,
            torch=metadata.version("torch").partition("+")[0],
            python=".".join(map(str, sys.version_info[:2])),
        ),
    }
