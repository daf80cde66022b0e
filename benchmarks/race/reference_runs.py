"""Runs of other packages in the race: transformers, torch's DDP, vLLM, TRL, safetensors, an import of torch.

It also runs in an environment without moefold: each implementation imports its package when it is built.
"""

import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race.run_protocol import (
    GROUP_SIZE,
    LEARNING_RATE,
    SEED,
    ProcessSpec,
    Turns,
    grpo_prompts,
    prompts_of,
    run_implementation,
)

MAX_GRAD_NORM = 1.0


def training_step(
    model: nn.Module, loss: Callable[[], Tensor], lr: float, masters: list[Tensor] | None, clip: float | None = None
) -> Callable[[], float]:
    """Return forward, backward and AdamW of torch. On float32 master weights, if they are given.

    Args:
        model: the module whose parameters are trained.
        loss: computes the loss of the batch.
        lr: the learning rate.
        masters: float32 copies of the parameters, which have a lower precision.
        clip: the largest norm of the gradients; None does not clip.
    """
    parameters: list[Tensor] = list(model.parameters())
    trained = parameters if masters is None else masters
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)

    def step() -> float:
        value = loss()
        value.backward()
        for master, parameter in zip(masters or (), parameters, strict=masters is not None):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        if masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def train(experts: str, dtype: torch.dtype, turns: Turns, spec: ProcessSpec) -> None:
    """Train the model of transformers; with several ranks by torch's DistributedDataParallel."""
    model = _pretrained(spec.folder / "model", experts).train()
    wrapped: Any = model
    if spec.ranks > 1:
        store = f"tcp://127.0.0.1:{spec.port}"
        torch.distributed.init_process_group("gloo", store, rank=spec.rank, world_size=spec.ranks)
        wrapped = nn.parallel.DistributedDataParallel(model)
    masters = None
    if dtype != torch.float32:
        masters = [p.detach().clone() for p in model.parameters()]
        model.to(dtype)
    tokens = torch.load(spec.folder / "tokens.pt").chunk(spec.ranks)[spec.rank][:, :-1].contiguous()
    step = training_step(model, lambda: wrapped(input_ids=tokens, labels=tokens).loss, 1e-4, masters, MAX_GRAD_NORM)
    turns.take(lambda _: {"loss": step()})


def _pretrained(folder: Path, experts: str) -> Any:
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation(experts)
    return model


def generate(experts: str, turns: Turns, spec: ProcessSpec) -> None:
    """Generate with transformers' `generate`, all samples at once, to the length of the longest one."""
    model = _pretrained(spec.folder / "model", experts).eval()
    model.config.output_router_logits = False

    @torch.no_grad()
    def run(scenario: str) -> dict[str, Any]:
        prompts, lengths = prompts_of(spec.folder, scenario)
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        new = out[:, ids.shape[1] :].tolist()
        return {"tokens": [row[:length] for row, length in zip(new, lengths, strict=True)]}

    turns.take(run)


def batch_continuously(turns: Turns, spec: ProcessSpec) -> None:
    """Generate with transformers' continuous batching."""
    from transformers import GenerationConfig

    model = _pretrained(spec.folder / "model", "grouped_mm").eval()
    settings = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)

    @torch.no_grad()
    def run(scenario: str) -> dict[str, Any]:
        prompts, lengths = prompts_of(spec.folder, scenario)
        completions: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(generation_config=settings) as manager:
            ids = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
            while len(completions) < len(ids):
                result = manager.get_result(timeout=10)
                if result is None and not manager.is_running():
                    raise RuntimeError("the thread of continuous batching ended")
                if result is not None and result.is_finished():
                    completions[result.request_id] = result.generated_tokens
        return {"tokens": [completions[request_id] for request_id in ids]}

    turns.take(run)


VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def serve_vllm(turns: Turns, spec: ProcessSpec) -> None:
    """Generate with vLLM in this process, without a compiler."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(spec.folder / "model"),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=spec.sizes.positions,
        max_num_seqs=256,
        generation_config="vllm",
    )

    def run(scenario: str) -> dict[str, Any]:
        prompts, lengths = prompts_of(spec.folder, scenario)
        llm.reset_prefix_cache()
        settings = [
            SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
        return {"tokens": [list(output.outputs[0].token_ids) for output in done]}

    turns.take(run)


def train_trl(experts: str, turns: Turns, spec: ProcessSpec) -> None:
    """Run the steps of TRL's GRPO trainer; a turn is everything between two updates of the optimizer."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[float] = []

    class Ticks(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Ends a turn with each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """See `TrainerCallback`."""
            turns.end({"new": lengths[-1]})
            turns.begin()

    def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]

    model = _pretrained(spec.folder / "bytes", experts)
    settings = GRPOConfig(
        output_dir=str(spec.scratch),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=spec.sizes.rollouts,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=spec.sizes.new,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=spec.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=SEED,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(grpo_prompts(spec.folder)),
        processing_class=_byte_tokenizer(),
        callbacks=[Ticks()],
    )
    turns.ready()
    turns.begin()
    trainer.train()


def _byte_tokenizer() -> Any:
    """Return a tokenizer of transformers whose ids are bytes, with the end of text 0, like moefold's tokenizer."""
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


def copy_safetensors(num_digests: int, turns: Turns, spec: ProcessSpec) -> None:
    """Read the files of a folder into memory and write them, only with safetensors.

    Args:
        num_digests: SHA-256 digests of all weights: with 2, one of the bytes read and one of the bytes written.
        turns: the turns of this process.
        spec: its place in the race.
    """
    from safetensors.torch import load_file, save_file

    out = spec.scratch / "model.safetensors"

    def run(_: str) -> None:
        tensors = {}
        for path in sorted((spec.folder / "large").glob("*.safetensors")):
            # Mapped files would be read by `save_file` while it writes.
            tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}
        for _ in range(num_digests):
            digest = hashlib.sha256()
            for tensor in tensors.values():
                digest.update(tensor.flatten().numpy())
        save_file(tensors, out)

    turns.take(run, lambda _: out.unlink())


def import_module(name: str, turns: Turns, spec: ProcessSpec) -> None:
    """Import a module in a fresh process each turn, and report the CPU time of that process."""

    def run(_: str) -> Mapping[str, float]:
        before = os.times()
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True, stdin=subprocess.DEVNULL)
        after = os.times()
        return {"cpu_s": after[2] + after[3] - before[2] - before[3]}

    turns.take(run)


KINDS: dict[str, Callable[[Turns, ProcessSpec], None]] = {
    "train grouped_mm float32": partial(train, "grouped_mm", torch.float32),
    "train eager float32": partial(train, "eager", torch.float32),
    "train grouped_mm bfloat16": partial(train, "grouped_mm", torch.bfloat16),
    "train eager bfloat16": partial(train, "eager", torch.bfloat16),
    "generate grouped_mm": partial(generate, "grouped_mm"),
    "generate eager": partial(generate, "eager"),
    "generate continuously": batch_continuously,
    "vllm": serve_vllm,
    "trl grouped_mm": partial(train_trl, "grouped_mm"),
    "trl eager": partial(train_trl, "eager"),
    "safetensors": partial(copy_safetensors, 0),
    "safetensors with hashes": partial(copy_safetensors, 2),
    "import torch": partial(import_module, "torch"),
    "import trainer": partial(import_module, "moefold.train.trainer"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_implementation(KINDS, sys.argv[1:])
