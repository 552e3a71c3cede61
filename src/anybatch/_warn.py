"""What a call warns about: once per function, before anything is committed."""

import warnings
from collections.abc import Iterable, Iterator, Sequence

from torch.nn import Module

from anybatch.errors import InexactWarning
from anybatch.fit.transaction import Transaction

_MOST_NAMES = 6


def warn_once(function: str, notes: Iterable[str], warned: set[str]) -> None:
    """Warns of what the function was not warned about yet."""
    for note in dict.fromkeys(notes):
        if note not in warned:
            warnings.warn(f"`apply`: {function}: {note}.", InexactWarning, stacklevel=2)
            warned.add(note)


def side_effects(transaction: Transaction, models: Sequence[Module]) -> Iterator[str]:
    """What modules did in a call that depends on how the mini-batch was cut, one sentence each.

    Args:
        transaction: Which knows the modules that ran.
        models: Those that the function can name; layers are called what they are called in them.
    """
    changed = transaction.snapshot.changed_parameters()
    if changed:
        module, name = changed[0]
        yield (
            f"the function changes parameters ({type(module).__name__}.{name}), once per micro-batch and in "
            "the probe. Take that out of it"
        )
    norms, missed = transaction.norms, transaction.norms.missed()
    coupled = norms.taking_batch_statistics(transaction.snapshot.modules)
    coupled = [layer for layer in coupled if layer not in missed]
    for layers, note in ((coupled, norms.coupled), (missed, norms.out_of_reach)):
        if layers:
            yield note.format(layers=_names(models, layers))


def _names(models: Sequence[Module], layers: Sequence[Module]) -> str:
    """The layers' paths in their models, with their kind, the first few of them."""
    paths = {module: path for model in models for path, module in model.named_modules()}
    names = [
        f"{path} ({type(layer).__name__})" if (path := paths.get(layer)) else type(layer).__name__
        for layer in layers
    ]
    further = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + further
