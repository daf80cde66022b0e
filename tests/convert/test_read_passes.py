"""How often an import and an export read their bytes, counted by the kernel."""

import filecmp
from pathlib import Path

import pytest

from moefold.checkpoint.manifest import read_manifest
from moefold.comm.groups import current_world
from moefold.convert.export_folder import ExportOptions, export_folder
from moefold.convert.import_folder import ImportOptions, import_folder
from tests.convert.hf_models import make_model, save_model

COUNTERS = Path("/proc/self/io")


def bytes_read() -> int:
    """Bytes that this process has read from files, from the kernel's cache too. Mapped bytes do not count."""
    return next(int(line.split()[1]) for line in COUNTERS.read_text().splitlines() if line.startswith("rchar"))


@pytest.mark.skipif(not COUNTERS.exists(), reason="counters of Linux")
def test_tensors_are_read_once_whether_their_hashes_are_compared_or_not(tmp_path):
    """An embedding of two chunks, so that descriptions and modules of Python are few bytes beside it."""
    sizes = {"vocab_size": 36_000, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"tie_word_embeddings": True}
    folder = save_model(make_model("mixtral", **sizes), tmp_path / "hf")
    world = current_world()
    options = ImportOptions(needs_tokenizer=False)
    import_folder(folder, tmp_path / "first", world, options, on_bytes=abs)
    export_folder(tmp_path / "first", tmp_path / "first_hf", world, ExportOptions(), on_bytes=abs)

    start = bytes_read()
    import_folder(folder, tmp_path / "ckpt", world, options, on_bytes=abs)
    imported = bytes_read()
    export_folder(tmp_path / "ckpt", tmp_path / "verified", world, ExportOptions(), on_bytes=abs)
    verified = bytes_read()
    export_folder(tmp_path / "ckpt", tmp_path / "plain", world, ExportOptions(verify=False), on_bytes=abs)
    plain = bytes_read()
    size = sum(one.size_bytes for name, one in read_manifest(tmp_path / "ckpt").items() if name.endswith(".distcp"))
    # The folder is mapped, and the files of the checkpoint are hashed while they are written.
    assert imported - start < 0.1 * size
    assert size <= plain - verified < 1.1 * size
    assert size <= verified - imported < 1.1 * size
    for out in ("verified", "plain"):
        assert filecmp.cmp(tmp_path / out / "model.safetensors", folder / "model.safetensors", shallow=False)
