"""Operators whose kernels take workspace that their fakes do not show."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["hidden_in"]

# Figures: the process's growth against the bytes of tensors, on a CPU with torch 2.13.
_REASONS = {
    "aten::mkldnn_rnn_layer": "its workspace has no bytes in the fake (an LSTM needs 3 times what is seen)",
    "aten::mkldnn_rnn_layer_backward": "it takes scratch memory",
    "aten::_cudnn_rnn": "its reserve has no bytes in the fake",
    "aten::miopen_rnn": "its reserve has no bytes in the fake",
    "aten::_embedding_bag": "it takes scratch memory (1.7 times what is seen)",
    "aten::_embedding_bag_forward_only": "it takes scratch memory",
    "aten::slow_conv_transpose2d": "it unfolds its input",
    "aten::_fft_r2c": "its plan takes workspace",
    "aten::_fft_c2c": "its plan takes workspace",
    "aten::_fft_c2r": "its plan takes workspace",
    "aten::linalg_svd": "the solver takes workspace",
    "aten::_linalg_svd": "the solver takes workspace",
    "aten::_linalg_eigh": "the solver takes workspace",
    "aten::linalg_qr": "the solver takes workspace",
}


def hidden_in(operators: Iterable[str]) -> tuple[str, ...]:
    """What a symbolic run can't see, one sentence for each operator in it that takes more than it shows."""
    met = dict.fromkeys(operator.partition(".")[0] for operator in operators)
    return tuple(f"{name}: {_REASONS[name]}" for name in met if name in _REASONS)
