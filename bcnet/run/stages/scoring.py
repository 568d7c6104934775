"""What the search asks for scores: the supernet, or networks that inherit the given network's weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bcnet.accel import open_cut_scorer, open_evaluator
from bcnet.errors import BcnetError
from bcnet.run.session import Run
from bcnet.space.widths import Floats, Widths
from bcnet.supernet.scoring import Evaluator
from bcnet.training.inherit import CutScorer, Healing
from bcnet.training.loop import out_of_memory
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation

LEAST_PARTS, MOST_PARTS = 4, 8
"""The fewest and the most parts of the validation images by which the noise of a supernet's scores is measured."""
RATES = (0.08, 0.02, 0.005, 0.00125)
"""Learning rates of healing to choose from. Which one heals depends on how the given network was trained: a MobileNetV2
cut to 15% of its FLOPs had a loss of 0.60, and of 1.85 after 30 steps at 0.02 (docs/results/rivals.md)."""
HEALING = "search/healing"


def open_scorer(run: Run) -> Evaluator | CutScorer:
    """The scorer that the run's recipe asks for."""
    return _evaluator(run) if run.recipe.scorer == "supernet" else cut_scorer(run, run.recipe.scorer)


def scores_in_parts(run: Run, scorer: Evaluator | CutScorer, widths: Widths, by: str) -> Floats:
    """The scores of configurations (n, L) by ``by``, on each part of the validation images: (n, parts)."""
    if isinstance(scorer, CutScorer):
        return scorer.parts(widths, by)
    assert isinstance(scorer.batches, list)
    batches = scorer.batches[:MOST_PARTS]
    parts = [part for batch in batches for part in _chunks(batch, -(-LEAST_PARTS // len(batches)))]
    found = [
        Evaluator(scorer.net, [part], run.task, _recalibration(run), run.recipe.supernet.bf16).measure(widths)
        for part in parts
    ]
    return np.stack([one.score if by == "score" else -one.loss for one in found], axis=1)


def cut_scorer(run: Run, kind: str) -> CutScorer:
    """Scores of inherited networks after the ``cut``, or after some ``steps`` of fine-tuning."""
    r = run.recipe
    steps = r.healing.steps if kind == "steps" else 0
    teacher = run.teacher()
    healing = Healing(
        steps=steps,
        optimisation=Optimisation(
            epochs=1, lr=r.healing.lr or RATES[0], weight_decay=r.retrain.weight_decay, bf16=r.retrain.bf16
        ),
        distillation=r.distillation or Distillation(),
        calibration=r.healing.calibration,
        by=r.rank_by,
        seed=r.seed,
    )
    scorer, words = open_cut_scorer(
        run.space,
        run.given_network(),
        run.channel_scores,
        run.training_batches(max(steps, r.healing.calibration)),
        run.searched.batches(0, 0, run.device),
        run.task,
        teacher=teacher,
        healing=healing,
        reconstruct=r.reconstruct,
        engine=r.engine,
    )
    if run.device.type == "cuda":
        run.listener.note(f"the engine that scores slim networks is {words}")
    if steps and r.healing.lr is None:
        scorer.heal_by(steps, _healing_rate(run, scorer))
    return scorer


def _healing_rate(run: Run, scorer: CutScorer) -> float:
    """The rate that leaves uniform widths the lowest loss. Known after the first time, so that a resumed search does
    the same."""
    if not run.done(HEALING):
        cut = _uniform_loss(run, scorer, 0, RATES[0])
        losses = [_uniform_loss(run, scorer, run.recipe.healing.steps, lr) for lr in RATES]
        best, loss = RATES[int(np.argmin(losses))], min(losses)
        note = f"healing at {best:g}, the best of {len(RATES)} rates, takes uniform widths from a loss of {cut:.3g} to "
        harm = "" if loss < cut else ", so it does harm: raise healing.steps, or score by the cut"
        run.write(HEALING, {"lr": best, "note": f"{note}{loss:.3g}{harm}"})
    rate: float = run.read(HEALING)["lr"]
    return rate


def _uniform_loss(run: Run, scorer: CutScorer, steps: int, lr: float) -> float:
    scorer.heal_by(steps, lr)
    loss = -float(scorer.parts(run.constraints.uniform(), "loss").mean())
    return loss if np.isfinite(loss) else np.inf


def _evaluator(run: Run) -> Evaluator:
    """What scores widths in the supernet; its batches shrink until the largest fits."""
    net, r = run.supernet(), run.recipe
    for parts in (1, 2, 4, 8, 16, 32, 64):
        batches = [part for batch in _scoring_batches(run) for part in _chunks(batch, parts)]
        try:
            evaluator, words = open_evaluator(
                net, batches, run.task, _recalibration(run), engine=r.engine, bf16=r.supernet.bf16, by=r.rank_by
            )
            evaluator.score(run.space.max)
            if run.device.type == "cuda":
                run.listener.note(f"the engine that scores configurations is {words}")
            return evaluator
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            run.listener.note(f"a scoring batch does not fit into the memory of {run.device}: it is halved")
    raise BcnetError(f"no scoring batch fits into the memory of {run.device}: lower loading.eval_batch_size")


def _scoring_batches(run: Run) -> list[tuple[Tensor, Tensor]]:
    """The search's validation images; small batches are put together, since batch norm needs their statistics."""
    batches = list(run.searched.batches(0, 0, run.device))
    most = run.recipe.loading.eval_batch_size
    together = len({(x.shape[1:], y.shape[1:]) for x, y in batches}) == 1
    if len(batches) == 1 or 2 * len(batches[0][0]) > most or not together:
        return batches
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    parts = -(-len(x) // most)
    return list(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True))


def _chunks(batch: tuple[Tensor, Tensor], parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True)


def _recalibration(run: Run) -> list[tuple[Tensor, Tensor]]:
    return run.training_batches(run.recipe.recalibrate)
