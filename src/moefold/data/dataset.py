"""Open the data of a recipe: training samples, validation samples and the tokenizer."""

import logging
from collections.abc import Set
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.data.held_out import IndexRanges, split_samples
from moefold.data.sample import ReferenceLogProbs, Sample, SampleSource
from moefold.data.sampler import Sampler, SplitSampler
from moefold.data.skip_corrupt import corrupt_files, report_skipped, skipped_files
from moefold.data.source_listing import named_sources
from moefold.data.tokenizer import OffsetTokenizer, Tokenizer, load_tokenizer, report_notes
from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.data.sources.huggingface import TextTables
    from moefold.data.sources.text_source import Corpus
    from moefold.data.token_file import TokenFile
    from moefold.data.token_file_set import TokenFileSet


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training and validation samples of a run. The two parts share no token."""

    train: Sampler
    """Training samples. data.shuffle reshuffles them every epoch."""
    validation: Sampler
    """Held-out samples, shuffled in the same order for every seed. There are none if data.validation_fraction is 0."""
    tokenizer: Tokenizer
    """Converts text to ids and back."""
    reference: ReferenceLogProbs | None = None
    """Log-probabilities of all pairs under the reference model, which the trainer fills in. None without pairs."""


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

    A program derives from `Sampler`. Its `annotated_sample` returns tokens, weights of the targets and the columns of
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


@dataclass(frozen=True, slots=True)
class DataRequest:
    """Settings of a recipe that determine its samples. Every process with the same settings gets the same samples."""

    data: DataConfig
    _: KW_ONLY
    seq_len: int
    """train.seq_len, S. A sample has S + 1 tokens."""
    vocab_size: int
    """model.vocab_size. Every id is below it."""
    seed: int
    """run.seed. It determines the order of the training samples, and the whole data of kind "synthetic"."""
    align: AlignConfig = field(default_factory=AlignConfig)

    @classmethod
    def of(cls, cfg: Config) -> Self:
        """Return the settings in a recipe."""
        return cls(
            cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed, align=cfg.align
        )

    def open(self, token_file_set: "TokenFileSet | None" = None) -> Dataset:
        """Open the samples.

        Text is tokenised on the first call and read from the cache afterwards: call `prepare` before starting ranks.

        Args:
            token_file_set: the token files recorded when the run began. None means list the files now.

        Raises:
            ConfigError: the data is missing, broken, too small, or does not fit the model's vocabulary.
        """
        return _DatasetBuilder(self, token_file_set=token_file_set).open()

    def prepare(self) -> Path | None:
        """Tokenise text into the cache and check token ids, once before ranks start, with progress on stderr.

        Returns the file of tokenised text, or None for mixtures and for kinds of data that need no such file.
        """
        data = self.data
        if data.kind == "tokens" and data.corrupt == "fatal":
            from moefold.data.token_file import token_files
            from moefold.data.token_stream import TokenFileStream
            from moefold.data.tokenize_record import compare_tokenizers

            files = token_files(data)
            TokenFileStream(files, vocab_size=self.vocab_size).probe()
            tokenizer = load_tokenizer(data, vocab_size=self.vocab_size)
            if note := compare_tokenizers([file.path for file in files], tokenizer, data.tokenizer):
                logger.warning("%s", note)
        opener = _DatasetBuilder(self, is_first=True)
        dataset = opener.open()
        report_notes(dataset.tokenizer)
        train = dataset.train
        train.sample(train.next_sample_indices(0, 1)[0])
        return opener.cached_path


@dataclass(slots=True)
class _DatasetBuilder:
    """Opener of the data of a request, with the results of its intermediate steps."""

    request: DataRequest
    is_first: bool = False
    """This process opens the data before all others: it shows progress and logs skipped files."""
    token_file_set: "TokenFileSet | None" = None
    cached_path: Path | None = None
    _skipped: Set[Path] = frozenset()

    def open(self) -> Dataset:
        request = self.request
        data = request.data
        tokenizer = load_tokenizer(data, vocab_size=request.vocab_size)
        if data.weights:
            return self._mixture(tokenizer)
        if self.token_file_set is None and data.drops_files:
            self.token_file_set = self._build_token_file_set()
        if self.token_file_set is None:
            self._skipped = skipped_files(data, reports=self.is_first)
        if data.has_conversations:
            return self._conversations(cast(OffsetTokenizer, tokenizer))
        if data.kind == "task":
            from moefold.data.synthetic_problems import open_task

            training_problems, held_out = open_task(data, tokenizer, seq_len=request.seq_len, seed=request.seed)
            return Dataset(training_problems, held_out or NoSamples(), tokenizer)
        if data.kind == "prompts":
            raise ConfigError(NEEDS_RL)
        if data.streaming:
            return Dataset(self._stream(tokenizer), self._held_out_split(tokenizer), tokenizer)
        source = self._source(tokenizer, data.split)
        if data.validation_split:
            return Dataset(self._training(source), self._held_out_split(tokenizer), tokenizer)
        training, validation = split_samples(len(source), data.validation_fraction)
        return Dataset(self._training(source, training), _validation(source, validation), tokenizer)

    def _mixture(self, tokenizer: Tokenizer) -> Dataset:
        from moefold.data.mixture_sampler import MixtureSampler

        data = self.request.data
        parts = [replace(self.request, data=replace(data, path=path, weights=())) for path in data.paths]
        sources = [replace(self, request=part).open() for part in parts]
        return Dataset(
            MixtureSampler([source.train for source in sources], data.weights),
            MixtureSampler([source.validation for source in sources], data.weights),
            tokenizer,
        )

    def _build_token_file_set(self) -> "TokenFileSet":
        from moefold.data.token_file_set import build_token_file_set

        data = self.request.data
        faults = corrupt_files(data)
        skipped = {name for name, file in named_sources(data) if file in faults}
        shards = build_token_file_set(data, vocab_size=self.request.vocab_size, skipped=skipped)
        if self.is_first:
            report_skipped(faults | {Path(name): fault for name, fault in shards.dropped.items()})
        return shards

    def _training(self, source: SampleSource, members: IndexRanges | None = None) -> SplitSampler:
        return SplitSampler(source, members, order_key=self._order_key)

    @property
    def _order_key(self) -> int | None:
        return hash_ints(self.request.seed) if self.request.data.shuffle else None

    def _source(self, tokenizer: Tokenizer, split: str) -> SampleSource:
        request = self.request
        data = request.data
        if data.kind == "program":
            raise ConfigError(NEEDS_PROGRAM)
        if data.kind == "synthetic":
            from moefold.data.synthetic_samples import SyntheticSamples

            check_no_data_path(data)
            return SyntheticSamples(
                seed=request.seed,
                vocab_size=request.vocab_size,
                seq_len=request.seq_len,
                document_end=data.document_end,
            )
        from moefold.data.packed_samples import IndexAnnotatedSamples, PackedSamples
        from moefold.data.token_stream import TokenFileStream

        files = self._token_files(tokenizer, split)
        dropped = () if self.token_file_set is None else self.token_file_set.dropped
        stream = TokenFileStream(files, vocab_size=request.vocab_size, dropped=dropped, is_indexed=data.document_index)
        if data.packing == "best_fit":
            from moefold.data.best_fit import recipe_best_fit

            packed_documents = recipe_best_fit(data, stream, files, seq_len=request.seq_len)
            if self.is_first:
                logger.warning("%s", packed_documents.counts.describe(request.seq_len + 1))
            return packed_documents
        check_enough_tokens(len(stream), seq_len=request.seq_len)
        if data.document_index:
            return IndexAnnotatedSamples(stream, request.seq_len)
        return PackedSamples(stream, request.seq_len, data.document_end)

    def _token_files(self, tokenizer: Tokenizer, split: str) -> "tuple[TokenFile, ...]":
        """Return the token files of the recipe, or the file with its tokenised text."""
        from moefold.data.token_file import read_npy_header, token_files

        data = self.request.data
        if data.kind == "tokens":
            return token_files(data, self._skipped) if self.token_file_set is None else self.token_file_set.files(data)
        from moefold.data.token_cache import cached_tokens

        texts = _texts(data, split, self._skipped)
        self.cached_path = cached_tokens(texts, tokenizer, shows_progress=self.is_first)
        return (read_npy_header(self.cached_path),)

    def _held_out_split(self, tokenizer: Tokenizer) -> SplitSampler:
        """Return the split named by data.validation_split, which is cached, as it is read at every evaluation."""
        if split := self.request.data.validation_split:
            return _validation(self._source(tokenizer, split))
        from moefold.data.synthetic_samples import SyntheticSamples

        return _validation(SyntheticSamples(seed=0, vocab_size=1, seq_len=self.request.seq_len), IndexRanges(()))

    def _stream(self, tokenizer: Tokenizer) -> Sampler:
        from moefold.data.sources.huggingface import text_tables
        from moefold.data.streaming_sampler import StreamingSampler

        data = self.request.data
        return StreamingSampler(
            text_tables(data, data.split, self._skipped),
            tokenizer,
            seq_len=self.request.seq_len,
            order_key=self._order_key,
            document_end=data.document_end,
        )

    def _conversations(self, tokenizer: OffsetTokenizer) -> Dataset:
        """Return conversations for fine-tuning, also by rewards, or preference pairs."""
        from moefold.data.conversations.conversation_cache import open_conversations
        from moefold.data.preference import pack_pairs, preference_reader
        from moefold.data.scored_conversations import conditioned_reader, open_rewards, rewarded_reader
        from moefold.data.sft import pack_conversations

        data = self.request.data
        align = self.request.align
        sizes = {"seq_len": self.request.seq_len, "pad_id": tokenizer.separator_id or 0}
        method = chosen_in(align, AlignmentPart)
        reader = preference_reader(align) if data.kind == "preference" else None
        if method.prompt_template:
            reader = conditioned_reader(method)
        elif method.reward_column:
            reader = rewarded_reader(method.reward_column, skips=data.skip_bad_rows)
        conversations = open_conversations(data, tokenizer, self._skipped, reader=reader, shows_progress=self.is_first)
        if data.kind == "preference":
            pairs, held_out_pairs = pack_pairs(data, align, conversations, **sizes, reports=self.is_first)
            return Dataset(self._training(pairs), _validation(held_out_pairs), tokenizer, pairs.reference)
        select = None
        if method.selects_rows:
            rewards = open_rewards(data, method.reward_column, tokenizer, self._skipped)
            select = partial(method.select, rewards)
        training, validation = pack_conversations(data, conversations, **sizes, reports=self.is_first, select=select)
        return Dataset(self._training(training), _validation(validation), tokenizer)


def _validation(source: SampleSource, members: IndexRanges | None = None) -> SplitSampler:
    # The validation order does not depend on the seed and is shuffled, so its first samples cover the whole data set.
    return SplitSampler(source, members, order_key=hash_ints(0), split_name="validation")


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
