"""Results that took long, each a line of JSON written as it comes: work that was stopped goes on after the last one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from bcnet.errors import BcnetError
from bcnet.utils.files import clear_errors, read_regular, write_file

T = TypeVar("T")


class Results(Generic[T]):
    """The lines of ``file``, each as ``read`` gives it; below ``head``, where there is one, which says whose they are.

    A last line that a kill cut short is dropped, and any other that ``read`` cannot take is a :class:`BcnetError`.
    """

    def __init__(self, file: Path, read: Callable[[Any], T], head: Mapping[str, Any] | None = None):
        self.file, self._read = file, read
        heads = [] if head is None else [json.dumps(head)]
        with clear_errors(str(file)):
            lines = read_regular(file).decode("utf-8", "replace").split("\n") if file.exists() else []
        if lines and lines[: len(heads)] != heads:
            raise BcnetError(f"{file} belongs to work with other settings: choose another folder")
        whole = [*heads, *(line for line in lines[len(heads) : -1] if line)]
        with clear_errors(str(file)):
            write_file(file, "".join(f"{line}\n" for line in whole).encode())
        self.known = [self._of(line, number) for number, line in enumerate(whole, 1) if number > len(heads)]

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep one more result; it is on disk when this returns."""
        line = json.dumps(row)
        with clear_errors(str(self.file)), open(self.file, "a") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())
        self.known.append(self._read(json.loads(line)))

    def _of(self, line: str, number: int) -> T:
        try:
            return self._read(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise BcnetError(f"line {number} of {self.file} is damaged: remove it to have it done again") from None
