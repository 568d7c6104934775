"""What several stages do: keep a trained network with its figures."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bcnet.accel import plain_step
from bcnet.run.session import Run
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import FastStep, Loss, Retraining, Step, evaluate, learnt

CHECKPOINTS = "checkpoints"


def rows_of(history: list[tuple[int, float, float]]) -> list[dict[str, float]]:
    """A history as JSON."""
    return [{"epoch": epoch, "loss": loss, "rate": rate} for epoch, loss, rate in history]


def fast_step(run: Run) -> FastStep | None:
    """How plain networks of a run are trained faster than by autograd; a run on a GPU says how, once."""
    if run.recipe.engine == "plain" or run.device.type != "cuda":
        return None

    def make(network: nn.Module, x: Tensor, loss: Loss, teacher: nn.Module | None) -> Step | None:
        step, words = plain_step(network, x, loss, teacher)
        run.tell_once(f"the engine of plain networks is {words}")
        return step

    return make


def plain_training(run: Run, optimisation: Optimisation) -> Retraining:
    """How a run trains plain networks, without a teacher."""
    r = run.recipe
    return Retraining(
        optimisation=optimisation,
        seed=r.seed,
        checkpoint_minutes=r.checkpoint_minutes,
        channels_last=r.channels_last,
        engine="plain" if r.engine == "plain" else "auto",
    )


def keep_network(run: Run, name: str, network: nn.Module, result: dict[str, Any]) -> None:
    """Store a trained network with its figures: on test images where there are any, else on validation images that no
    search has seen.

    Where the validation images are held out to the end those say which network is the best (``val``), and the test
    images need not.
    """
    network.eval()
    images, bf16 = run.data.test or run.judged, run.recipe.retrain.bf16
    measured = evaluate(network, images, run.task, bf16=bf16)
    known = learnt(network, images, run.task, bf16=bf16)
    if run.holds_out:
        result = {**result, "val": evaluate(network, run.judged, run.task, bf16=bf16)}
    costs = run.cost_of(result["widths"])
    figures = {"name": name, "scored_on": run.data.scored_on, **measured, "learnt": known, "costs": costs}
    run.write(f"retrain/{name}", {**figures, **result}, network.state_dict())
    run.remove(f"{CHECKPOINTS}/{name}")
