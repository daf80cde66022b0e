"""Options of every command that computes with a finished model."""

import argparse


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    """Add what evaluation and generation have in common."""
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float64, or auto: the type of the stored weights (auto)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (auto)")
