"""A recipe as text with a comment for every key: what ``bcnet recipe show`` prints, as a start for your own."""

from __future__ import annotations

import json

from bcnet.run.recipe import GROUPS, Recipe
from bcnet.utils.settings import meanings

KEYS = {
    "version": "the version of this format",
    "about": "what the recipe is for, in a sentence",
    "model": "zoo:NAME, timm:NAME, torchvision:NAME or path/to/file.py:NAME",
    "start": "trained: keep what the network has learnt; scratch: the paper's way, from random weights",
    "weights": "a file of trained weights, .safetensors or .pt",
    "pretrained": "whether to take the weights that timm or torchvision publish",
    "input": "channels, height and width of one input; left out: the data's",
    "data": "digits, cluttered_digits, cifar10:FOLDER or imagefolder:FOLDER",
    "val_fraction": "the share of training images that is set aside to score networks on",
    "loading": "how images are loaded and augmented",
    "groups": "how many groups the channels of a layer are divided into, and so how many widths it may have",
    "base": "how many of these groups the narrowest width has",
    "round_to": "widths are multiples of this; left out: what suits the hardware with a latency budget, else 1",
    "least": "the fewest channels a layer may keep",
    "ignore": "layers that keep their width, by patterns such as stage1.*",
    "squeeze": "whether the widths of squeeze-and-excitation are searched, too",
    "widen": "search around a network that is this many times as wide (scratch only)",
    "budgets": "what the slim network may cost, all at once: flops=50%, params=3M, memory=2MiB, latency=4ms",
    "targets": "several budgets instead, with a slim network for each",
    "paper_budgets": "the budgets that the paper reports results for",
    "latency": "how latency is measured, for a latency budget and for the comparison",
    "given": "how the given network is trained if it knows nothing yet",
    "keep": "the criterion by which channels are kept: l1, l2, bn-scale, taylor, fpgm, lamp or random",
    "reconstruct": "whether layers make up for dropped channels, by least squares",
    "allot": "widths to take without a search: uniform, l2-global, l2-isomorphic, ...; left out: search",
    "score": "what the search ranks by: a few steps of healing, the bare cut, or a supernet",
    "healing": "what is done to a configuration before it is scored",
    "method": "how a supernet is trained: bcv2, bc, ua, autoslim, ...",
    "sampling": "which networks a training step of the supernet trains; left out: the method's own",
    "backward": "path: gradients of one network of a step at a time (less memory); step: of all at once",
    "engine": "auto, plain or fused: what runs the steps of training",
    "bf16": "whether all training is in bf16; left out: on GPUs that have it",
    "supernet": "how the supernet is trained, one network whose weights all widths share",
    "prior": "where the search in a supernet starts: the widths with the lowest training losses",
    "recalibrate": "batches for batch-norm statistics before widths are scored in a supernet; 0: those of the batch",
    "rank_by": "what configurations are compared by on validation images: their score or their loss",
    "fallback": "whether scores that differ by no more than chance give way to safe widths",
    "search": "the search for widths",
    "race": "the race of the finalists; null: none, the search alone decides",
    "retrain": "how slim networks are trained",
    "distillation": "how slim networks learn from the given one; null: from the labels alone",
    "compare": "what is trained for comparison only: uniform, l2-global, ..., from scratch also full; [] for none",
    "repeats": "how often slim networks are trained; more than once gives intervals over trainings",
    "random": "the paper's baseline of random widths, if compare names it",
    "checkpoint_minutes": "minutes between checkpoints of a training",
    "channels_last": "whether networks run with channels innermost, which suits most hardware",
    "threads": "threads of the CPU; left out: torch's own choice",
    "seed": "the one seed of everything",
}
REQUIRED = ("model", "data")


def commented(recipe: Recipe) -> str:
    """The YAML of ``recipe``: a comment above every key, and one behind every key of a group."""
    lines: list[str] = []
    within: dict[str, str] = {}
    for line in recipe.to_yaml().splitlines():
        key = line.partition(":")[0]
        if line[:1].strip() and key in KEYS:
            within = meanings(GROUPS[key]) if key in GROUPS else {}
            lines.append(f"# {KEYS[key]}")
        elif key.startswith("  ") and key[2:] in within:
            line = f"{line}  # {within[key[2:]]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def tables() -> str:
    """Every key with its default and its comment, as Markdown for the reference: one table of the keys, and one for
    each kind of group."""
    defaults = {key: entry.default for key, entry in Recipe.model_fields.items()}
    own = [(key, "" if key in GROUPS or key in REQUIRED else _json(defaults[key]), said) for key, said in KEYS.items()]
    kinds: dict[type, list[str]] = {}
    for key, kind in GROUPS.items():
        kinds.setdefault(kind, []).append(key)
    parts = [_table(own)]
    for kind, keys in kinds.items():
        given = [defaults[key] or kind() for key in keys]
        rows = [(name, _each([getattr(one, name) for one in given]), said) for name, said in meanings(kind).items()]
        parts.append(f"**{', '.join(f'`{key}`' for key in keys)}**\n\n{_table(rows)}")
    return "\n".join(parts)


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| key | default | what it says |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{key}` | {default} | {said} |" for key, default, said in rows)]) + "\n"


def _each(values: list[object]) -> str:
    """One default, or that of each group in turn."""
    shown = [_json(value) for value in values]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"
