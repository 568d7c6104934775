"""Counts the lines of each room of the package, and of features that one could do without, for docs/design.md.

python benchmarks/lines.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import test_architecture  # noqa: E402

ROOMS = [room.replace(".", "/") for room in test_architecture.ROOMS if room != "errors"]
KINDS = ("lines", "code", "docstrings and comments", "blank")
FEATURES = {
    "training and scoring by fused GPU kernels": ("accel/__init__.py", "accel/fused_step/*", "accel/kernels/[!e]*"),
    "all configurations of a space at once, on a GPU": ("accel/enumeration/gpu_level.py", "accel/kernels/enum_*"),
    "the same, and shared prefixes, by plain torch": ("accel/enumeration/[!g]*",),
    "the benchmark, its commands and its baselines": ("bench/*", "cli/bench/*", "supernet/meta.py", "supernet/tas.py"),
    "the report and the model card": ("report/*", "run/report.py", "run/card.py", "cli/report.py"),
    "latency as a budget": ("latency/*", "run/stages/budgets.py"),
    "the zoo": ("models/[!lw_]*", "models/layers.py"),
    "the paper's prior population": ("search/prior/*",),
    "training on several devices": ("training/distributed.py",),
    "strategies beside evolution and neighbours": tuple(
        f"search/strategies/{name}.py" for name in ("agent", "baselines", "enumerate", "greedy", "legr", "markov")
    ),
}
BESIDE = (".html", ".css", ".js", ".md", ".yaml")


def count(path: Path) -> tuple[int, int, int, int]:
    """Lines of a file, by :data:`KINDS`."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
    words |= {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    return len(lines), len(lines) - len(blank | words), len(words - blank), len(blank)


def features() -> str:
    """The lines of every feature, and of what is left without any of them, in Markdown."""
    package = ROOT / "bcnet"
    files = {
        name: [path for glob in globs for path in package.glob(glob) if path.suffix == ".py"]
        for name, globs in FEATURES.items()
    }
    counts = {name: sum(count(path)[0] for path in paths) for name, paths in files.items()}
    left = sum(count(path)[0] for path in package.rglob("*.py")) - sum(counts.values())
    body = [f"| {name} | {n:,} |" for name, n in {**counts, "**everything else**": left}.items()]
    return "\n".join(["| feature | lines |", "| --- | ---: |", *body])


def table() -> str:
    """The lines of every room and of all, in Markdown."""
    rooms = {f"`{room}/`": [0] * len(KINDS) for room in ROOMS} | {"the package's own files": [0] * len(KINDS)}
    for path in sorted((ROOT / "bcnet").rglob("*.py")):
        name = path.relative_to(ROOT / "bcnet").as_posix()
        room = max((f"`{room}/`" for room in ROOMS if name.startswith(f"{room}/")), key=len, default=None)
        row = rooms[room or "the package's own files"]
        row[:] = [a + b for a, b in zip(row, count(path), strict=True)]
    rooms["**all**"] = [sum(column) for column in zip(*rooms.values(), strict=True)]
    beside = [path.read_text("utf-8").splitlines() for path in (ROOT / "bcnet").rglob("*") if path.suffix in BESIDE]
    blank = sum(not line.strip() for lines in beside for line in lines)
    count_beside = sum(map(len, beside))
    rooms["beside these: templates, style, script and recipes"] = [count_beside, count_beside - blank, 0, blank]
    body = [f"| {room} | {' | '.join(f'{n:,}' for n in row)} |" for room, row in rooms.items()]
    return "\n".join([f"| room | {' | '.join(KINDS)} |", "| --- |" + " ---: |" * len(KINDS), *body])


def main() -> None:
    page = ROOT / "docs" / "design.md"
    text = page.read_text("utf-8")
    for made in (table(), features()):
        head = re.escape(made[: made.index("|", 2)])
        text = re.sub(head + r"\| lines .*?\n(?=\n)", lambda _, made=made: made + "\n", text, flags=re.DOTALL)
        print(made)
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
