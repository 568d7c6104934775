"""How benchmarks/fuzz.py changes a file: some bytes, one value of its JSON, or a value with its digest put right."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from bcnet.run import serialization
from bcnet.run.folder import _digest_of
from bcnet.search.rows import row_digest, sum_of_digests


def change_bytes(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    """Flip bits, cut, repeat, overwrite or insert, once to three times."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data)) if data else 0
        length = rng.choice([1, 1, 2, 8, 64])
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            data[at:at] = rng.choice([rng.randbytes(length), bytes(data[at : at + length]) * 2, b"[" * 1000, b"\0"])
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            del data[at:]
        else:
            data[at : at + length] = rng.choice([b"\0", b"\xff", b"9", b"-", b"}", b'"']) * length
    path.write_bytes(data)


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**4000, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x", "9" * 50,
    "a\0b", "../../etc/passwd", "\ud800", "<script>", [], [[]], [None], [1] * 5000, {}, {"": None}, {"a": {"b": []}},
)  # fmt: skip


def odd(rng: random.Random, value: Any) -> Any:
    """``value`` with one part of it, at any depth, replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.05:
            return {**value, rng.choice(["", "more", "version", "x" * 5000]): rng.choice(ODD)}
        return {**value, key: odd(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at] + value[at + 1 :]
        if rng.random() < 0.05:
            return value * 2
        return [*value[:at], odd(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def change_json(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    path.write_text(json.dumps(odd(rng, json.loads(good))), "utf-8")


def change_result(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    """Change a result of a run and put its digest right."""
    content = json.loads(good)
    integrity = content.pop("integrity")
    changed = odd(rng, content) if rng.random() < 0.9 else {**content, "version": 2}
    whole = {**changed, "integrity": integrity} if isinstance(changed, dict) else {"integrity": integrity}
    if rng.random() < 0.1:
        other = odd(rng, integrity)
        whole["integrity"] = other if isinstance(other, dict) else {}
    whole["integrity"]["sha256"] = _digest_of(whole)
    path.write_text(json.dumps(whole), "utf-8")


def change_description(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    """Change the description of an exported network and put its digest right."""
    changed = odd(rng, {k: v for k, v in json.loads(good).items() if k != "sha256"})
    whole = changed if isinstance(changed, dict) else {"widths": changed}
    path.write_text(json.dumps({**whole, "sha256": serialization.digest_of(whole)}), "utf-8")


CELLS = (None, -1, 2**62, 1e300, float("inf"), "", "[]", "{}", "[1,", '{"flops": []}', b"\xff", "9" * 5000)


def change_cells(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    """Change a cell of the trials and put the digests right."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(trials)")][:-1]
        column = rng.choice([*names, "key", "value"])
        table = "settings" if column in ("key", "value") else "trials"
        rows = connection.execute(f"SELECT rowid FROM {table}").fetchall()
        try:
            change = (rng.choice(CELLS), rng.choice(rows)[0])
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", change)
        except sqlite3.Error:  # a cell that the table itself refuses
            return
        trials = connection.execute("SELECT * FROM trials").fetchall()
        for row in trials:
            connection.execute("UPDATE trials SET digest = ? WHERE number = ?", (row_digest(row[:-1]), row[0]))
        settings = connection.execute("SELECT key, value FROM settings WHERE key NOT IN ('sum', 'version')").fetchall()
        total = sum_of_digests([*(row_digest(row[:-1]) for row in trials), *map(row_digest, settings)])
        connection.execute("UPDATE settings SET value = ? WHERE key = 'sum'", (json.dumps(total),))


def change_tensors(rng: random.Random, folder: Path, path: Path, good: bytes) -> None:
    """Change the weights of an export and put their digest right."""
    change_bytes(rng, folder, path, good)
    data, place = path.read_bytes(), folder / serialization.DESCRIPTION
    content = {k: v for k, v in json.loads(place.read_bytes()).items() if k != "sha256"}
    content["weights"] |= {"bytes": len(data), "sha256": serialization.digest(data)}
    place.write_text(json.dumps({**content, "sha256": serialization.digest_of(content)}))
