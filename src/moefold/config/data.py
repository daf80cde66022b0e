"""The [data] section: source of the training tokens; see docs/data.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.field import BELOW_ONE, Bound, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the training tokens."""

    kind: Literal[
        "python-docs", "text", "tokens", "synthetic", "huggingface", "sft", "preference", "program", "task", "prompts"
    ] = "python-docs"
    """python-docs: documentation texts of this Python. text: files or folders. tokens: memory-mapped ids. synthetic:
    generated. huggingface: any source of the package `datasets`. sft: conversations for supervised fine-tuning
    ([data.md](data.md)). preference: pairs of completions, or completions with a label
    ([alignment.md](alignment.md)). program: samples that a Python program passes to `train_model`
    ([api.md](api.md)). task: problems generated from run.seed, with their answers, or without them for reinforcement
    learning. prompts: JSON lines for reinforcement learning ([rl.md](rl.md))."""
    path: str | tuple[str, ...] = ""
    """File or folder, or a list of them (text, tokens, sft, preference, prompts); huggingface: also a name on the
    hub. May be remote ([remote.md](remote.md))."""
    task: Literal["sort", "add", "countdown"] = "sort"
    """Problems of kind "task". sort: sort digits. add: add two numbers. countdown: combine all given numbers by + - *
    to a target."""
    task_size: Annotated[int, at_least(1)] = 4
    """Digits to sort, digits of each summand, or numbers to combine (task)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each path, in any unit; empty: paths are concatenated, so that each counts by its size."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json or its folder, which may be remote or hf://ORG/NAME."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the ids in a .bin file; .npy files store their own."""
    validation_fraction: Annotated[float, BELOW_ONE] = 0.05
    """Fraction of the tokens (sft, preference: of the rows; task, prompts: of the prompts) held out for evaluation."""
    document_end: Annotated[
        int, Bound("must be at least 0, or -1 (a sample is one document)", lambda token: token >= -1)
    ] = -1
    """Id of the token that ends a document, 0 with the tokenizer "bytes": attention is then masked to the document, and
    its first token is no target. -1: a sample counts as one document."""
    document_index: bool = False
    """Mask attention as document_end does, at the document boundaries that `moefold tokenize` recorded next to the
    tokens (tokens)."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How documents become samples. concatenate: the stream of all documents is split every seq_len tokens. best_fit:
    no document of up to seq_len + 1 tokens is split, and padding fills the rest of a sample (arXiv:2404.10830;
    python-docs, text, tokens, huggingface)."""
    corrupt: Literal["fatal", "skip"] = "fatal"
    """Handling of files that cannot be read to their end: fatal refuses the run; skip leaves out each such file as a
    whole and lists it in the log, token files also when they become unreadable during the run
    ([data.md](data.md#corrupt-files))."""
    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from run.seed."""
    column: str = "text"
    """Column with the text (huggingface)."""
    split: str = "train"
    """Split to train on (huggingface)."""
    validation_split: str = ""
    """Split to evaluate on instead of a part of `split` (huggingface)."""
    subset: str = ""
    """Configuration of a hub data set that has several (huggingface)."""
    revision: str = ""
    """Commit, tag or branch of a hub data set; only a commit always gives the same text (huggingface)."""
    streaming: bool = False
    """Tokenise during training, in bounded memory and without a cache (huggingface)."""
    chat_template: str = ""
    """File with a Jinja chat template; empty: the tokenizer's own, ChatML for bytes (sft, preference, prompts)."""
    overlong: Literal["cut", "refuse"] = "cut"
    """Handling of conversations (preference: pairs) longer than seq_len + 1 tokens (sft, preference)."""
    skip_bad_rows: bool = False
    """Skip rows that are no conversation, pair or prompt, that the template refuses, or that lack the reward or the
    columns of the verifier, and log their number; false: the first one ends the run (sft, preference, prompts)."""
