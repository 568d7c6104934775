"""Width variables and spaces: candidates, sampling, encoding, uniform scaling, JSON, and every error."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import FORMAT_VERSION, MAX_WIDTH, WidthSpace, WidthVariable, candidates


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(largest, groups, base, unit) of a variable that exists."""
    unit = draw(st.sampled_from([1, 1, 2, 3, 8]))
    groups = draw(st.integers(1, 40))
    return unit * draw(st.integers(1, 300)), groups, draw(st.integers(1, groups)), unit


@st.composite
def spaces(draw: st.DrawFn) -> WidthSpace:
    rows = draw(st.lists(shapes(), min_size=1, max_size=5))
    return WidthSpace(
        [WidthVariable(f"v{i}", candidates(*row), (f"conv{i}", "fc"), row[3]) for i, row in enumerate(rows)]
    )


def small_space() -> WidthSpace:
    return WidthSpace(
        [WidthVariable("stem", (2, 4, 6), ("conv1",)), WidthVariable("head", (8, 16), ("fc", "bn"), unit=8)]
    )


def message(call, *args) -> str:
    with pytest.raises(BcnetError) as error:
        call(*args)
    return str(error.value)


# Candidates


@given(shapes())
def test_candidates_rise_from_the_base_to_the_largest_in_units_and_are_closed(shape):
    largest, _, _, unit = shape
    widths = candidates(*shape)
    assert list(widths) == sorted(set(widths))
    assert widths[0] >= unit
    assert widths[-1] == largest
    assert all(c % unit == 0 for c in widths)
    assert {largest + widths[0] - c for c in widths} == set(widths)


def test_candidate_count_is_k_minus_base_plus_1_for_every_layer_of_at_least_k_channels():
    for groups in range(1, 41):
        for largest in range(groups, 301):
            for base in range(1, groups + 1):
                assert len(candidates(largest, groups, base)) == groups - base + 1, (largest, groups, base)


@given(shapes())
def test_candidates_stay_near_the_groups(shape):
    """Never more than two units off the exact k*l/K: the base may move by one more to mirror, a step by rounding."""
    largest, groups, base, unit = shape
    widths = candidates(*shape)
    if largest // unit >= groups:
        exact = [k * largest / groups for k in range(base, groups + 1)]
        assert max(abs(c - e) for c, e in zip(widths, exact, strict=True)) <= 2 * unit


@given(st.integers(1, 40), st.integers(1, 20), st.data())
def test_candidates_are_the_groups_where_they_are_whole(groups, step, data):
    base = data.draw(st.integers(1, groups))
    assert candidates(groups * step, groups, base) == tuple(k * step for k in range(base, groups + 1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((64, 20, 5), (16, 19, 22, 26, 29, 32, 35, 38, 42, 45, 48, 51, 54, 58, 61, 64)),
        ((10, 4, 1), (3, 5, 8, 10)),
        ((9, 3, 1), (3, 6, 9)),
        ((10, 3, 1), (4, 7, 10)),  # the middle one is its own complement, so the base moves from 3 to 4
        ((5, 20, 1), (1, 2, 3, 4, 5)),  # fewer channels than groups: every width
        ((5, 20, 12), (3, 4, 5)),
        ((64, 20, 20), (64,)),
        ((7, 1, 1), (7,)),
        ((64, 4, 1, 8), (16, 32, 48, 64)),
        ((1, 1, 1), (1,)),
    ],
)
def test_candidates_pinned(arguments, expected):
    assert candidates(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((64, 0), "groups is 0, but a space needs at least 1 group"),
        ((64, 20, 0), "base is 0, but it counts groups and must lie in 1..20"),
        ((64, 20, 21), "base is 21, but it counts groups and must lie in 1..20"),
        ((0, 20), "a width variable needs at least 1 channel, not 0"),
        ((-3, 20), "a width variable needs at least 1 channel, not -3"),
        ((64, 20, 1, 5), "64 channels cannot be divided into units of 5"),
        ((64, 20, 1, 0), "64 channels cannot be divided into units of 0"),
        ((4, 20, 1, 8), "4 channels cannot be divided into units of 8"),
        ((MAX_WIDTH + 1, 20), "1048577 channels are too many: a width variable may have at most 1048576"),
    ],
)
def test_candidates_that_make_no_space(arguments, text):
    assert message(candidates, *arguments) == text


