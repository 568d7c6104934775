"""The prior initial population (``eq10`` to ``eq12``): widths sampled where training losses were low.

A log of training losses gives every candidate of every variable a potential error; the program of
:mod:`bcnet.search.prior.problem` finds the least expected error within the budgets and a bound on it; and the
population is sampled from a smoother version of it, keeping only widths that hold every budget.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.search.prior.problem import PriorProblem
from bcnet.search.prior.smooth import smooth
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Floats, Widths, WidthSpace

DRAWS_PER_WIDTHS = 50


@dataclass(frozen=True)
class PotentialErrors:
    """The potential error of every candidate: one array (K_l,) per variable; ``estimated`` counts those of
    candidates that no recorded configuration used."""

    values: tuple[Floats, ...]
    estimated: int


class PathLosses(NamedTuple):
    """Training losses (m,) of configurations (m, L), as :meth:`bcnet.supernet.loss_log.LossLog.best` gives them."""

    widths: ArrayLike
    losses: ArrayLike


def potential_errors(space: WidthSpace, recorded: PathLosses, top: int | None = None) -> PotentialErrors:
    """Potential errors (``eq10``): the mean loss of the recorded configurations that use a candidate.

    The paper takes only the ``top`` 100 configurations of least loss. That hides how bad a candidate's others were:
    on the benchmark's tables the whole log gives populations that are better by 0.17 to 0.46 points of accuracy
    (docs/results/search.md), so it is the default.

    A candidate that no configuration used gets the value interpolated between the next used candidates below and
    above it, or that of the nearest where it has none on one side.
    """
    index = np.atleast_2d(space.encode(recorded.widths))
    losses = np.atleast_1d(np.asarray(recorded.losses, dtype=np.float64))
    if len(index) != len(losses):
        raise BcnetError(f"{len(index)} configurations have {len(losses)} losses: record one for each")
    finite = np.flatnonzero(np.isfinite(losses))
    if not len(finite):
        raise BcnetError("the prior needs at least one finite training loss: start from a random population")
    kept = finite[np.argsort(losses[finite], kind="stable")[:top]]
    values, estimated = [], 0
    for i, variable in enumerate(space.variables):
        count = len(variable.candidates)
        uses = np.bincount(index[kept, i], minlength=count)
        sums = np.bincount(index[kept, i], weights=losses[kept], minlength=count)
        used = np.flatnonzero(uses)
        widths = np.array(variable.candidates, dtype=np.float64)
        values.append(np.interp(widths, widths[used], sums[used] / uses[used]))
        estimated += count - len(used)
    return PotentialErrors(tuple(values), estimated)


@dataclass(frozen=True)
class PriorReport:
    """How good the prior is: the program's ``objective`` and the proven ``bound`` on it, the expected error of
    what is sampled (``smooth_objective``) at temperature ``tau`` with ``effective`` candidates per variable,
    how many widths were ``sampled`` as wanted, and how many potential errors had to be ``estimated``."""

    objective: float
    bound: float
    gap: float
    smooth_objective: float
    tau: float
    effective: float
    sampled: int
    estimated: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prior_population(
    constraints: Constraints, errors: PotentialErrors, n: int, rng: np.random.Generator, effective: float = 2.0
) -> tuple[Widths, PriorReport]:
    """``n`` different configurations (n, L) that hold every budget, sampled from the prior, and a report on it.

    Quadratic costs (FLOPs, parameters) shape the prior; all budgets decide which samples are kept.
    """
    budgets = [(constraints.costs[b.name], b.limit) for b in constraints.budgets]
    quadratic = [(cost, limit) for cost, limit in budgets if isinstance(cost, QuadraticCost)]
    if not quadratic:
        raise BcnetError("the prior needs a budget of flops or params: add one, or start from a random population")
    program = PriorProblem(constraints.space, errors.values, quadratic)
    solution = program.solve()
    soft = smooth(program, solution, effective)
    widths, sampled = _sample(constraints, soft.distributions, n, rng)
    report = PriorReport(
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        smooth_objective=program.objective(soft.distributions),
        tau=soft.tau,
        effective=soft.effective,
        sampled=sampled,
        estimated=errors.estimated,
        notes=() if sampled == n else (_fallback_note(sampled, n, len(widths)),),
    )
    return widths, report


def _sample(constraints: Constraints, distributions: Floats, n: int, rng: np.random.Generator) -> tuple[Widths, int]:
    """``n`` different feasible widths, and how many of them were drawn as they are.

    Where a bounded number of draws gives too few, draws that broke a budget are shrunk until they hold
    it, and then random feasible widths follow.
    """
    cumulative = distributions.cumsum(axis=1)
    cumulative[:, -1] = np.inf
    uniform = rng.random((DRAWS_PER_WIDTHS * n, len(distributions)))
    index = (uniform[..., None] >= cumulative).sum(axis=-1)
    drawn = constraints.space.decode(np.minimum(index, [len(v.candidates) - 1 for v in constraints.space.variables]))
    feasible = constraints.feasible(drawn)
    found = _different(drawn[feasible])[:n]
    if len(found) == n:
        return found, n
    shrunk = constraints.space.decode(constraints.shrink(constraints.space.encode(drawn[~feasible][:n]), rng))
    more = _different(np.concatenate([found, shrunk, constraints.sample(rng, n)[0]]))
    return more[constraints.feasible(more)][:n], len(found)


def _fallback_note(sampled: int, wanted: int, got: int) -> str:
    draws = DRAWS_PER_WIDTHS * wanted
    return (
        f"{draws} draws from the prior gave {sampled} of {wanted} different widths within the budgets; "
        f"{got - sampled} shrunk or random ones were added"
    )


def _different(widths: Widths) -> Widths:
    """Rows (n, L) without repetitions, in their order."""
    _, first = np.unique(widths, axis=0, return_index=True)
    return widths[np.sort(first)]
