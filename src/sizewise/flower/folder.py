"""A Flower app folder for a config: what `flwr run` takes, here and against a deployment."""

import re
from pathlib import Path

import tomli_w

from sizewise.config import Config
from sizewise.data import memory
from sizewise.errors import ConfigError
from sizewise.flower import units

_PACKAGE = "sizewise_app"

_PYPROJECT = """\
# A Flower app, written by `sizewise flower new`. Edit {package}/config.toml to change the run.
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{method} on {data}, by sizewise"
license = "Apache-2.0"
dependencies = ["sizewise[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "sizewise"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
out = "{out}"  # The run folder, on the server; an unfinished run in it goes on.
set = ""  # Changes to the config of a new run, such as "rounds=3 recipe.lr=0.05".
"""

_SERVER = '''\
"""The server: runs the federation of config.toml."""

from pathlib import Path

from sizewise.flower.server import make_app

app = make_app(Path(__file__).with_name("config.toml"))
'''

_CLIENT = '''\
"""A node: trains one device, within the bytes of its --node-config."""

from sizewise.flower.node import make_app

app = make_app()
'''


def write(folder: Path, config: Config) -> None:
    """Write the app folder of a config; raise ConfigError if there is something in the way."""
    memory.check(config.data, None)  # Other machines do not have what is in the memory of one.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not empty; choose another folder")
    folder = folder.resolve()
    name = re.sub("[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "sizewise-app"
    project = _PYPROJECT.format(
        name=name,
        package=_PACKAGE,
        method=config.method.name.replace('"', ""),
        data=Path(config.data.name).name.replace('"', ""),
        # Beside the folder, not in it: Flower would pack the run into the app.
        out=folder.with_name(f"{folder.name}-run").as_posix(),
    )
    files = {
        "pyproject.toml": project,
        f"{_PACKAGE}/__init__.py": '"""A federation of devices, by sizewise."""\n',
        f"{_PACKAGE}/server_app.py": _SERVER,
        f"{_PACKAGE}/client_app.py": _CLIENT,
        f"{_PACKAGE}/config.toml": tomli_w.dumps(config.to_dict()),
        **units.files(),
    }
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the app folder {str(folder)!r} cannot be made: {error}") from None
