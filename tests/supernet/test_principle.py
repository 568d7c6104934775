"""Fairness is arithmetic: every claim of the design's third section, for every small layer."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.space.widths import WidthVariable, candidates
from bcnet.supernet.principle import BC, BCV2, BCV2_PRINTED, PRINCIPLES, SIDES, UA, Principle, get_principle


@functools.cache
def every_variable() -> tuple[WidthVariable, ...]:
    """Every distinct candidate set of l <= 300, K <= 40 and every base: 181,702 of them."""
    sets = {candidates(n, k, base) for n in range(1, 301) for k in range(1, 41) for base in range(1, k + 1)}
    return tuple(WidthVariable("layer", widths) for widths in sorted(sets))


@st.composite
def variables(draw: st.DrawFn) -> WidthVariable:
    unit = draw(st.sampled_from([1, 1, 2, 3, 8, 16]))
    groups = draw(st.integers(1, 40))
    widths = candidates(unit * draw(st.integers(1, 300)), groups, draw(st.integers(1, groups)), unit)
    return WidthVariable("layer", widths, unit=unit)


@st.composite
def variables_with_width(draw: st.DrawFn) -> tuple[WidthVariable, int]:
    variable = draw(variables())
    return variable, draw(st.sampled_from(variable.candidates))


def plain(largest: int, step: int = 1, base: int = 1) -> WidthVariable:
    """Candidates base*step, (base+1)*step, ..., largest."""
    return WidthVariable("layer", tuple(range(base * step, largest + 1, step)))


def touches(principle: Principle, variable: WidthVariable, widths: tuple[int, ...]) -> np.ndarray:
    """How often each channel is used by ``widths``, on every side the principle has: shape (total,)."""
    counts = np.zeros(principle.total(variable), dtype=int)
    for width in widths:
        for side in principle.sides:
            counts[list(principle.channels(variable, width, side))] += 1
    return counts


def test_bcv2_is_fair_for_every_layer():
    for variable in every_variable():
        cardinality = BCV2.cardinality(variable)
        assert cardinality.shape == (variable.max + variable.base,)
        assert (cardinality == len(variable.candidates)).all(), variable.candidates


def test_bcv2_complement_is_a_candidate_for_every_layer():
    for variable in every_variable():
        complements = tuple(BCV2.complement(variable, c) for c in reversed(variable.candidates))
        assert complements == variable.candidates


@given(variables())
def test_bcv2_is_fair_and_closed_in_units_too(variable):
    assert BCV2.fair(variable)
    assert {BCV2.complement(variable, c) for c in variable.candidates} == set(variable.candidates)
    assert BCV2.total(variable) % variable.unit == 0


@given(variables_with_width())
def test_bcv2_complementary_step_touches_every_channel_exactly_twice(drawn):
    variable, width = drawn
    complement = BCV2.complement(variable, width)
    assert width + complement == BCV2.total(variable)
    assert (touches(BCV2, variable, (width, complement)) == 2).all()


@given(variables())
def test_cardinality_counts_the_channels_of_all_candidates_and_sides(variable):
    for principle in PRINCIPLES:
        cardinality = principle.cardinality(variable)
        assert cardinality.dtype == np.int64
        assert cardinality.tolist() == touches(principle, variable, variable.candidates).tolist()


@given(variables_with_width())
def test_channels_lie_in_the_supernet_and_are_as_many_as_the_width(drawn):
    variable, width = drawn
    for principle in PRINCIPLES:
        total = principle.total(variable)
        assert total >= variable.max
        assert principle.channels(variable, width, "left") == range(width)
        right = principle.channels(variable, width, "right")
        assert right == (range(width) if principle is UA else range(total - width, total))


@given(variables_with_width())
def test_complement_can_always_run(drawn):
    variable, width = drawn
    for principle in PRINCIPLES:
        complement = principle.complement(variable, width)
        exact = principle.total(variable) - width
        assert complement == (exact if exact >= variable.base else variable.base)
        assert complement % variable.unit == 0


@given(st.integers(1, 300))
def test_ua_uses_channel_c_of_l_exactly_l_minus_c_plus_1_times(largest):
    variable = plain(largest)
    assert UA.total(variable) == largest
    assert UA.cardinality(variable).tolist() == [largest - c + 1 for c in range(1, largest + 1)]
    assert UA.sides == ("left",)


@given(st.integers(1, 30), st.integers(1, 12))
def test_bc_is_fair_where_candidates_are_multiples_of_a_group(count, step):
    variable = plain(count * step, step)
    assert BC.total(variable) == count * step
    assert (BC.cardinality(variable) == count + 1).all()
    for width in variable.candidates[:-1]:
        assert (touches(BC, variable, (width, BC.complement(variable, width))) == 2).all()


def test_bc_clamps_the_empty_complement_of_the_full_width_to_one_group():
    variable = plain(6, 2)
    assert BC.complement(variable, 6) == 2
    assert touches(BC, variable, (6, 2)).tolist() == [3, 3, 2, 2, 3, 3]
    mean = np.mean([touches(BC, variable, (c, BC.complement(variable, c))) for c in variable.candidates], axis=0)
    np.testing.assert_allclose(mean, [2 + 1 / 3, 2 + 1 / 3, 2, 2, 2 + 1 / 3, 2 + 1 / 3])


def test_base_widths_break_bc_and_each_principle_is_fair_only_where_its_table_says():
    assert BC.cardinality(plain(8, base=3)).tolist() == [7, 8, 9, 9, 9, 9, 8, 7]
    for variable in every_variable()[::7]:
        single = len(variable.candidates) == 1
        multiples = variable.candidates == tuple(range(variable.base, variable.max + 1, variable.base))
        assert UA.fair(variable) == single
        assert BC.fair(variable) == multiples
        bc_in_disguise = BCV2_PRINTED.total(variable) == variable.max and multiples
        assert BCV2_PRINTED.fair(variable) == (single or bc_in_disguise)


def test_printed_bcv2_is_unfair_at_its_ends():
    variable = plain(20, base=5)  # K = 16 candidates, d = 1
    assert BCV2_PRINTED.total(variable) == 24
    assert BCV2_PRINTED.cardinality(variable).tolist() == [16] * 4 + [17] * 16 + [16] * 4
    assert not BCV2_PRINTED.fair(variable)
    assert BCV2.total(variable) == 25
    assert BCV2.cardinality(variable).tolist() == [16] * 25


@given(st.integers(2, 30), st.integers(1, 8), st.integers(2, 10))
def test_printed_bcv2_has_k_at_the_ends_and_one_more_between(count, step, base):
    variable = plain((base + count - 1) * step, step, base)
    ends = variable.base - step
    expected = [count] * ends + [count + 1] * (variable.max - ends) + [count] * ends
    assert BCV2_PRINTED.cardinality(variable).tolist() == expected


@pytest.mark.parametrize(
    ("widths", "unit", "total"),
    [
        ((5, 7, 10, 12), 1, 15),  # d = 7/3 is rounded to 2
        ((5, 6, 8), 1, 11),  # d = 3/2 is rounded up to 2
        ((16, 24, 40), 8, 40),  # d = 12 is rounded up to two units of 8
        ((2, 12), 1, 12),  # d = 10 is cut to l_s = 2, so that 12 channels fit
        ((7,), 1, 14),  # one candidate has no step: d = 0
    ],
)
def test_printed_bcv2_rounds_its_step(widths, unit, total):
    assert BCV2_PRINTED.total(WidthVariable("layer", widths, unit=unit)) == total


@pytest.mark.parametrize("principle", PRINCIPLES, ids=lambda p: p.name)
def test_principles_are_found_by_name_and_frozen(principle):
    assert get_principle(principle.name) is principle
    with pytest.raises(AttributeError, match="cannot assign to field 'name'"):
        principle.name = "other"


def test_names_are_the_contract():
    assert [p.name for p in PRINCIPLES] == ["ua", "bc", "bcv2", "bcv2-printed"]
    assert SIDES == ("left", "right")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BCv2", "unknown principle 'BCv2': did you mean 'bcv2' or 'bc'?"),
        ("bcv3", "unknown principle 'bcv3': did you mean 'bcv2' or 'bc'?"),
        ("autoslim", "unknown principle 'autoslim': there are ua, bc, bcv2, bcv2-printed"),
    ],
)
def test_unknown_principle_names_the_near_ones(name, message):
    with pytest.raises(BcnetError) as error:
        get_principle(name)
    assert str(error.value) == message


@pytest.mark.parametrize("width", [0, -1, 9])
def test_width_outside_the_layer_is_an_error(width):
    for call in (lambda: BC.channels(plain(8), width, "left"), lambda: BC.complement(plain(8), width)):
        with pytest.raises(BcnetError) as error:
            call()
        assert str(error.value) == f"width {width} of variable 'layer' must lie in 1..8"


def test_unknown_side_is_an_error():
    with pytest.raises(BcnetError) as error:
        UA.channels(plain(8), 4, "middle")
    assert str(error.value) == "side is 'middle', but it must be left or right"
