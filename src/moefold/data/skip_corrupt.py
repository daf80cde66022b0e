"""data.corrupt="skip": unreadable data files are found once, before a run starts, and skipped.

Every file is read completely before the ranks start. The result is stored in the token cache, keyed by the sizes and
times of the files, for ranks and later runs. A file is skipped as a whole, so the numbers of the samples do not depend
on where a reader fails. For token files only headers are checked, and `token_file` handles files that break later.
"""

import logging
from collections.abc import Mapping, Set
from pathlib import Path

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.cache_dir import cache_folders, entry_key, write_json_entry
from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import ENDS_SUFFIXES
from moefold.data.shard_reader import BrokenShardError
from moefold.data.source_listing import named_sources
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting, format_list

FORMAT_VERSION = 1

logger = logging.getLogger(__name__)


def skipped_files(data: DataConfig, *, reports: bool = False) -> Set[Path]:
    """Return the corrupt files of data.path, which are skipped and reported. There are none if data.corrupt is "fatal".

    Raises:
        ConfigError: all files are corrupt, or a source is on the hub.
    """
    faults = corrupt_files(data)
    if reports:
        report_skipped(faults)
    return faults.keys()


def report_skipped(reasons: Mapping[Path, str]) -> None:
    """Log the skipped files."""
    for file, fault in reasons.items():
        # Most reasons already contain the file's path.
        logger.warning("data.corrupt: left out a file: %s", fault if str(file) in fault else f"{file}: {fault}")


def corrupt_files(data: DataConfig) -> dict[Path, str]:
    """Return the files of `skipped_files`, each with the reason."""
    if data.corrupt == "fatal":
        return {}
    files = [file for _, file in named_sources(data) if file.suffix not in ENDS_SUFFIXES]
    if not files:
        raise ConfigError(
            f'data.corrupt="skip" looks at files, and {Setting("data.path")} names none; leave it out for data sets on '
            "the hub"
        )
    faults = _validate_token_files(data, files) if data.kind == "tokens" else _validate_files_cached(data, files)
    if len(faults) == len(files):
        rule = f"holds no valid file: {format_list(list(faults.values()))}"
        raise ConfigError(Problem("data.path", None, rule, "copy them again"))
    return {Path(file): fault for file, fault in faults.items()}


def _validate_token_files(data: DataConfig, files: list[Path]) -> dict[str, str]:
    from moefold.data.token_file import open_document_ends, read_header

    faults = {}
    for file in files:
        try:
            header = read_header(file, data.token_dtype)
            if data.document_index and header.num_tokens:
                open_document_ends(file, header.num_tokens)
        except BrokenShardError as error:
            faults[str(file)] = error.cause
        except ConfigError as error:
            faults[str(file)] = str(error)
        except OSError as error:
            faults[str(file)] = f"it cannot be read ({error.strerror or error})"
    return faults


def _validate_files_cached(data: DataConfig, files: list[Path]) -> dict[str, str]:
    """Return the cached result for these files, or else read all files and store the result."""
    states = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = entry_key([FORMAT_VERSION, data.kind, states])
    folders = cache_folders(None)
    for folder in folders:
        try:
            cached = read_json(folder / f"{key}.corrupt.json", MAX_DESCRIPTION_BYTES)
        except (OSError, ValueError):
            continue
        if isinstance(cached, dict) and cached.keys() <= set(map(str, files)):
            return {str(file): str(fault) for file, fault in cached.items()}
    faults = {str(file): fault for file in files if (fault := _unreadable_reason(data, file))}
    write_json_entry(folders, f"{key}.corrupt.json", faults)
    return faults


def _unreadable_reason(data: DataConfig, file: Path) -> str:
    """Read a whole file, and return the reason why it is unreadable, or "" if it is readable."""
    from moefold.data.sources.file_formats import ColumnError, jsonl_records
    from moefold.data.sources.table_rows import check_rows_readable
    from moefold.data.sources.text_source import TextFile, check_decodable

    try:
        if data.kind == "text":
            check_decodable(TextFile(file, file.stat().st_size, file.stat().st_mtime_ns, is_named=False))
        elif data.has_conversations:
            for _ in jsonl_records(file):
                pass
        else:
            check_rows_readable(file, data.column)
    except ColumnError:
        raise
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    return ""
