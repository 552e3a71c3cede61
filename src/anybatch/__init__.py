"""Any batch size, in the memory you have."""

from anybatch import errors
from anybatch._apply import apply

__all__ = ["apply", "errors"]
