"""Time a GRPO step against TRL's GRPOTrainer: the same model, prompts, rewards and lengths, one thread each.

    python benchmarks/grpo_step.py --samples 64 --prompt 32 --new 64       needs pip install -e '.[align-check]'

The model is the quickstart preset as a Mixtral of transformers (2.6 M parameters), on the CPU in float32. No token can
end a completion early, so both generate and train on equally many tokens: a large constant in the residual stream gives
the end-of-text token a logit far below the others. Processes of both alternate; each runs `--steps` steps and the first
two do not count. TRL runs with each experts implementation of transformers, and the faster one counts. A step is
everything between two optimizer updates. The reward is a Python function of the ids, computed by TRL in its process and
by moefold in a worker. CPU time is the time of the training process; wall time depends on what else the machine does.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.rivals import hugging_face_model
from moefold.config.load import config_from_dict
from moefold.config.part import make_part
from moefold.config.schema import Config

GROUP_SIZE = 8
WARM_UP = 2
SEED = 5
LEARNING_RATE = 1e-6
CONSTANT = 20.0
"""Value of channel 0 of the residual stream."""
REWARD = """
def reward(prompts, completions, completion_ids, **columns):
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]
"""
IMPLEMENTATIONS = ("moefold", "trl grouped_mm", "trl eager")


def recipe(args: argparse.Namespace) -> Config:
    """Return the recipe of moefold, in a working folder that `main` has filled."""
    return config_from_dict(
        {
            "run": {"dir": f"{args.folder}/run", "steps": args.steps, "device": "cpu", "dtype": "float32"},
            "model": {"preset": "quickstart"},
            "moe": {"aux_loss": 0.0},
            "train": {
                "seq_len": args.prompt + args.new,
                "micro_batch_size": args.samples,
                "global_batch_size": args.samples,
                "lr": LEARNING_RATE,
                "lr_schedule": "constant",
                "optimizer": make_part("optimizer", "adamw", weight_decay=0.0),
            },
            "data": {"kind": "prompts", "path": [f"{args.folder}/prompts.jsonl"]},
            "rl": {"group_size": GROUP_SIZE, "advantage": "group_std"},
            "rollout": {"max_tokens": args.new},
            "reward": {"use": f"{args.folder}/reward.py:reward", "workers": 1},
            "checkpoint": {"init_from": f"{args.folder}/model", "every": 0, "at_end": False},
        }
    )


class Clock:
    """Wall and CPU time at the end of each step, and the numbers of new tokens."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.tokens: list[float] = []

    def tick(self) -> None:
        """Record the end of a step."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.times.append((time.perf_counter(), usage.ru_utime + usage.ru_stime))

    def record(self) -> dict[str, Any]:
        """Return the times of the steps that count, and the mean number of new tokens of a completion."""
        steps = list(zip(self.times[WARM_UP - 1 :], self.times[WARM_UP:], strict=False))
        return {
            "wall_s": [b[0] - a[0] for a, b in steps],
            "cpu_s": [b[1] - a[1] for a, b in steps],
            "tokens": statistics.mean(self.tokens[WARM_UP:]),
        }


def train_moefold(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps of moefold."""
    from moefold.comm.groups import ParallelGroups
    from moefold.host.rank_env import RankEnv
    from moefold.launch.ranks import init_distributed
    from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
    from moefold.train.signals import StopSignals
    from moefold.train.trainer import Trainer
    from moefold.validate.config import check_config

    clock = Clock()

    class Ticks(Callback):
        """Records each step."""

        def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
            """See `Callback`."""
            clock.tick()

    cfg = recipe(args)
    env = RankEnv(rank=0, local_rank=0, world_size=1, master_address="127.0.0.1", master_port=0)
    with init_distributed(env, "cpu") as device:
        Trainer(cfg, ParallelGroups.create(check_config(cfg), device), callbacks=[Ticks()]).run(StopSignals())
    lines = (Path(cfg.run.dir) / "metrics.jsonl").read_text().splitlines()
    clock.tokens = [json.loads(line)["rl"]["length_mean"] for line in lines]
    return clock.record()


