"""What all commands share: how they print, and how they fail.

People get tables, machines get JSON, and a mistake gets one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from bcnet.errors import BcnetError

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130


class Command(TyperCommand):
    """A command whose ``--help`` is listed as what it is, an option without a value."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))


def _without_value(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


class OneLineErrors(TyperGroup):
    """A group of commands that answers every mistake with one line on stderr and exit code 2."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except BcnetError as error:
            fail(str(error))
        except (typer.Abort, KeyboardInterrupt):
            fail("interrupted", code=INTERRUPTED)
        except BrokenPipeError:
            _leave_quietly()
        except OSError as error:
            fail(_refused(error))
        except Exception as error:
            # Usage errors; their class is found in click or in typer, depending on typer's version.
            if not hasattr(error, "format_message"):
                raise
            fail(error.format_message())
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            fail("interrupted", code=INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _refused(error: OSError) -> str:
    """What the system said, with the file it spoke of."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename is not None else f"cannot write the output: {reason}"


def _leave_quietly() -> NoReturn:
    """Exit without a word: whatever read the output, such as `head`, wants no more of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with ``error: message``, on one line, without characters that a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    print(f"error: {shown}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def interruptible(how: str) -> Iterator[None]:
    """Ctrl-C ends work that can go on with one line that says how."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"stopped, nothing is lost: {how}", code=INTERRUPTED)


def print_json(data: Any) -> None:
    """``data`` as indented JSON on stdout; numpy arrays and numbers become lists and numbers."""
    print(json.dumps(data, indent=2, default=lambda value: value.tolist()))


def console() -> Console:
    """Where tables go: text is printed as it is, in colour on a terminal unless NO_COLOR is set."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: whole numbers right-aligned with separators, "-" for none, all else as its text.

    Nothing is ever cut off: on a terminal long cells fold, in a pipe each row is one line.
    """
    from rich.measure import Measurement
    from rich.table import Table

    filled = [list(row) for row in rows]
    out = console()
    grid = Table()
    for i, name in enumerate(columns):
        numeric = all(isinstance(row[i], int) or row[i] == "-" for row in filled)
        grid.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in filled:
        grid.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    if not out.is_terminal:
        natural = Measurement.get(out, out.options.update(width=1_000_000), grid).maximum
        out.width = max(out.width, natural)
    out.print(title, style="bold", soft_wrap=True)
    out.print(grid)


def main() -> None:
    """The command line."""
    from bcnet.cli import app

    app(_spread(sys.argv[1:]), prog_name="bcnet")


def _spread(arguments: Sequence[str]) -> list[str]:
    """``--targets a=1 b=2`` as ``--targets a=1 --targets b=2``, which is how typer takes several values."""
    found: list[str] = []
    several = False
    for argument in arguments:
        if several and "=" in argument and not argument.startswith("-") and found[-1] != "--targets":
            found.append("--targets")
        else:
            several = argument == "--targets" or (several and found[-1:] == ["--targets"])
        found.append(argument)
    return found
