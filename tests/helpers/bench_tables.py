"""What tests of Channel-Bench share: the committed table, the released ones where they are, and clean folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_table import FILE, SPACE

from bcnet.bench import ChannelBench
from bcnet.errors import BcnetError

RELEASED = Path(__file__).parents[3] / "shared" / "data" / "channel-bench-macro"
needs_released = pytest.mark.skipif(not RELEASED.is_dir(), reason=f"the released tables are not at {RELEASED}")


@pytest.fixture(autouse=True)
def no_tables_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CHANNEL_BENCH_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(name="table", scope="module")
def committed_table() -> ChannelBench:
    return ChannelBench.load(SPACE, FILE)


def failure(call: object, *args: object, **options: object) -> str:
    """The message of the BcnetError that the call must raise."""
    with pytest.raises(BcnetError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return str(caught.value)
