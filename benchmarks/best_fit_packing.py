"""Compare both values of data.packing on shipped histograms of document lengths, and time the packing and padded steps.

    python benchmarks/best_fit_packing.py           about a minute on a CPU

Counts the documents that fit into a sample but that the end of a sample splits under "concatenate"; "best_fit" splits
none. Then times the forward and backward pass of a MoE layer with a share of padding, in CPU time relative to the same
layer without padding.
"""

import argparse
import time

import numpy as np
import torch

from moefold.config.edit import edit_model
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.data.best_fit import pack_documents
from moefold.model.moe.token_group import TokenColumns
from moefold.model.transformer import module_settings
from moefold.planner.lengths.distribution import histogram_names, load_distribution

NUM_DOCUMENTS = 2**16
ROUNDS = 7
TOKENS = 2048


def _compare_packings(name: str, seq_len: int) -> str:
    fractions = np.random.RandomState(0).random_sample(NUM_DOCUMENTS)
    lengths = load_distribution(name).quantile(fractions)
    started_s = time.process_time()
    samples = pack_documents(lengths.tolist(), seq_len)
    packing_us = 1e6 * (time.process_time() - started_s) / NUM_DOCUMENTS
    used = sum(length for documents in samples for _, _, length in documents)
    ends = np.cumsum(lengths)
    fits = lengths <= seq_len + 1
    # Sample i has the tokens i * S to i * S + S; a document that lies in one of them is whole.
    is_split = ((ends - lengths) // seq_len != (ends - 2) // seq_len) & fits & (lengths > 1)
    return (
        f"{name:>10} {seq_len:>7} {100 * is_split.sum() / fits.sum():>8.2f} "
        f"{100 * (1 - used / (len(samples) * (seq_len + 1))):>9.3f} {packing_us:>12.2f}"
    )


def _step_seconds(share: float) -> float:
    model = edit_model(
        ModelConfig(),
        {"hidden_size": 256, "ffn.moe.num_experts": 16, "ffn.moe.top_k": 4, "ffn.moe.intermediate_size": 256},
    )
    torch.manual_seed(0)
    layer = model.decoder_layers[0].ffn.build(module_settings(Config(model=model)).ffn, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.1)
    x = torch.randn(TOKENS, 1, model.hidden_size, requires_grad=True)
    weights = (torch.arange(TOKENS) >= share * TOKENS).float()[None] / TOKENS
    columns = TokenColumns(None, weights if share else None)
    seconds = []
    for _ in range(ROUNDS):
        started_s = time.process_time()
        layer(x, columns).y.sum().backward()
        seconds.append(time.process_time() - started_s)
    return min(seconds)


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print("   lengths seq_len  split % padding % us a document")
    for name in histogram_names():
        for seq_len in (4096, 32768):
            print(_compare_packings(name, seq_len))
    full_s = _step_seconds(0.0)
    print("padding %   CPU time over that without padding")
    for share in (0.25, 0.5, 0.75):
        print(f"{100 * share:>9.0f} {_step_seconds(share) / full_s:>10.2f}")


if __name__ == "__main__":
    main()
