"""What torch.compile has taken: a function, or a module with all its children."""

from typing import Any

from torch.nn import Module


def is_compiled(function: Any) -> bool:
    """Is a function or a module compiled when it is called, as far as it shows?"""
    is_module = isinstance(function, Module)
    return hasattr(function, "_torchdynamo_orig_callable") or (
        is_module and (hasattr(function, "_orig_mod") or function._compiled_call_impl is not None)
    )
