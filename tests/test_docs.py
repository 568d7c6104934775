"""Every command and every snippet of README.md and docs/ is run, page by page, each page in a folder of its own.

``bash`` blocks are run line by line (commands of bcnet in this process), ``python`` blocks of a page share their names,
``sh`` blocks name targets of the Makefile, which must exist, and ``console`` blocks must print what they show, where a
line of ``...`` stands for any lines. What would take long is made small: runs get few epochs and evaluations
(``SMALL``). A comment before a block says what else differs:

    <!-- test: parse, why -->     commands are only parsed
    <!-- test: skip, why -->      nothing is run
    <!-- test: fails -->          commands must fail, with the message of the ``text`` block that follows
    <!-- test: needs Channel-Bench -->  skipped where the released tables are not there
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import terminal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from traced import space_of

import bcnet
import bcnet.run.slim
from bcnet.models.load import LoadedModel
from bcnet.run.recipe import Recipe
from bcnet.run.recipe_comments import commented
from bcnet.run.session import PYTHON

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
TABLES = ROOT.parent / "shared" / "data" / "channel-bench-macro"
SMALL: dict[str, Any] = {
    "given": {"epochs": 1, "warmup": 0},
    "healing": {"steps": 1, "calibration": 1},
    "race": {"finalists": 2, "rounds": 1},
    "supernet": {"epochs": 1, "warmup": 0},
    "retrain": {"epochs": 1, "warmup": 0},
    "search": {"evaluations": 8, "population": 4},
}
FENCE = re.compile(
    r"(?:<!-- test: (?P<marker>[^>]*?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
KINDS = ("bash", "python", "console", "text", "yaml", "sh")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    marker: str


def blocks(page: str) -> list[Block]:
    found = FENCE.finditer((ROOT / page).read_text("utf-8"))
    return [Block(m["kind"], m["text"], m["marker"] or "") for m in found]


def has_code(page: str) -> bool:
    return any(block.kind in ("bash", "python", "console") for block in blocks(page))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with the data that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CHANNEL_BENCH_DIR", str(TABLES))
    monkeypatch.setattr(bcnet, "slim", _small_slim, raising=False)
    traced = LoadedModel.space
    monkeypatch.setattr(LoadedModel, "space", lambda s, **o: (traced if s.spec == PYTHON else space_of)(s, **o))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these networks are too small for more
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)])
def test_page(page, place):
    if "imagefolder:photos" in (ROOT / page).read_text("utf-8"):
        _write_photos(place / "photos")
    names: dict[str, Any] = _names() if page == "README.md" else {}
    listed = blocks(page)
    for block, following in zip(listed, [*listed[1:], Block("text", "", "")], strict=True):
        if block.marker.startswith("skip") or ("Channel-Bench" in block.marker and not TABLES.exists()):
            continue
        if block.kind == "bash":
            for line in _lines(block.text):
                _run_line(line, block.marker, following.text)
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.text, page, "exec"), names)
            _check_remarks(block.text, printed.getvalue())
        elif block.kind == "console":
            _check_console(block.text)
        elif block.kind == "sh":
            for line in block.text.splitlines():
                subprocess.run(["make", "--dry-run", *shlex.split(line, comments=True)[1:]], cwd=ROOT, check=True)


def _names() -> dict[str, Any]:
    """What the README takes for granted: a model and loaders."""
    generator = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(64, 3, 32, 32, generator=generator), torch.arange(64) % 10)
    body = (nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return {"model": model, "train_loader": DataLoader(images, 32, shuffle=True), "val_loader": DataLoader(images, 32)}


def _small_slim(*arguments: Any, recipe: dict[str, Any] | None = None, **options: Any) -> Any:
    given = recipe or {}
    small = {group: {**given.get(group, {}), **keys} for group, keys in SMALL.items()} | {"fallback": False}
    return bcnet.run.slim.slim(*arguments, recipe={**given, **small}, progress=False, **options)


def _write_photos(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("bees", "birds"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def _lines(text: str) -> list[str]:
    """The commands of a block; a here-document belongs to the command that reads it."""
    lines = iter(text.splitlines())
    found = []
    for line in lines:
        document = re.search(r"<<'(\w+)'$", line)
        if document:
            body = [line]
            for more in lines:
                body.append(more)
                if more == document[1]:
                    break
            line = "\n".join(body)
        if line.strip():
            found.append(line)
    return found


def _run_line(line: str, marker: str, expected: str) -> None:
    if not line.startswith("bcnet "):
        subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True, timeout=600)
        return
    command, _, target = line.partition(" > ")
    arguments = shlex.split(command, comments=True)[1:]
    if arguments[0] == "run" and "--resume" not in arguments:
        sets = [f"{group}.{key}={value}" for group, keys in SMALL.items() for key, value in keys.items()]
        sets.append("fallback=false")
        sets += [] if "loading." in line else ["loading.batch_size=512"]
        arguments += [part for one in sets for part in ("--set", one)]
    if marker.startswith("parse"):
        arguments.append("--help")
    result = terminal.run(*arguments)
    if marker.startswith("fails"):
        assert result.exit_code == 2
        assert result.stderr.split()[-len(expected.split()) :] == expected.split()
        return
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
    if target:
        Path(target.strip()).write_text(result.stdout, "utf-8")


def _check_remarks(code: str, printed: str) -> None:
    """``print(...)  # output`` must print that output."""
    remarks = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    for remark in remarks:
        assert remark in printed


def _check_console(text: str) -> None:
    """``$ command`` and what it prints."""
    command, *shown = text.splitlines()
    assert command.startswith("$ bcnet ")
    result = terminal.run(*shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    pattern = r"\n".join(r"(?:.*\n)*?.*" if line == "..." else re.escape(line.rstrip()) for line in shown)
    printed = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert re.fullmatch(pattern, printed), f"{command} printed\n{printed}"


def test_the_reference_has_a_line_for_every_key_of_a_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import mkdocs_hooks

    page = mkdocs_hooks.on_page_markdown((ROOT / "docs" / "reference.md").read_text("utf-8"))
    for line in commented(Recipe.read("digits")).splitlines():
        if line[:1].isalpha() or (line.startswith("  ") and "  # " in line):
            assert f"| `{line.strip().partition(':')[0]}` |" in page, line


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_a_known_kind(page):
    text = (ROOT / page).read_text("utf-8")
    assert text.count("\n```") == 2 * len(blocks(page))
    assert {block.kind for block in blocks(page)} <= set(KINDS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:")):
            assert ((ROOT / page).parent / target).exists(), target