# Variables and spaces


def test_variable_knows_its_largest_and_base_width_and_keeps_plain_integers():
    variable = WidthVariable("stem", tuple(np.array([2, 4, 6])))
    assert (variable.max, variable.base) == (6, 2)
    assert [type(c) for c in variable.candidates] == [int, int, int]
    with pytest.raises(AttributeError, match="cannot assign to field 'name'"):
        variable.name = "other"


@pytest.mark.parametrize(
    ("widths", "unit", "text"),
    [
        ((), 1, "variable 'stem' needs ascending candidates of at least 1, got []"),
        ((0, 1), 1, "variable 'stem' needs ascending candidates of at least 1, got [0, 1]"),
        ((2, 2), 1, "variable 'stem' needs ascending candidates of at least 1, got [2, 2]"),
        ((4, 2), 1, "variable 'stem' needs ascending candidates of at least 1, got [4, 2]"),
        ((1.0, 2.5), 1, "variable 'stem' has candidates that are not whole numbers"),
        (("2",), 1, "variable 'stem' has candidates that are not whole numbers"),
        ((4, 6), 4, "variable 'stem' has candidates that are not multiples of its unit 4"),
        ((4, 6), 0, "variable 'stem' has candidates that are not multiples of its unit 0"),
        ((10**30,), 1, "variable 'stem' is too wide: a width variable may have at most 1048576"),
    ],
)
def test_variable_that_cannot_be(widths, unit, text):
    assert message(WidthVariable, "stem", widths, (), unit) == text


def test_space_of_nothing_or_of_twins_is_an_error():
    assert message(WidthSpace, []) == "a width space needs at least one width variable"
    twins = [WidthVariable("stem", (1, 2)), WidthVariable("stem", (1, 2))]
    assert message(WidthSpace, twins) == "the names of width variables must differ from each other"


def test_space_describes_itself():
    space = small_space()
    assert len(space) == 2
    assert space.names == ("stem", "head")
    assert space.size == 6
    assert space.max.tolist() == [6, 16]
    assert space.min.tolist() == [2, 8]
    assert space == small_space()
    assert hash(space) == hash(small_space())
    assert space != WidthSpace(space.variables[:1])


def test_size_is_exact_beyond_64_bits():
    space = WidthSpace([WidthVariable(f"v{i}", candidates(64, 20)) for i in range(37)])
    assert space.size == 20**37


# Checking widths


def test_check_accepts_any_width_within_the_network():
    space = small_space()
    assert space.check([1, 8]).tolist() == [1, 8]
    assert space.check([[5.0, 16.0]]).tolist() == [[5, 16]]
    assert space.check([5, 16]).dtype == np.int64
    assert space.check(np.array([5, 16], dtype=object)).dtype == np.int64
    assert space.check(np.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ([4], "this space has 2 width variables, but 1 widths were given"),
        ([], "this space has 2 width variables, but 0 widths were given"),
        ([[4, 8, 8]], "this space has 2 width variables, but 3 widths were given"),
        ([[4, 8], [4]], "widths must be rows of whole numbers of equal length"),
        (4, "widths must be whole numbers, one per variable, got 4"),
        (None, "widths must be whole numbers, one per variable, got None"),
        ("44,51", "widths must be whole numbers, one per variable, got '44,51'"),
        (["4", "8"], "widths must be whole numbers, one per variable, got ['4', '8']"),
        ([4.5, 8], "widths must be whole numbers, one per variable, got [4.5, 8]"),
        ([float("nan"), 8], "widths must be whole numbers, one per variable, got [nan, 8]"),
        ([float("inf"), 8], "widths must be whole numbers, one per variable, got [inf, 8]"),
        ([True, False], "widths must be whole numbers, one per variable, got [True, False]"),
        ([4j, 8], "widths must be whole numbers, one per variable, got [4j, 8]"),
        ([0, 8], "width 0 of variable 'stem' (number 1) must lie in 1..6"),
        ([-1, 8], "width -1 of variable 'stem' (number 1) must lie in 1..6"),
        ([7, 8], "width 7 of variable 'stem' (number 1) must lie in 1..6"),
        ([4, 24], "width 24 of variable 'head' (number 2) must lie in 8..16 in multiples of 8"),
        ([[4, 8], [4, 12]], "width 12 of variable 'head' (number 2) must lie in 8..16 in multiples of 8"),
        ([10**25, 8], "width 10000000000000000000000000 of variable 'stem' (number 1) must lie in 1..6"),
    ],
)
def test_check_names_what_is_wrong(widths, text):
    assert message(small_space().check, widths) == text


