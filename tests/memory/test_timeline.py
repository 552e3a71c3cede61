"""The samples that a timeline keeps."""

from __future__ import annotations

import pytest

from anybatch.memory.phases import Phase
from anybatch.memory.timeline import Sample, Timeline


def timeline_of(amounts: list[int], most_samples: int) -> Timeline:
    """A timeline of one sample per second, which keeps at most so many."""
    timeline = Timeline(most_samples)
    for time_s, amount in enumerate(amounts):
        timeline.add(float(time_s), amount, Phase.OTHER)
    return timeline


def test_few_samples_are_all_kept() -> None:
    """What fits stays as it was added, in the order of time."""
    timeline = timeline_of([3, 1, 2], 3)
    assert timeline.samples == tuple(
        Sample(float(time_s), amount, Phase.OTHER) for time_s, amount in enumerate([3, 1, 2])
    )


@pytest.mark.parametrize("peak_at", range(101))
def test_maximum_is_never_lost(peak_at: int) -> None:
    """However often a timeline of at most 10 samples is thinned, the largest of 101 samples is in it."""
    amounts = [time_s % 7 for time_s in range(101)]
    amounts[peak_at] = 1000
    samples = timeline_of(amounts, 10).samples
    assert len(samples) <= 10
    assert max(sample.live_bytes for sample in samples) == 1000
    assert samples[0].time_s == 0.0
    assert [sample.time_s for sample in samples] == sorted({sample.time_s for sample in samples})


def test_samples_come_in_the_order_of_time() -> None:
    """A sample that a thread adds late is sorted in."""
    timeline = timeline_of([1, 1], 10)
    timeline.add(0.5, 7, Phase.FORWARD)
    assert [sample.live_bytes for sample in timeline.samples] == [1, 7, 1]
