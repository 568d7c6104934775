"""What a report is made from: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bcnet.search.constraints import Budget
from bcnet.search.trial import Trial
from bcnet.space.widths import WidthVariable


@dataclass(frozen=True)
class Figures:
    """One network: its widths (L,), its score after training, and what it costs.

    ``costs`` are computed, in their own units (memory in bytes, latency in nanoseconds); ``latency_ms`` is measured.
    ``lead`` is how far the network that ships is ahead of it on the same images, and the standard error of that.
    """

    name: str
    widths: tuple[int, ...]
    score: float
    costs: Mapping[str, float]
    latency_ms: float | None = None
    lead: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """The mean loss of every epoch of one training, (e,)."""

    name: str
    losses: tuple[float, ...]


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows. ``networks`` are by name (``words.NAMES``); ``full`` and ``found`` must be there.

    ``full_widths`` (L,) are those of the original; ``reference_scores`` what the search's scorer gave for ``full`` and
    ``uniform``; ``principle`` and ``supernet_curve`` are None where no supernet was trained; ``inherited`` says that
    networks began with the weights of the given one, ``race`` what its finalists had on validation images after each
    epoch, and ``validated`` what networks had there after training (epochs, score, loss); ``slim`` is the name of the
    network that ships; ``ranked_by`` says whether these and the trials' are scores or negated losses;
    ``gains`` (L,) are what the log-width model holds for doubling each width, where it chose; ``percent`` says that
    scores are shares, shown in percent; ``count`` is how many samples they are means of, where known, and ``repeats``
    how many trainings; ``learnt`` says whether the network that ships knows more than chance; ``kept`` has for each
    budget what it allows and what is taken, ``timed_by`` how latency was measured; ``run`` is the folder; ``facts`` and
    ``notes`` are for people. Scores of which lower is better are negated here (``higher_is_better``), and shown as
    they were given, with their ``unit``.
    """

    model: str
    data: str
    metric: str
    percent: bool
    scored_on: str
    budgets: tuple[Budget, ...]
    variables: tuple[WidthVariable, ...]
    full_widths: tuple[int, ...]
    principle: str | None
    networks: Mapping[str, Figures]
    trials: tuple[Trial, ...]
    chosen: Trial
    reference_scores: Mapping[str, float]
    supernet_curve: Curve | None
    retrain_curves: tuple[Curve, ...]
    recipe: str
    command: str
    repeat: str
    facts: Mapping[str, str]
    ranked_by: str = "score"
    inherited: bool = False
    race: tuple[Mapping[str, Any], ...] = ()
    validated: tuple[Mapping[str, Any], ...] = ()
    learnt: bool = True
    unit: str = ""
    higher_is_better: bool = True
    slim: str = "found"
    gains: tuple[float, ...] | None = None
    count: int | None = None
    repeats: int = 1
    in_python: bool = False
    kept: tuple[Mapping[str, Any], ...] = ()
    timed_by: str = ""
    run: str = "RUN"
    notes: tuple[str, ...] = ()
    export: Mapping[str, Any] | None = field(default=None)

    @property
    def full(self) -> Figures:
        return self.networks["full"]

    @property
    def found(self) -> Figures:
        """The network that ships."""
        return self.networks[self.slim]

    @property
    def star(self) -> Trial | None:
        """The trial of what was found; None where the search did not score that, as a race has others, too."""
        found = self.networks.get("found")
        return None if found is None else next((t for t in self.trials if t.widths == tuple(found.widths)), None)

    @property
    def first_budget(self) -> Budget:
        """The budget that the Pareto front is drawn over."""
        return self.budgets[0]
