"""Channel-Bench-Macro: its spaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench_tables import failure
from hypothesis import given
from hypothesis import strategies as st
from synthetic_table import SPACE

from bcnet.bench import BenchSpace, ChannelBench, get_space
from bcnet.space.widths import WidthVariable


@st.composite
def spaces(draw: st.DrawFn) -> BenchSpace:
    sets = draw(st.lists(st.sets(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=4))
    return BenchSpace("drawn", [WidthVariable(f"v{i}", tuple(sorted(s))) for i, s in enumerate(sets)])


@given(spaces(), st.integers(0, 2**31))
def test_widths_keys_and_indices_are_one_to_one(space: BenchSpace, seed: int) -> None:
    index = np.random.default_rng(seed).integers(0, space.size, size=20)
    keys = space.keys(index)
    assert (space.index(space.widths(index)) == index).all()
    assert (space.parse(keys) == index).all()
    assert (space.index(space.widths(index).astype(float)) == index).all()
    assert [space.keys(i) for i in index] == keys.tolist()
    assert (np.argsort(keys, kind="stable") == np.argsort(index, kind="stable")).all()


def mobilenet_flops(c0: int, h1: int, h2: int, h3: int, c4: int, h5: int, c6: int) -> int:
    at_16 = 27 * c0 + (2 * c0 + 9) * (h1 + h2) + c0 * h3
    at_8 = (9 + c4) * h3 + (2 * c4 + 9) * h5 + c4 * c6
    return 16 * 16 * at_16 + 8 * 8 * at_8 + 10 * c6


def mobilenet_params(c0: int, h1: int, h2: int, h3: int, c4: int, h5: int, c6: int) -> int:
    blocks = (2 * c0 + 13) * (h1 + h2) + (c0 + c4 + 13) * h3 + 4 * c4 + (2 * c4 + 13) * h5
    return 33 * c0 + blocks + c4 * c6 + 12 * c6 + 10


def resnet_flops(c0: int, m1: int, m2: int, m3: int, c4: int, m5: int, m6: int) -> int:
    at_16 = 27 * c0 + 18 * c0 * (m1 + m2)
    at_8 = 9 * (c0 + c4) * m3 + 18 * c4 * (m5 + m6)
    return 16 * 16 * at_16 + 8 * 8 * at_8 + 10 * c4


def resnet_params(c0: int, m1: int, m2: int, m3: int, c4: int, m5: int, m6: int) -> int:
    blocks = (18 * c0 + 2) * (m1 + m2) + (9 * c0 + 9 * c4 + 2) * m3 + (18 * c4 + 2) * (m5 + m6)
    return 33 * c0 + blocks + 16 * c4 + 10


@pytest.mark.parametrize(
    ("name", "flops", "params"),
    [("mobilenet", mobilenet_flops, mobilenet_params), ("resnet", resnet_flops, resnet_params)],
)
def test_traced_costs_are_those_of_the_released_tables(
    name: str, flops: Callable[..., int], params: Callable[..., int]
) -> None:
    """The formulas agree with every entry of the released tables; the package counts on the traced network."""
    space = get_space(name)
    widths = space.all_widths()
    assert (space.costs["flops"](widths) == [flops(*row) for row in widths.tolist()]).all()
    assert (space.costs["params"](widths) == [params(*row) for row in widths.tolist()]).all()


def test_index_keeps_the_shape_of_what_is_asked() -> None:
    mobilenet = get_space("mobilenet")
    widths = mobilenet.all_widths()[:12].reshape(3, 4, 7)
    assert (mobilenet.index(widths) == np.arange(12).reshape(3, 4)).all()
    assert mobilenet.index(mobilenet.max) == 4**7 - 1
    assert mobilenet.parse("4444444") == 4**7 - 1
    assert mobilenet.parse([]).shape == (0,)
    assert mobilenet.widths(0).tolist() == [32, 192, 192, 192, 64, 384, 256]


def test_full_networks_cost_what_the_paper_says() -> None:
    for name, flops in (("mobilenet", 211_281_920), ("resnet", 1_436_226_560)):
        assert get_space(name).costs["flops"](get_space(name).max) == flops


def test_wrong_widths_keys_and_indices_are_named() -> None:
    mobilenet = get_space("mobilenet")
    assert failure(mobilenet.index, [[32, 192, 192, 192, 64, 384, 255]]) == (
        "width 255 is not a candidate of variable 'c6': [256, 512, 768, 1024]"
    )
    assert failure(mobilenet.index, np.array([-32, 192, 192, 192, 64, 384, 256])) == (
        "width -32 of variable 'c0' (number 1) must lie in 1..128"
    )
    assert failure(mobilenet.index, [1, 2]) == "this space has 7 width variables, but 2 widths were given"
    assert failure(SPACE.parse, ["111", "115"]) == (
        "'115' is no key of space 'synthetic': a key is 3 digits, each at most the number of its variable's "
        "candidates, [4, 4, 4]"
    )
    for wrong in ("11", "1١1", "1A1", 111):
        assert failure(SPACE.parse, [wrong]).startswith(f"{wrong!r} is no key of space 'synthetic'")
    assert failure(SPACE.widths, [64]) == "an index of space 'synthetic' is a whole number in 0..63"
    assert failure(SPACE.keys, -1) == "an index of space 'synthetic' is a whole number in 0..63"


def test_a_space_must_be_small_enough() -> None:
    many = [WidthVariable(f"v{i}", tuple(range(1, 21))) for i in range(6)]
    assert failure(BenchSpace, "wide", many) == (
        "space 'wide' has 64,000,000 widths, but a table holds at most 16,777,216"
    )
    assert failure(BenchSpace, "long", [WidthVariable("v", tuple(range(1, 37)))]) == (
        "space 'long' has a variable of over 35 candidates, too many for a key"
    )


def test_a_wrong_space_name_gets_a_near_match() -> None:
    end = "name mobilenet, resnet or the .json file of a space"
    assert failure(ChannelBench.load, "mobilnet") == "there is no space 'mobilnet': did you mean 'mobilenet'?"
    assert failure(ChannelBench.load, "ResNet") == "there is no space 'ResNet': did you mean 'resnet'?"
    assert failure(ChannelBench.load, "vgg") == f"there is no space 'vgg': {end}"


def test_a_space_can_come_from_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(SPACE.to_json())
    assert get_space(str(file)) == SPACE
    assert get_space(str(file)).name == "mine"
    file.write_text("{")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: this is not the JSON text of a width space"
    file.write_bytes(b"\xff")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: it is not text"
    file.unlink()
    assert failure(get_space, str(file)) == f"cannot read the space {file}: No such file or directory"
