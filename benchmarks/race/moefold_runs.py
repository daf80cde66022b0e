"""Runs of moefold in the race: training, generation, a GRPO step, import, export; and the inputs of all runs."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.reference_steps import hugging_face_model
from benchmarks.race.run_protocol import (
    GROUP_SIZE,
    LEARNING_RATE,
    SEED,
    ProcessSpec,
    Sizes,
    Turns,
    prompts_of,
    run_implementation,
)
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.base.part import make_part
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed
from moefold.validate.config import check_config

CONSTANT = 20.0
"""Value of channel 0 of the residual stream of the model of GRPO."""
INIT_STD = 0.05
"""A gap so wide that rounding does not decide a token."""
REWARD = """
def reward(prompts, completions, completion_ids, **columns):
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]
"""


def train(dtype: str, turns: Turns, spec: ProcessSpec, **mapping: int) -> None:
    """Train the model, on several ranks by data parallelism unless a mapping says otherwise."""
    from moefold.parallel.batch import Batch
    from moefold.parallel.parallelize import parallelize
    from moefold.train.train_step import TrainingStep

    dp = spec.ranks // mapping.get("tp", 1)
    per_rank = spec.sizes.samples // dp
    cfg = step_recipe(spec.sizes, dtype, {"world_size": spec.ranks, **mapping}, per_rank)
    with init_distributed(_rank_env(spec), "cpu") as device:
        torch.set_num_threads(1)
        step = TrainingStep(parallelize(cfg, ParallelGroups.create(check_config(cfg), device)), cfg)
        dp_rank = spec.rank * dp // spec.ranks
        mine = torch.load(spec.folder / "tokens.pt").chunk(dp)[dp_rank]
        tokens = mine[:, :-1].contiguous()
        labels = mine[:, 1:].contiguous()
        # A weight for each token, whose sum over all ranks is 1.
        weights = torch.full(tokens.shape, 1 / (spec.sizes.samples * spec.sizes.seq_len))
        ids = torch.arange(per_rank) + dp_rank * per_rank
        batch = Batch(tokens, {"labels": labels, "weights": weights, "sample_ids": ids})
        turns.take(lambda _: {"loss": step.run(batch, 1).loss})


def step_recipe(sizes: Sizes, dtype: str, mapping: Mapping[str, int], micro_batch_size: int) -> Config:
    """Return the recipe of a training step of the race."""
    return config_from_dict(
        {
            "run": {"dtype": dtype, "device": "cpu"},
            "model": {"preset": sizes.preset, "init_std": INIT_STD},
            "parallel": dict(mapping),
            "train": {
                "seq_len": sizes.seq_len,
                "micro_batch_size": micro_batch_size,
                "global_batch_size": sizes.samples,
            },
            "data": {"kind": "synthetic"},
        }
    )


def _rank_env(spec: ProcessSpec) -> RankEnv:
    return RankEnv(spec.rank, spec.rank, spec.ranks, "127.0.0.1", spec.port, local_world_size=spec.ranks)


def generate(shares_prompts: bool, turns: Turns, spec: ProcessSpec) -> None:
    """Generate with the generation engine and default settings."""
    from moefold.inference.engine.engine import GenerationEngine
    from moefold.inference.engine.requests import EngineSettings, Request
    from moefold.inference.load import load_model
    from moefold.inference.sampling import SamplingParams
    from moefold.inference.settings import InferenceRequest, inference_config
    from moefold.inference.source import find_source

    with init_distributed(_rank_env(spec), "cpu") as device:
        torch.set_num_threads(1)
        source = find_source(str(spec.folder / "model"))
        request = InferenceRequest(device="cpu", dtype="float32", seq_len=spec.sizes.positions, batch_size=1)
        loaded = load_model(source, inference_config(source, request, "generate"), device)
        settings = EngineSettings(slots=256, cache_gib=0, share_prompts=shares_prompts)

        def run(scenario: str) -> dict[str, Any]:
            prompts, lengths = prompts_of(spec.folder, scenario)
            numbers: dict[tuple[int, ...], int] = {}
            requests = [
                Request(
                    prompt=tuple(prompt),
                    prompt_number=numbers.setdefault(tuple(prompt), len(numbers)),
                    sample_number=i,
                    max_tokens=length,
                )
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
            done = GenerationEngine(loaded.model, settings, SamplingParams(temperature=0.0)).generate(requests)
            return {"tokens": [list(completion.tokens) for completion in done]}

        turns.take(run)


class PhaseClock(FlightRecorder):
    """Adds up the CPU seconds of each phase of the trainer."""

    def __init__(self) -> None:
        self._name = ""
        self._seconds: dict[str, float] = {}
        self._started_s = time.process_time()
        super().__init__()

    def set_phase(self, phase: str) -> None:
        """See base class."""
        now_s = time.process_time()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now_s - self._started_s
        self._name, self._started_s = phase, now_s
        super().set_phase(phase)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by phase."""
        self.set_phase("after the step")
        seconds, self._seconds = self._seconds, {}
        return seconds


