"""Networks from timm, torchvision and files: their spaces, and what a mistake is told."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn
from traced import space_of

from bcnet.errors import BcnetError
from bcnet.models.load import LoadedModel, load_model, parse_shape

NET = """
from torch import nn

class Net(nn.Module):
    input_shape = (3, 16, 16)
    num_classes = 10

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3)
        self.second = nn.Conv2d(width, 12, 3)
        self.classifier = nn.Linear(12, 10)

    def forward(self, x):
        return self.classifier(self.second(self.first(x).relu()).relu().mean((2, 3)))
"""


def error_of(spec: str, *arguments: object) -> str:
    with pytest.raises(BcnetError) as caught:
        load_model(spec, *arguments)
    return str(caught.value)


# Files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the user's file net.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def more(folder: Path, code: str) -> None:
    (folder / "net.py").write_text(f"{NET}\n{code}\n")


def known(source: LoadedModel) -> tuple[str, str, tuple[int, ...], int | None]:
    return source.spec, type(source.model).__name__, source.input_shape, source.classes


def test_a_class_a_function_and_an_instance_in_a_file(folder: Path) -> None:
    more(folder, "made = Net()\ndef small(): return nn.Sequential(nn.Conv2d(1, 2, 1))\nsmall.input_shape = [1, 4, 5]")
    assert known(load_model("net.py:Net")) == ("net.py:Net", "Net", (3, 16, 16), 10)
    assert known(load_model(f"{folder}/net.py:made")) == (f"{folder}/net.py:made", "Net", (3, 16, 16), 10)
    assert known(load_model("net.py:small")) == ("net.py:small", "Sequential", (1, 4, 5), None)
    assert known(load_model("net.py:Net", (3, 8, 8)))[2] == (3, 8, 8)
    space = load_model("net.py:Net").space()
    assert [(v.name, v.max, v.layers) for v in space.variables] == [
        ("first", 8, ("first", "second")),
        ("second", 12, ("second", "classifier")),
    ]
    assert space.own_class


def test_the_example_is_where_the_network_is(folder: Path) -> None:
    more(folder, "def double(): return Net().double()")
    assert load_model("net.py:double").example.dtype == torch.float64


def test_a_file_imports_its_neighbours_and_prints_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bcnet_test_neighbour.py").write_text("width = 5")
    more(folder, "print('hello')\nimport bcnet_test_neighbour\ndef other(): return Net(bcnet_test_neighbour.width)")
    before = list(sys.path)
    assert load_model("net.py:other").model.first.out_channels == 5
    assert sys.path == before
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("code", "spec", "message"),
    [
        ("", "gone.py:Net", "there is no file gone.py"),
        ("", "net.py", "net.py is a file: write net.py:NAME, where NAME() in it returns the network"),
        ("", "net.py:Nett", "net.py has no 'Nett': did you mean 'Net'?"),
        ("", "net.py:", "net.py has no ''"),
        (
            *("thing = 3", "net.py:thing"),
            "net.py:thing is an object of type int, but it must be a function or class that returns a torch.nn.Module",
        ),
        (
            *("def none(): pass", "net.py:none"),
            "net.py:none returned None, but it must return a torch.nn.Module",
        ),
        (
            *("def rows(): return [Net()]", "net.py:rows"),
            "net.py:rows returned an object of type list, but it must return a torch.nn.Module",
        ),
        (
            *("def wants(a, b=2, *more, c): pass", "net.py:wants"),
            "net.py:wants needs arguments (a, c), but it is called without: give them defaults, or name a function "
            "that passes them",
        ),
        (
            *("def bare(): return nn.Conv2d(1, 2, 1)", "net.py:bare"),
            "the input shape of net.py:bare is not known: pass --input C,H,W, or set bare.input_shape",
        ),
        (
            *("Net.input_shape = (3, 16)", "net.py:Net"),
            "the input_shape of net.py:Net must be C,H,W in whole numbers such as 3,224,224, not (3, 16)",
        ),
        ("def fails(): return 1 / 0", "net.py:fails", "net.py, line 17, fails: ZeroDivisionError: division by zero"),
        (
            *("def fails():\n    raise ValueError('one\\ntwo')", "net.py:fails"),
            "net.py, line 18, fails: ValueError: one",
        ),
        (
            *("def fails(): return nn.Conv2d(3, -1, 3)", "net.py:fails"),
            "net.py, line 17, fails: RuntimeError: Trying to create tensor with negative dimension -1: [-1, 3, 3, 3]",
        ),
        ("def broken(:", "net.py:Net", "net.py, line 17, fails: SyntaxError: invalid syntax"),
        (
            *("import nothing_here", "net.py:Net"),
            "net.py, line 17, fails: ModuleNotFoundError: No module named 'nothing_here'",
        ),
        ("raise SystemExit(3)", "net.py:Net", "net.py, line 17, fails: SystemExit: 3"),
    ],
)
def test_mistakes_in_a_file_get_one_sentence(folder: Path, code: str, spec: str, message: str) -> None:
    more(folder, code)
    assert error_of(spec) == message


def test_endless_recursion_in_a_file_gets_one_sentence(folder: Path) -> None:
    more(folder, "def again(): return again()")
    message = "net.py, line 17, fails: RecursionError: maximum recursion depth exceeded"
    assert error_of("net.py:again").startswith(message)  # some versions of Python say where


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"\x00\x01", ["SyntaxError", "ValueError"]),  # the latter in older versions of Python
        (b"\xff\xfe\xfa", ["SyntaxError"]),
    ],
)
def test_a_file_of_noise_gets_one_sentence(folder: Path, content: bytes, errors: list[str]) -> None:
    (folder / "net.py").write_bytes(content)
    message = error_of("net.py:Net")
    assert message.startswith("net.py")
    assert any(f"fails: {error}" in message for error in errors)


def test_a_folder_is_no_file(folder: Path) -> None:
    (folder / "dir.py").mkdir()
    assert error_of("dir.py:Net") == "there is no file dir.py"


# Names and shapes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "resnet50",
            "unknown model 'resnet50': did you mean 'resnet50_imagenet' or 'resnet18_cifar'? `bcnet models` lists all",
        ),
        ("zoo:", "unknown model '': `bcnet models` lists all"),
        (
            "keras:vgg",
            "unknown source 'keras' of a model: write zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME",
        ),
        (
            "file:vgg",
            "unknown source 'file' of a model: write zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME",
        ),
    ],
)
def test_unknown_models(spec: str, message: str) -> None:
    assert error_of(spec) == message


def test_shapes() -> None:
    assert parse_shape("3,224,224") == parse_shape(" 3, 224 ,224") == (3, 224, 224)


@pytest.mark.parametrize("text", ["", "3", "3,32", "3,32,32,1", "a,b,c", "3,,32", "3,-1,32", "3,1e3,8", "9" * 5000])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(BcnetError) as caught:
        parse_shape(text)
    assert str(caught.value) == f"--input must be C,H,W in whole numbers such as 3,224,224, not {text!r:.60}"


def test_shapes_too_small_and_too_large() -> None:
    for text in ("3,0,32", "3,99999,99999"):
        with pytest.raises(BcnetError) as caught:
            parse_shape(text)
        assert str(caught.value) == (
            f"--input is {text}, but C, H and W must be at least 1 and their product at most 67108864"
        )
    assert error_of("digits_cnn", (1, 8.5, 8)) == (
        "the input shape must be C,H,W in whole numbers such as 3,224,224, not (1, 8.5, 8)"
    )


# Extras


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert error_of(f"{package}:resnet18") == f'{package} is not installed: pip install "bcnet[{package}]"'


def test_a_broken_extra_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("import bcnet_test_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert error_of("timm:resnet18") == (
        "timm is installed but cannot be imported (ModuleNotFoundError: No module named 'bcnet_test_nowhere'): if it, "
        f"or torchvision, was made for another torch, install it anew from where torch {torch.__version__} came from"
    )


def test_sources_of_extras_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def network(classes: int) -> nn.Module:
        made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
        made.num_classes, made.default_cfg = classes, {"input_size": (3, 96, 96)}
        return made

    def create_model(name: str, pretrained: bool = True, num_classes: int = 1000) -> nn.Module:
        if pretrained or name == "odd":
            raise RuntimeError("would download")
        return network(num_classes)

    def get_model(name: str, weights: str | None = "DEFAULT", num_classes: int = 1000) -> nn.Module:
        return create_model(name, weights is not None, num_classes)

    names = ["some_net", "inception_v3", "odd"]
    models = SimpleNamespace(list_models=lambda module: names, get_model=get_model)
    fake = SimpleNamespace(is_model=names.__contains__, list_models=lambda: names, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))

    assert known(load_model("timm:some_net")) == ("timm:some_net", "Sequential", (3, 96, 96), 1000)
    assert known(load_model("timm:some_net", (3, 32, 32), 7))[2:] == ((3, 32, 32), 7)
    assert known(load_model("torchvision:some_net"))[2:] == ((3, 224, 224), 1000)
    assert known(load_model("torchvision:inception_v3", classes=5))[2:] == ((3, 299, 299), 5)
    assert error_of("timm:some_nat") == "timm has no model 'some_nat': did you mean 'some_net'?"
    assert error_of("torchvision:") == "torchvision has no classification model ''"
    assert error_of("torchvision:some_nte") == (
        "torchvision has no classification model 'some_nte': did you mean 'some_net'?"
    )
    assert error_of("timm:odd") == "timm:odd cannot be built: RuntimeError: would download"


def test_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published weights are asked for, torchvision's last layers replaced; offline it is one sentence."""

    def network(classes: int) -> nn.Module:
        made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, classes), nn.Conv2d(4, classes, 1))
        made.num_classes, made.default_cfg = classes, {"input_size": (3, 3, 3)}
        return made

    asked: list[tuple[object, ...]] = []

    def create_model(name: str, pretrained: bool, num_classes: int = 1000) -> nn.Module:
        asked.append(("timm", pretrained, num_classes))
        return network(num_classes)

    def get_model(name: str, weights: str | None, num_classes: int = 1000) -> nn.Module:
        if name == "offline":
            raise URLError("no route to host")
        if weights is not None and num_classes != 1000:
            raise ValueError("another number of classes")
        asked.append(("torchvision", weights, num_classes))
        return network(num_classes)

    models = SimpleNamespace(list_models=lambda module: ["net", "offline"], get_model=get_model)
    fake = SimpleNamespace(is_model=lambda name: name == "net", create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    for spec in ("timm:net", "torchvision:net"):
        for classes in (None, 7):
            loaded = load_model(spec, None, classes, pretrained=True)
            wanted = classes or 1000
            assert loaded.classes == loaded.model[2].out_features == loaded.model[3].out_channels == wanted
    assert asked == [("timm", True, 1000), ("timm", True, 7), *[("torchvision", "DEFAULT", 1000)] * 2]
    assert error_of("torchvision:offline", None, None, True) == (
        "the pretrained weights of torchvision:offline cannot be loaded (URLError: <urlopen error no route to host>): "
        "go online once, so that they are cached, or give a file of weights"
    )
    assert error_of("zoo:vgg19_cifar", None, None, True) == (
        "there are no pretrained weights of zoo:vgg19_cifar: give a file of weights, or take timm or torchvision"
    )


def test_timm_and_torchvision_agree_on_resnet18() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    spaces = [load_model(spec).space() for spec in ("timm:resnet18", "torchvision:resnet18")]
    zoos = space_of(load_model("zoo:resnet18_imagenet"))
    for space in spaces:
        assert space.max.tolist() == zoos.max.tolist()
        widths = zoos.sample(np.random.default_rng(0), 5)
        for name in ("flops", "params"):
            np.testing.assert_array_equal(space.costs[name](widths), zoos.costs[name](widths))
    assert error_of("timm:resnet_18").startswith("timm has no model 'resnet_18': did you mean 'resnet18' or ")
    assert math.prod(load_model("timm:efficientnet_b0", classes=4).input_shape) == 3 * 224 * 224
