"""Open the data of a recipe: training samples, validation samples and the tokenizer; synthetic data."""

import logging
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.data.sample import ReferenceLogProbs, Sample, SampleSource
from moefold.data.sampler import (
    IndexAnnotatedSamples,
    IndexRanges,
    MixtureSampler,
    PackedSamples,
    Sampler,
    SplitSampler,
    split_samples,
)
from moefold.data.skip_corrupt import corrupt_files, report_skipped, skipped_files
from moefold.data.source_listing import named_sources
from moefold.data.token_file import (
    TokenFileSet,
    TokenFileStream,
    build_token_file_set,
    compare_tokenizers,
    read_npy_header,
    token_files,
)
from moefold.data.tokenizer import OffsetTokenizer, Tokenizer, load_tokenizer, report_notes
from moefold.errors import ConfigError
from moefold.integer_hash import draw_bits, hash_ints
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.data.sources.huggingface import TextTables
    from moefold.data.sources.text_source import Corpus

logger = logging.getLogger(__name__)
# The validation order does not depend on the seed and is shuffled, so its first samples cover the whole data set.
_VALIDATION_ORDER = hash_ints(0)
_VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training and validation samples of a run. The two parts share no token."""

    train: Sampler
    """Training samples; reshuffled every epoch if data.shuffle."""
    validation: Sampler
    """Held-out samples; empty if data.validation_fraction is 0. Shuffled in the same order for every seed."""
    tokenizer: Tokenizer
    """Converts text to ids and back."""
    reference: ReferenceLogProbs | None = None
    """Log-probabilities of all pairs under the reference model, for the trainer to fill in; None without pairs."""


NEEDS_PROGRAM = (
    'data.kind="program" takes its samples from a program, which calls moefold.train_model(recipe, data=...); '
    "choose another kind for a command"
)
"""Message if no program passes samples."""


NEEDS_RL = (
    'data.kind="prompts" has no answers to train on: `moefold train` reads it, with rl.group_size above 0; choose '
    'data.kind="synthetic" for other commands'
)
"""Message if prompts would be trained on as text."""


class NoSamples(Sampler):
    """Source without samples."""

    def __len__(self) -> int:
        return 0

    def annotated_sample(self, index: int) -> Sample:
        """Raise ConfigError."""
        raise ConfigError("there is no sample")


@dataclass(frozen=True, slots=True)
class ProgramData:
    """Samples that a program passes to `train_model`, for data.kind="program".

    A program derives from `Sampler`; its `annotated_sample` returns tokens, weights of the targets and the columns of
    its loss. Every rank has its own copy and reads the samples of its data-parallel rank. Sample `index` must be the
    same on every rank. The position of a run is the number of samples it has read.
    """

    train: Sampler
    validation: Sampler = field(default_factory=NoSamples)

    def check(self, seq_len: int) -> None:
        """Raise ConfigError if samples have another length, or annotations although `has_annotations` is False."""
        for sampler in (self.train, self.validation):
            if not len(sampler):
                continue
            if sampler.seq_len != seq_len:
                raise ConfigError(f"train.seq_len={seq_len} must be the seq_len of the samples, {sampler.seq_len}")
            if not sampler.has_annotations and sampler.annotated_sample(0).is_annotated:
                raise ConfigError(
                    f"samples of {type(sampler).__name__} have columns, weights or document_ids; "
                    "set has_annotations = True"
                )


class DatasetRequest(TypedDict):
    """Arguments of `open_dataset` and `prepare` that a recipe determines."""

    data: DataConfig
    seq_len: int
    vocab_size: int
    seed: int
    align: AlignConfig


def dataset_request(cfg: Config) -> DatasetRequest:
    """Return the arguments that open the data of a recipe."""
    return {
        "data": cfg.data,
        "seq_len": cfg.train.seq_len,
        "vocab_size": cfg.model.vocab_size,
        "seed": cfg.run.seed,
        "align": cfg.align,
    }


def open_dataset(
    data: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    seed: int,
    token_file_set: TokenFileSet | None = None,
    align: AlignConfig | None = None,
) -> Dataset:
    """Open the data of a recipe; every process that passes the same arguments gets the same samples.

    Text is tokenised on the first call and read from the cache afterwards: call `prepare` before starting ranks.

    Args:
        seq_len: train.seq_len, S. A sample has S + 1 tokens.
        vocab_size: model.vocab_size; every id is below it.
        seed: run.seed; it determines the order of the training samples, and the whole data of kind "synthetic".
        token_file_set: the token files recorded when the run began; None: list the files now.

    Raises:
        ConfigError: the data is missing, broken, too small, or does not fit the model's vocabulary.
    """
    return _DatasetBuilder(
        data, seq_len, vocab_size, seed, align or AlignConfig(), token_file_set=token_file_set
    ).open()


def prepare(
    data: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    seed: int,
    align: AlignConfig | None = None,
) -> Path | None:
    """Tokenise text into the cache and check token ids, once before ranks start, with progress on stderr.

    Returns the file of tokenised text; None for kinds of data that need none, and for mixtures.
    """
    if data.kind == "tokens" and data.corrupt == "fatal":
        files = token_files(data)
        TokenFileStream(files, vocab_size=vocab_size).probe()
        if note := compare_tokenizers(files, load_tokenizer(data, vocab_size=vocab_size), data.tokenizer):
            logger.warning("%s", note)
    opener = _DatasetBuilder(data, seq_len, vocab_size, seed, align or AlignConfig(), is_first=True)
    dataset = opener.open()
    report_notes(dataset.tokenizer)
    train = dataset.train
    train.sample(train.next_sample_indices(0, 1)[0])
    return opener.cached_path


@dataclass(slots=True)
class _DatasetBuilder:
    """Arguments of `open_dataset`, and the results of its intermediate steps."""

    data: DataConfig
    seq_len: int
    vocab_size: int
    seed: int
    align: AlignConfig
    is_first: bool = False
    """This process opens the data before all others: it shows progress and logs skipped files."""
    cached_path: Path | None = None
    token_file_set: TokenFileSet | None = None
    _skipped: Set[Path] = frozenset()

    def open(self) -> Dataset:
        data = self.data
        tokenizer = load_tokenizer(data, vocab_size=self.vocab_size)
        if data.weights:
            sources = [replace(self, data=replace(data, path=path, weights=())).open() for path in data.paths]
            return Dataset(
                MixtureSampler([source.train for source in sources], data.weights),
                MixtureSampler([source.validation for source in sources], data.weights),
                tokenizer,
            )
        if self.token_file_set is None and data.drops_files:
            self.token_file_set = self._build_token_file_set()
        if self.token_file_set is None:
            self._skipped = skipped_files(data, reports=self.is_first)
        if data.has_conversations:
            return self._conversations(cast(OffsetTokenizer, tokenizer))
        if data.kind == "task":
            from moefold.data.synthetic_problems import open_task

            training_problems, held_out = open_task(data, tokenizer, seq_len=self.seq_len, seed=self.seed)
            return Dataset(training_problems, held_out or NoSamples(), tokenizer)
        if data.kind == "prompts":
            raise ConfigError(NEEDS_RL)
        if data.streaming:
            return Dataset(self._stream(tokenizer), self._held_out_split(tokenizer), tokenizer)
        source = self._source(tokenizer, data.split)
        if data.validation_split:
            return Dataset(self._all_of(source), self._held_out_split(tokenizer), tokenizer)
        training, validation = split_samples(len(source), data.validation_fraction)
        return Dataset(
            SplitSampler(source, training, order_key=self._order_key),
            SplitSampler(source, validation, order_key=_VALIDATION_ORDER, split_name=_VALIDATION),
            tokenizer,
        )

    def _build_token_file_set(self) -> TokenFileSet:
        faults = corrupt_files(self.data)
        skipped = {name for name, file in named_sources(self.data) if file in faults}
        shards = build_token_file_set(self.data, vocab_size=self.vocab_size, skipped=skipped)
        if self.is_first:
            report_skipped(faults | {Path(name): fault for name, fault in shards.dropped.items()})
        return shards

    @property
    def _order_key(self) -> int | None:
        return hash_ints(self.seed) if self.data.shuffle else None

    def _source(self, tokenizer: Tokenizer, split: str) -> SampleSource:
        data = self.data
        if data.kind == "program":
            raise ConfigError(NEEDS_PROGRAM)
        if data.kind == "synthetic":
            check_no_data_path(data)
            return SyntheticSamples(
                seed=self.seed, vocab_size=self.vocab_size, seq_len=self.seq_len, document_end=data.document_end
            )
        if data.kind == "tokens":
            files = token_files(data, self._skipped) if self.token_file_set is None else self.token_file_set.files(data)
        else:
            from moefold.data.token_cache import cached_tokens

            texts = _texts(data, split, self._skipped)
            self.cached_path = cached_tokens(texts, tokenizer, shows_progress=self.is_first)
            files = (read_npy_header(self.cached_path),)
        dropped = () if self.token_file_set is None else self.token_file_set.dropped
        stream = TokenFileStream(files, vocab_size=self.vocab_size, dropped=dropped, is_indexed=data.document_index)
        if data.packing == "best_fit":
            from moefold.data.best_fit import recipe_best_fit

            packed_documents = recipe_best_fit(data, stream, files, seq_len=self.seq_len)
            if self.is_first:
                logger.warning("%s", packed_documents.counts.describe(self.seq_len + 1))
            return packed_documents
        check_enough_tokens(len(stream), seq_len=self.seq_len)
        if data.document_index:
            return IndexAnnotatedSamples(stream, self.seq_len)
        return PackedSamples(stream, self.seq_len, data.document_end)

    def _all_of(self, source: SampleSource) -> SplitSampler:
        return SplitSampler(source, IndexRanges((range(len(source)),)), order_key=self._order_key)

    def _held_out_split(self, tokenizer: Tokenizer) -> SplitSampler:
        """Return the split named by data.validation_split, which is cached, as it is read at every evaluation."""
        if not self.data.validation_split:
            return SplitSampler(
                SyntheticSamples(seed=0, vocab_size=1, seq_len=self.seq_len),
                IndexRanges(()),
                order_key=None,
                split_name=_VALIDATION,
            )
        source = self._source(tokenizer, self.data.validation_split)
        return SplitSampler(
            source, IndexRanges((range(len(source)),)), order_key=_VALIDATION_ORDER, split_name=_VALIDATION
        )

    def _stream(self, tokenizer: Tokenizer) -> Sampler:
        from moefold.data.sources.huggingface import text_tables
        from moefold.data.streaming_sampler import StreamingSampler

        texts = text_tables(self.data, self.data.split, self._skipped)
        order_key = self._order_key
        document_end = self.data.document_end
        return StreamingSampler(texts, tokenizer, seq_len=self.seq_len, order_key=order_key, document_end=document_end)

    def _conversations(self, tokenizer: OffsetTokenizer) -> Dataset:
        """Return conversations for fine-tuning, also by rewards, or preference pairs."""
        from moefold.data.preference import pack_pairs, preference_reader
        from moefold.data.scored_conversations import conditioned_reader, open_rewards, rewarded_reader
        from moefold.data.sft import open_conversations, pack_conversations

        data = self.data
        sizes = {"seq_len": self.seq_len, "pad_id": tokenizer.separator_id or 0}
        method = chosen_in(self.align, AlignmentPart)
        reader = preference_reader(self.align) if data.kind == "preference" else None
        if method.prompt_template:
            reader = conditioned_reader(method)
        elif method.reward_column and data.skip_bad_rows:
            reader = rewarded_reader(method.reward_column)
        conversations = open_conversations(data, tokenizer, self._skipped, reader=reader, shows_progress=self.is_first)
        training: SampleSource
        validation: SampleSource
        reference = None
        if data.kind == "preference":
            pairs, validation = pack_pairs(data, self.align, conversations, **sizes, reports=self.is_first)
            training = pairs
            reference = pairs.reference
        else:
            select = None
            if method.selects_rows:
                rewards = open_rewards(data, method.reward_column, tokenizer, self._skipped)
                select = partial(method.select, rewards)
            training, validation = pack_conversations(
                data, conversations, **sizes, reports=self.is_first, select=select
            )
        held_out = SplitSampler(
            validation, IndexRanges((range(len(validation)),)), order_key=_VALIDATION_ORDER, split_name=_VALIDATION
        )
        return Dataset(self._all_of(training), held_out, tokenizer, reference)


def check_no_data_path(data: DataConfig) -> None:
    """Raise ConfigError if data.path is set for a kind of data that reads no files."""
    if data.path:
        rule = f'is not used by data.kind="{data.kind}"'
        raise ConfigError(Problem("data.path", data.path, rule, 'leave it out, or set data.kind to "text" or "tokens"'))


def check_enough_tokens(num_tokens: int, *, seq_len: int) -> None:
    """Raise ConfigError if the tokens do not fill one sample."""
    if num_tokens < seq_len + 1:
        raise ConfigError(
            f"train.seq_len={seq_len} needs samples of {seq_len + 1} tokens, but the data has {num_tokens}; "
            f"give more data, or set train.seq_len to at most {max(1, num_tokens - 1)}"
        )


def _texts(data: DataConfig, split: str, skipped: Set[Path]) -> "Corpus | TextTables":
    if data.kind == "huggingface":
        from moefold.data.sources.huggingface import text_tables

        return text_tables(data, split, skipped)
    from moefold.data.sources.text_source import python_docs_corpus, text_corpus

    if data.kind == "text":
        return text_corpus(data.path, skipped)
    check_no_data_path(data)
    return python_docs_corpus()


NUM_SAMPLES = 2**40
JUMP_PROBABILITY = 0.1
_NUM_STRIDES = 4


class SyntheticSamples(SampleSource):
    """Samples that count upwards by a stride, with random jumps; computed on demand.

    The seed chooses four strides. Each sample uses one of them: token t+1 is (token t + stride) mod V, or, with
    probability 0.1, any token. A model first learns the four successors of each token, and then, with attention, which
    stride the current sample uses.
    """

    def __init__(self, *, seed: int, vocab_size: int, seq_len: int, document_end: int = -1) -> None:
        self.seq_len = seq_len
        self.document_end = document_end
        self.has_annotations = document_end >= 0
        self.vocab_size = vocab_size
        self._seed = seed
        strides = draw_bits(hash_ints(seed, NUM_SAMPLES), _NUM_STRIDES) % np.uint64(max(1, vocab_size - 1))
        self._strides = strides.astype(np.int64) + 1

    def __len__(self) -> int:
        """Return a number of samples that no run reaches."""
        return NUM_SAMPLES

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, int64 [seq_len + 1]."""
        if not 0 <= number < NUM_SAMPLES:
            raise IndexError(f"sample {number} is outside [0, {NUM_SAMPLES})")
        length = self.seq_len + 1
        key = hash_ints(self._seed, number)
        bits = draw_bits(key, 2 * length)
        position = np.arange(length, dtype=np.int64)
        jumps = bits[:length] < np.uint64(int(JUMP_PROBABILITY * 2**64))
        last_jump = np.maximum.accumulate(np.where(jumps, position, 0))
        landed = (bits[length:] % np.uint64(self.vocab_size)).astype(np.int64)[last_jump]
        stride = self._strides[hash_ints(key, length) % _NUM_STRIDES]
        tokens: NDArray[np.int64] = (landed + stride * (position - last_jump)) % self.vocab_size
        return tokens