def train_grpo(turns: Turns, spec: ProcessSpec) -> None:
    """Run the steps of the GRPO recipe; a turn is everything between two updates of the optimizer."""
    from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
    from moefold.train.signals import StopSignals
    from moefold.train.trainer import Trainer

    class Ticks(Callback):
        """Ends a turn with each step."""

        def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
            """See `Callback`."""
            assert step.rl is not None
            turns.end({"new": step.rl["length_mean"], "parts": clock.take()})
            turns.begin()

    cfg = grpo_recipe(spec)
    clock = PhaseClock()
    with init_distributed(_rank_env(spec), "cpu") as device:
        torch.set_num_threads(1)
        trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), device, clock), callbacks=[Ticks()])
        turns.ready()
        turns.begin()
        trainer.run(StopSignals())


def grpo_recipe(spec: ProcessSpec) -> Config:
    """Return the recipe of a GRPO step."""
    sizes = spec.sizes
    return config_from_dict(
        {
            "run": {"dir": str(spec.scratch / "run"), "steps": spec.steps, "device": "cpu", "dtype": "float32"},
            "model": {"preset": "quickstart"},
            "moe": {"aux_loss": 0.0},
            "train": {
                "seq_len": sizes.prompt + sizes.new,
                "micro_batch_size": sizes.rollouts,
                "global_batch_size": sizes.rollouts,
                "lr": LEARNING_RATE,
                "lr_schedule": "constant",
                "optimizer": make_part("optimizer", "adamw", weight_decay=0.0),
            },
            "data": {"kind": "prompts", "path": [str(spec.folder / "prompts.jsonl")]},
            "rl": {"group_size": GROUP_SIZE, "advantage": "group_std"},
            "rollout": {"max_tokens": sizes.new},
            "reward": {"use": f"{spec.folder / 'reward.py'}:reward", "workers": 1},
            "checkpoint": {"init_from": str(spec.folder / "bytes"), "every": 0, "at_end": False},
        }
    )


def import_weights(turns: Turns, spec: ProcessSpec) -> None:
    """Import a folder to a checkpoint."""
    checkpoint = spec.scratch / "checkpoint"
    turns.take(lambda _: _import(spec, checkpoint), lambda _: shutil.rmtree(checkpoint))


def export_weights(turns: Turns, spec: ProcessSpec) -> None:
    """Export a checkpoint of the imported folder to a folder."""
    from moefold.convert.export_folder import ExportOptions, export_folder

    checkpoint = spec.scratch / "checkpoint"
    out = spec.scratch / "exported"
    _import(spec, checkpoint)

    def run(_: str) -> None:
        export_folder(checkpoint, out, current_world(), ExportOptions(), on_bytes=_ignore)

    turns.take(run, lambda _: shutil.rmtree(out))


def _import(spec: ProcessSpec, checkpoint: Path) -> None:
    from moefold.convert.import_folder import ImportOptions, import_folder

    options = ImportOptions(needs_tokenizer=False)
    import_folder(spec.folder / "large", checkpoint, current_world(), options, on_bytes=_ignore)


def _ignore(count: int) -> None:
    """Show no progress."""


