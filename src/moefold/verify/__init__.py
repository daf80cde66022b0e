PRELOAD = ("moefold.verify.preload",)
"""What a `WorkerPool` imports once for all ranks that train."""
