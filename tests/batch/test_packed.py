"""Packed sequences are cut by row, whatever the order in which they are packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence

import anybatch
from anybatch.batch import feed, join, lay_out

from .exactness import CUTS, assert_exact, pieces_of

# As many steps as the longest row has are another graph where pieces have longest rows of other lengths.
pytestmark = pytest.mark.filterwarnings("ignore:.*has another graph for another number of rows")


def _rows(rows: int, is_sorted: bool) -> list[Tensor]:
    lengths = [(3 * row) % 5 + 1 for row in range(rows)]
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    return [torch.randn(length, 3, dtype=torch.float64) for length in lengths]


def _packed(rows: int, is_sorted: bool) -> PackedSequence:
    return pack_sequence(_rows(rows, is_sorted), enforce_sorted=is_sorted)


class _Network(nn.Module):
    """A recurrent network with a loss of its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4).double()
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: PackedSequence, y: Tensor) -> Tensor:
        _, state = self.rnn(x)
        return ((self.head(state[-1])[:, 0] - y) ** 2).mean()


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_packed_batch_equals_the_whole(rows: int, ub_size: int, is_sorted: bool) -> None:
    """A recurrent network gets the gradient of the whole from packed pieces, each with its labels."""
    network = _Network()
    batch = {"x": _packed(rows, is_sorted), "y": torch.randn(rows).double()}
    assert_exact(lambda x, y: network(x, y), batch, network, ub_size)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_rows_stay_in_order(rows: int, ub_size: int, is_sorted: bool) -> None:
    """Unpacked, the pieces give every row once and in order; so does what joins them."""
    x = _packed(rows, is_sorted)
    expected = unpack_sequence(x)
    pieces = pieces_of(x, ub_size)
    assert all((piece.sorted_indices is None) == is_sorted for piece in pieces)
    found = [row for piece in pieces for row in unpack_sequence(piece)]
    joined = join(pieces, [len(unpack_sequence(piece)) for piece in pieces], None)
    assert (joined.sorted_indices is None) == is_sorted
    for rows_of in (found, unpack_sequence(joined)):
        assert len(rows_of) == rows
        assert all(torch.equal(a, b) for a, b in zip(rows_of, expected, strict=True))


def test_piece_is_packed_as_torch_packs_it() -> None:
    """A piece is what packing its rows alone gives."""
    rows = _rows(7, is_sorted=False)
    piece = lay_out({"x": pack_sequence(rows, enforce_sorted=False)}).cut(2, 6)["x"]
    expected = pack_sequence(rows[2:6], enforce_sorted=False)
    assert torch.equal(piece.batch_sizes, expected.batch_sizes)
    assert unpack_sequence(piece)[1].tolist() == unpack_sequence(expected)[1].tolist()
    assert torch.equal(piece.sorted_indices[piece.unsorted_indices], torch.arange(4))


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_the_rows(rows: int, ub_size: int) -> None:
    """Rows that require grad get their gradient through the packing."""
    leaves, network = [row.requires_grad_() for row in _rows(rows, is_sorted=False)], _Network()
    y = torch.randn(rows).double()

    def packed() -> PackedSequence:
        return pack_sequence([leaf * 2 for leaf in leaves], enforce_sorted=False)

    expected = torch.autograd.grad(network(packed(), y), leaves)
    anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: network(x, y))(packed(), y)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_sizes_stay_on_the_host(is_sorted: bool) -> None:
    """Data and order move to the device, batch sizes stay, as torch wants it."""
    (piece,) = feed(lay_out({"x": _packed(4, is_sorted)}), (4,), torch.device("meta"))
    moved = piece.arguments["x"]
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"
    assert is_sorted or moved.sorted_indices.device.type == moved.unsorted_indices.device.type == "meta"


@pytest.mark.parametrize("is_sorted", [True, False])
def test_packed_outputs_are_joined(is_sorted: bool) -> None:
    """A packed output comes back packed, for the whole mini-batch, in the order of its rows."""
    x, network = _packed(10, is_sorted), _Network()

    @anybatch.apply(["x"], ub_size=4)
    def step(x: PackedSequence) -> tuple[Tensor, PackedSequence]:
        output, _ = network.rnn(x)
        return output.data.pow(2).mean(), output

    _, output = step(x)
    assert not output.data.requires_grad
    expected, lengths = pad_packed_sequence(network.rnn(x)[0])
    padded, joined_lengths = pad_packed_sequence(output)
    torch.testing.assert_close(padded, expected.detach())
    assert torch.equal(joined_lengths, lengths)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS[:3])
def test_losses_of_states_and_steps_equal_the_whole(
    rows: int, ub_size: int, is_sorted: bool, kind: type[nn.RNNBase]
) -> None:
    """A mean over rows beside one over steps, as a dict of losses, has the gradient of the whole."""
    rnn, batch = kind(3, 4).double(), {"x": _packed(rows, is_sorted), "y": torch.randn(rows, 4).double()}

    def step(x: PackedSequence, y: Tensor) -> dict[str, Tensor]:
        output, state = rnn(x)
        last = state[0] if kind is nn.LSTM else state
        return {"last": ((last[-1] - y) ** 2).mean(), "steps": output.data.pow(2).mean()}

    expected = torch.autograd.grad(sum(step(**batch).values()), list(rnn.parameters()))
    anybatch.apply(["x", "y"], ub_size=ub_size)(step)(**batch)
    for parameter, gradient in zip(rnn.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
