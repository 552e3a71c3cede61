"""A call in micro-batches against the same call whole."""

from anybatch._verify.entry import verify
from anybatch._verify.report import Verification

__all__ = ["Verification", "verify"]
