PRELOAD = ("moefold.verify.preload",)
"""Modules that a `WorkerPool` imports once for all ranks that train."""