def train_trl(args: argparse.Namespace, experts: str) -> dict[str, Any]:
    """Run the steps of TRL with an experts implementation of transformers."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock()

    class Ticks(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Records each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """See `TrainerCallback`."""
            clock.tick()

    def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.tokens.append(statistics.mean(map(len, completion_ids)))
        return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]

    model = transformers.AutoModelForCausalLM.from_pretrained(f"{args.folder}/model", dtype=torch.float32)
    model.set_experts_implementation(experts)
    settings = GRPOConfig(
        output_dir=f"{args.folder}/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.samples,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=args.new,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=SEED,
    )
    rows = [json.loads(line) for line in Path(f"{args.folder}/prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=_byte_tokenizer(),
        callbacks=[Ticks()],
    )
    trainer.train()
    return clock.record()


def _byte_tokenizer() -> Any:
    """Return a tokenizer of transformers whose ids are bytes, with the end of text 0, as moefold's."""
    import tokenizers
    import transformers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    characters = {byte: chr(byte) if byte in printable else chr(next(others)) for byte in range(256)}
    vocabulary = {character: byte for byte, character in characters.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    end = characters[0]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


@torch.no_grad()
def write_inputs(args: argparse.Namespace) -> int:
    """Write model, prompts and reward function; return the number of parameters."""
    torch.manual_seed(SEED)
    folder = Path(args.folder)
    (folder / "reward.py").write_text(REWARD)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(args.samples // GROUP_SIZE * args.steps):
            text = "".join(chr(code) for code in torch.randint(97, 123, (args.prompt,)).tolist())
            file.write(json.dumps({"prompt": text}) + "\n")
    cfg = replace(recipe(args), train=replace(recipe(args).train, seq_len=1024))
    model = hugging_face_model(cfg, torch.device("cpu"), torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = CONSTANT
        elif name.endswith("lm_head.weight"):
            weight[:, 0] = 0.0
            weight[0, 0] = -CONSTANT
        elif name.endswith("gate.weight"):
            weight[:, 0] = 0.0
    model.config.output_router_logits = False
    # Mixtral's default ends texts at token 2.
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id = config.pad_token_id = 0
    model.save_pretrained(folder / "model")
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help="rollouts of a step, in groups of 8")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=6, help="steps of a process; the first two do not count")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each implementation, in turn")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        kind, _, experts = args.one.partition(" ")
        found = train_moefold(args) if kind == "moefold" else train_trl(args, experts)
        print("\n" + json.dumps(found))
        return
    results: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "cpu_s": []} for name in IMPLEMENTATIONS}
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        print(f"{write_inputs(args) / 1e6:.1f} M parameters, {args.samples} x ({args.prompt} + {args.new}) tokens")
        for _ in range(args.rounds):
            for name in IMPLEMENTATIONS:
                found = _run_process(args, name)
                assert found["tokens"] == args.new, (name, found["tokens"])
                print(f"{name}: CPU {statistics.median(found['cpu_s']):.3f} s a step", flush=True)
                for key, values in results[name].items():
                    values += found[key]
    ours = results["moefold"]
    for name, of_steps in results.items():
        medians = {key: statistics.median(values) for key, values in of_steps.items()}
        ratios = {key: medians[key] / statistics.median(ours[key]) for key in medians}
        print(
            f"{name:16} CPU {medians['cpu_s']:7.3f} s a step ({ratios['cpu_s']:.2f} x), "
            f"wall {medians['wall_s']:7.3f} s ({ratios['wall_s']:.2f} x)"
        )


def _run_process(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one implementation in a process of its own, with one thread."""
    options = {"samples": args.samples, "prompt": args.prompt, "new": args.new, "steps": args.steps}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        for entry in ("model", "prompts.jsonl", "reward.py"):
            (Path(scratch) / entry).symlink_to(Path(args.folder) / entry)
        process = subprocess.run(
            [sys.executable, __file__, *words, "--one", name, "--folder", scratch],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stdout}\n{process.stderr}")
    found: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
