"""`moefold board`: a page that shows runs side by side, from a local server or as a static export."""

import argparse
import secrets
import socket
from pathlib import Path

from moefold.cli.command_parser import CommandParser, check_packages
from moefold.errors import ConfigError
from moefold.host.listen import LOOPBACK_NAMES, check_port, listen, url_of
from moefold.remote_path import is_remote
from moefold.terminal import print_escaped

DEFAULT_PORT = 6007
EPILOG = """RUNS are run folders, or folders of run folders, which are searched again while the board is open and may be
empty yet. The board only reads: it follows running jobs, and any number of boards may show one run.

The server listens on this machine alone. From another machine, forward its port: ssh -L 6007:127.0.0.1:6007 HOST

examples:
  moefold board runs
  moefold board runs/quickstart runs/other --port 9000
  moefold board runs --export board
"""


def run(argv: list[str]) -> int:
    """Serve the board until interrupted, or export it."""
    arguments = _parser().parse_args(argv)
    _check_effect(arguments)
    _check_local(arguments)
    if arguments.export is not None:
        return _export(arguments)
    check_port(arguments.port)
    is_loopback = arguments.host in LOOPBACK_NAMES
    if not is_loopback and not arguments.allow_remote:
        raise ConfigError(
            f"--host {arguments.host} lets other machines read rollouts and recipes; forward a port instead (ssh -L), "
            "or add --allow-remote, which asks for a token"
        )
    if is_loopback and arguments.allow_remote:
        raise ConfigError(
            f"--allow-remote has no effect on the loopback address {arguments.host}; give --host 0.0.0.0 or an address "
            "of this machine, or leave it out"
        )
    check_packages("board", "starlette", "uvicorn", otherwise=", or write a static board with --export FOLDER")
    # numpy and starlette take a tenth of a second to import, which --help does not need.
    from moefold.board.app import make_app
    from moefold.board.run_list import RunList
    from moefold.host.http_protocol import make_server

    runs = RunList([Path(name) for name in arguments.runs])
    token = secrets.token_urlsafe(24) if arguments.allow_remote or arguments.token else ""
    with listen(arguments.host, arguments.port) as listener:
        app = make_app(runs, token=token, is_loopback=is_loopback)
        count = len(runs.readers)
        # A browser cannot open an address that stands for all of this machine.
        url = url_of(listener).replace("0.0.0.0", socket.gethostname()).replace("[::]", socket.gethostname())
        address = f"{url}/{f'?token={token}' if token else ''}"
        summary = f"{count} run{'s' if count > 1 else ''}" if count else "no runs yet; they appear when they start,"
        print_escaped(f"moefold: {summary} at {address}", flush=True)
        http, sockets = make_server(app, listener)
        http.run(sockets=sockets)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from moefold.board.export import export_board
    from moefold.board.run_list import RunList

    names = export_board(
        RunList([Path(name) for name in arguments.runs]), Path(arguments.export), force=arguments.force
    )
    index = Path(arguments.export) / "index.html"
    print_escaped(f"wrote {len(names)} run{'s' if len(names) > 1 else ''}; open {index} in a browser")
    return 0


def _check_effect(arguments: argparse.Namespace) -> None:
    """Check that every given option has an effect. Raise ConfigError if an option has none."""
    if arguments.export is None:
        if arguments.force:
            raise ConfigError("--force replaces an export; name it with --export FOLDER")
        return
    defaults = _parser()
    for name in ("host", "port", "allow_remote", "token"):
        if getattr(arguments, name) != defaults.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--export serves nothing, so {option} has no effect; leave it out")


def _check_local(arguments: argparse.Namespace) -> None:
    """Check that no path is a URL, whose slashes a local path would lose. Raise ConfigError if a path is one."""
    for name in (*arguments.runs, *filter(None, [arguments.export])):
        if is_remote(name):
            raise ConfigError(
                f"{name!r} must be a folder of this machine, not a URL; run.dir is one also if checkpoint.dir is remote"
            )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold board",
        "Show runs side by side in a browser: curves, balance of experts, memory and times of ranks,\n"
        "faults, rollouts with their texts, and how their recipes differ. Follows runs that go on.",
        EPILOG,
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders of run folders")
    parser.option("--host", "127.0.0.1", None, "name or address to listen on (127.0.0.1)")
    parser.option("--port", DEFAULT_PORT, None, f"port; 0: any that is free ({DEFAULT_PORT})")
    parser.flag("--allow-remote", "allow another host than the loopback; asks for a token")
    parser.flag("--token", "ask for a token on the loopback, too, which all users of a machine reach")
    parser.option("--export", str, "FOLDER", "write a static board and serve nothing")
    parser.flag("--force", "replace an export that exists")
    return parser
