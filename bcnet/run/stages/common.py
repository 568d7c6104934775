"""What several stages do: keep a trained network with its figures."""

from __future__ import annotations

from typing import Any

from torch import nn

from bcnet.run.session import Run
from bcnet.training.retraining import evaluate, learnt

CHECKPOINTS = "checkpoints"


def rows_of(history: list[tuple[int, float, float]]) -> list[dict[str, float]]:
    """A history as JSON."""
    return [{"epoch": epoch, "loss": loss, "rate": rate} for epoch, loss, rate in history]


def keep_network(run: Run, name: str, network: nn.Module, result: dict[str, Any]) -> None:
    """Store a trained network with its figures: on test images where there are any, else on validation.

    Where the validation images are held out to the end they say which network is the best (``val``), and the test
    images need not.
    """
    network.eval()
    images, bf16 = run.data.test or run.data.val, run.recipe.retrain.bf16
    measured = evaluate(network, images, run.task, bf16=bf16)
    known = learnt(network, images, run.task, bf16=bf16)
    if run.holds_out:
        result = {**result, "val": evaluate(network, run.data.val, run.task, bf16=bf16)}
    costs = run.cost_of(result["widths"])
    figures = {"name": name, "scored_on": run.data.scored_on, **measured, "learnt": known, "costs": costs}
    run.write(f"retrain/{name}", {**figures, **result}, network.state_dict())
    run.remove(f"{CHECKPOINTS}/{name}")
