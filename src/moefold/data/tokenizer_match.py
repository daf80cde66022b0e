"""Comparison of the tokenizer of token files with the tokenizer of a run."""

from collections.abc import Sequence

from moefold.data.token_file import TokenFile, read_tokenize_info
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.data.tokenizer_folder import JsonTokenizer
from moefold.errors import ConfigError, Problem, Setting


def compare_tokenizers(files: Sequence[TokenFile], tokenizer: Tokenizer, name: str) -> str:
    """Compare the tokenizers of token files and of a run, by the facts that determine the ids of a text.

    Args:
        tokenizer: the tokenizer of the run; bare numbers are not compared.
        name: data.tokenizer, for messages.

    Returns:
        A note if the tokenizer of some files is not known; else empty.

    Raises:
        ConfigError: files were made with another tokenizer.
    """
    if isinstance(tokenizer, NumberTokenizer):
        return ""
    unknown = []
    for folder in sorted({file.path.parent for file in files}):
        info = read_tokenize_info(folder)
        made_with = str(info.get("tokenizer", "")).split()
        identity = tokenizer.identity.split()
        if not made_with:
            unknown.append(str(folder))
        elif made_with[0] == identity[0]:
            continue
        elif info.get("format") == 1 and made_with[0] != "bytes" and isinstance(tokenizer, JsonTokenizer):
            if made_with[0] != tokenizer.folder.process.sha256:
                unknown.append(str(folder))
        else:
            recorded = str(info.get("tokenizer_name", "")) or "another one"
            rule = f"is not the tokenizer that made the ids of {folder}: `moefold tokenize` had {recorded!r}"
            raise ConfigError(Problem("data.tokenizer", name, rule, f"set {Setting('data.tokenizer')} to that one"))
    if not unknown or name == "bytes":
        return ""
    return (
        f"note: {unknown[0]} does not say which tokenizer made its ids, so {Setting('data.tokenizer', name)} is not "
        "compared with it; `moefold tokenize` records it"
    )
