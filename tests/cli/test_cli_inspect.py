"""``bcnet models``, ``show`` and ``cost``, and what they tell a mistaken user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden import golden_widths
from terminal import answer, cells, run, shell

from bcnet import models as zoo

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden_widths.json"
LISTED = "`bcnet models` lists all"


pytestmark = pytest.mark.usefixtures("traced_once")


# bcnet models


def test_models() -> None:
    rows = answer("models")["models"]
    assert [row["name"] for row in rows] == list(zoo.MODELS)
    assert rows[-3] == {
        "name": "resnet50_imagenet",
        "input": [3, 224, 224],
        "classes": 1000,
        "variables": 37,
        "flops": 4_089_184_256,
        "params": 25_557_032,
        "about": "ResNet of bottlenecks, stride in the 3x3",
    }


def test_models_need_no_torch() -> None:
    code = "import sys; from bcnet.cli import app; app(['models'], standalone_mode=False); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "│ efficientnet_b0_imagenet │ 3x224x224 │        24 │" in out
    assert "'bcnet.models.registry'" in out
    assert "'torch'" not in out


# bcnet show


@pytest.mark.parametrize(
    ("name", "count"), [("resnet50_imagenet", 37), ("mobilenetv2_imagenet", 25), ("vgg19_cifar", 16)]
)
def test_show_has_every_variable(name: str, count: int) -> None:
    shown = answer("show", f"zoo:{name}")
    model = zoo.MODELS[name]
    assert len(shown["variables"]) == count
    assert [(v["name"], v["candidates"][-1]) for v in shown["variables"]] == [(v.name, v.width) for v in model.order]
    assert (shown["flops"]["max"], shown["params"]["max"]) == (model.flops, model.params)
    assert (shown["full"]["flops"], shown["full"]["params"]) == (model.flops, model.params)
    assert shown["own_class"] is True


def test_show_json() -> None:
    shown = answer("show", "digits_cnn", "--groups", "4", "--base", "2", "--ignore", "block1.*", "--ignore", "head.*")
    c0, h, c1 = 32, 128, 64  # candidates 16, 24, 32 and 64, 96, 128 and 32, 48, 64; 48 and 128 are ignored
    assert shown["variables"] == [
        {
            "name": "block2.body.expand.conv",
            "candidates": [64, 96, 128],
            "layers": [
                *("block2.body.expand.conv", "block2.body.expand.bn", "block2.body.depthwise.conv"),
                *("block2.body.depthwise.bn", "block2.body.project.conv"),
            ],
            "unit": 1,
        },
        {
            "name": "block2.body.project.conv",
            "candidates": [32, 48, 64],
            "layers": ["block2.body.project.conv", "block2.body.project.bn", "head.conv"],
            "unit": 1,
        },
    ]

    def flops(h: int, c1: int) -> int:
        return 64 * (9 * c0 + 2 * 9 * c0 * 48 + c0 * h) + 16 * (9 * h + h * c1 + c1 * 128) + 1280

    assert shown["flops"] == {"min": flops(h // 2, c1 // 2), "max": flops(h, c1)}
    assert (shown["size"], shown["input"], shown["model"]) == (9, [1, 8, 8], "zoo:digits_cnn")
    assert {"layer": "classifier", "reason": "it is the network's output"} in shown["fixed"]
    assert {"layer": "head.conv", "reason": "head.conv is ignored"} in shown["fixed"]


def test_show_rounds_widths_and_takes_another_input() -> None:
    shown = answer("show", "digits_cnn", "--round-to", "8", "--input", "1,16,16", "--groups", "4")
    assert [v["candidates"] for v in shown["variables"]] == [
        *([8, 16, 24, 32], [16, 24, 40, 48], [32, 64, 96, 128], [16, 32, 48, 64], [32, 64, 96, 128]),
    ]
    assert shown["input"] == [1, 16, 16]
    assert shown["flops"]["max"] == 4 * (zoo.MODELS["digits_cnn"].flops - 1280) + 1280


def test_show_for_people_is_whole_in_a_pipe() -> None:
    done = shell("show", "digits_cnn", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    rows = cells(done.stdout)
    assert rows[:2] == [
        [
            *("1", "stem.conv", "2, 4, 5, ..., 30, 32 (20)"),
            "stem.bn, block1.body.conv1.conv, block1.body.conv2.conv and 2 more",
        ],
        [
            *("2", "block1.body.conv1.conv", "2, 4, 7, ..., 46, 48 (20)"),
            "block1.body.conv1.bn, block1.body.conv2.conv",
        ],
    ]
    assert rows[-1] == ["classifier", "it is the network's output"]
    assert "zoo:digits_cnn: 5 width variables, for one input of 1x8x8\n" in done.stdout
    assert "The space has 3,200,000 networks\n" in done.stdout
    assert done.stdout.endswith(
        "Networks at other widths are built from the class Sequential itself.\n100.0% of the FLOPs can be reduced.\n"
    )
    assert "…" not in done.stdout


STUBBORN = """
import torch
from torch import nn

