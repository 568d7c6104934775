"""Which paths a step trains, as arithmetic: nothing is trained here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.space.widths import WidthSpace, WidthVariable, candidates
from bcnet.supernet.paths import METHODS, Path, PathSampling, complement
from bcnet.supernet.principle import PRINCIPLES, Principle, get_principle

SPACES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=5
).map(
    lambda rows: WidthSpace(
        [
            WidthVariable(f"v{i}", candidates(size * unit, groups, min(base, groups), unit), unit=unit)
            for i, (size, groups, base, unit) in enumerate(rows)
        ]
    )
)
STRATEGIES = st.builds(
    PathSampling,
    draws=st.integers(1, 4),
    complement=st.booleans(),
    sides=st.sampled_from(["both", "alternate", "left"]),
    sandwich=st.booleans(),
    extremes=st.sampled_from([0.0, 0.5, 1.0]),
)
SEEDS = st.integers(0, 2**31)
STEPS = st.integers(0, 10**6)


def drawn(sampling: PathSampling, step: int, seed: int, space: WidthSpace, principle: Principle) -> list[Path]:
    return sampling.paths(step, seed, space, principle)


@given(STRATEGIES, STEPS, SEEDS, SPACES, st.sampled_from(PRINCIPLES))
def test_a_seed_and_a_step_give_the_paths(
    sampling: PathSampling, step: int, seed: int, space: WidthSpace, principle: Principle
) -> None:
    paths = drawn(sampling, step, seed, space, principle)
    assert paths == drawn(sampling, step, seed, space, principle)
    widths = (sampling.draws * (2 if sampling.complement else 1)) + (2 if sampling.sandwich else 0)
    sides = 2 if sampling.sides == "both" and len(principle.sides) == 2 else 1
    assert len(paths) == widths * sides
    assert sum(path.weight for path in paths) == pytest.approx(1)
    assert len({path.weight for path in paths}) == 1
    rows = np.array([path.widths for path in paths])
    assert (space.check(rows) == rows).all()
    assert {path.side for path in paths} <= set(principle.sides)


@given(SEEDS, STEPS, SPACES)
def test_a_complementary_step_of_bcv2_uses_every_channel_twice(seed: int, step: int, space: WidthSpace) -> None:
    principle = get_principle("bcv2")
    paths = drawn(PathSampling(), step, seed, space, principle)
    assert len(paths) == 4
    for k, variable in enumerate(space.variables):
        uses = Counter(c for path in paths for c in principle.channels(variable, path.widths[k], path.side))
        assert uses == dict.fromkeys(range(principle.total(variable)), 2)


@given(SEEDS, st.integers(0, 10**6), st.sampled_from([0.0, 0.5]), SPACES)
def test_two_alternating_steps_of_bcv2_use_every_channel_twice(
    seed: int, pair: int, extremes: float, space: WidthSpace
) -> None:
    principle = get_principle("bcv2")
    sampling = PathSampling(sides="alternate", extremes=extremes)
    steps = [drawn(sampling, step, seed, space, principle) for step in (2 * pair, 2 * pair + 1)]
    assert [{path.side for path in paths} for paths in steps] == [{"left"}, {"right"}]
    assert [path.widths for path in steps[0]] == [path.widths for path in steps[1]]
    for k, variable in enumerate(space.variables):
        uses = Counter(
            c for paths in steps for path in paths for c in principle.channels(variable, path.widths[k], path.side)
        )
        assert uses == dict.fromkeys(range(principle.total(variable)), 2)


@given(SPACES, SEEDS, st.sampled_from(PRINCIPLES))
def test_complement_of_a_table(space: WidthSpace, seed: int, principle: Principle) -> None:
    widths = space.sample(np.random.default_rng(seed), 3)
    others = complement(space, principle, widths)
    for k, variable in enumerate(space.variables):
        assert others[:, k].tolist() == [principle.complement(variable, int(c)) for c in widths[:, k]]
    if principle.name == "bcv2":
        assert (complement(space, principle, others) == widths).all()


SPACE = WidthSpace([WidthVariable("a", (2, 4, 6, 8)), WidthVariable("b", (1, 2, 3))])


def test_both_sides_of_a_width_are_trained_together() -> None:
    paths = drawn(PathSampling(complement=False), 0, 0, SPACE, get_principle("bcv2"))
    assert [path.side for path in paths] == ["left", "right"]
    assert paths[0].widths == paths[1].widths


def test_alternating_flips_the_side_by_step() -> None:
    sampling = PathSampling(sides="alternate")
    sides = [[path.side for path in drawn(sampling, step, 0, SPACE, get_principle("bc"))] for step in range(4)]
    assert sides == [["left"] * 2, ["right"] * 2] * 2


def test_ua_has_the_left_side_only() -> None:
    for sides in ("both", "alternate", "left"):
        sampling = PathSampling(sides=sides)  # type: ignore[arg-type]
        for step in range(2):
            assert {path.side for path in drawn(sampling, step, 0, SPACE, get_principle("ua"))} == {"left"}


def test_sandwich_puts_the_teacher_first_and_the_narrowest_last() -> None:
    paths = drawn(PathSampling(draws=2, complement=False, sandwich=True), 3, 5, SPACE, get_principle("bcv2"))
    assert [path.learns for path in paths] == ["labels"] * 2 + ["teacher"] * 6
    assert [path.side for path in paths] == ["left", "right"] * 4
    assert paths[0].widths == paths[1].widths == (8, 3)
    assert paths[-1].widths == paths[-2].widths == (2, 1)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_steps_trains_the_widest_and_the_narrowest(share: float) -> None:
    bcv2 = get_principle("bcv2")
    sampling = PathSampling(extremes=share)
    steps = [drawn(sampling, step, 0, SPACE, bcv2) for step in range(2000)]
    extreme = {tuple(SPACE.max.tolist()), tuple(SPACE.min.tolist())}
    found = sum({path.widths for path in step} == extreme for step in steps) / len(steps)
    assert found == pytest.approx(share + (1 - share) * 2 / SPACE.size, abs=0.04)


def test_without_complements_the_extremes_are_drawn_equally_often() -> None:
    sampling = PathSampling(draws=4, complement=False, sides="left", extremes=1.0)
    first = Counter(drawn(sampling, step, 0, SPACE, get_principle("ua"))[0].widths for step in range(1000))
    assert set(first) == {tuple(SPACE.max.tolist()), tuple(SPACE.min.tolist())}
    assert first[tuple(SPACE.max.tolist())] == pytest.approx(500, abs=60)


def test_steps_and_seeds_differ() -> None:
    wide = WidthSpace([WidthVariable(f"v{i}", tuple(range(1, 33))) for i in range(8)])
    principle = get_principle("bcv2")
    found = {drawn(PathSampling(), step, seed, wide, principle)[0].widths for step in range(20) for seed in range(20)}
    assert len(found) == 400


def test_widths_are_drawn_uniformly() -> None:
    """Every candidate of every variable comes up equally often, also counting complements."""
    principle, count = get_principle("bcv2"), 3000
    seen = [Counter[int](), Counter[int]()]
    for step in range(count):
        for path in drawn(PathSampling(), step, 0, SPACE, principle):
            for k, width in enumerate(path.widths):
                seen[k][width] += 1
    for variable, counts in zip(SPACE.variables, seen, strict=True):
        expected = 4 * count / len(variable.candidates)
        assert set(counts) == set(variable.candidates)
        assert all(abs(n - expected) < 0.1 * expected for n in counts.values())


def test_methods_train_four_paths_a_step() -> None:
    assert list(METHODS) == ["bcv2", "bcv2-alternate", "bcv2-printed", "bc", "ua", "autoslim"]
    for name, method in METHODS.items():
        paths = drawn(method.sampling, 1, 0, SPACE, get_principle(method.principle))
        assert len(paths) == (2 if name == "bcv2-alternate" else 4)
        assert any(path.learns == "teacher" for path in paths) == (name == "autoslim")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"draws": 0}, "draws is 0, but it must be at least 1"),
        ({"extremes": 1.5}, "extremes is 1.5, but it must be at most 1"),
        ({"sides": "right"}, "sides is 'right', but it must be both, alternate or left"),
    ],
)
def test_strategies_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BcnetError) as error:
        PathSampling(**change)
    assert str(error.value) == sentence
