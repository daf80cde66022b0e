"""Signed lines: nothing but the next line of the same connection, made with the shared secret, is read."""

import pytest

from moefold.errors import ConfigError
from moefold.launch.signed_lines import MAX_LINE_BYTES, SECRET_VARIABLE, BadLineError, SignedLines, read_secret

SECRET = b"0123456789abcdef"


def pair(secret: bytes = SECRET, other: bytes = SECRET, nonce: str = "1") -> tuple[SignedLines, SignedLines]:
    client = SignedLines(secret, nonce, "2", is_server=False)
    return client, SignedLines(other, "1", "2", is_server=True)


def test_both_sides_read_each_other():
    client, server = pair()
    for i in range(3):
        assert server.open(client.seal({"i": i})) == {"i": i}
        assert client.open(server.seal({"j": i})) == {"j": i}


@pytest.mark.parametrize("case", ["other secret", "other nonce", "changed", "repeated", "sent back", "no signature"])
def test_other_lines_are_refused(case):
    client, server = pair(
        other=b"another secret of many characters" if case == "other secret" else SECRET,
        nonce="3" if case == "other nonce" else "1",
    )
    line = client.seal({"apply": True})
    if case == "changed":
        line = line.replace(b"true", b"false")
    elif case == "repeated":
        server.open(line)
    elif case == "sent back":
        line = server.seal({"apply": True})
    elif case == "no signature":
        line = b'{"apply": true}\n'
    with pytest.raises(BadLineError, match="shared secret"):
        server.open(line)


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"[" * 30000, b"NaN1"])
def test_content_that_is_not_an_object_is_refused(content):
    client, server = pair()
    signed = client._signature(b"client", 1, content) + b" " + content + b"\n"
    with pytest.raises(BadLineError, match="JSON"):
        server.open(signed)


def test_long_messages_are_not_sent():
    client, _ = pair()
    with pytest.raises(BadLineError, match="longer than 65536"):
        client.seal({"text": "x" * MAX_LINE_BYTES})


def test_secret_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "secret"
    file.write_text("a secret of a file, long enough\n")
    variable = {SECRET_VARIABLE: "a secret of the environment"}
    assert read_secret(str(file), "sites.secret", variable) == b"a secret of a file, long enough"
    assert read_secret("", "sites.secret", variable) == b"a secret of the environment"
    assert read_secret("", "sites.secret", {}) == b""
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"sites.secret=.* holds a secret of 5 characters, and needs at least 16"):
        read_secret(str(file), "sites.secret", {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "none"), "sites.secret", {})
