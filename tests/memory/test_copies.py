"""The stream for copies waits, and lets wait, where memory or values would be taken too early."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
import torch

from anybatch.memory.copies import CopyStream, copy_stream

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """torch's streams, of which everything that is called is recorded."""
    found = Mock()
    found.computing.device = DEVICE
    monkeypatch.setattr(torch, "Stream", lambda device: found.copying)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: found.computing)
    return found


def _tensor(device: torch.device, layout: torch.layout = torch.strided) -> Mock:
    return Mock(device=device, layout=layout)


def test_the_computing_stream_waits_for_the_copies(streams: Mock) -> None:
    """It waits for the mark that was set behind the piece, and for nothing sent after it."""
    stream = CopyStream(DEVICE)
    mark = stream.mark()
    assert mark is streams.copying.record_event.return_value
    stream.hand_over(mark, [])
    assert streams.computing.mock_calls == [call.wait_event(mark)]


def test_memory_is_kept_until_the_device_has_read_it(streams: Mock) -> None:
    """Each tensor on the device is recorded on the stream that reads it; host tensors are not."""
    stream = CopyStream(DEVICE)
    sent, host, sparse = _tensor(DEVICE), _tensor(torch.device("cpu")), _tensor(DEVICE, torch.sparse_coo)
    stream.hand_over(stream.mark(), [sent, host, sparse])
    sent.record_stream.assert_called_once_with(streams.computing)
    host.record_stream.assert_not_called()
    sparse.record_stream.assert_not_called()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_rows_are_sent_from_page_locked_memory(streams: Mock, is_pinned: bool) -> None:
    """Rows that lie elsewhere go through page-locked memory first; the host waits for neither."""
    source = Mock()
    source.is_pinned.return_value = is_pinned
    pinned = source if is_pinned else source.pin_memory.return_value
    sent = CopyStream(DEVICE).send(source)
    assert source.pin_memory.called is not is_pinned
    pinned.detach.return_value.to.assert_called_once_with(DEVICE, non_blocking=True)
    assert sent is pinned.detach.return_value.to.return_value


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2), True),
        (torch.ones(2, 2).to_sparse(), False),
        (torch.ones(2, device="meta"), False),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), False),
    ],
    ids=["strided", "sparse", "not on the host", "nested"],
)
def test_only_plain_host_tensors_are_sent(streams: Mock, tensor: torch.Tensor, expected: bool) -> None:
    """Others have memory in several places, or none on the host."""
    assert CopyStream(DEVICE).can_send(tensor) is expected


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta"), torch.device("mps")])
def test_devices_without_copies_beside_their_work(device: torch.device | None) -> None:
    """Such devices get no second stream."""
    assert copy_stream(device) is None


def test_nothing_is_sent_beside_a_capture(streams: Mock) -> None:
    """While a graph is captured there is no second stream, whose work would not be part of it."""
    streams.computing.is_capturing.return_value = True
    assert copy_stream(DEVICE) is None
    streams.computing.is_capturing.return_value = False
    assert isinstance(copy_stream(DEVICE), CopyStream)
