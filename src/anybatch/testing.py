"""For your own tests: a process short of memory, and an out-of-memory error where you want one.

Not loaded by `import anybatch`; say `import anybatch.testing`. Nothing here needs pytest.
"""

from anybatch._testing.faults import Fault, fail_at
from anybatch._testing.limit import memory_limit

__all__ = ["Fault", "fail_at", "memory_limit"]