def write_inputs(turns: Turns, spec: ProcessSpec) -> None:
    """Write the inputs of the implementations: weights, tokens and prompts."""
    turns.ready()
    turns.begin()
    folder = spec.folder
    sizes = spec.sizes
    generator = torch.Generator().manual_seed(SEED)
    cfg = step_recipe(sizes, "float32", {"world_size": 1}, sizes.samples)
    shape = sizes.samples, sizes.seq_len + 1
    torch.save(torch.randint(cfg.model.vocab_size, shape, generator=generator), folder / "tokens.pt")
    (folder / "prompts.json").write_text(json.dumps(_scenarios(sizes, generator)))
    (folder / "reward.py").write_text(REWARD)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(sizes.rollouts // GROUP_SIZE * spec.steps):
            text = "".join(chr(code) for code in torch.randint(97, 123, (sizes.prompt,), generator=generator).tolist())
            file.write(json.dumps({"prompt": text}) + "\n")
    write_model(folder / "model", _with_length(cfg, sizes.positions))
    write_model(folder / "bytes", _with_length(grpo_recipe(spec), 1024), never_ends=True)
    wide = {"hidden_size": sizes.folder_width, "ffn.moe.intermediate_size": sizes.folder_width}
    large = {"preset": sizes.preset, "ffn.moe.num_experts": 16} | wide
    write_model(folder / "large", config_from_dict({"model": large, "data": {"kind": "synthetic"}}))
    turns.end(asdict(sizes))


def _scenarios(sizes: Sizes, generator: torch.Generator) -> dict[str, tuple[list[list[int]], list[int]]]:
    """Return prompts and numbers of new tokens of the scenarios of decoding."""

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(256, (count, length), generator=generator).tolist()

    scenarios = {str(count): (prompts(count, sizes.prompt), [sizes.new] * count) for count in (1, 8, 64)}
    lengths = torch.empty(sizes.lengths).log_normal_(mean=3.5, std=0.8, generator=generator)
    scenarios["lengths"] = prompts(sizes.lengths, sizes.prompt), lengths.clamp(1, 4 * sizes.new).long().tolist()
    count, copies, length, new = sizes.shared
    scenarios["shared"] = [p for p in prompts(count, length) for _ in range(copies)], [new] * (count * copies)
    return scenarios


def _with_length(cfg: Config, positions: int) -> Config:
    return replace(cfg, train=replace(cfg.train, seq_len=positions))


@torch.no_grad()
def write_model(folder: Path, cfg: Config, *, never_ends: bool = False) -> None:
    """Write a model of transformers with random weights.

    Args:
        folder: the folder to write.
        cfg: the recipe of its sizes.
        never_ends: whether a constant in the residual stream gives the end-of-text token a logit far below the others,
            so that all implementations generate and train on equally many tokens.
    """
    torch.manual_seed(SEED)
    model = hugging_face_model(cfg, torch.device("cpu"), torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(std=cfg.model.init_std)
        if never_ends and name.endswith("embed_tokens.weight"):
            weight[:, 0] = CONSTANT
        elif never_ends and name.endswith("lm_head.weight"):
            weight[:, 0] = 0.0
            weight[0, 0] = -CONSTANT
        elif never_ends and name.endswith("gate.weight"):
            weight[:, 0] = 0.0
    if never_ends:
        model.config.output_router_logits = False
    # The recipe of the training references has no cache, which generation would take over.
    model.generation_config.use_cache = True
    # Mixtral's default ends texts at token 2.
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id = config.pad_token_id = 0 if never_ends else None
    model.save_pretrained(folder)


KINDS: dict[str, Callable[[Turns, ProcessSpec], None]] = {
    "train float32": partial(train, "float32"),
    "train bfloat16": partial(train, "bfloat16"),
    "train float32 ep2": partial(train, "float32", ep=2),
    "train float32 tp2": partial(train, "float32", tp=2),
    "generate": partial(generate, True),
    "generate unshared": partial(generate, False),
    "grpo": train_grpo,
    "import": import_weights,
    "export": export_weights,
    "inputs": write_inputs,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_implementation(KINDS, sys.argv[1:])
