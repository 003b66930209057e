"""Commands as a user types them, run in this process."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from sizewise import cli


@dataclass(frozen=True)
class Answer:
    """What a command gave."""

    code: int
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def sizewise(*arguments: str | Path, stdin: str = "", typed: bool = False) -> Answer:
    """Run a command in this process; starting one of its own would take seconds.

    Args:
        arguments: What comes after `sizewise`.
        stdin: What it can read.
        typed: Whether that comes from a terminal.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    command = ["sizewise", *map(str, arguments)]
    given = (Terminal if typed else io.TextIOWrapper)(io.BytesIO(stdin.encode()))
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "stdin", given),
        mock.patch.dict(os.environ),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Answer(code, out.getvalue(), err.getvalue())


def assert_one_sentence(answer: Answer, message: str, code: int = 2) -> None:
    """Check that a command ended with an error of one sentence, and printed nothing else."""
    assert answer.code == code, answer
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
