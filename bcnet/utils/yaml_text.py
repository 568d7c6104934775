"""YAML that may come from strangers: measured before anything is built from it.

A few lines of YAML can expand to gigabytes (aliases of aliases), an endless recursion (deep brackets) or minutes of
work (many keys). So its events are counted while they are read, which takes time and memory in proportion to the text,
and nothing is built from a text beyond the bounds. PyYAML reads about 100 kB a second, hence the bound on the size.
"""

from __future__ import annotations

import reprlib
from collections.abc import Hashable
from typing import Any

import yaml

from bcnet.errors import BcnetError

LARGEST = 2**16
DEEPEST = 16
MOST_ALIASES = 16
MOST_VALUES = 2000
"""Bounds of a text: bytes, levels, aliases, and values and keys together."""


def parse_yaml(text: str) -> Any:
    """What ``text`` says, in plain Python objects; a :class:`BcnetError` for anything that is not small, safe YAML."""
    if len(text) > LARGEST:
        raise BcnetError(f"this YAML has {len(text):,} characters, and at most {LARGEST:,} are read")
    try:
        return yaml.load(text, Loader=_Bounded)
    except BcnetError:
        raise
    except yaml.YAMLError as error:
        raise BcnetError(f"this is not YAML: {_first_line(error)}") from None
    except (RecursionError, ValueError, OverflowError, TypeError) as error:  # such as the date 2001-99-99
        raise BcnetError(f"this YAML cannot be read: {str(error).partition(';')[0][:120]}") from None


class _Bounded(yaml.SafeLoader):
    """Safe YAML within the bounds, in which a key that is written twice is an error.

    All events of a text are read before anything is built from them.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.aliases = self.values = 0

    def get_event(self) -> yaml.Event | None:
        event = super().get_event()
        self.depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        self.aliases += isinstance(event, yaml.AliasEvent)
        self.values += isinstance(event, yaml.ScalarEvent)
        found = {"levels": (self.depth, DEEPEST), "aliases": (self.aliases, MOST_ALIASES)}
        for what, (number, most) in (found | {"values": (self.values, MOST_VALUES)}).items():
            if number > most:
                raise BcnetError(f"this YAML has over {most:,} {what}, more than are read")
        return event

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise BcnetError(f"{key.value:.40} is written twice: keep one of them")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _first_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}" if mark else str(problem)[:120]


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 200, 200, 60


def brief(value: object, most: int = 40) -> str:
    """The first ``most`` characters of a value as Python writes it, however large it is."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print numbers of over 4,300 digits
        return f"a number of about {int(value.bit_length() * 0.30103):,} digits"
    return (repr(value[: most + 1]) if isinstance(value, str) else _Brief().repr(value))[:most]