class Stubborn(nn.Module):
    '''Keeps a size where no attribute tells.'''

    input_shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)).reshape(-1, 16))
"""


def test_show_says_where_the_class_itself_cannot_be_resized(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(STUBBORN)
    result = run("show", f"{tmp_path}/net.py:Stubborn")
    assert result.exit_code == 0
    assert result.stdout.endswith(
        "Networks at other widths are built from the exported graph of Stubborn, without its Python code.\n"
        "100.0% of the FLOPs can be reduced.\n"
    )
    assert result.stderr.startswith("note: Stubborn itself does not run at other widths (")
    assert result.stderr.count("\n") == 1
    assert answer("show", f"{tmp_path}/net.py:Stubborn")["own_class"] is False


# bcnet cost


def golden() -> list[tuple[str, str, dict[str, Any]]]:
    if not GOLDEN.exists():
        return []
    entries = json.loads(GOLDEN.read_text())
    nets = {name: rows for name, rows in entries.items() if name != "about"}
    return [(name, key, row) for name, rows in nets.items() for key, row in rows.items() if key != "order"]


@pytest.mark.skipif(not GOLDEN.exists(), reason="the published widths are not part of the repository")
@pytest.mark.parametrize(("network", "key", "entry"), golden())
def test_cost_reproduces_published_networks(network: str, key: str, entry: dict[str, Any]) -> None:
    widths = golden_widths(entry)
    cost = answer("cost", f"zoo:{network.removesuffix('10')}", "--widths", ",".join(map(str, widths)))
    assert (cost["flops"], cost["params"]) == (entry["flops"], entry["params"]), (network, key)
    assert cost["widths"] == widths


def test_cost_json() -> None:
    cost = answer("cost", "channel_bench_resnet", "--widths", "64,256,192,512,128,384,256")
    flops = 256 * (27 * 64 + 18 * 64 * (256 + 192)) + 576 * (64 + 128) * 512 + 1152 * 128 * (384 + 256) + 10 * 128
    assert cost["model"] == "zoo:channel_bench_resnet"
    assert cost["flops"] == flops
    assert cost["full"]["flops"] == 1_436_226_560
    assert cost["ratio"]["flops"] == flops / 1_436_226_560
    assert set(cost["ratio"]) == set(cost["full"]) == {"flops", "params", "memory"}
    # The first block at its worst: its input for the addition, and the input and output of one layer; 4 bytes each.
    assert cost["memory"] == 4 * 256 * (64 + 256 + 256)


def test_cost_for_people() -> None:
    rows = cells(run("cost", "digits_cnn", "--widths", "32,48,128,64,64").stdout)
    assert rows[0] == ["FLOPs", "2,265,728", "2,331,904", "0.9716"]
    assert [row[0] for row in rows] == ["FLOPs", "parameters", "peak activations, bytes"]


def test_squeeze_widths_can_be_given() -> None:
    name = "efficientnet_b0_imagenet"
    every = ",".join(str(v.width) for v in zoo.MODELS[name].order)
    assert answer("cost", name, "--squeeze", "--widths", every)["params"] == zoo.MODELS[name].params


@pytest.mark.parametrize(
    "data",
    [
        [16, 24, 64, 32, 64],
        {"widths": [16, 24, 64, 32, 64], "score": 0.9},
        dict(zip(reversed(zoo.MODELS["digits_cnn"].variables), [64, 32, 64, 24, 16], strict=True)),
        {"widths": dict(zip(zoo.MODELS["digits_cnn"].variables, [16, 24, 64, 32, 64], strict=True))},
    ],
)
def test_widths_from_a_file(tmp_path: Path, data: object) -> None:
    (tmp_path / "widths.json").write_text(json.dumps(data))
    cost = answer("cost", "digits_cnn", "--widths", f"@{tmp_path}/widths.json")
    assert cost["widths"] == [16, 24, 64, 32, 64]
    assert cost["flops"] == 64 * (9 * 16 + 2 * 9 * 16 * 24 + 16 * 64) + 16 * (9 * 64 + 64 * 32 + 32 * 64) + 640


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show resnet5_imagenet", f"unknown model 'resnet5_imagenet': did you mean {{near}}? {LISTED}"),
        ("cost xyz --widths 1", f"unknown model 'xyz': {LISTED}"),
        (
            "show keras:vgg",
            "unknown source 'keras' of a model: write zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME",
        ),
        ("show digits_cnn --groups 0", "groups is 0, but a space needs at least 1 group"),
        ("show digits_cnn --groups -3", "groups is -3, but a space needs at least 1 group"),
        ("show digits_cnn --base 0", "base is 0, but it counts groups and must lie in 1..20"),
        ("show digits_cnn --groups 4 --base 5", "base is 5, but it counts groups and must lie in 1..4"),
        ("show digits_cnn --round-to 0", "round_to is 0, but widths are rounded to multiples of at least 1"),
        ("show digits_cnn --ignore stem.cnv", "ignore names 'stem.cnv', but no layer of the network is called so"),
        (
            "show digits_cnn --ignore *",
            "this network has no channel dimension that could vary (stem.conv: stem.conv is ignored; "
            "block1.body.conv1.conv: block1.body.conv1.conv is ignored; block1.body.conv2.conv: block1.body.conv2.conv "
            "is ignored; block2.body.expand.conv: block2.body.expand.conv is ignored; block2.body.depthwise.conv: "
            "block2.body.depthwise.conv is ignored; ...)",
        ),
        ("show digits_cnn --squeeze", "zoo:digits_cnn keeps no squeeze widths that could be searched too"),
        ("show digits_cnn --input 1,8", "--input must be C,H,W in whole numbers such as 3,224,224, not '1,8'"),
        ("cost digits_cnn --widths 1,2,3", "this space has 5 width variables, but 3 widths were given"),
        ("cost digits_cnn --widths 1,2,3,4,5,6", "this space has 5 width variables, but 6 widths were given"),
        ("cost digits_cnn --widths 1,0,3,4,5", "width 0 of variable {second} (number 2) must lie in 1..48"),
        ("cost digits_cnn --widths -1,2,3,4,5", "width -1 of variable 'stem.conv' (number 1) must lie in 1..32"),
        ("cost digits_cnn --widths 1,49,3,4,5", "width 49 of variable {second} (number 2) must lie in 1..48"),
        (
            f"cost digits_cnn --widths 1,{'9' * 18},3,4,5",
            f"width {'9' * 18} of variable {{second}} (number 2) must lie in 1..48",
        ),
        ("cost digits_cnn --widths 1,two,3,4,5", "{whole}, but 'two' is none"),
        ("cost digits_cnn --widths 1,2.5,3,4,5", "{whole}, but '2.5' is none"),
        ("cost digits_cnn --widths 1,,3,4,5", "{whole}, but '' is none"),
        ("cost digits_cnn --widths 1,nan,3,4,5", "{whole}, but 'nan' is none"),
        ("cost digits_cnn --widths 1,1_0,3,4,5", "{whole}, but '1_0' is none"),
        (f"cost digits_cnn --widths {'9' * 5000}", f"{{whole}}, but '{'9' * 39} is none"),
        ("cost digits_cnn --widths @gone.json", "there is no file gone.json"),
        ("cost digits_cnn --widths @", "there is no file ."),
        ("cost digits_cnn --widths @/dev/zero", "there is no file /dev/zero"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments: str, message: str) -> None:
    expected = message.format(
        near="'resnet50_imagenet' or 'resnet34_imagenet' or 'resnet18_imagenet'",
        second="'block1.body.conv1.conv'",
        whole="widths must be whole numbers separated by commas, or @file.json",
    )
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {expected}\n")


def test_an_input_the_network_cannot_take_gets_one_line() -> None:
    result = run("show", "digits_cnn", "--input", "3,8,8")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: Sequential does not run on an example input of shape (2, 3, 8, 8): ")


WRONG_KIND = 'widths.json must hold a list of whole numbers or a map of variables to them, perhaps as "widths"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2, 3", "widths.json is no JSON text: Expecting ',' delimiter: line 1 column 9 (char 8)"),
        (b"", "widths.json is no JSON text: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\x00\xfe", "widths.json is no JSON text: "),
        (b"[" * 100_000, "widths.json is no JSON text: maximum recursion depth exceeded"),
        (b"[1, 2, 3, 4, " + b"9" * 5000 + b"]", "widths.json is no JSON text: Exceeds the limit"),
        (b"[1, 2, 3, 4, " + b"9" * 1000 + b"]", WRONG_KIND),
        (b" " * 2**20 + b"[]", "widths.json is over 1,048,576 bytes, too large for a list of widths"),
        (b"[[1, 2, 3, 4, 5]]", WRONG_KIND),
        (b"[1, 2, 3, 4, true]", WRONG_KIND),
        (b"[1, 2, 3, 4, 5.0]", WRONG_KIND),
        (b"[1, 2, 3, 4, NaN]", WRONG_KIND),
        (b'[1, 2, 3, 4, "5"]', WRONG_KIND),
        (b'{"widths": null}', WRONG_KIND),
        (b'{"widths": {"widths": [1]}}', WRONG_KIND),
        (b"7", WRONG_KIND),
        (b"null", WRONG_KIND),
        (b"[]", "this space has 5 width variables, but 0 widths were given"),
        (b"{}", "the width of variable 'stem.conv' is missing (5 of 5 are)"),
        (b'{"stem.conv": 4}', "the width of variable 'block1.body.conv1.conv' is missing (4 of 5 are)"),
        (b'{"stem.cnv": 4}', "this space has no variable 'stem.cnv': did you mean 'stem.conv'?"),
        (b'{"?": 4}', "this space has no variable '?': it has 5"),
        (b"[4, 4, 4, 4, 0]", "width 0 of variable 'head.conv' (number 5) must lie in 1..128"),
    ],
)
def test_hostile_files_get_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("widths.json").write_bytes(content)
    result = run("cost", "digits_cnn", "--widths", "@widths.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["show"], "MODEL"),
        (["cost", "digits_cnn"], "--widths"),
        (["show", "digits_cnn", "--groups", "many"], "--groups"),
        (["show", "digits_cnn", "--nonsense"], "--nonsense"),
        (["cost", "timm_is_no_source", "--widths", "1"], "unknown model 'timm_is_no_source'"),
    ],
)
def test_usage_errors_get_one_line_and_exit_code_2(arguments: list[str], part: str) -> None:
    result = shell(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert part in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_extra_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("show", "timm:efficientnet_b0", "--input", "3,224,224")
    assert (result.exit_code, result.stderr) == (2, 'error: timm is not installed: pip install "bcnet[timm]"\n')


def test_a_failing_file_gets_one_line_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def net():\n    return 1 / 0\n")
    result = shell("show", f"{tmp_path}/net.py:net")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/net.py, line 2, fails: ZeroDivisionError: division by zero\n"
