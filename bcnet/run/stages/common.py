"""What several stages do: tell how a training gets on, and keep a trained network with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from bcnet.run.session import Run
from bcnet.training.loop import Progress
from bcnet.training.retraining import evaluate

CHECKPOINTS = "checkpoints"


def told(run: Run, name: str) -> Callable[[Progress], None]:
    """A callback that tells the run's listener of a training called ``name``."""
    last = 0.0

    def tell(state: Progress) -> None:
        nonlocal last
        # Reading the loss waits for the device, so not every step does.
        figures = {}
        if time.monotonic() - last > 0.5 or state.step == state.steps:
            last = time.monotonic()
            figures = {"loss": state.loss, "rate": state.rate, "images": float(state.images)}
        run.listener.step(name, state.step, state.steps, figures)

    return tell


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
