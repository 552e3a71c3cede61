"""The picture of a monitor's findings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import device

from anybatch._monitor.chart import draw
from anybatch._monitor.findings import Findings
from anybatch.memory.phases import Phase
from anybatch.memory.reading import Quantity, Reading
from anybatch.memory.state import MemoryState
from anybatch.memory.timeline import Sample

MIB = 1 << 20


def findings(limit_mib: int | None) -> Findings:
    """One step that rises to 100 MiB, under a limit."""
    nothing = Reading(Quantity.LIVE, None, "nobody")
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    limit = Reading(Quantity.LIMIT, limit_bytes, "somebody")
    samples = (
        Sample(0.0, 20 * MIB, Phase.OTHER),
        Sample(0.1, 80 * MIB, Phase.FORWARD),
        Sample(0.2, 100 * MIB, Phase.BACKWARD),
        Sample(0.3, 40 * MIB, Phase.OPTIMIZER),
    )
    memory = MemoryState(device("cpu"), nothing, nothing, nothing, limit, limit)
    return Findings(
        "tracked", memory, "bytes of tensors", 20 * MIB, 40 * MIB, 100 * MIB, 1, {}, (), None, samples
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.parametrize(
    ("limit_mib", "words", "top"),
    [
        (120, "limit 120.0 MiB", 126),
        (10_000, "limit 9.8 GiB, far above", 110),
        (None, "peak 100.0 MiB", 110),
    ],
    ids=["near", "far", "none"],
)
def test_picture_has_phases_peak_and_limit(
    limit_mib: int | None, words: str, top: float, drawn: list[Figure], tmp_path: Path
) -> None:
    """Axes have units, the legend names phases, peak and limit, and a far limit does not press the curve."""
    draw(findings(limit_mib), tmp_path / "memory.png")
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time [s]"
    assert axes.get_ylabel() == "in use, bytes of tensors [MiB]"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"forward", "backward", "optimizer", "in use", "peak 100.0 MiB"} <= set(legend)
    assert words in legend
    assert axes.get_ylim() == pytest.approx((0, top))
    height, width, _ = imread(tmp_path / "memory.png").shape
    assert (width, height) == (1500, 750)


def test_areas_of_phases_leave_no_gap(drawn: list[Figure], tmp_path: Path) -> None:
    """Where the phase changes, the area of the new one begins where that of the old one ends."""
    draw(findings(None), tmp_path / "memory.png")
    areas = drawn[0].axes[0].collections
    spans = sorted(
        (path.get_extents().x0, path.get_extents().x1) for area in areas for path in area.get_paths()
    )
    ends = [end for _, end in spans if end > 0]
    begins = [begin for begin, end in spans if end > 0]
    assert begins == pytest.approx([0.0, 0.1, 0.2])
    assert ends == pytest.approx([0.1, 0.2, 0.3])


ONLY_WHEN_DRAWN = """
import sys, torch, anybatch
net = torch.nn.Linear(2, 2)
with anybatch.MemoryMonitor(net) as monitor:
    net(torch.ones(1, 2))
monitor.to_json()
print([name for name in ("matplotlib", "rich") if name in sys.modules])
monitor.plot(sys.argv[1])
print("matplotlib.pyplot" in sys.modules)
"""


def test_matplotlib_is_loaded_only_to_draw(tmp_path: Path) -> None:
    """Watching loads no library for drawing or printing; drawing leaves the user's pyplot alone (Rule 6)."""
    command = [sys.executable, "-c", ONLY_WHEN_DRAWN, str(tmp_path / "memory.png")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "False"]
