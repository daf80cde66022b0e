"""A server with the interface of vLLM 0.32.0 and 0.33.0 that rollouts use. It computes with moefold's own engine.

It refuses the same requests as vLLM's own schemas: the names below are from `GenerateRequest` and `SamplingParams`.
"""

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.convert.weight_sources import load_hf_weights
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.parallel.inference_model import InferenceModel
from moefold.topology.layout import fold

# vllm/entrypoints/scale_out/token_in_token_out/protocol.py: required and optional fields that a client may set.
REQUEST_FIELDS = {"request_id", "token_ids", "sampling_params", "model", "return_token_ids", "output_mode", "stream"}
# vllm/sampling_params.py.
SAMPLING_FIELDS = {
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("detokenize", "skip_special_tokens", "logit_bias"),
}


class StandIn:
    """State of the server; `answers` replaces the answer of a path, `calls` lists the paths that were called."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        self.cfg = replace(cfg, parallel=ParallelConfig())
        self.folder = folder
        self.version = "default"
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {}
        self.url = ""
        self.max_loads = 1000
        """Requests to load weights that are carried out. Later ones are answered and ignored."""
        self.flips_experts = False
        self.shift = 0.0
        """Added to minus each log-probability."""
        self._lock = threading.Lock()
        self._model: InferenceModel | None = None

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "m", "root": str(self.folder), "max_model_len": 64}]}
        assert path == "/server_info?config_format=json", path
        return {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs", "dtype": f"torch.{self.cfg.run.dtype}"},
                "aux_output_config": {"enable_return_routed_experts": True},
                "device_config": {"device": "cuda"},
            }
        }

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            assert body["kwargs"].keys() == {"weights_path"}
            if self.calls.count(path) <= self.max_loads:
                self._load(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        assert path == "/inference/v1/generate", path
        return self._generate(body)

    def _load(self, folder: Path) -> None:
        with self._lock, self._loaded_model().writing_weights():
            load_hf_weights(folder, self._loaded_model().named_parameters, self._loaded_model().named_buffers)

    def _loaded_model(self) -> InferenceModel:
        if self._model is None:
            groups = ParallelGroups.create(fold(world_size=1), torch.device("cpu"))
            self._model = InferenceModel.build(self.cfg, groups)
            with self._model.writing_weights():
                load_hf_weights(self.folder, self._model.named_parameters, self._model.named_buffers)
        return self._model

    def _generate(self, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        assert body.keys() <= REQUEST_FIELDS
        assert params.keys() <= SAMPLING_FIELDS
        assert (params["n"], params["ignore_eos"], params["logprobs"]) == (1, True, 0)
        sampling = SamplingParams(temperature=params["temperature"], seed=params["seed"])
        request = Request(
            prompt=tuple(body["token_ids"]),
            max_tokens=params["max_tokens"],
            eos_ids=frozenset(params["stop_token_ids"]),
        )
        with self._lock:
            engine = GenerationEngine(self._loaded_model(), EngineSettings(), sampling, records_routing=True)
            (made,) = engine.generate([request])
        assert made.expert_ids is not None
        content = [
            {"token_id": token, "logprob": value - self.shift, "rank": 1, "top_logprobs": []}
            for token, value in zip(made.tokens, made.log_probs, strict=True)
        ]
        # All layers, those without experts too.
        experts = np.zeros(
            (made.expert_ids.shape[1], self.cfg.model.num_layers, self.cfg.model.ffn.moe.top_k), np.uint8
        )
        experts[:, list(self.cfg.model.moe_layer_numbers)] = made.expert_ids.transpose(1, 0, 2)
        file = io.BytesIO()
        np.save(file, 3 - experts if self.flips_experts else experts)
        is_eos = made.finish_reason == "eos"
        choice = {
            "index": 0,
            "token_ids": list(made.tokens),
            "logprobs": {"content": content},
            "finish_reason": "stop" if is_eos else "length",
            "stop_reason": made.tokens[-1] if is_eos else None,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(made.tokens)}],
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }
        return {"request_id": "r", "output_mode": "tokens", "choices": [choice]}


@contextmanager
def stand_in(cfg: Config, folder: Path) -> Iterator[StandIn]:
    """Run the server in a thread of this process."""
    state = StandIn(cfg, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(lambda: state.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(lambda: state.post(self.path, body))

        def _answer(self, compute: Any) -> None:
            state.calls.append(self.path)
            status = 200
            try:
                found = state.answers[self.path] if self.path in state.answers else compute()
            except AssertionError as error:
                status, found = 400, {"error": str(error)}
            if isinstance(found, int):
                status, found = found, {"error": "replaced"}
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        # A rank opens its connections at once.
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield state
    finally:
        dist.destroy_process_group()
        server.shutdown()
        thread.join()
        server.server_close()
