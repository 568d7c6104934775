"""What goes with an exported network: facts for programs, and MODEL.md for people.

The facts say how to use the file without bcnet: what an input is, from raw image to tensor, what the outputs mean, and
what the network is worth. They stand in ``widths.json``, and in the metadata of an ONNX file under ``bcnet``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bcnet import __version__
from bcnet.report.words import images
from bcnet.run.recipe import PYTHON
from bcnet.run.session import Run
from bcnet.search.constraints import format_cost
from bcnet.training.task import Task

CARD = "MODEL.md"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def facts_of(run: Run) -> dict[str, Any]:
    """What programs need to know of the network that ``run`` ships, ready for JSON."""
    trained, done = run.read(f"retrain/{run.chosen}"), run.data.preprocessing
    return {
        "bcnet": __version__,
        "layout": "NCHW, float32" if len(run.original.input_shape) == 3 else "batch first, float32",
        "class_names": list(run.data.names) if run.data.names else None,
        "preprocessing": None if done is None else {
            "resize": done.resize, "values": done.values, "mean": list(done.mean), "std": list(done.std)
        },
        "metric": {**run.task.metric, "score": trained["score"], "scored_on": trained["scored_on"]},
    }  # fmt: skip


def write_metadata(path: Path, facts: Mapping[str, Any]) -> None:
    """Put ``facts`` into an ONNX file, as JSON under the key ``bcnet``."""
    import onnx

    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {"bcnet": json.dumps(facts)})
    onnx.save(model, str(path))


def model_card(run: Run, facts: Mapping[str, Any], files: list[str]) -> str:
    """MODEL.md: what the network is, what it is worth, and how to use it (card.md)."""
    trained = run.read(f"retrain/{run.chosen}")
    card = TEMPLATES.get_template("card.md").render(
        recipe=run.recipe,
        own=run.recipe.model == PYTHON,
        facts=facts,
        names=facts["class_names"],
        trained=trained,
        full=run.read("trace")["costs"]["full"] if run.done("trace") else {},
        worth=_worth(run.task, trained),
        widths=list(zip(run.space.names, trained["widths"], strict=True)),
        shape=tuple(run.original.input_shape),
        chosen=run.chosen,
        onnx="model.onnx" in files,
        photo=run.recipe.data.startswith("imagefolder:"),
        format_cost=format_cost,
        numbers=lambda values: ", ".join(f"{value:.4g}" for value in values),
    )
    return f"{card}\n"


def _worth(task: Task, trained: Mapping[str, Any]) -> str:
    score = trained["score"] if task.higher_is_better else -trained["score"]
    shown = f"{100 * score:.2f} %" if task.unit == "%" else f"{score:.4g} {task.unit}".strip()
    count = f"{trained['count']:,} " if trained.get("count") else ""
    return f"{shown} {task.name} on {count}{images(trained['scored_on'])}"
