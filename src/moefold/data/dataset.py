"""A recipe's data, opened: training and validation samples, and the tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from moefold.config.schema import DataConfig
from moefold.data.cache import cached_tokens
from moefold.data.document import Corpus, python_docs_corpus, text_corpus
from moefold.data.marked import EndMarkedSamples, SampleSource
from moefold.data.random_bits import combine
from moefold.data.sampling import PackedSamples, Split
from moefold.data.split import split_samples
from moefold.data.synthetic import SyntheticSamples
from moefold.data.token_file import TokenFiles, look_at_npy, token_files
from moefold.data.tokenizer import Tokenizer, load_tokenizer
from moefold.errors import ConfigError

# Validation is visited in one order for every seed, so that its first samples come from all over the data.
_VALIDATION_ORDER = combine(0)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The samples of a run. They share no token between the two parts."""

    train: Split
    """Samples to train on; shuffled anew for each epoch if data.shuffle."""
    validation: Split
    """Samples held out; empty if data.validation_fraction is 0. Shuffled in the same way for every seed."""
    tokenizer: Tokenizer
    """Text to ids and back."""


def open_dataset(
    data: DataConfig, *, seq_len: int, vocab_size: int, seed: int, cache_dir: Path | None = None
) -> Dataset:
    """Open the data of a recipe; every process that does so with the same arguments sees the same samples.

    Text is tokenised on the first call and mapped from the cache afterwards: call `prepare` before starting ranks.

    Args:
        data: the recipe's section.
        seq_len: train.seq_len, S; a sample has S + 1 tokens.
        vocab_size: model.vocab_size; every id is below it.
        seed: run.seed; it draws the order of the training samples, and all of `synthetic`.
        cache_dir: folder of tokenised text; None means `default_cache_dir()`.

    Raises:
        ConfigError: the data is missing, broken, too small, or does not fit the model's vocabulary.
    """
    tokenizer = load_tokenizer(data, vocab_size=vocab_size)
    source: SampleSource
    if data.kind == "synthetic":
        refuse_path(data)
        source = SyntheticSamples(seed=seed, vocab_size=vocab_size, seq_len=seq_len)
    else:
        if data.kind == "tokens":
            files = token_files(data)
        else:
            path = cached_tokens(_corpus(data), tokenizer, cache_dir=cache_dir, shows_progress=False)
            files = (look_at_npy(path),)
        stream = TokenFiles(files, vocab_size=vocab_size)
        refuse_too_few(len(stream), seq_len=seq_len)
        source = PackedSamples(stream, seq_len)
    if data.document_end >= 0:
        source = EndMarkedSamples(source, data.document_end)
    training, validation = split_samples(len(source), data.validation_fraction)
    return Dataset(
        Split(source, training, order_key=combine(seed) if data.shuffle else None),
        Split(source, validation, order_key=_VALIDATION_ORDER),
        tokenizer,
    )


def prepare(
    data: DataConfig, *, seq_len: int, vocab_size: int, seed: int, cache_dir: Path | None = None
) -> Path | None:
    """Do once, before ranks start, what each would do again: tokenise text into the cache, look for strange ids.

    Long work shows its progress on stderr. Arguments and errors are those of `open_dataset`.

    Returns:
        The file of tokenised text; None for kinds of data that need none.
    """
    path = None
    if data.kind in ("python-docs", "text"):
        tokenizer = load_tokenizer(data, vocab_size=vocab_size)
        path = cached_tokens(_corpus(data), tokenizer, cache_dir=cache_dir, shows_progress=True)
    if data.kind == "tokens":
        TokenFiles(token_files(data), vocab_size=vocab_size).probe()
    open_dataset(data, seq_len=seq_len, vocab_size=vocab_size, seed=seed, cache_dir=cache_dir)
    return path


def refuse_path(data: DataConfig) -> None:
    """Raise ConfigError if a kind of data that reads no files was given some."""
    if data.path:
        raise ConfigError(
            f'data.path={data.path!r} is not used by data.kind="{data.kind}"; '
            'leave it out, or set data.kind to "text" or "tokens"'
        )


def refuse_too_few(num_tokens: int, *, seq_len: int) -> None:
    """Raise ConfigError if the tokens do not fill one sample."""
    if num_tokens < seq_len + 1:
        raise ConfigError(
            f"train.seq_len={seq_len} needs samples of {seq_len + 1} tokens, but the data has {num_tokens}; "
            f"give more data, or set train.seq_len to at most {max(1, num_tokens - 1)}"
        )


def _corpus(data: DataConfig) -> Corpus:
    if data.kind == "text":
        return text_corpus(data.path)
    refuse_path(data)
    return python_docs_corpus()
