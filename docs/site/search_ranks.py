"""Ranks of the site's search: which pages come first, which are left out, and other words for pages and recipe keys.

A hook of mkdocs that runs after the plugin `search` has written its index.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

BOOSTS = (
    ("how-to/", 8.0),
    ("tutorials/", 4.0),
    ("recipe.html", 4.0),
    ("commands.html", 3.0),
    ("install.html", 3.0),
    ("metrics.html", 3.0),
    ("python-reference.html", 0.3),
    ("performance.html", 0.3),
    ("design/", 0.1),
    ("changelog.html", 0.1),
    ("contributing.html", 0.1),
)
"""Factor of the rank of the pages whose address begins so; 1 for others."""
LEFT_OUT = ("log.html", "log/", "files.html", "tests/", "benchmarks/", "documentation.html")
WORDS = {
    "how-to/run-out-of-memory.html": ("oom", "out of memory", "cuda memory", "killed", "sigkill"),
    "how-to/change-the-mapping.html": ("tensor parallel", "degrees", "mapping", "resume", "reshard", "another cluster"),
    "how-to/find-a-slow-rank.html": ("slow", "straggler", "throughput"),
    "how-to/export-and-serve.html": ("export", "serve", "vllm", "sglang"),
    "how-to/continue-pretraining.html": ("continued pretraining", "cpt"),
    "how-to/eight-gpus-and-jsonl.html": ("jsonl", "own data", "pretrain"),
    "how-to/long-documents.html": ("long context", "128k"),
    "how-to/upcycle.html": ("upcycle", "upcycling", "sparse upcycling"),
    "tutorials/first-run.html": ("quickstart", "getting started", "first run"),
    "tutorials/fine-tune-chat.html": ("sft", "fine-tune", "chat"),
    "tutorials/grpo.html": ("grpo",),
    "tutorials/debug-a-hang.html": ("hang", "stuck", "deadlock", "nccl timeout"),
    "tutorials/hugging-face-model.html": ("hugging face", "huggingface", "hf", "qwen3", "mixtral", "deepseek", "olmoe"),
    "conversion.html": ("qwen3", "qwen", "llama", "mixtral", "deepseek", "gpt-oss", "import", "convert"),
    "comparison.html": ("megatron", "torchtitan", "deepspeed", "nemo", "olmo-core", "alternatives"),
    "alignment.html": ("dpo", "kto", "ipo", "simpo", "preference"),
    "rl.html": ("reinforcement learning", "rlhf", "ppo", "rlvr"),
    "lora.html": ("lora", "peft", "adapter"),
    "install.html": ("install", "pip", "docker", "container", "windows", "macos"),
    "cluster.html": ("slurm", "torchrun", "kubernetes", "multi-node", "sbatch"),
    "checkpoints.html": ("checkpoint", "save"),
    "board.html": ("board", "tensorboard", "wandb", "dashboard", "curves"),
    "silent-faults.html": ("nan", "loss spike", "divergence"),
    "failures.html": ("watchdog", "crash"),
    "elastic.html": ("preemption", "elastic", "fewer nodes"),
    "fp8.html": ("fp8", "float8", "low precision"),
    "pipeline.html": ("pipeline", "zero bubble", "1f1b", "dualpipe"),
    "metrics.html": ("metrics", "mfu", "tokens per second", "perplexity"),
    "planner.html": ("planner", "auto parallel"),
    "recipe.html#train.lr": ("lr", "learning rate"),
    "recipe.html#train.global_batch_size": ("batch size", "gradient accumulation"),
    "recipe.html#train.lr_schedule": ("cosine", "wsd", "learning rate schedule"),
}
"""Other words by which readers look for a page or a section, which count more than any word of a text."""


def on_post_build(config: "MkDocsConfig") -> None:
    """Write the boosts and the words into the index of the search, and take out pages that nobody looks for."""
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = ranked(index["docs"])
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def ranked(entries: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the entries of a search index that stay, with boosts and words.

    Raises:
        ValueError: words are given for an entry that does not exist.
    """
    found = []
    words = dict(WORDS)
    for entry in entries:
        location = str(entry["location"])
        if location.startswith(LEFT_OUT):
            continue
        boost = next((factor for start, factor in BOOSTS if location.startswith(start)), 1.0)
        tags = words.pop(location, ())
        found.append({**entry, "boost": boost} | ({"tags": list(tags)} if tags else {}))
    if words:
        raise ValueError(f"docs/site/search_ranks.py: WORDS has sections that the site has not: {', '.join(words)}")
    return found
