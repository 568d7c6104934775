"""Asking a scorer: one configuration at a time, many at once, or spread over processes.

A scorer is a function ``widths (L,) -> float``, or an object with such a method ``score``; where it also
has ``score_many(widths (n, L)) -> (n,)``, that is used. Higher is better. A scorer that raises, or
returns something that is not a finite number, fails for those widths alone.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bcnet.errors import BcnetError
from bcnet.space.widths import Widths


class Outcome(NamedTuple):
    """The score of the widths in row ``row``, or why there is none."""

    row: int
    score: float | None
    failure: str | None
    seconds: float


class Here:
    """Scores widths (n, L) in this process, yielding outcomes as they come."""

    def __init__(self, scorer: Any):
        self._one = _single(scorer)
        self._many: Callable[[Widths], Any] | None = getattr(scorer, "score_many", None)

    def __call__(self, widths: Widths) -> Iterator[Outcome]:
        if self._many is not None and len(widths) > 1:
            start = time.perf_counter()
            try:
                scores = np.asarray(self._many(widths), dtype=np.float64)
            except Exception:
                scores = np.empty(0)
            if scores.shape == (len(widths),):
                each = (time.perf_counter() - start) / len(widths)
                yield from (Outcome(row, *_checked(score), each) for row, score in enumerate(scores))
                return
            # One bad row must not cost the others: ask again, row by row, so that each gets its own answer.
        for row, one in enumerate(widths):
            start = time.perf_counter()
            try:
                answer = _checked(self._one(one))
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
            yield Outcome(row, *answer, time.perf_counter() - start)

    def close(self) -> None:
        """There is nothing to release."""


class OverRay:
    """Scores in ``workers`` processes of Ray, or of the Ray cluster this program is already connected to; outcomes come
    in any order."""

    def __init__(self, scorer: Any, workers: int):
        try:
            import ray
        except ImportError:
            raise BcnetError("the ray executor needs Ray: pip install 'bcnet[ray]', or score in one process") from None
        self._ray, self._workers = ray, workers
        self._started = not ray.is_initialized()
        if self._started:
            # What this program can import, so that workers can unpickle the scorer.
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
            ray.init(
                num_cpus=workers,
                runtime_env=environment,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        self._chunked = hasattr(scorer, "score_many")
        self._scorer = ray.put(scorer)
        self._score = ray.remote(_score_rows)

    def __call__(self, widths: Widths) -> Iterator[Outcome]:
        parts = min(self._workers, len(widths)) if self._chunked else len(widths)
        chunks = np.array_split(np.arange(len(widths)), parts)
        waiting = {self._score.remote(self._scorer, widths[rows]): rows for rows in chunks}
        for _ in range(len(chunks)):
            (done, *_), _ = self._ray.wait(list(waiting), num_returns=1)
            rows = waiting.pop(done)
            try:
                outcomes = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                outcomes = [Outcome(row, None, reason, 0.0) for row in range(len(rows))]
            yield from (outcome._replace(row=int(rows[outcome.row])) for outcome in outcomes)

    def close(self) -> None:
        """End the processes, where this executor started them."""
        if self._started:
            self._ray.shutdown()


Executor = Here | OverRay


def open_executor(scorer: Any, executor: str = "here", workers: int = 1) -> Executor:
    """``"here"`` scores in this process, ``"ray"`` in ``workers`` processes."""
    if executor == "here":
        return Here(scorer)
    if executor == "ray":
        return OverRay(scorer, workers)
    raise BcnetError(f"unknown executor {executor!r}: choose here or ray")


def _score_rows(scorer: Any, widths: Widths) -> list[Outcome]:
    return list(Here(scorer)(widths))


def _single(scorer: Any) -> Callable[[Widths], Any]:
    method = getattr(scorer, "score", None)
    if callable(method):
        one: Callable[[Widths], Any] = method
        return one
    if callable(scorer):
        called: Callable[[Widths], Any] = scorer
        return called
    many = getattr(scorer, "score_many", None)
    if callable(many):
        return lambda widths: many(widths[None])[0]
    raise BcnetError(f"{scorer!r:.60} cannot score: give a function of widths, or an object with a method score")


def _checked(value: Any) -> tuple[float | None, str | None]:
    try:
        score = float(value)
    except (TypeError, ValueError):
        return None, f"the scorer returned {value!r:.60}, which is no number"
    return (score, None) if math.isfinite(score) else (None, f"the scorer returned {score}")