# Sampling and encoding


def test_sampling_is_seeded_and_uniform_over_the_candidates():
    space = small_space()
    drawn = space.sample(np.random.default_rng(0), 6000)
    assert drawn.shape == (6000, 2)
    assert drawn.dtype == np.int64
    assert (drawn == space.sample(np.random.default_rng(0), 6000)).all()
    assert (drawn != space.sample(np.random.default_rng(1), 6000)).any()
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == space.size
    assert abs(counts - 1000).max() < 150  # five standard deviations


@given(spaces(), st.integers(0, 2**32 - 1))
def test_encode_and_decode_are_inverse(space, seed):
    widths = space.sample(np.random.default_rng(seed), 20)
    indices = space.encode(widths)
    assert (space.decode(indices) == widths).all()
    assert (space.encode(widths[0]) == indices[0]).all()
    assert (space.encode(space.min) == 0).all()
    assert space.encode(space.max).tolist() == [len(v.candidates) - 1 for v in space.variables]


def test_encode_and_decode_name_what_is_wrong():
    space = small_space()
    assert message(space.encode, [3, 8]) == "width 3 is not a candidate of variable 'stem': [2, 4, 6]"
    assert message(space.encode, [[2, 8], [1, 8]]) == "width 1 is not a candidate of variable 'stem': [2, 4, 6]"
    assert message(space.decode, [0]) == "this space has 2 width variables, so indices need that many columns"
    assert message(space.decode, 0) == "this space has 2 width variables, so indices need that many columns"
    assert message(space.decode, [3, 0]) == "an index lies outside its variable's candidates"
    assert message(space.decode, [-1, 0]) == "an index lies outside its variable's candidates"
    assert message(space.decode, [0.5, 0.0]) == "indices of candidates must be whole numbers"
    assert message(space.decode, ["a", "b"]) == "indices of candidates must be whole numbers"
    assert space.decode(np.zeros((0, 2))).shape == (0, 2)


# Uniform scaling


def test_scaled_rounds_down_to_units_and_keeps_one():
    space = WidthSpace([WidthVariable("a", (10,)), WidthVariable("b", (64,), unit=8), WidthVariable("c", (3,))])
    assert space.scaled(0.7).tolist() == [7, 40, 2]
    assert space.scaled(0.01).tolist() == [1, 8, 1]
    assert space.scaled(1.0).tolist() == [10, 64, 3]
    assert space.scaled(5).tolist() == [10, 64, 3]


@pytest.mark.parametrize("factor", [0, -0.5, float("nan"), float("inf")])
def test_scaling_needs_a_positive_number(factor):
    assert message(small_space().scaled, factor) == f"widths can be scaled by a positive number only, not by {factor}"


