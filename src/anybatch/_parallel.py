"""Models in `nn.DataParallel`: the devices that share a piece, and whether the model agrees on them."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import DataParallel, Module

from anybatch.memory.device import as_device


def parallel_devices(device_ids: Any) -> tuple[torch.device, ...]:
    """The accelerators that `device_ids` names.

    Args:
        device_ids: Indexes of accelerators, each once; None for models that live on one device.

    Returns:
        The accelerators, in this order; none for None.

    Raises:
        ValueError: It is no list of distinct indexes, or this machine lacks one of the accelerators.
    """
    if device_ids is None:
        return ()
    indexes = _indexes(device_ids)
    if not indexes or len(set(indexes)) < len(indexes):
        raise ValueError(
            "`apply`: `device_ids` lists the indexes of accelerators, each once, as in [0, 1]. "
            f"Got {device_ids!r}. Leave it out for a model on one device."
        )
    try:
        return tuple(device for device in map(as_device, indexes) if device is not None)
    except ValueError as error:
        raise ValueError(
            f"`apply`: `device_ids` names accelerators of this machine. Got {device_ids!r}. "
            f"Leave it out for a model on one device. {error}"
        ) from error


def _indexes(device_ids: Any) -> list[int]:
    """The indexes; empty where it is no list of them."""
    is_list = isinstance(device_ids, (list, tuple))
    if not is_list or any(isinstance(one, bool) or not hasattr(one, "__index__") for one in device_ids):
        return []
    return [operator.index(one) for one in device_ids]


def check_parallel(devices: Sequence[torch.device], modules: Iterable[Module], function: str) -> None:
    """Checks that the model shares its pieces out among the same devices.

    Where it does not, a device gets more rows than `ub_size`.

    Args:
        devices: What `device_ids` names.
        modules: The modules of the call, without their children.
        function: The name of the user's function.

    Raises:
        ValueError: No model is in `nn.DataParallel`, or one is on other devices.
    """
    if len(devices) < 2:
        return
    wanted = [device.index for device in devices]
    parts = (part for module in modules for part in module.modules())
    models = [part for part in parts if isinstance(part, DataParallel)]
    others = [list(model.device_ids) for model in models if sorted(model.device_ids) != sorted(wanted)]
    if models and not others:
        return
    fact = f"one on {others[0]}" if others else "none that the function names"
    raise ValueError(
        f"`apply`: with `device_ids={wanted}` the model is an nn.DataParallel on these devices. "
        f"Got {fact} in {function}. Pass the model as an argument and the same `device_ids` to both, or "
        "leave `device_ids` out: `ub_size` then counts the rows of all devices together."
    )
