"""The curve of whole training steps, against the same steps on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch.memory.curve import fit_curve
from anybatch.memory.shadow import shadow_of, step_shadow
from anybatch.memory.symbolic import Fakes, run_symbolically
from anybatch.memory.trace import Trace
from anybatch.memory.tracker import Tracker

_IMAGES, _VECTORS, _TOKENS = torch.randn(40, 3, 8, 8), torch.randn(40, 20), torch.randint(50, (40, 16))
_LABELS = torch.randint(5, (40,))


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 5)
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 5))


class _Sequences(nn.Module):
    """An embedding, a body, and a head on the mean over the places."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(50, 32), body, nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.body(self.embed(tokens))
        states: Tensor = found[0] if isinstance(found, tuple) else found
        result: Tensor = self.head(states.mean(1))
        return result


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return _Sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 32)


def _gru() -> nn.Module:
    return _Sequences(nn.GRU(32, 24, 2, batch_first=True), 24)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(50, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 50, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens)).tanh()).mean(1)
        return logits


class _Checkpointed(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 20)) for _ in range(3)
        ]
        self.blocks, self.head, self.is_reentrant = nn.ModuleList(blocks), nn.Linear(20, 5), is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.is_reentrant else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        result: Tensor = self.head(x)
        return result


class _Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=50,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits.mean(1)
        return logits


@dataclass(frozen=True)
class Case:
    """A network, its inputs, whether autocast is on, and what is known to be missing in fakes."""

    make: Callable[[], nn.Module]
    inputs: Tensor
    is_autocast: bool = False
    missing_bytes: int = 0


_CASES = {
    "conv net": Case(_conv_net, _IMAGES),
    "mlp": Case(_mlp, _VECTORS),
    "encoder": Case(_encoder, _TOKENS),
    "gru": Case(_gru, _TOKENS),
    "tied weights": Case(_Tied, _TOKENS),
    "checkpoint": Case(lambda: _Checkpointed(False), _VECTORS),
    "reentrant checkpoint": Case(lambda: _Checkpointed(True), _VECTORS),
    "encoder bf16": Case(_encoder, _TOKENS, is_autocast=True),
    # The fake of a batch norm keeps both statistics of its 8 channels in bfloat16, the real one in float32.
    "conv net bf16": Case(_conv_net, _IMAGES, is_autocast=True, missing_bytes=2 * 8 * 2),
    "gpt2": Case(_Gpt2, _TOKENS),
}


def _loss(case: Case, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.is_autocast):
        return F.cross_entropy(net(x), y)


def _foreseen(case: Case) -> Callable[[int], Trace]:
    """Two steps on fakes, with AdamW; the second one finds optimizer state."""
    net = case.make()
    optimizer = torch.optim.AdamW(net.parameters())

    def run(rows: int) -> Trace:
        piece = case.inputs[:rows], _LABELS[:rows]

        def steps(fakes: Fakes) -> object:
            shadow = shadow_of(optimizer, fakes)
            for _ in range(2):
                x, y = fakes.fake(piece)
                _loss(case, net, x, y).backward()
                del x, y
                step_shadow(shadow)
                net.zero_grad()
            return shadow

        result = run_symbolically(steps, [net])
        assert result.kept == ()
        assert result.hidden == ()
        return result.trace

    return run


def _real(case: Case, rows: int) -> Trace:
    net = case.make()
    optimizer = torch.optim.AdamW(net.parameters())
    with Tracker() as tracker:
        for _ in range(2):
            x, y = case.inputs[:rows].clone(), _LABELS[:rows].clone()
            _loss(case, net, x, y).backward()
            del x, y
            optimizer.step()
            optimizer.zero_grad()
    return tracker.trace()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.models if n == "gpt2" else ()) for n in _CASES]
)
def test_curve_is_the_real_peak_to_the_byte(name: str) -> None:
    """From runs of 2 and 3 rows, the peak of two real steps is known at 5, 17 and 33 rows."""
    case = _CASES[name]
    run = _foreseen(case)
    curve = fit_curve(run)
    assert curve.is_aligned
    for rows in (5, 17, 33):
        real = _real(case, rows)
        assert curve.peak_bytes(rows) == real.peak_bytes - case.missing_bytes
        assert run(rows).peak_bytes == curve.peak_bytes(rows)
        assert run(rows).end_bytes == real.end_bytes


def _similarities(rows: int) -> Trace:
    """Trains on the similarities of all rows with all rows."""
    net, x = nn.Linear(20, 16), torch.zeros(rows, 20)

    def step(fakes: Fakes) -> None:
        z = net(fakes.fake(x))
        F.cross_entropy(z @ z.t(), fakes.fake(torch.arange(rows))).backward()

    return run_symbolically(step, [net]).trace


def test_matrix_of_rows_by_rows_is_beyond_the_curve() -> None:
    """A contrastive loss bends the need: a symbolic run of a larger size shows more than the curve says."""
    curve = fit_curve(_similarities)
    assert _similarities(1000).peak_bytes > 2 * curve.peak_bytes(1000)


def test_loop_over_rows_is_told() -> None:
    """A loop over rows takes other operators at every size, which the curve says."""
    net = nn.Linear(4, 4)

    def run(rows: int) -> Trace:
        x = torch.zeros(rows, 4)
        return run_symbolically(lambda fakes: [net(row).sum() for row in fakes.fake(x)], [net]).trace

    assert not fit_curve(run).is_aligned


def test_peak_is_named_by_its_operator() -> None:
    """The curve says what has the peak: in few rows the optimizer's step, in many the activations."""
    run = _foreseen(_CASES["mlp"])
    curve = fit_curve(run)
    assert curve.at(1) != curve.at(10_000)
    assert "backward" in curve.at(10_000)