@given(spaces(), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_uniform_is_the_widest_scaling_that_fits(space, share, seed):
    rng = np.random.default_rng(seed)
    length = len(space)
    cost = QuadraticCost(
        float(rng.integers(0, 100)),
        rng.integers(1, 9, length).astype(float),
        np.triu(rng.integers(0, 9, (length, length))).astype(float),
    )
    factors = {k / m for m in space.max.tolist() for k in range(1, m + 1)} | set(rng.uniform(0.001, 1, 100))
    every = np.array(sorted({tuple(space.scaled(f).tolist()) for f in factors}, key=sum))
    costs = cost(every)
    limit = costs[0] + share * (costs[-1] - costs[0])
    assert space.uniform(cost, limit).tolist() == every[costs <= limit][-1].tolist()


def test_uniform_at_the_edges():
    space = small_space()

    def cost(widths):
        return np.asarray(widths).sum(axis=1)

    assert space.uniform(cost, 22).tolist() == [6, 16]
    assert space.uniform(cost, 1e30).tolist() == [6, 16]
    assert space.uniform(cost, 9).tolist() == [1, 8]
    assert message(space.uniform, cost, 8) == "no uniform scaling costs at most 8: the smallest costs 9"


@given(st.integers(1, 12), st.floats(0.01, 1))
def test_uniform_leaves_every_layer_as_many_channels_as_a_search_must(least, factor):
    variables = [WidthVariable(name, tuple(range(1, widest + 1))) for name, widest in (("a", 6), ("b", 64))]
    widths = WidthSpace(variables, least=least).scaled(factor)
    assert (widths >= np.minimum(least, [6, 64])).all()
    plain = WidthSpace(variables).scaled(factor)
    assert (widths == np.maximum(plain, np.minimum(least, [6, 64]))).all()


# JSON


@given(spaces())
def test_json_round_trip(space):
    again = WidthSpace.from_json(space.to_json())
    assert again == space
    assert again.to_json() == space.to_json()


def test_json_carries_its_format_and_version():
    assert json.loads(small_space().to_json()) == {
        "format": "bcnet.widthspace",
        "version": FORMAT_VERSION,
        "variables": [
            {"name": "stem", "candidates": [2, 4, 6], "layers": ["conv1"], "unit": 1},
            {"name": "head", "candidates": [8, 16], "layers": ["fc", "bn"], "unit": 8},
        ],
    }


ROW = {"name": "stem", "candidates": [2, 4], "layers": ["conv1"], "unit": 1}
BAD_ROW = "a variable of this width space needs a name, candidates and a unit in whole numbers, and names of layers"


def text_of(**changes) -> str:
    return json.dumps({"format": "bcnet.widthspace", "version": FORMAT_VERSION, "variables": [ROW]} | changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "this is not the JSON text of a width space"),
        (small_space().to_json()[:-5], "this is not the JSON text of a width space"),
        ("[" * 100_000, "this is not the JSON text of a width space"),
        ("9" * 10_000, "this is not the JSON text of a width space"),
        ("[]", "this JSON does not describe a width space"),
        ("{}", "this JSON does not describe a width space"),
        (text_of(format="other"), "this JSON does not describe a width space"),
        (text_of(version=2), "this width space has format version 2, but this bcnet reads 1"),
        (text_of(version=True), "this width space has format version True, but this bcnet reads 1"),
        (text_of(version="1"), "this width space has format version '1', but this bcnet reads 1"),
        (text_of(version=None), "this width space has format version None, but this bcnet reads 1"),
        (text_of(variables=None), "this width space lacks its list of variables"),
        (text_of(variables={"name": 1}), "this width space lacks its list of variables"),
        (text_of(variables=[]), "a width space needs at least one width variable"),
        (text_of(variables=[ROW, ROW]), "the names of width variables must differ from each other"),
        (text_of(variables=["stem"]), BAD_ROW),
        (text_of(variables=[{}]), BAD_ROW),
        (text_of(variables=[ROW | {"name": 7}]), BAD_ROW),
        (text_of(variables=[ROW | {"candidates": "24"}]), BAD_ROW),
        (text_of(variables=[ROW | {"candidates": [2, 4.0]}]), BAD_ROW),
        (text_of(variables=[ROW | {"candidates": [True, 4]}]), BAD_ROW),
        (text_of(variables=[ROW | {"candidates": [float("nan")]}]), BAD_ROW),
        (text_of(variables=[ROW | {"layers": "conv1"}]), BAD_ROW),
        (text_of(variables=[ROW | {"layers": [1]}]), BAD_ROW),
        (text_of(variables=[ROW | {"unit": True}]), BAD_ROW),
        (text_of(variables=[ROW | {"unit": 3}]), "variable 'stem' has candidates that are not multiples of its unit 3"),
        (
            text_of(variables=[ROW | {"unit": 10**4000}]),
            "variable 'stem' has candidates that are not multiples of its unit 10000000000000000000",
        ),
        (
            text_of(variables=[ROW | {"candidates": [10**30]}]),
            "variable 'stem' is too wide: a width variable may have at most 1048576",
        ),
    ],
)
def test_json_that_is_no_width_space(text, expected):
    assert message(WidthSpace.from_json, text) == expected


def test_widths_and_principles_import_no_torch():
    code = "import sys, bcnet.space.widths, bcnet.supernet.principle; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
