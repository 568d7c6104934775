"""The house has a direction: a room imports only rooms listed before it, lazy imports included."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "bcnet"
ROOMS = (
    "errors",
    "utils",
    "space",
    "accel.kernels",  # plain functions of tensors, which training and scoring alike may call
    "latency",
    "models",
    "data",
    "training",
    "supernet",
    "search",
    "accel",
    "report",
    "run",
    "bench",
    "cli",
)
DOORS = {"bcnet/__init__.py", "bcnet/__main__.py"}  # they only open rooms


def room_of(module: str) -> str | None:
    """The innermost room that the dotted ``module`` belongs to; None for the package itself."""
    inside = module.removeprefix("bcnet").removeprefix(".")
    matches = [room for room in ROOMS if inside == room or inside.startswith(f"{room}.")]
    return max(matches, key=len, default=None)


def imports(path: Path) -> list[tuple[int, str]]:
    """Every (line, module of bcnet) that a file imports, at its top, in a function, or for types alone."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, which hides the room"
            module = node.module or ""
            found += [(node.lineno, f"{module}.{name.name}") for name in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value))
    return [(line, module) for line, module in found if module == "bcnet" or module.startswith("bcnet.")]


def test_rooms_import_only_rooms_before_them() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        here = room_of(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if name in DOORS:
            continue
        assert here is not None, f"{name} lies in no room"
        for line, module in imports(path):
            there = room_of(module)
            if there is not None and ROOMS.index(there) > ROOMS.index(here):
                wrong.append(f"{name}:{line} ({here}) imports {module} ({there})")
    assert not wrong, "\n".join(wrong)


def test_every_room_is_there_and_nothing_lies_beside_them() -> None:
    beside = {p.name for p in PACKAGE.iterdir() if not p.name.startswith("__") and p.suffix in ("", ".py")}
    rooms = {room.partition(".")[0] for room in ROOMS}
    assert beside == (rooms - {"errors"}) | {"errors.py"}


def test_files_stay_short_enough_to_read() -> None:
    long = {p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def defined() -> set[str]:
    """The dotted names of all modules, functions, classes and members, inherited ones included, in the package."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    classes = {n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}

    def members(node: ast.ClassDef) -> set[str]:
        own = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}
        bases = [classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in classes]
        return own.union({m.name for m in node.body if isinstance(m, ast.FunctionDef)}, *map(members, bases))

    found = set()
    for path, tree in trees.items():
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found.add(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
                found |= {f"{module}.{name.name}" for name in node.names}
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(f"{module}.{node.name}")
            if isinstance(node, ast.ClassDef):
                found |= {f"{module}.{node.name}.{member}" for member in members(node)}
    return found


def test_the_design_names_what_there_is() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text("utf-8")
    section = page[page.index("## How data flows") :]
    files = {"rank.json", "widths.json"}
    named = set(re.findall(r"`([A-Za-z_][\w.]*)`", section)) - files
    known = [f".{name}" for name in defined()]
    assert len(named) > 40
    assert not [name for name in sorted(named) if not any(other.endswith(f".{name}") for other in known)]


def types_defined() -> dict[str, list[str]]:
    """Public classes and type aliases of the package, each with the modules that define it."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = node.name if isinstance(node, ast.ClassDef) else getattr(target, "id", "")
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    return found


def test_a_type_has_one_name_and_a_name_one_type() -> None:
    found = types_defined()
    assert len(found) > 200
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_tests_lie_in_the_rooms_they_test() -> None:
    tests = PACKAGE.parent / "tests"
    rooms = {room.partition(".")[0] for room in ROOMS} | {"helpers", "benchmarks"}
    assert {p.name for p in tests.iterdir() if p.is_dir() and not p.name.startswith("__")} <= rooms
    assert {p.name for p in tests.glob("*.py")} == {"conftest.py", "test_architecture.py", "test_docs.py"}
