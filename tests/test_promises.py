"""Nothing executable on the wire or on disk: no pickle, and no code that came as data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sizewise

SOURCES = sorted(Path(sizewise.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BUILTINS = {"eval", "exec", "compile"}
METHODS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}
FLAGS = {"allow_pickle", "trust_remote_code"}
# A multiprocessing connection pickles what goes through these; send_bytes and recv_bytes do not.
PICKLING = {"recv", "send_pyobj", "recv_pyobj"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
            yield from MODULES.intersection(names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            yield from MODULES & {module}
            dotted = {f"{module}.{alias.name}" for alias in node.names}
            yield from METHODS & dotted
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            attribute = called.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
            yield from (BUILTINS | METHODS) & {called} | PICKLING & {attribute}
        elif isinstance(node, ast.keyword) and node.arg in FLAGS:
            value = ast.unparse(node.value)
            yield from {f"{node.arg}={value}"} - {f"{node.arg}=False"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_source_runs_nothing_that_it_reads(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import dill as d", "torch.load(f)"),
        *("from torch import load", "eval('1')", "exec(text)", "yaml.load(f)", "pipe.recv()"),
        *("import os, marshal", "f(x, allow_pickle=True)", "f(trust_remote_code=flag)"),
    ],
)
def test_search_would_find(code: str) -> None:
    assert list(offences(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "load(f)", "re.compile(x)", "pipe.recv_bytes()"])
def test_search_lets_pass(code: str) -> None:
    assert not list(offences(ast.parse(code)))


def test_there_is_source_to_search() -> None:
    assert len(SOURCES) > 30
