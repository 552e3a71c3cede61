"""A small GPT-2 on lines of different length, padded: the loss is a mean over all tokens but the padding.

Shows what goes wrong where pieces are averaged: short lines count for more than their tokens. Nothing is to
be declared here, the count is read from the loss that the Hugging Face model computes. Its batch is a dict,
which is cut as it is.

    python examples/gpt2_padded_text.py
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import anybatch
from anybatch import Verification

LINES = """
We keep our own loop.
One decorator.
The mini-batch is cut into pieces that fit the device, and each piece is run forward and backward.
What a piece weighs is written in the graph of its loss.
Padding does not count.
A piece of short lines weighs less than one of long lines; the sum is the gradient of the whole.
Exact.
Or said not to be.
""".strip().splitlines()


def padded(lines: Sequence[str]) -> dict[str, Tensor]:
    """The bytes of each line, filled up with zeros to the longest; labels of -100 where nothing counts."""
    length = max(map(len, lines))
    tokens = torch.tensor([list(line.encode().ljust(length, b"\0")) for line in lines])
    mask = (tokens != 0).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@anybatch.apply(["batch"], ub_size=3)
def train_step(model: GPT2LMHeadModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def by_hand(model: GPT2LMHeadModel, batch: dict[str, Tensor], rows: int) -> list[Tensor]:
    """The gradient of a loop that divides each loss by the number of pieces, as it is usually written."""
    pieces = list(zip(*(value.split(rows) for value in batch.values()), strict=True))
    model.zero_grad()
    for piece in pieces:
        (model(**dict(zip(batch, piece, strict=True))).loss / len(pieces)).backward()
    return [parameter.grad for parameter in model.parameters()]


def difference(model: GPT2LMHeadModel, batch: dict[str, Tensor], gradients: list[Tensor]) -> float:
    """The largest difference to the gradient of the whole mini-batch, over the largest gradient."""
    whole = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    largest = max(gradient.abs().max() for gradient in whole)
    return float(max((a - b).abs().max() for a, b in zip(gradients, whole, strict=True)) / largest)


def main(argv: Sequence[str] | None = None) -> tuple[list[float], Verification]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_dropout))
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = padded(LINES)
    error = difference(model, batch, by_hand(model, batch, 3))
    print(f"A loop by hand, loss / pieces: gradients differ by {error:.2f} of the largest one.")

    losses: list[float] = []
    print("step  loss per token")
    for step in range(options.steps):
        optimizer.zero_grad()
        losses.append(train_step(model, batch=batch).item())
        optimizer.step()
        if step % 10 == 0:
            print(f"{step:4}  {losses[-1]:14.3f}")

    report = anybatch.verify(train_step, model, batch=batch, double=True)
    print(report)
    return losses, report


if __name__ == "__main__":
    main()
