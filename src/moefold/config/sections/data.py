"""The [data] section: source of the training tokens, described in docs/data.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import BELOW_ONE, Bound, ReadIf, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the training tokens."""

    kind: Literal[
        "python-docs", "text", "tokens", "synthetic", "huggingface", "sft", "preference", "program", "task", "prompts"
    ] = "python-docs"
    """python-docs: documentation texts of this Python. text: files or folders. tokens: files of ids. synthetic:
    generated. huggingface: any source of the package `datasets`. sft: conversations for supervised fine-tuning
    ([data.md](data.md)). preference: pairs of completions, or completions with a label
    ([alignment.md](alignment.md)). program: samples that a Python program passes to `train_model`
    ([api.md](api.md)). task: problems generated from run.seed, with their answers, or without them for reinforcement
    learning. prompts: JSON lines for reinforcement learning ([rl.md](rl.md))."""
    path: Annotated[str | tuple[str, ...], ReadIf("data.kind=text|tokens|huggingface|sft|preference|prompts")] = ""
    """File or folder, or a list of them (text, tokens, sft, preference, prompts). huggingface: also a name on the hub.
    May be remote ([remote.md](remote.md))."""
    task: Annotated[Literal["sort", "add", "countdown"], ReadIf("data.kind=task")] = "sort"
    """Problems of kind "task". sort: sort digits. add: add two numbers. countdown: combine all given numbers by + - *
    to a target."""
    task_size: Annotated[int, at_least(1), ReadIf("data.kind=task")] = 4
    """Digits to sort, digits of each summand, or numbers to combine (task)."""
    weights: Annotated[tuple[float, ...], ReadIf("data.kind=text|tokens|huggingface|sft|preference")] = ()
    """Sampling weight of each path, in any unit. Empty: paths are concatenated, so that each counts by its size."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json or its folder, which may be remote or hf://ORG/NAME."""
    token_dtype: Annotated[Literal["uint16", "uint32", "int32", "int64"], ReadIf("data.kind=tokens")] = "uint16"
    """Type of the ids in a .bin file. .npy files store their own."""
    validation_fraction: Annotated[float, BELOW_ONE, ReadIf("data.kind!=program")] = 0.05
    """Fraction of the tokens, rows (sft, preference) or prompts (task, prompts) that is held out for evaluation."""
    document_end: Annotated[
        int,
        Bound("must be at least 0, or -1 (a sample is one document)", lambda token: token >= -1),
        ReadIf("data.kind=python-docs|text|tokens|synthetic|huggingface"),
        ReadIf("data.document_index=false"),
    ] = -1
    """Id of the token that ends a document, 0 with the tokenizer "bytes": attention is then masked to the document, and
    its first token is not a target. -1: a sample counts as one document."""
    document_index: Annotated[bool, ReadIf("data.kind=tokens")] = False
    """Mask attention as document_end does, at the boundaries that `moefold tokenize` recorded (tokens)."""
    packing: Annotated[Literal["concatenate", "best_fit"], ReadIf("data.kind=python-docs|text|tokens|huggingface")] = (
        "concatenate"
    )
    """Packing of documents. concatenate: the stream of all documents is split every seq_len tokens. best_fit: no
    document of up to seq_len + 1 tokens is split, and padding fills the rest of a sample (arXiv:2404.10830). For
    python-docs, text, tokens and huggingface."""
    corrupt: Annotated[Literal["fatal", "skip"], ReadIf("data.kind=text|tokens|huggingface|sft|preference")] = "fatal"
    """Handling of files that cannot be read to their end. fatal: the run is refused. skip: each such file is left out
    as a whole and listed in the log, token files also when they become unreadable during the run
    ([data.md](data.md#corrupt-files))."""
    shuffle: Annotated[bool, ReadIf("data.kind!=program"), ReadIf("data.kind!=task")] = True
    """Visit the samples of each epoch in an order drawn from run.seed."""
    column: Annotated[str, ReadIf("data.kind=huggingface")] = "text"
    """Column with the text (huggingface)."""
    split: Annotated[str, ReadIf("data.kind=huggingface")] = "train"
    """Split to train on (huggingface)."""
    validation_split: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Split to evaluate on instead of a part of `split` (huggingface)."""
    subset: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Configuration of a hub data set that has several (huggingface)."""
    revision: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Commit, tag or branch of a hub data set. Only a commit always gives the same text (huggingface)."""
    streaming: Annotated[bool, ReadIf("data.kind=huggingface")] = False
    """Tokenise during training, in bounded memory and without a cache (huggingface)."""
    chat_template: Annotated[str, ReadIf("data.kind=sft|preference|prompts")] = ""
    """File with a Jinja chat template. Empty: the tokenizer's own, ChatML for bytes (sft, preference, prompts)."""
    overlong: Annotated[Literal["cut", "refuse"], ReadIf("data.kind=sft|preference")] = "cut"
    """Handling of conversations (preference: pairs) longer than seq_len + 1 tokens (sft, preference)."""
    skip_bad_rows: Annotated[bool, ReadIf("data.kind=sft|preference|prompts")] = False
    """Skip rows that are not a conversation, pair or prompt, that the template refuses, or that lack the reward or the
    columns of the verifier, and log their number. False: the first one ends the run (sft, preference, prompts)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of `path`, also if it is a single one."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def drops_files(self) -> bool:
        """Return whether token files that become unreadable during the run are left out."""
        return self.kind == "tokens" and self.corrupt == "skip"

    @property
    def has_conversations(self) -> bool:
        """Return whether the samples are conversations or pairs of them."""
        return self.kind in ("sft", "preference")

    @property
    def has_prompts(self) -> bool:
        """Return whether reinforcement learning can take its prompts from the data."""
        return self.kind in ("task", "prompts")

    @property
    def has_documents(self) -> bool:
        """Return whether attention is masked at document boundaries."""
        return self.document_end >= 0 or self.document_index or self.has_conversations or self.has_prompts

    @property
    def may_have_documents(self) -> bool:
        """Return whether a sample may hold several documents. The samples of a program are not known before it runs."""
        return self.has_documents or self.kind == "program"

    @property
    def reads_rows(self) -> bool:
        """Return whether the data are JSON lines of conversations, pairs or prompts."""
        return self.has_conversations or self.kind == "prompts"
