"""`moefold meet`: serve the meeting point of the sites of a run."""

import argparse
import asyncio
import signal
import socket

from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.host.listen import check_port, is_loopback, listen
from moefold.launch.meet_server import MeetServer
from moefold.launch.signed_lines import SECRET_VARIABLE, read_secret
from moefold.terminal import print_escaped

DEFAULT_PORT = 29600
EPILOG = f"""The sites of a run (recipe section [sites]) agree here on who takes part in a round, and find each other;
weights go from site to site. Messages are signed with the shared secret of --secret or {SECRET_VARIABLE}, and not
encrypted: use a VPN between the sites. Ctrl-C ends it; started again, it learns everything from the sites.

examples:
  openssl rand -hex 32 > secret.txt
  moefold meet --host 10.0.0.1 --secret secret.txt
  moefold train recipe.toml sites.count=2 sites.number=0 sites.meet=10.0.0.1:{DEFAULT_PORT} sites.secret=secret.txt
"""


def run(argv: list[str]) -> int:
    """Serve until a signal and return the exit status."""
    args = _parser().parse_args(argv)
    check_port(args.port)
    secret = read_secret(args.secret, "--secret")
    if not secret and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} can be reached from other machines, and there is no shared secret; name a file with "
            f"--secret, or set {SECRET_VARIABLE}"
        )
    asyncio.run(_serve(listen(args.host, args.port), args.host, secret))
    return 0


async def _serve(listener: socket.socket, host: str, secret: bytes) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    # The server takes the socket over.
    port = listener.getsockname()[1]
    async with MeetServer(listener, secret, lambda line: print_escaped(line, flush=True)):
        print_escaped(f"meeting point at {host}:{port}; Ctrl-C ends it", flush=True)
        await stopped.wait()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("moefold meet", "Serve the meeting point of the sites of a run.", EPILOG)
    parser.option("--host", "127.0.0.1", None, "address to listen on; default: this machine only")
    parser.option("--port", DEFAULT_PORT, None, f"port; default {DEFAULT_PORT}, 0: a free one")
    parser.option("--secret", "", "FILE", "file with the shared secret")
    return parser
