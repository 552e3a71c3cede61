"""The room that knows containers: lay a mini-batch out, cut it, feed the pieces, join their outputs."""

from anybatch.batch.containers import register
from anybatch.batch.cut import balanced
from anybatch.batch.declared import BatchDim
from anybatch.batch.extent import extent
from anybatch.batch.feed import Piece, feed, outside_inference, piece_of
from anybatch.batch.inputs import InputGradient, InputLeaf, input_gradients
from anybatch.batch.join import detach, join
from anybatch.batch.layout import Layout, lay_out

__all__ = [
    "BatchDim",
    "InputGradient",
    "InputLeaf",
    "Layout",
    "Piece",
    "balanced",
    "detach",
    "extent",
    "feed",
    "input_gradients",
    "join",
    "lay_out",
    "outside_inference",
    "piece_of",
    "register",
]
