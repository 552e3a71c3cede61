"""Any batch size, in the memory you have."""

from anybatch import errors
from anybatch._apply import apply
from anybatch._verify import Verification, verify

__all__ = ["Verification", "apply", "errors", "verify"]
