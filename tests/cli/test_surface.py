"""What holds for all commands alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from bcnet.cli import app


def commands(node: Any = None, name: str = "bcnet") -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups included."""
    node = typer.main.get_command(app) if node is None else node
    if not hasattr(node, "commands"):
        yield name, node
        return
    for part, inner in node.commands.items():
        yield from commands(inner, f"{name} {part}")


def test_every_command_can_print_json() -> None:
    names = [name for name, _ in commands()]
    assert len(names) > 20
    assert not [name for name, command in commands() if "--json" not in [o for p in command.params for o in p.opts]]


def test_an_option_is_a_flag_everywhere_or_nowhere() -> None:
    kinds: dict[str, set[bool]] = {}
    for _, command in commands():
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("-"):
                    kinds.setdefault(option, set()).add(parameter.is_flag)
    assert len(kinds) > 40
    assert not [option for option, found in kinds.items() if len(found) > 1]
