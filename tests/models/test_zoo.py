"""The zoo's networks: their exact costs, their width variables, and what a mistaken name or width is told."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import golden_widths
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bcnet import models as zoo
from bcnet.errors import BcnetError

DATA = Path(__file__).parents[3] / "shared" / "data"

# FLOPs, parameters, width variables: the figures of torchvision's and the papers' networks, not of our own code.
# Two are ours: digits_cnn, 64*(9*32 + 2*9*32*48 + 32*128) + 16*(9*128 + 128*64 + 64*128) + 128*10 FLOPs, and
# cluttered_cnn, 9*(144*(8 + 8*16) + 36*(16*48 + 2*48*48 + 48*96)) + 96*10 FLOPs.
FACTS = {
    "cluttered_cnn": (3_412_032, 92_578, 5),
    "digits_cnn": (2_331_904, 51_978, 5),
    "channel_bench_mobilenet": (211_281_920, 1_804_170, 7),
    "channel_bench_resnet": (1_436_226_560, 15_356_170, 7),
    "vgg19_cifar": (398_136_320, 20_035_018, 16),
    "mobilenetv2_cifar": (296_473_088, 2_236_682, 25),
    "mobilenetv2_imagenet": (300_774_272, 3_504_872, 25),
    "resnet18_cifar": (555_422_720, 11_173_962, 12),
    "resnet18_imagenet": (1_814_073_344, 11_689_512, 12),
    "resnet34_imagenet": (3_663_761_408, 21_797_672, 20),
    "resnet50_imagenet": (4_089_184_256, 25_557_032, 37),
    "efficientnet_b0_imagenet": (385_814_752, 5_288_548, 24),
    "proxylessnas_imagenet": (320_427_584, 4_080_512, 28),
}
NAMES = list(FACTS)


def meta(name: str, widths: Sequence[int] | None = None) -> tuple[nn.Module, torch.Tensor]:
    """The network and one input on the meta device: shapes without arithmetic."""
    with torch.device("meta"):
        return zoo.build(name, widths).eval(), torch.empty(1, *zoo.MODELS[name].input_shape)


def measure(name: str, widths: Sequence[int] | None = None) -> tuple[int, int]:
    """FLOPs (torch counts two per multiply-accumulate) and parameters of the built network."""
    net, x = meta(name, widths)
    with FlopCounterMode(display=False) as counter:
        net(x)
    return counter.get_total_flops() // 2, sum(p.numel() for p in net.parameters())


def test_the_table_lists_exactly_the_known_networks() -> None:
    assert sorted(zoo.MODELS) == sorted(FACTS)


@pytest.mark.parametrize("name", NAMES)
def test_network(name: str) -> None:
    flops, params, count = FACTS[name]
    model = zoo.MODELS[name]
    assert len(model.widths) == len(model.variables) == len(set(model.variables)) == count
    assert measure(name) == (flops, params) == (model.flops, model.params)
    rng = random.Random(name)
    for widths in (None, [1] * count, [rng.randint(1, w) for w in model.widths]):
        net, x = meta(name, widths)
        assert net(x).shape == (1, model.classes)
    with torch.device("meta"):
        assert zoo.build(name, classes=7)(x).shape == (1, 7)


@pytest.mark.parametrize("name", NAMES)
def test_widths_come_in_order_of_first_use(name: str) -> None:
    every = len(zoo.MODELS[name].order)
    distinct = list(range(2, every + 2))  # not 1, which an addition of unequal widths would broadcast
    net, x = meta(name, distinct)
    seen: list[int] = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, __, out: seen.append(out.shape[1]))
    net(x)
    assert list(dict.fromkeys(seen)) == distinct


@pytest.mark.parametrize("name", NAMES)
def test_shortcuts_do_not_depend_on_widths(name: str) -> None:
    full, _ = meta(name)
    ones, _ = meta(name, [1] * len(zoo.MODELS[name].widths))
    assert [(key, type(layer)) for key, layer in full.named_modules()] == [
        (key, type(layer)) for key, layer in ones.named_modules()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_export_with_any_batch(name: str) -> None:
    model = zoo.MODELS[name]
    net = zoo.build(name, [2] * len(model.widths)).eval()
    batch = torch.randn(3, *model.input_shape)
    exported = torch.export.export(net, (batch[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(exported.module()(batch), net(batch))


def test_variables_are_named_after_their_first_layers() -> None:
    for name, model in zoo.MODELS.items():
        net, _ = meta(name)
        layers = {key: layer.out_channels for key, layer in net.named_modules() if isinstance(layer, nn.Conv2d)}
        assert [layers[v.name] for v in model.order] == [v.width for v in model.order]


def test_squeeze_widths_stay_unless_given() -> None:
    full = [8, 4, 6, 6, 10, 10, 20, 20, 20, 28, 28, 28, 48, 48, 48, 48]

    def squeezes(widths: Sequence[int] | None) -> list[int]:
        net, _ = meta("efficientnet_b0_imagenet", widths)
        return [layer.out_channels for key, layer in net.named_modules() if key.endswith("gate.squeeze")]

    order = zoo.MODELS["efficientnet_b0_imagenet"].order
    assert squeezes(None) == squeezes([3] * 24) == full
    assert squeezes([3] * 40) == [3] * 16
    assert [v.width for v in order if v.fixed] == full
    assert measure("efficientnet_b0_imagenet", [v.width for v in order]) == FACTS["efficientnet_b0_imagenet"][:2]


@pytest.mark.parametrize(
    ("factor", "flops", "params"), [(0.86, "3.03G", "19.1M"), (0.71, "2.07G", "13.3M"), (0.5, "1.05G", "6.9M")]
)
def test_uniform_rows_of_the_paper(factor: float, flops: str, params: str) -> None:
    got = measure("resnet50_imagenet", [int(w * factor) for w in zoo.MODELS["resnet50_imagenet"].widths])
    assert (f"{got[0] / 1e9:.2f}G", f"{got[1] / 1e6:.1f}M") == (flops, params)


def test_golden_widths() -> None:
    path = DATA / "golden_widths.json"
    if not path.exists():
        pytest.skip(f"no {path.name}: the published widths are not part of the repository")
    golden = json.loads(path.read_text())
    del golden["about"]
    assert len(golden) == 4
    for network, entries in golden.items():
        name = network.removesuffix("10")
        for key, entry in entries.items():
            if key != "order":
                assert measure(name, golden_widths(entry)) == (entry["flops"], entry["params"]), (name, key)


def bench_mobilenet(c0: int, h1: int, h2: int, h3: int, c4: int, h5: int, c6: int) -> tuple[int, int]:
    return (
        256 * (27 * c0 + (2 * c0 + 9) * (h1 + h2) + c0 * h3)
        + 64 * ((9 + c4) * h3 + (2 * c4 + 9) * h5 + c4 * c6)
        + 10 * c6,
        33 * c0
        + (2 * c0 + 13) * (h1 + h2)
        + (c0 + c4 + 13) * h3
        + 4 * c4
        + (2 * c4 + 13) * h5
        + c4 * c6
        + 12 * c6
        + 10,
    )


def bench_resnet(c0: int, m1: int, m2: int, m3: int, c4: int, m5: int, m6: int) -> tuple[int, int]:
    return (
        256 * (27 * c0 + 18 * c0 * (m1 + m2)) + 576 * (c0 + c4) * m3 + 1152 * c4 * (m5 + m6) + 10 * c4,
        33 * c0 + (18 * c0 + 2) * (m1 + m2) + (9 * c0 + 9 * c4 + 2) * m3 + 16 * c4 + (18 * c4 + 2) * (m5 + m6) + 10,
    )


BENCH = [("channel_bench_mobilenet", bench_mobilenet, "MobileNet"), ("channel_bench_resnet", bench_resnet, "ResNet")]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=7, max_size=7))
def test_channel_bench_formulas(widths: list[int]) -> None:
    for name, formula, _ in BENCH:
        assert measure(name, widths) == formula(*widths)


@pytest.mark.parametrize(("name", "formula", "table"), BENCH)
def test_channel_bench_tables(name: str, formula: Any, table: str) -> None:
    path = DATA / "channel-bench-macro" / f"Results_{table}.json"
    if not path.exists():
        pytest.skip(f"no {path.name}: the released tables are not part of the repository")
    entries = json.loads(path.read_text())
    full = zoo.MODELS[name].widths
    assert len(entries) == 4**7
    for key, entry in entries.items():
        widths = [int(digit) * w // 4 for digit, w in zip(key, full, strict=True)]
        assert formula(*widths) == (entry["flops"], entry["params"]), key
    for key in random.Random(0).sample(sorted(entries), 5):
        widths = [int(digit) * w // 4 for digit, w in zip(key, full, strict=True)]
        assert measure(name, widths) == (entries[key]["flops"], entries[key]["params"]), key


def test_digits_cnn_learns_digits() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    torch.manual_seed(0)
    net = zoo.build("digits_cnn", [w // 2 for w in zoo.MODELS["digits_cnn"].widths])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=96)
    for _ in range(8):
        for batch in torch.randperm(1200).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(x[1200:]).argmax(1) == y[1200:]).float().mean().item()
    assert accuracy > 0.9  # 0.93 to 0.96 over three seeds, on writers not trained on


def test_names_and_widths_need_no_torch() -> None:
    code = "import sys, bcnet.models as z; assert z.MODELS['vgg19_cifar'].widths; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "widths", "message"),
    [
        (
            *("resnet5_imagenet", None),
            "unknown model 'resnet5_imagenet': did you mean 'resnet50_imagenet' or 'resnet34_imagenet' or "
            "'resnet18_imagenet'? `bcnet models` lists all",
        ),
        (
            *("MobileNetV2", None),
            "unknown model 'MobileNetV2': did you mean 'mobilenetv2_cifar' or 'mobilenetv2_imagenet' or "
            "'channel_bench_mobilenet'? `bcnet models` lists all",
        ),
        ("", None, "unknown model '': `bcnet models` lists all"),
        ("xyz", None, "unknown model 'xyz': `bcnet models` lists all"),
        ("vgg19_cifar", [1] * 15, "vgg19_cifar has 16 width variables, but 15 widths were given"),
        ("vgg19_cifar", [], "vgg19_cifar has 16 width variables, but 0 widths were given"),
        (
            *("efficientnet_b0_imagenet", [1] * 25),
            "efficientnet_b0_imagenet has 24 width variables, or 40 with the fixed ones, but 25 widths were given",
        ),
        ("digits_cnn", [4, 4, 0, 4, 4], "width 0 of variable 'block2.body.expand.conv' (number 3) must be at least 1"),
        ("digits_cnn", [-2, 4, 4, 4, 4], "width -2 of variable 'stem.conv' (number 1) must be at least 1"),
        ("digits_cnn", [4, 4, 4.5, 4, 4], "widths must be whole numbers, got [4, 4, 4.5, 4, 4]"),
        ("digits_cnn", [True] * 5, "widths must be whole numbers, got [True, True, True, True, True]"),
        ("digits_cnn", "44444", "widths must be whole numbers, got '44444'"),
        ("digits_cnn", 4, "widths must be whole numbers, got 4"),
    ],
)
def test_mistakes_get_one_sentence(name: str, widths: Any, message: str) -> None:
    with pytest.raises(BcnetError) as caught:
        zoo.build(name, widths)
    assert str(caught.value) == message


def test_classes_must_be_positive() -> None:
    with pytest.raises(BcnetError) as caught:
        zoo.build("digits_cnn", classes=0)
    assert str(caught.value) == "classes is 0, but a classifier needs a whole number of at least 1"
