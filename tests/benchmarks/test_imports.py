"""Benchmarks run for hours on machines that are hard to get: what they import from one another must be there."""

from __future__ import annotations

import ast
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _names(tree: ast.Module) -> set[str]:
    """What a module has at its top level."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
    return found


def test_benchmarks_find_what_they_import_from_one_another() -> None:
    trees = {file.stem: ast.parse(file.read_text()) for file in BENCHMARKS.glob("*.py")}
    names = {stem: _names(tree) for stem, tree in trees.items()}
    missing = [
        f"{stem}.py imports {alias.name} from {node.module}.py"
        for stem, tree in trees.items()
        for node in ast.walk(tree)  # imports within functions too
        if isinstance(node, ast.ImportFrom) and node.module in trees
        for alias in node.names
        if alias.name not in names[node.module]
    ]
    assert not missing
