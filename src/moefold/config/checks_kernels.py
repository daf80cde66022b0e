"""Rules on kernels and on the precision of matrix products."""

from collections.abc import Iterator

from moefold.config.schema import Config


def kernel_faults(cfg: Config) -> Iterator[str]:
    """The kernels know the type."""
    if cfg.run.kernels == "triton" and cfg.run.dtype == "float64":
        yield (
            "run.kernels='triton' sums in float32, which run.dtype='float64' is beyond; set run.kernels to 'auto' or "
            "'plain', or run.dtype to 'bfloat16' or 'float32'"
        )
    if cfg.run.kernels == "triton" and cfg.train.precision != "dtype":
        yield (
            f"train.precision={cfg.train.precision!r} has matrix products of its own, which run.kernels='triton' would "
            "replace; leave run.kernels out"
        )


KERNEL_RULES = (kernel_faults,)
