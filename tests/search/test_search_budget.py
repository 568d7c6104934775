"""Budgets: what an engineer may write, what is refused, and what is feasible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import chain, every

from bcnet.errors import BcnetError
from bcnet.search import Constraints, format_cost, parse_budget

SPACE, COSTS = chain()
KNOWN = {**COSTS, "latency": COSTS["flops"]}
FULL = int(COSTS["flops"](SPACE.max)[0])


@pytest.mark.parametrize(
    ("text", "name", "limit"),
    [
        ("flops=50%", "flops", FULL / 2),
        ("flops=150M", "flops", 150e6),
        ("flops=1.5G", "flops", 1.5e9),
        ("flops=1e5", "flops", 1e5),
        (" params = 3k ", "params", 3e3),
        ("params=1,500,000", "params", 1.5e6),
        ("memory=2MiB", "memory", 2 * 2**20),
        ("memory=3 KB", "memory", 3e3),
        ("latency=4ms", "latency", 4e6),
        ("latency=0.25s", "latency", 0.25e9),
    ],
)
def test_budget_is_read(text: str, name: str, limit: float) -> None:
    budget = parse_budget(text, KNOWN, SPACE)
    assert (budget.name, budget.text) == (name, text)
    assert budget.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops", "budget 'flops' must read name=value, such as flops=50%"),
        ("energy=3", "unknown budget 'energy': this space knows flops, latency, memory, params"),
        ("FLOPs=50%", "unknown budget 'FLOPs': did you mean flops?"),
        (
            "flops=50%,params=3M",
            "budget 'flops=50%,params=3M' names several: give each on its own, as in --budget flops=50%",
        ),
        ("flops=", "budget 'flops=' has no number after the equals sign, as in flops=50%"),
        ("flops=fast", "budget 'flops=fast' has no number after the equals sign, as in flops=50%"),
        ("flops=1.2.3", "budget 'flops=1.2.3' has no number after the equals sign, as in flops=50%"),
        ("flops=12,5%", "budget 'flops=12,5%' has no number after the equals sign, as in flops=50%"),
        ("flops=1e999", "budget 'flops=1e999' has no number after the equals sign, as in flops=50%"),
        ("flops=-5M", "budget 'flops=-5M' must be above zero"),
        ("flops=0", "budget 'flops=0' must be above zero"),
        (
            "flops=3ms",
            "budget 'flops=3ms' has the unknown unit 'ms': flops takes k, K, M, G, B, T, or % of the largest network",
        ),
        ("latency=4", "budget 'latency=4' needs a unit: ns, us, ms, s, or % of the largest network"),
    ],
)
def test_bad_budget_is_refused(text: str, message: str) -> None:
    with pytest.raises(BcnetError) as error:
        parse_budget(text, KNOWN, SPACE)
    assert str(error.value) == message


def test_no_budget_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(BcnetError, match=r"^a search needs at least one budget, such as flops=50%$"):
        Constraints(SPACE, COSTS, [])
    with pytest.raises(BcnetError, match=r"^budget 'flops' is given twice \(flops=50% and flops=20%\): give it once$"):
        Constraints(SPACE, COSTS, ["flops=50%", "flops=20%"])


def test_impossible_budget_names_the_nearest_feasible_one() -> None:
    least = int(COSTS["flops"](SPACE.min)[0])
    with pytest.raises(BcnetError) as error:
        Constraints(SPACE, COSTS, ["params=90%", "flops=100"]).check()
    assert str(error.value) == (
        f"budget flops=100 is impossible: the smallest network of this space costs {format_cost('flops', least)}, "
        f"so the nearest feasible budget is flops={least}"
    )
    Constraints(SPACE, COSTS, [f"flops={least}"]).check()


def test_feasibility_compares_smallest_uniform_and_largest() -> None:
    constraints = Constraints(SPACE, COSTS, ["flops=40%", "memory=60%"])
    report = constraints.check()
    for row in report.budgets:
        cost = COSTS[row.name]
        assert (row.smallest, row.largest) == (cost(SPACE.min)[0], cost(SPACE.max)[0])
        assert row.uniform == cost(report.uniform)[0] <= row.limit
    assert not constraints.feasible(np.array([report.uniform]) + 1)[0]


@given(st.lists(st.integers(0, 5), min_size=5, max_size=5), st.floats(3, 100))
def test_every_budget_must_hold(index: list[int], percent: float) -> None:
    constraints = Constraints(SPACE, COSTS, [f"flops={percent}%", f"params={percent}%"])
    widths = SPACE.decode([index])
    held = [COSTS[b.name](widths)[0] <= b.limit for b in constraints.budgets]
    assert constraints.feasible(widths)[0] == all(held)
    assert (constraints.excess(widths)[0] <= 0).tolist() == held


@given(st.integers(0, 2**32), st.floats(3, 60))
def test_shrinking_ends_feasible_and_never_widens(seed: int, percent: float) -> None:
    constraints = Constraints(SPACE, COSTS, [f"flops={percent}%"])
    rng = np.random.default_rng(seed)
    index = SPACE.encode(SPACE.sample(rng, 8))
    shrunk = constraints.shrink(index, rng)
    assert constraints.feasible(SPACE.decode(shrunk)).all()
    assert (shrunk <= index).all()
    kept = constraints.feasible(SPACE.decode(index))
    assert (shrunk[kept] == index[kept]).all()


@given(st.integers(5, 100))
def test_candidates_about_the_uniform_scaling_leave_no_room_for_another(percent: int) -> None:
    constraints = Constraints(SPACE, COSTS, [f"flops={percent}%"])
    even, index = constraints.uniform(), constraints.uniform_index()
    widths = SPACE.decode(index)
    if not constraints.feasible(even[None])[0]:
        assert widths.tolist() == SPACE.min.tolist()
        return
    assert constraints.feasible(widths[None])[0]
    for n, variable in enumerate(SPACE.variables):
        below = [c for c in variable.candidates if c <= even[n]] or [variable.min]
        above = [c for c in variable.candidates if c >= even[n]]
        assert widths[n] in (below[-1], above[0])
        raised = widths.copy()
        raised[n] = above[0]
        assert widths[n] == above[0] or not constraints.feasible(raised[None])[0]


def test_samples_are_uniform_over_feasible_widths() -> None:
    space, costs = chain(length=2, groups=4)
    constraints = Constraints(space, costs, ["flops=40%"])
    drawn, shrunk = constraints.sample(np.random.default_rng(0), 4000)
    feasible = every(space)[constraints.feasible(every(space))]
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert shrunk == 0
    assert found.tolist() == feasible.tolist()
    assert counts.min() > 0.8 * 4000 / len(feasible)


def test_tight_budget_is_met_by_shrinking() -> None:
    constraints = Constraints(SPACE, COSTS, [f"flops={int(COSTS['flops'](SPACE.min)[0])}"])
    drawn, shrunk = constraints.sample(np.random.default_rng(0), 10, tries=1)
    assert constraints.feasible(drawn).all()
    assert shrunk == 10


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("flops", 105_640_960, "105.6M"),
        ("params", 999, "999"),
        ("memory", 2_202_009, "2.1 MiB"),
        ("latency", 3_920_000, "3.92 ms"),
    ],
)
def test_costs_for_people(name: str, value: int, text: str) -> None:
    assert format_cost(name, value) == text


@given(st.integers(0, 2**31), st.integers(5, 95))
def test_random_networks_use_the_budget(seed: int, percent: int) -> None:
    space, costs = chain(groups=24)
    constraints = Constraints(space, costs, [f"flops={percent}%"])
    widths = constraints.sample_full(np.random.default_rng(seed), 5)
    assert widths.shape == (5, len(space))
    assert constraints.feasible(widths).all()
    assert (constraints.excess(widths) >= -0.05).all()


@given(st.integers(0, 2**31), st.integers(5, 95), st.floats(0.1, 1))
def test_filling_stops_when_it_is_enough(seed: int, percent: int, enough: float) -> None:
    space, costs = chain(groups=24)
    constraints = Constraints(space, costs, [f"flops={percent}%"])
    rng = np.random.default_rng(seed)
    lean = constraints.sample(rng, 5)[0]
    widths = constraints.fill(lean, rng, enough)
    more = constraints.fill(widths, rng)
    assert constraints.feasible(widths).all()
    assert (widths >= lean).all()
    assert ((constraints.used(widths) >= enough) | (more == widths).all(axis=1)).all()


def test_random_networks_of_few_candidates_are_as_full_as_can_be_met() -> None:
    constraints = Constraints(SPACE, COSTS, ["flops=7%"])
    widths = constraints.sample_full(np.random.default_rng(0), 4)
    assert (constraints.fill(widths, np.random.default_rng(1)) == widths).all()


@given(st.integers(5, 100))
def test_uniform_scaling_is_exact_or_in_multiples(percent: int) -> None:
    space, costs = chain(length=4, groups=4, width=60)
    constraints = Constraints(space, costs, [f"flops={percent}%"])
    exact, eights = constraints.uniform(), constraints.uniform(8)
    assert len(set(exact.tolist())) == 1  # all layers are 60 wide
    assert constraints.feasible(np.stack([exact, eights])).all()
    assert not constraints.feasible(np.minimum(exact + 1, 61)[None])[0] or exact[0] == 60
    assert ((eights % 8 == 0) | (eights == 60)).all() or (eights == exact).all()


def test_multiples_that_do_not_fit_leave_the_exact_scaling() -> None:
    constraints = Constraints(SPACE, COSTS, ["flops=3%"])
    assert (constraints.uniform(8) == constraints.uniform()).all()
