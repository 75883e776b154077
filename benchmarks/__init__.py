"""Programs that run and measure fused_accum, each started as ``python -m benchmarks.<name>``."""


class JobError(Exception):
    """What was asked for cannot be done; the message says why and what to do instead. Shown without traceback."""
