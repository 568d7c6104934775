"""What several stages do: keep a trained network with its figures."""

from __future__ import annotations

from typing import Any

from torch import nn

from bcnet.run.session import Run
from bcnet.training.retraining import evaluate

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
    on = "test" if run.data.test is not None else "val"
    measured = evaluate(network, run.data.test or run.data.val, run.task, bf16=run.recipe.retrain.bf16)
    if run.holds_out:
        result = {**result, "val": evaluate(network, run.data.val, run.task, bf16=run.recipe.retrain.bf16)}
    costs = run.cost_of(result["widths"])
    run.write(
        f"retrain/{name}", {"name": name, "scored_on": on, **measured, "costs": costs, **result}, network.state_dict()
    )
    run.remove(f"{CHECKPOINTS}/{name}")
