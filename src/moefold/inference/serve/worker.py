"""Worker of `moefold serve`: the function that each rank runs."""

import socket
import threading

from moefold.host.http_protocol import make_server
from moefold.host.listen import listen, url_of
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.engine import RolloutEngine
from moefold.inference.load import joined_job, load_model, report_decoding
from moefold.inference.sampling import SamplingParams
from moefold.inference.serve.access import AccessLog
from moefold.inference.serve.app import CompletionServer
from moefold.inference.serve.engine_loop import EngineLoop
from moefold.inference.serve.grammar import JsonGrammars
from moefold.inference.serve.job import OOM_HINT, ServeJob
from moefold.inference.text import open_tokenizer
from moefold.terminal import print_escaped


def serve_worker(job: ServeJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, and serve until the process is interrupted; return the exit status."""
    with joined_job(rank_env, device_type, OOM_HINT) as device:
        # A port in use is reported before the weights are read.
        listener = listen(job.options.host, job.options.port) if rank_env.rank == 0 else None
        log_name = job.options.access_log if rank_env.rank == 0 else ""
        log = AccessLog(log_name).write if log_name else None
        tokenizer = open_tokenizer(job.source, job.options.tokenizer)
        loaded = load_model(job.source, job.cfg, device, tokenizer)
        report_decoding(loaded, job.cfg.run)
        engine = RolloutEngine(loaded.model, job.settings, SamplingParams())
        grammars = JsonGrammars(tokenizer, job.source.model.vocab_size)
        with engine.open(job.num_pages, grammars.start) as generation:
            loop = EngineLoop(generation, loaded.groups)
            if listener is not None:
                url = url_of(listener)
                _start_http(CompletionServer(job, tokenizer, loop, grammars, log), loop, listener)
                print_escaped(f"moefold: {job.name} at {url}/v1", flush=True)
            loop.run()
    return 0


def _start_http(server: CompletionServer, loop: EngineLoop, listener: socket.socket) -> None:
    """Serve HTTP on a thread; when it ends, for whatever reason, so does the engine loop."""
    http, sockets = make_server(server.app(), listener)

    def run() -> None:
        try:
            http.run(sockets=sockets)
        finally:
            loop.stop()

    threading.Thread(target=run, name="http", daemon=True).start()
