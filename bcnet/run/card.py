"""What goes with an exported network: facts for programs, and MODEL.md for people.

The facts say how to use the file without bcnet: what an input is, from raw image to tensor, what the outputs mean, and
what the network is worth. They stand in ``widths.json``, and in the metadata of an ONNX file under ``bcnet``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcnet import __version__
from bcnet.report.words import images
from bcnet.run.recipe import PYTHON
from bcnet.run.session import Run
from bcnet.search.constraints import format_cost

CARD = "MODEL.md"
USE = """\
import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
facts = json.loads(session.get_modelmeta().custom_metadata_map["bcnet"])
image = np.zeros({shape}, dtype=np.float32)  # pixels {values}: channels, rows, columns
mean, std = (np.array(facts["preprocessing"][key], dtype=np.float32)[:, None, None] for key in ("mean", "std"))
(logits,) = session.run(["logits"], {{"input": ((image - mean) / std)[None]}})
print(facts["class_names"][logits[0].argmax()])
"""


def facts_of(run: Run) -> dict[str, Any]:
    """What programs need to know of the network that ``run`` ships, ready for JSON."""
    trained, done = run.read(f"retrain/{run.chosen}"), run.data.preprocessing
    return {
        "bcnet": __version__,
        "layout": "NCHW, float32" if len(run.source.input_shape) == 3 else "batch first, float32",
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
    """MODEL.md: what the network is, what it is worth, and how to use it."""
    trained, recipe = run.read(f"retrain/{run.chosen}"), run.recipe
    name = "A network of your own" if recipe.model == PYTHON else recipe.model
    data = "your loaders" if recipe.data == PYTHON else recipe.data
    full = run.read("trace")["costs"]["full"] if run.done("trace") else {}
    costs = "\n".join(
        f"| {cost} | {format_cost(cost, value)} | {_share(value, full.get(cost))} |"
        for cost, value in trained["costs"].items()
    )
    widths = ", ".join(f"`{key}` {value}" for key, value in zip(run.space.names, trained["widths"], strict=True))
    parts = [
        f"# {name}, slimmed",
        f"Slimmed by bcnet {__version__} within {', '.join(recipe.budgets)}, trained on {data}. {_worth(run, trained)}",
        f"| cost | this network | of the original |\n| --- | ---: | ---: |\n{costs}",
        f"FLOPs are multiply-accumulates of convolutions and linear layers, for one input. Widths: {widths}.",
        f"## Input and output\n\n{_input(run, facts)}\n\n{_output(facts)}",
        f"## How it was made\n\n{_made(run)}",
        "## What is not known\n\nHow it does on other data, and on kinds of images that this data has few of: this was "
        "not measured.",
    ]
    if "model.onnx" in files and facts["preprocessing"] and facts["class_names"]:
        values = facts["preprocessing"]["values"]
        code = USE.format(shape=tuple(run.source.input_shape), values=values)
        parts.insert(5, f"## Use it without bcnet\n\n```python\n{code}```")
    return "\n\n".join(parts) + "\n"


def _share(value: float, full: float | None) -> str:
    return f"{100 * value / full:.1f} %" if full else "–"


def _worth(run: Run, trained: Mapping[str, Any]) -> str:
    metric = run.task
    score = trained["score"] if metric.higher_is_better else -trained["score"]
    shown = f"{100 * score:.2f} %" if metric.unit == "%" else f"{score:.4g} {metric.unit}".strip()
    count = f"{trained['count']:,} " if trained.get("count") else ""
    return f"It has {shown} {metric.name} on {count}{images(trained['scored_on'])}."


def _input(run: Run, facts: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, run.source.input_shape))
    done = facts["preprocessing"]
    text = f"`input`: a batch of {shape} ({facts['layout']})."
    if done is None:
        return f"{text} What was done to it before, your loaders know."
    mean, std = (", ".join(f"{value:.4g}" for value in done[key]) for key in ("mean", "std"))
    return f"{text} From an image: {done['resize']}; pixels {done['values']}; minus {mean}, divided by {std}."


def _output(facts: Mapping[str, Any]) -> str:
    names = facts["class_names"]
    if not names:
        return "The outputs are those of the original network."
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more in widths.json" if len(names) > 20 else "")
    return f"`logits`: a number for each class, the largest is the answer: {shown}."


def _made(run: Run) -> str:
    how = "inherits the most important channels of the trained original" if run.recipe.start == "trained" else (
        "was trained from scratch"
    )  # fmt: skip
    return f"The network ships as `{run.chosen}`; it {how}. Recipe, figures and report are in the run's folder."
