"""Settings of hypothesis, in the process of the tests and in the ranks that they fork."""

from hypothesis import HealthCheck, settings


def ignore_speed() -> None:
    """Set no time limit for an example: its time depends on the machine and its other work."""
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")
