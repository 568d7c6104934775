"""Evolutionary search: pymoo's NSGA-II on candidate indices, told where scoring pays.

The objectives are the error and the cost of the first budget; all budgets are constraints. Three small
operators are ours: offspring are shrunk until they hold the budgets and most of them grown until they use them,
nothing is scored twice, and of many offspring a surrogate picks those worth scoring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pymoo.algorithms.moo.nsga2 import NSGA2, RankAndCrowdingSurvival, binary_tournament
from pymoo.core.duplicate import DuplicateElimination
from pymoo.core.evaluator import Evaluator
from pymoo.core.mating import Mating
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.repair import Repair
from pymoo.core.termination import NoTermination
from pymoo.operators.crossover.pntx import TwoPointCrossover
from pymoo.operators.mutation.pm import PM
from pymoo.operators.selection.tournament import TournamentSelection
from pymoo.problems.static import StaticProblem

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import FULL, Constraints
from bcnet.search.predictors.climb import climb
from bcnet.search.predictors.surrogate import Surrogate
from bcnet.search.strategies.base import Strategy
from bcnet.space.widths import Floats, Indices, Widths

MATING_ROUNDS = 3


class ToCandidates(Repair):
    """Rounds to candidate indices and, with ``rng``, shrinks until they hold the budgets."""

    def __init__(self, constraints: Constraints, rng: np.random.Generator | None):
        super().__init__()
        self._constraints, self._rng = constraints, rng

    def _do(self, problem: Problem, X: Floats, **_: Any) -> Indices:
        index = np.around(X).astype(np.int64)
        return index if self._rng is None else self._constraints.shrink(index, self._rng)


class Grown(ToCandidates):
    """For offspring: all but a share ``lean``, which is for the front, also grow until they use 95 % of a budget."""

    def __init__(self, constraints: Constraints, rng: np.random.Generator | None, lean: float):
        super().__init__(constraints, rng)
        self._lean = lean

    def _do(self, problem: Problem, X: Floats, **_: Any) -> Indices:
        index = super()._do(problem, X)
        if self._rng is not None:
            grown = self._rng.random(len(index)) >= self._lean
            index[grown] = _grown(self._constraints, index[grown], self._rng)
        return index


class Unseen(DuplicateElimination):
    """Drops offspring asked for before, in any generation, and repetitions among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()

    def _do(self, pop: Population, other: Population | None, is_duplicate: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if other is None:
            return ~self.new(pop.get("X"))
        others = _keys(other.get("X"))
        return np.array([key in others for key in _keys(pop.get("X"))], dtype=bool)

    def new(self, index: Indices) -> NDArray[np.bool_]:
        """Which rows (n, L) occur here for the first time: (n,)."""
        met: set[bytes] = set()
        fresh = np.zeros(len(index), dtype=bool)
        for row, key in enumerate(_keys(index)):
            fresh[row] = key not in self.seen and key not in met
            met.add(key)
        return fresh


class ScreenedMating(Mating):
    """Makes a pool of offspring, and keeps those of which a surrogate expects most.

    The pool holds ``config.pool`` times the offspring asked for, random widths, and what is met when the
    best widths so far, and as many of the Pareto front, climb on the surrogate. Most of these are grown to
    use a budget, since a surrogate that knows networks of one cost would have others smaller. Most are kept for
    their expected score; a share of ``config.front_share`` for the front of expected error and cost.
    """

    def __init__(self, constraints: Constraints, config: SearchConfig, rng: np.random.Generator, **kwargs: Any):
        super().__init__(**kwargs)
        self._constraints, self._config, self._rng = constraints, config, rng
        counts = np.array([len(v.candidates) for v in constraints.space.variables])
        self._surrogate = Surrogate(counts)
        self._best: Indices = np.empty((0, len(counts)), dtype=np.int64)
        self._best_scores: Floats = np.empty(0)

    def learn(self, index: Indices, scores: Floats) -> None:
        """Learn from the scores (n,) of candidate indices (n, L); NaN says nothing."""
        known = np.isfinite(scores)
        self._surrogate.add(index[known], scores[known])
        good = known & self._constraints.feasible(self._constraints.space.decode(index))
        merged = np.append(self._best_scores, scores[good])
        kept = np.argsort(-merged, kind="stable")[: self._config.hill_climbs]
        self._best, self._best_scores = np.vstack([self._best, index[good]])[kept], merged[kept]

    def do(self, problem: Problem, pop: Population, n_offsprings: int, **kwargs: Any) -> Population:
        self._surrogate.fit(self._rng, self._config.explore)
        mated = super().do(problem, pop, self._config.pool * n_offsprings, **kwargs)
        strangers = self._constraints.space.encode(self._constraints.sample(self._rng, n_offsprings, tries=2)[0])
        offspring = np.array([one.X for one in mated], dtype=np.int64).reshape(-1, strangers.shape[1])
        pool = np.vstack([offspring, self.repair._do(problem, np.vstack([strangers, self._climbed(pop)]))])
        pool = pool[self.eliminate_duplicates.new(pool)]
        return Population.new("X", pool[self._pick(problem, pop, pool, n_offsprings)])

    def _climbed(self, pop: Population) -> Indices:
        """Climbs from the best, within the budgets, and from the front, at no more than each one's cost."""
        front = pop[(pop.get("rank") == 0) & pop.get("FEAS")[:, 0]].get("X").astype(np.int64)
        some = self._rng.permutation(len(front))[: self._config.hill_climbs]
        starts = np.vstack([self._best, front[some].reshape(-1, self._best.shape[1])])
        caps = self._constraints.excess(self._constraints.space.decode(starts))[:, 0]
        caps[: len(self._best)] = 0.0
        return climb(self._surrogate, self._constraints, starts, caps, self._rng)

    def _pick(self, problem: Problem, pop: Population, pool: Indices, n: int) -> Indices:
        """The rows of the pool (m, L) to score: at most n. Half of those for their score use a budget, if enough do."""
        expected = self._surrogate.predict(pool)
        for_front = round(self._config.front_share * n)
        lean = self._constraints.used(self._constraints.space.decode(pool)) < FULL
        full = np.lexsort((-expected, lean))[: (n - for_front + 1) // 2]
        others = np.setdiff1d(np.arange(len(pool)), full)
        order = np.concatenate([full, others[np.argsort(-expected[others], kind="stable")]])
        best, rest = order[: n - for_front], order[n - for_front :]
        objectives = np.column_stack([-expected, _first_cost(self._constraints, self._constraints.space.decode(pool))])
        guessed = Population.new("X", pool[rest], "F", objectives[rest])
        both = Population.merge(guessed, Population.new("X", pop.get("X"), "F", pop.get("F")))
        RankAndCrowdingSurvival().do(problem, both, n_survive=len(both), random_state=self._rng)
        merit = np.array([(one.get("rank"), -one.get("crowding")) for one in guessed]).reshape(-1, 2)
        ahead = np.lexsort((merit[:, 1], merit[:, 0]))[:for_front]
        return np.concatenate([best, rest[ahead]])


def evolution(constraints: Constraints, config: SearchConfig, initial: Widths | None = None) -> Strategy:
    """NSGA-II from the population ``initial`` (n, L), or from a random one."""
    rng = np.random.default_rng([config.seed, 1])
    unseen = Unseen()
    bound = (constraints, rng if config.feasible_only else None)
    operators: dict[str, Any] = {
        "selection": TournamentSelection(func_comp=binary_tournament),
        "crossover": TwoPointCrossover(),
        "mutation": PM(eta=20),
        "repair": ToCandidates(*bound),
        "eliminate_duplicates": unseen,
    }
    offspring_operators = {**operators, "repair": Grown(*bound, config.front_share)}
    mating = (
        ScreenedMating(constraints, config, rng, n_max_iterations=MATING_ROUNDS, **offspring_operators)
        if config.pool > 1
        else Mating(**offspring_operators)
    )
    population = constraints.space.encode(initial) if initial is not None else _first(constraints, config, rng)
    retained = config.retained or config.population
    algorithm = NSGA2(
        pop_size=retained, n_offsprings=config.population, sampling=population, mating=mating, **operators
    )
    problem = Problem(
        n_var=len(constraints.space),
        n_obj=2,
        n_ieq_constr=len(constraints.budgets),
        xl=np.zeros(len(constraints.space)),
        xu=np.array([len(v.candidates) - 1 for v in constraints.space.variables], dtype=np.float64),
    )
    algorithm.setup(problem, seed=config.seed, termination=NoTermination())
    for _ in range(config.evaluations):  # every generation asks for something new
        offspring = algorithm.ask()
        if offspring is None or not len(offspring):
            return
        index = offspring.get("X").astype(np.int64)
        unseen.seen.update(_keys(index))
        widths = constraints.space.decode(index)
        scores = yield widths
        if isinstance(mating, ScreenedMating):
            mating.learn(index, scores)
        Evaluator().eval(StaticProblem(problem, **_objectives(constraints, widths, scores)), offspring)
        algorithm.tell(infills=offspring)


def _first(constraints: Constraints, config: SearchConfig, rng: np.random.Generator) -> Indices:
    """A random population: feasible widths, most of which use the budget, unless any will do."""
    if not config.feasible_only:
        return constraints.space.encode(constraints.space.sample(rng, config.population))
    lean = round(config.front_share * config.population)
    drawn = np.vstack([constraints.sample_full(rng, config.population - lean), constraints.sample(rng, lean)[0]])
    return constraints.space.encode(constraints.with_uniform(drawn)[: config.population])


def _grown(constraints: Constraints, index: Indices, rng: np.random.Generator) -> Indices:
    """Feasible candidate indices (n, L), raised until they use a budget."""
    return constraints.space.encode(constraints.fill(constraints.space.decode(index), rng, enough=FULL))


def _objectives(constraints: Constraints, widths: Widths, scores: Floats) -> dict[str, Floats]:
    """F (n, 2) and G (n, B); failed widths count as infeasible and as bad as the worst."""
    failed = ~np.isfinite(scores)
    error = np.where(failed, -np.min(scores[~failed], initial=0.0), -scores)
    excess = np.where(failed[:, None], 1.0, constraints.excess(widths))
    return {"F": np.column_stack([error, _first_cost(constraints, widths)]), "G": excess}


def _first_cost(constraints: Constraints, widths: Widths) -> Floats:
    first = constraints.budgets[0]
    return constraints.costs[first.name](widths) / first.limit


def _keys(index: NDArray[Any]) -> list[bytes]:
    return [row.tobytes() for row in np.asarray(index).astype(np.int32)]
