"""The lines of the model card that turn a photo into an input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bcnet.data import LoadOptions
from bcnet.data.load import load_data
from bcnet.run.card import TEMPLATES


def lines(channels: int) -> str:
    """The card's code up to the image as an array."""
    card = TEMPLATES.get_template("card.md").render(
        recipe=SimpleNamespace(model="m", budgets=[], data="imagefolder:photos", start="trained"),
        facts={"bcnet": "0", "layout": "", "preprocessing": {"resize": "", "values": "", "mean": [], "std": []}},
        own=False, names=["a"], trained=SimpleNamespace(costs={}), full={}, worth="", widths=[],
        shape=(channels, 20, 20), chosen="found", onnx=True, photo=True, format_cost=None, numbers=str,
    )  # fmt: skip
    code = card.partition("```python\n")[2].partition("```")[0]
    return "\n".join(
        line for line in code.splitlines() if line.startswith(("photo", "side", "left", "image", "from PIL"))
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_a_photo_becomes_the_input_that_the_run_saw(channels: int, tmp_path: Path, monkeypatch: Any) -> None:
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (31, 47, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    options = LoadOptions(image_size=20, channels=channels, workers=0)
    data = load_data(f"imagefolder:{tmp_path}", options=options)
    seen = next(iter(data.test.batches(0, 0, torch.device("cpu"))))[0][0]
    monkeypatch.chdir(tmp_path)
    Image.open(tmp_path / "test" / "a" / "0.png").save("photo.png")
    known: dict[str, Any] = {"np": np}
    exec(lines(channels).replace("photo.jpg", "photo.png"), known)
    mean, std = (
        np.array(v, dtype=np.float32)[:, None, None] for v in (data.preprocessing.mean, data.preprocessing.std)
    )
    torch.testing.assert_close(torch.from_numpy((known["image"] - mean) / std), seen, atol=1e-5, rtol=0)
