"""Time the sampling of data-parallel ranks that exchange tokens, and of ranks that read each other's experts.

    python benchmarks/peer_experts.py                      time as it passes on this machine
    python benchmarks/peer_experts.py --base-ms 20 --row-ms 0.5

The ranks of one ep group sample requests of log-normal lengths, of prompts and of completions (`--sigma`), under
rollout.experts = exchange, then fetch, then whole. With `--row-ms`, each pass is followed by a pause in proportion to
its rows, as if a device of that speed had computed it: on few cores the ranks would otherwise wait for each other's
processor time. Reports the makespan, the mean time when a rank ended, the passes with and without rows, and the memory
of the experts of all ranks.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moefold.comm.groups import ParallelGroups
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.config.sections.rl import RolloutConfig
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.launch.rank_pool import WorkerPool
from moefold.model.local_param import local_tensor
from moefold.model.weight_init import init_weights
from moefold.parallel.inference_model import InferenceModel
from moefold.validate.config import check_config
from moefold.verify import PRELOAD

WAYS = ("exchange", "fetch", "whole")
MAX_NEW = 512
MAX_PROMPT = 480


@dataclass(frozen=True)
class RankResult:
    """Times and counts of one rank."""

    finished_s: float
    """Time when its own requests were complete."""
    makespan_s: float
    cpu_s: float
    passes: int
    empty_passes: int
    expert_bytes: int
    """Bytes of its own experts."""
    tokens: tuple[tuple[int, ...], ...]


def _recipe(preset: str, ranks: int, experts: str) -> Config:
    cfg = config_from_dict(
        {
            "run": {"dtype": "float32", "device": "cpu", "seed": 1},
            "model": {"preset": preset},
            "train": {"seq_len": 1024, "micro_batch_size": 1, "global_batch_size": ranks},
            "parallel": {"world_size": ranks, "ep": 1 if experts == "whole" else ranks, "zero": 0},
            "data": {"kind": "synthetic"},
        }
    )
    return replace(cfg, rollout=RolloutConfig(experts="fetch" if experts == "fetch" else "exchange"))


def _requests(rank: int, count: int, sigma: float) -> list[Request]:
    generator = torch.Generator().manual_seed(rank)

    def lengths(mean: float, longest: int) -> list[int]:
        drawn = torch.empty(count).log_normal_(mean, sigma, generator=generator)
        return drawn.clamp(1, longest).long().tolist()

    pairs = zip(lengths(4.5, MAX_PROMPT), lengths(3.5, MAX_NEW), strict=True)
    return [
        Request(
            prompt=tuple(torch.randint(256, (prompt,), generator=generator).tolist()),
            prompt_number=rank * count + i,
            max_tokens=new,
        )
        for i, (prompt, new) in enumerate(pairs)
    ]


def _measure(cfg: Config, args: argparse.Namespace) -> RankResult:
    groups = ParallelGroups.create(check_config(cfg, is_training=False), torch.device("cpu"))
    model = InferenceModel.build(cfg, groups)
    with torch.no_grad(), model.writing_weights():
        init_weights(model.stage, cfg.model, cfg.run.seed)
    requests = _requests(groups.rank, args.requests, args.sigma)
    engine = GenerationEngine(model, EngineSettings(slots=args.slots, pass_tokens=args.pass_tokens), SamplingParams())
    passes = empty_passes = 0
    finished_s = 0.0
    tokens: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    num_pages = sum(-(-(len(request.prompt) + request.max_tokens) // 64) for request in requests)
    with engine.open(num_pages) as generation:
        decoder: Any = generation._decoder
        forward = decoder.forward

        def forward_and_pause(tokens_R: torch.Tensor, *arguments: Any) -> Any:
            nonlocal passes, empty_passes
            result = forward(tokens_R, *arguments)
            passes += len(tokens_R) > 0
            empty_passes += len(tokens_R) == 0
            if len(tokens_R):
                time.sleep((args.base_ms + args.row_ms * len(tokens_R)) / 1e3)
            return result

        decoder.forward = forward_and_pause
        for i, request in enumerate(requests):
            generation.add(i, request)
        dist.barrier()
        started_s = time.perf_counter()
        started_cpu_s = time.process_time()
        while generation.any_rank_has_work():
            for new in generation.step():
                tokens[new.request_id].append(new.token)
                if new.finish_reason is not None:
                    generation.pop(new.request_id, new.finish_reason)
            if not generation.has_work and not finished_s:
                finished_s = time.perf_counter() - started_s
        cpu_s = time.process_time() - started_cpu_s
        dist.barrier()
        makespan_s = time.perf_counter() - started_s
    weights = [local_tensor(weight) for layer in model.stage.moe_layers().values() for weight in layer.experts.weights]
    expert_bytes = sum(weight.nbytes for weight in weights)
    texts = tuple(tuple(tokens[i]) for i in range(len(requests)))
    return RankResult(finished_s, makespan_s, cpu_s, passes, empty_passes, expert_bytes, texts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="model")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the ep group")
    parser.add_argument("--requests", type=int, default=32, help="requests of a rank")
    parser.add_argument("--slots", type=int, default=8, help="samples that a rank decodes at once")
    parser.add_argument("--pass-tokens", type=int, default=512, help="most rows of a pass")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithms of the lengths")
    parser.add_argument("--base-ms", type=float, default=0.0, help="pause after a pass")
    parser.add_argument("--row-ms", type=float, default=0.0, help="pause after a pass for each of its rows")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each way, in turn")
    args = parser.parse_args()
    pool = WorkerPool(PRELOAD)
    times: dict[str, list[list[RankResult]]] = {method: [] for method in WAYS}
    for _ in range(args.rounds):
        for method in WAYS:
            cfg = _recipe(args.preset, args.ranks, method)
            times[method].append(pool.run(args.ranks, _measure, cfg, args, timeout_s=600))
    texts = {tuple(rank.tokens for rank in results[0]) for results in times.values()}
    assert len(texts) == 1, "the ways gave different completions"
    base = statistics.median(results[0].makespan_s for results in times["exchange"])
    for method, rounds in times.items():
        makespan_s = statistics.median(results[0].makespan_s for results in rounds)
        ended_s = statistics.median(statistics.mean(rank.finished_s for rank in results) for results in rounds)
        cpu_s = statistics.median(sum(rank.cpu_s for rank in results) for results in rounds)
        first = rounds[0]
        print(
            f"{method:8} makespan {makespan_s:6.2f} s ({base / makespan_s:.2f} x), a rank ends after {ended_s:6.2f} s, "
            f"CPU {cpu_s:6.2f} s, passes {[rank.passes for rank in first]}, empty "
            f"{[rank.empty_passes for rank in first]}, experts {sum(rank.expert_bytes for rank in first) / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
