"""`moefold meet`: the command as users start it."""

import re
import signal
import socket
import subprocess
import sys


def test_the_meeting_point_serves_until_ctrl_c():
    command = [sys.executable, "-m", "moefold", "meet", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"meeting point at 127\.0\.0\.1:(\d+); Ctrl-C ends it\n", line)
            assert found, process.communicate(timeout=60)
            with socket.create_connection(("127.0.0.1", int(found[1])), timeout=60) as connection:
                # The greeting: the server waits for the answer of the site when it is told to end.
                assert connection.recv(1)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
            assert process.returncode == 0
            assert "Traceback" not in errors
        finally:
            process.kill()
