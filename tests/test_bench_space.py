"""Channel-Bench-Macro: its spaces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_tables import failure
from hypothesis import given
from hypothesis import strategies as st
from synthetic_table import SPACE
from traced import space_of

from bcnet.bench import MOBILENET, RESNET, BenchSpace, ChannelBench, get_space
from bcnet.bench.spaces import quadratic
from bcnet.models.load import load_model
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


@pytest.mark.parametrize("space", [MOBILENET, RESNET])
def test_released_spaces_have_the_layers_of_their_networks(space: BenchSpace) -> None:
    traced = space_of(load_model(f"zoo:channel_bench_{space.name}"), groups=4)
    assert [v.layers for v in space.variables] == [v.layers for v in traced.variables]
    assert [v.candidates for v in space.variables] == [v.candidates for v in traced.variables]


def test_index_keeps_the_shape_of_what_is_asked() -> None:
    widths = MOBILENET.all_widths()[:12].reshape(3, 4, 7)
    assert (MOBILENET.index(widths) == np.arange(12).reshape(3, 4)).all()
    assert MOBILENET.index(MOBILENET.max) == 4**7 - 1
    assert MOBILENET.parse("4444444") == 4**7 - 1
    assert MOBILENET.parse([]).shape == (0,)
    assert MOBILENET.widths(0).tolist() == [32, 192, 192, 192, 64, 384, 256]


@given(st.lists(st.integers(-50, 50), min_size=10, max_size=10), st.lists(st.integers(0, 90), min_size=3, max_size=3))
def test_quadratic_reads_a_polynomial_off_its_values(coefficients: list[int], point: list[int]) -> None:
    def polynomial(a: int, b: int, c: int) -> int:
        terms = (1, a, b, c, a * a, b * b, c * c, a * b, a * c, b * c)
        return sum(k * t for k, t in zip(coefficients, terms, strict=True))

    assert quadratic(polynomial, 3)([point]) == polynomial(*point)


def test_full_networks_cost_what_the_paper_says() -> None:
    assert MOBILENET.costs["flops"](MOBILENET.max) == 211_281_920
    assert RESNET.costs["flops"](RESNET.max) == 1_436_226_560


def test_wrong_widths_keys_and_indices_are_named() -> None:
    assert failure(MOBILENET.index, [[32, 192, 192, 192, 64, 384, 255]]) == (
        "width 255 is no candidate of variable 'c6': [256, 512, 768, 1024]"
    )
    assert failure(MOBILENET.index, np.array([-32, 192, 192, 192, 64, 384, 256])) == (
        "width -32 of variable 'c0' (number 1) must lie in 1..128"
    )
    assert failure(MOBILENET.index, [1, 2]) == "this space has 7 width variables, but 2 widths were given"
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
    assert failure(ChannelBench.load, "mobilnet") == f"there is no space 'mobilnet' (did you mean 'mobilenet'?): {end}"
    assert failure(ChannelBench.load, "ResNet") == f"there is no space 'ResNet' (did you mean 'resnet'?): {end}"
    assert failure(ChannelBench.load, "vgg") == f"there is no space 'vgg': {end}"


def test_a_space_can_come_from_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(SPACE.to_json())
    assert get_space(str(file)) == SPACE
    assert get_space(str(file)).name == "mine"
    file.write_text("{")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: this is no JSON text of a width space"
    file.write_bytes(b"\xff")
    assert failure(get_space, str(file)) == f"{file} is no file of a space: it is not text"
    file.unlink()
    assert failure(get_space, str(file)) == f"cannot read the space {file}: No such file or directory"
