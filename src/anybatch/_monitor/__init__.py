"""`anybatch.MemoryMonitor`: who uses memory during training, and when."""

from anybatch._monitor.monitor import MemoryMonitor

__all__ = ["MemoryMonitor"]
