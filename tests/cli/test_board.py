"""`moefold board` as a user starts it."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from moefold.cli.main import main
from moefold.errors import install_command
from tests.board.run_files import write_run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines read rollouts and recipes; forward a port instead"),
        (["--allow-remote"], "--allow-remote has no effect on the loopback address 127.0.0.1"),
        (["--port", "70000"], "--port 70000 must lie in [0, 65535]"),
        (["--force"], "--force replaces an export; name it with --export FOLDER"),
        (["--export", "x", "--token"], "--export serves nothing, so --token has no effect; leave it out"),
        (["s3://bucket/runs"], "'s3://bucket/runs' must be a folder of this machine, not a URL"),
        (["--export", "s3://bucket/board"], "'s3://bucket/board' must be a folder of this machine, not a URL"),
        (["--export", "x", "--port", "1"], "--export serves nothing, so --port has no effect; leave it out"),
    ],
)
def test_options_that_cannot_work_are_one_message(tmp_path, capsys, options, message):
    write_run(tmp_path / "run", 1)
    assert main(["board", str(tmp_path / "run"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"moefold: error: {message}")


def test_an_export_without_runs_and_a_port_in_use_are_one_message(tmp_path, capsys):
    assert main(["board", str(tmp_path), "--export", str(tmp_path / "board")]) == 2
    assert f"--export has nothing to write: no run below {tmp_path}" in capsys.readouterr().err
    write_run(tmp_path / "run", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["board", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moefold: error: --host 127.0.0.1 --port {port}: cannot listen there")
    assert error.count("\n") == 1


def test_a_missing_package_is_one_message(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["board", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"moefold: error: the package starlette is not installed; {install_command('board')}, or write"
    )


def test_the_command_exports_a_board(tmp_path, capsys):
    write_run(tmp_path / "run", 2)
    assert main(["board", str(tmp_path / "run"), "--export", str(tmp_path / "board")]) == 0
    assert capsys.readouterr().out == f"wrote 1 run; open {tmp_path}/board/index.html in a browser\n"


@pytest.mark.e2e
def test_a_board_is_served_until_ctrl_c(tmp_path):
    write_run(tmp_path / "run", 2)
    command = [sys.executable, "-m", "moefold", "board", str(tmp_path), "--port", "0", "--token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        line = board.stdout.readline()
        assert line.startswith("moefold: 1 run at http://127.0.0.1:")
        address, _, token = line.split()[-1].partition("?token=")
        request = urllib.request.Request(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["runs"][0]["step"] == 2
        board.send_signal(signal.SIGINT)
        _, error = board.communicate(timeout=60)
    assert board.returncode == 130
    assert error == "moefold: interrupted\n"
