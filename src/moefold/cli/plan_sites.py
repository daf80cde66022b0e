"""Sites in `moefold plan` and `moefold simulate`: options, and the table of the settings over a link."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from moefold.cli.screen import Column, numbers, print_columns, print_prose
from moefold.config.tables.toml_text import toml_value
from moefold.errors import ConfigError
from moefold.planner.mapping import format_seconds
from moefold.planner.sites import MAX_PUBLISHED_EVERY, TARGET, SitePlan, SiteRate

OPTIONS = ("sites", "site_link", "site_latency")


def add_site_options(parser: argparse.ArgumentParser) -> None:
    """Add --sites, --site-link and --site-latency."""
    group = parser.add_argument_group("sites", "jobs that train one model over a slow link, see docs/sites.md")
    group.add_argument("--sites", type=int, metavar="N", help="number of sites (default: the recipe's sites.count)")
    help_ = "bandwidth of a site, one way (default: [site_link] of the device)"
    group.add_argument("--site-link", type=float, metavar="BYTES_PER_S", help=help_)
    help_ = "latency of a message between sites (default: the device's latency, or 0)"
    group.add_argument("--site-latency", type=float, metavar="S", help=help_)


def refuse_site_options(args: argparse.Namespace, option: str) -> None:
    """Refuse options of sites that have no effect with another option."""
    for name in OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on {option}, which prices no rounds between sites; leave it "
                "out"
            )


def print_site_plan(console: Console, plan: SitePlan) -> None:
    """Print the smallest `every` of each precision, the recipe's and the chosen settings, and data parallelism."""
    cost = plan.cost
    fragments = len(plan.recipe.exchanges_s)
    console.print()
    console.print(
        f"{cost.count} sites of these GPUs, {format_bytes(cost.link.bytes_per_s)}/s and {cost.link.latency_s:g} s "
        f"between them, {fragments} fragment{'s' if fragments > 1 else ''}: the smallest sites.every for a utilisation "
        f"of {TARGET:.0%}",
        style="bold",
    )
    first = [pair[0] for pair in plan.options]
    last = [pair[1] for pair in plan.options]
    seconds = [format_seconds(sum(rate.exchanges_s)) for rate in first]
    columns = [
        Column(name="sent", cells=[_code_text(plan, rate) for rate in first]),
        numbers("exchange, s", seconds),
    ]
    for rates in (first, last) if first != last else (first,):
        columns += _columns(rates)
    print_columns(console, columns)
    console.print()
    print_prose(console, "recipe", f"{describe_rate(plan, plan.recipe)}.")
    if plan.chosen != plan.recipe:
        print_prose(console, "chosen", f"{describe_chosen(plan)}.")
    parallel = plan.data_parallel
    print_prose(
        console,
        "one job",
        "data parallelism across the sites, overlapped with the whole step at best: "
        f"{format_seconds(parallel.step_time_s)} s a step, utilisation {parallel.utilisation:.1%}, "
        f"{format_bytes(parallel.bytes_per_day)} a day.",
    )


def describe_chosen(plan: SitePlan) -> str:
    """Describe the chosen settings."""
    further = " ".join(f"{key}={toml_value(value)}" for key, value in plan.further.items())
    text = describe_rate(plan, plan.chosen) + (f", with {further}" if further else "")
    if plan.chosen.settings.every > MAX_PUBLISHED_EVERY:
        text += f"; published runs have every={MAX_PUBLISHED_EVERY} at most, so measure the loss"
    return text


def describe_rate(plan: SitePlan, rate: SiteRate) -> str:
    """Describe the settings of a rate, the utilisation of the sites, and the bytes sent."""
    settings = rate.settings
    return (
        f"every={settings.every} {_code_text(plan, rate)} overlap={settings.overlap}: utilisation "
        f"{rate.utilisation:.1%}, {format_bytes(rate.bytes_per_day)} a day"
    )


def _code_text(plan: SitePlan, rate: SiteRate) -> str:
    """Return the keys of a recipe that determine the sent bytes."""
    if plan.method.coding_s != (0.0, 0.0):
        return f"method={toml_value(plan.method)}"
    return f"precision={rate.settings.precision}"


def format_bytes(number: float) -> str:
    """Format a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"


def _columns(rates: Sequence[SiteRate]) -> list[Column]:
    settings = rates[0].settings
    overlap = "=every" if settings.overlap == settings.every else f" {settings.overlap}"
    intervals = [f"{rate.settings.every:,}" for rate in rates]
    sent_bytes = [format_bytes(rate.bytes_per_day) for rate in rates]
    return [numbers(f"every, overlap{overlap}", intervals), numbers("a day", sent_bytes)]
