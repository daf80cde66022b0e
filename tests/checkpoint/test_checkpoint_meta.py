"""The description of a checkpoint is read as it was written, and a later format is refused."""

import json
from dataclasses import asdict

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE, counted, read_meta
from moefold.config.base.limits import FORMAT
from moefold.errors import ConfigError
from tests.checkpoint.empty_checkpoints import meta, write


def test_meta_is_read_as_written(tmp_path):
    assert read_meta(write(tmp_path, 7)) == meta(7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"is not a moefold checkpoint: it has no {META_FILE}"),
        ("{", f"has a broken {META_FILE}"),
        ('{"format": 1}', f"has a broken {META_FILE}"),
        ("[]", f"has a broken {META_FILE}"),
        ("[" * 100_000, f"has a broken {META_FILE}"),
        (json.dumps(asdict(meta(1)) | {"states": {"position": {"step": "1"}}}), f"broken {META_FILE}: step is '1'"),
        (json.dumps(asdict(meta(1)) | {"states": {}}), f"broken {META_FILE}: step is None"),
        (json.dumps(asdict(meta(1)) | {"states": []}), f"broken {META_FILE}: states is not an object"),
        (json.dumps(asdict(meta(1)) | {"states": {"data": 3}}), f"broken {META_FILE}: data is not an object"),
        (
            json.dumps(asdict(meta(1)) | {"states": counted() | {"weights": {"moment_updates": "1"}}}),
            f"broken {META_FILE}: moment_updates is '1'",
        ),
        (
            json.dumps(asdict(meta(1)) | {"states": counted() | {"weights": {"moment_updates": 2**63}}}),
            f"broken {META_FILE}: moment_updates is {2**63}",
        ),
        (
            json.dumps(asdict(meta(1)) | {"states": {"position": counted(step=1)["position"]}}),
            f"broken {META_FILE}: it has no weights.moment_updates",
        ),
        (json.dumps(asdict(meta(1)) | {"format": 0}), f"broken {META_FILE}: format is 0"),
        (json.dumps(asdict(meta(1)) | {"model": []}), f"has a broken {META_FILE}: model is not an object"),
        (json.dumps(asdict(meta(1)) | {"order": {"seq_len": "x"}}), f"broken {META_FILE}: order.seq_len is 'x'"),
        (json.dumps(asdict(meta(1)) | {"parallel": {"tp": 0}}), f"broken {META_FILE}: parallel.tp is 0"),
        (json.dumps(asdict(meta(1)) | {"dtype": 3}), f"broken {META_FILE}: dtype is not a text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_folder_that_is_not_a_checkpoint(tmp_path, content, message):
    if content is not None:
        (tmp_path / META_FILE).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_meta(tmp_path)


def test_a_later_format_is_refused_whatever_its_fields_are(tmp_path):
    path = write(tmp_path, 1)
    (path / META_FILE).write_text(json.dumps({"format": FORMAT + 1, "a_field_of_later": 1}))
    with pytest.raises(
        ConfigError, match=f"has format {FORMAT + 1}, and this version reads up to {FORMAT}; update moefold"
    ):
        read_meta(path)
