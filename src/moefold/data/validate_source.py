"""Validation of a recipe's data without reading it, so that the command line refuses it within two seconds."""

from pathlib import Path

from moefold.bounded_read import open_regular, parse_json
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, check_enough_tokens, check_no_data_path
from moefold.data.held_out import split_samples
from moefold.data.input_paths import data_paths, files_below, is_jsonl, refuse_data_set
from moefold.data.skip_corrupt import skipped_files
from moefold.data.source_listing import conversation_files
from moefold.data.sources.text_source import check_not_empty, is_text, python_docs_corpus
from moefold.data.token_file import open_document_ends, token_files
from moefold.data.tokenize_record import compare_tokenizers
from moefold.data.tokenizer import ByteTokenizer, load_tokenizer
from moefold.errors import ConfigError
from moefold.message_text import Setting

_FIRST_LINE_BYTES = 2**20
"""Maximum length of a first line that is parsed."""


def check_data(request: DataRequest) -> None:
    """Check that data is not missing, empty, too small or beyond the model's vocabulary.

    Only names, sizes, headers and the tokenizer are checked, not the data itself. `DataRequest.prepare` finds defects
    in the text or the ids (a file that is not UTF-8, an id above the vocabulary, too few tokens of a tokenizer.json).
    Only the modules of the recipe's kind of data are imported.
    """
    data = request.data
    seq_len = request.seq_len
    if data.kind == "huggingface":
        from moefold.data.sources.huggingface import check_package

        check_package()
    tokenizer = load_tokenizer(data, vocab_size=request.vocab_size)
    if data.kind == "program":
        return
    if data.kind == "task":
        from moefold.data.synthetic_problems import open_task

        check_no_data_path(data)
        open_task(data, tokenizer, seq_len=seq_len, seed=0)
        return
    if data.reads_rows:
        from moefold.data.conversations.chat import load_chat_template

        conversation_files(data)
        load_chat_template(data, tokenizer)
        return
    if data.kind == "huggingface":
        from moefold.data.sources.huggingface import text_tables

        for split in (data.split, data.validation_split):
            if split:
                text_tables(data, split)
        return
    if data.kind == "tokens":
        files = token_files(data, skipped_files(data))
        compare_tokenizers([file.path for file in files], tokenizer, data.tokenizer)
        if data.document_index:
            for file in files:
                open_document_ends(file.path, file.num_tokens)
        num_tokens = sum(file.num_tokens for file in files)
        check_enough_tokens(num_tokens, seq_len=seq_len)
        split_samples((num_tokens - 1) // seq_len, data.validation_fraction)
        return
    if not 0 <= data.validation_fraction < 1:
        split_samples(1, data.validation_fraction)
    if data.kind == "text":
        needed = seq_len + 1 if isinstance(tokenizer, ByteTokenizer) else 1
        num_bytes = _count_text_bytes(data, needed)
        if num_bytes < needed:
            check_enough_tokens(num_bytes, seq_len=seq_len)
        return
    check_no_data_path(data)
    if data.kind == "python-docs":
        python_docs_corpus()


def _count_text_bytes(data: DataConfig, stop_at: int) -> int:
    """Return the bytes and separators of the text that data.path names. Counting stops at `stop_at`."""
    roots = data_paths(data.path, "text")
    for root in roots:
        refuse_data_set("data.path", root)
        _refuse_json_lines(root)
    num_files = 0
    size_bytes = 0
    for root in roots:
        for file in files_below(root):
            if not is_text(file):
                if file in roots:
                    raise ConfigError(
                        f"{Setting('data.path', file):s} is not text: it holds zero bytes; name UTF-8 text files"
                    )
                continue
            num_files += 1
            if file_bytes := file.stat().st_size:
                size_bytes += file_bytes + 1
            if size_bytes >= stop_at:
                return size_bytes
    check_not_empty(roots, num_files=num_files, size_bytes=size_bytes)
    return size_bytes


def _refuse_json_lines(root: Path) -> None:
    """Refuse JSON lines as plain text: a model would learn braces, names of fields and escapes.

    A named file is detected by its suffix or its first line, and a folder by the suffixes of all its files.
    """
    if root.is_dir():
        is_json = next(files_below(root), None) is not None and all(map(is_jsonl, files_below(root)))
    else:
        is_json = is_jsonl(root) or _starts_with_json_object(root)
    if is_json:
        raise ConfigError(
            f'{Setting("data.path", root)} holds JSON lines, and data.kind="text" would train on their braces and '
            'field names; set data.kind="sft" for conversations, or data.kind="huggingface" with data.column for the '
            f"text of one field, or make token files of that field: "
            f"`moefold tokenize {root} --column text --out tokens`"
        )


def _starts_with_json_object(file: Path) -> bool:
    """Return whether the first line of a text file is a JSON object."""
    try:
        with open_regular(file) as opened:
            line = opened.readline(_FIRST_LINE_BYTES)
        return line.rstrip().endswith(b"}") and isinstance(parse_json(line), dict)
    except (OSError, ValueError):
        # Unreadable files are reported by the code that reads them.
        return False
