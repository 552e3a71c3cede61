"""Cross entropy straight from what the last layer gets, in chunks: the logits are never there as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from anybatch.errors import TechniqueError
from anybatch.techniques.late_logits import Head, LateLogits
from anybatch.techniques.technique import Setting, Technique

_AUTO = "auto"


@final
@dataclass(frozen=True)
class ChunkedHead(Technique):
    """Computes the last linear layer and cross entropy of class numbers together, in chunks of rows.

    In a run that layer gives logits that are computed when something asks for their values. Where they go
    into `cross_entropy`, reshaped or sliced by rows before, only one chunk of them is in memory at a time;
    backward computes each chunk again. Anything else gets the whole logits, with a warning that names it.

    Error: exact up to rounding. Below float32, sums are accumulated in float32.

    Source: `torch.nn.functional.linear_cross_entropy`; Wijmans et al., "Cut your losses in large-vocabulary
    language models", 2024.

    Attributes:
        head: The name of the layer. `"auto"` takes what the model names its output embeddings, or else its
            last linear layer.
        rows: Rows in a chunk, at least 1; None leaves them to torch.

    Raises:
        TechniqueError: An option is none of these.

    >>> ChunkedHead("lm_head", rows=128)
    ChunkedHead(head='lm_head', rows=128)
    """

    source: ClassVar[str] = "torch.nn.functional.linear_cross_entropy; Wijmans et al., Cut your losses, 2024"
    exactness: ClassVar[str] = "Exact up to rounding, in another order of additions."

    head: str = _AUTO
    rows: int | None = None

    def __post_init__(self) -> None:
        is_whole = isinstance(self.rows, int) and not isinstance(self.rows, bool) and self.rows >= 1
        wrong = [] if isinstance(self.head, str) and self.head else [f"head={self.head!r}"]
        wrong += [] if self.rows is None or is_whole else [f"rows={self.rows!r}"]
        if wrong:
            raise TechniqueError(
                f"`ChunkedHead`: `head` is the name of a layer, and `rows` at least 1. Got "
                f'{" and ".join(wrong)}. Write ChunkedHead("lm_head"), for example.'
            )

    def check(self, setting: Setting) -> None:
        if not hasattr(nn.functional, "linear_cross_entropy") or not hasattr(nn, "LinearCrossEntropyOptions"):
            raise TechniqueError(
                f"`ChunkedHead`: torch must have `linear_cross_entropy` with its options. Got torch "
                f"{torch.__version__}. Install a later one."
            )
        self._layer(setting.model)

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        self.check(setting)
        layer = self._layer(setting.model)
        head = Head(layer, _options(self.rows))

        def forward(hidden: Tensor) -> Tensor:
            return LateLogits.of(head, hidden)

        with _forward_as(layer, forward):
            yield

    def _layer(self, model: nn.Module) -> nn.Linear:
        name, layer = _last(model) if self.head == _AUTO else (self.head, _named(model, self.head))
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            kind = "a layer with a forward of its own" if isinstance(layer, nn.Linear) else _kind(layer)
            raise TechniqueError(
                f"`ChunkedHead`: the head is a plain nn.Linear. Got {name or 'nothing'}, {kind}. Name the "
                f"layer that gives the logits."
            )
        return layer


def _last(model: nn.Module) -> tuple[str, Any]:
    named: Callable[[], Any] = getattr(model, "get_output_embeddings", lambda: None)
    layer = named()
    if layer is not None:
        return "the output embeddings", layer
    linear = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return linear[-1] if linear else ("", None)


def _named(model: nn.Module, name: str) -> Any:
    return dict(model.named_modules()).get(name)


def _kind(layer: Any) -> str:
    return "which the model does not have" if layer is None else f"a {type(layer).__name__}"


def _options(rows: int | None) -> Any:
    options: Any = nn.LinearCrossEntropyOptions
    return options() if rows is None else options(batch_chunk_size=rows, chunking_method=None)


@contextmanager
def _forward_as(layer: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    vars(layer)["forward"] = forward  # of this one layer; its hooks still run
    try:
        yield
    finally:
        del vars(layer)["forward"]
