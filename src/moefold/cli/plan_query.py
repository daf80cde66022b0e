"""`moefold plan`: build the request and the planner from the options."""

import argparse
from dataclasses import fields

from moefold.cli.plan_table import parse_axes
from moefold.errors import ConfigError
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.query import PlanOptions, PlanQuery, make_planner, plan_request


def request_from_args(args: argparse.Namespace) -> PlanRequest:
    """Build the plan request from the options.

    Raises:
        ConfigError: an option is wrong or missing.
    """
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top {args.top} must be at least 1")
    query = PlanQuery(
        model=args.model,
        gpu=args.gpu,
        num_gpus=args.num_gpus,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        fix=parse_axes(args.fix, "--fix") if args.fix else {},
        options=PlanOptions(**{field.name: getattr(args, field.name) for field in fields(PlanOptions)}),
    )
    return plan_request(query)


def planner_from_args(request: PlanRequest, args: argparse.Namespace) -> Planner:
    """Create the planner, with the recorded routing of --trace if it is given."""
    return make_planner(request, args.trace)
