"""Client of a vLLM server: its model, new weights from a folder, and completions of token ids.

The client uses the interface of vLLM 0.32.0 and 0.33.0, with VLLM_SERVER_DEV_MODE=1 and --tokens-only: /v1/models,
/server_info, /collective_rpc, /reset_prefix_cache, /update_weight_version and /inference/v1/generate.
"""

import json
import math
import os
import time
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
from numpy.typing import NDArray

from moefold.config.sections.rl import RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.run_config import read_settings
from moefold.data.input_paths import CONFIG_FILE
from moefold.errors import ConfigError, RunError
from moefold.inference.engine.requests import Completion
from moefold.inference.engine.requests import Request as SampleRequest
from moefold.inference.sampling import SamplingParams

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the sampled distribution: softmax(logits / temperature)."""
VLLM_DTYPES = ("bfloat16", "float32")
"""Values of run.dtype that vLLM supports."""
MAX_ROUNDING = 1e-3
"""Rounding error of log-probabilities: a smaller positive value counts as 0."""
MAX_SHOWN = 300
"""Maximum characters of a server's answer in a message."""


class VllmError(RunError):
    """The server cannot be reached, or its answer is not from vLLM. The message has the way out."""


def serve_command(folder: str, *, dtype: str, max_tokens: int, returns_experts: bool) -> str:
    """Return the command that starts the server for a Hugging Face folder.

    Args:
        dtype: the dtype of training in vLLM's spelling. vLLM's own choice for float32 weights is bfloat16.
        max_tokens: length of the longest prompt with its completion.
    """
    variables = "VLLM_SERVER_DEV_MODE=1"
    options = f"--dtype {dtype} --tokens-only --generation-config vllm --logprobs-mode {LOGPROBS_MODE}"
    positions = _positions(folder)
    if positions is not None and positions < max_tokens:
        # The last token of a rollout is never an input, so there is one position less; vLLM has no rotation for more
        # positions.
        variables += " VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
        options += f" --max-model-len {min(max_tokens, positions + 1)}"
    experts = " --enable-return-routed-experts" if returns_experts else ""
    return f"{variables} vllm serve {folder} {options}{experts}"


def _positions(folder: str) -> int | None:
    """Return max_position_embeddings of a Hugging Face folder, or None if it is absent."""
    try:
        keys = read_settings(Path(folder) / CONFIG_FILE)
    except (ConfigError, OSError):
        return None
    count = keys.get("max_position_embeddings")
    return count if isinstance(count, int) else None


@dataclass(frozen=True)
class VllmClient:
    """Client of one vLLM server.

    Args:
        folder: the Hugging Face folder of its start.
        dtype: the dtype of training, run.dtype.
        max_tokens: maximum tokens of a prompt and its completion, train.seq_len + 1.
        timeout_s: maximum time of loading weights, and of sampling the rollouts of one round on one rank.
        returns_experts: whether completions contain the chosen experts of their tokens.
    """

    url: str
    folder: str
    dtype: str
    max_tokens: int
    timeout_s: float
    returns_experts: bool = False

    def check(self, *, max_tokens: int) -> None:
        """Check that the server runs, with the model of `folder` and the options of `serve_command`.

        `max_tokens` is the length of the longest prompt with its completion.
        """
        if self.dtype not in VLLM_DTYPES:
            raise VllmError(
                f"run.dtype={self.dtype!r} is not a dtype of vLLM (rollout.engine='vllm'); set run.dtype to "
                f"{' or '.join(map(repr, VLLM_DTYPES))}"
            )
        model = self._served_model()
        root = str(model.get("root"))
        if os.path.realpath(root) != os.path.realpath(self.folder):
            raise VllmError(
                f"rollout.url={self.url!r} serves {root!r}, and rollout.folder is {self.folder!r}; start it by: "
                f"{self._command()}"
            )
        longest = model.get("max_model_len")
        if not isinstance(longest, int) or longest < max_tokens:
            raise VllmError(
                f"rollout.url={self.url!r} has max_model_len={longest!r}, and the longest prompt with "
                f"rollout.max_tokens has {max_tokens} tokens; {self._longer_context_advice()}, or lower "
                "rollout.max_tokens"
            )
        info = self._call("/server_info?config_format=json")
        config = info.get("vllm_config")
        if not isinstance(config, dict):
            raise self._unexpected_answer("/server_info", info)
        self._check_dtype(_at(config, "model_config", "dtype"))
        mode = _at(config, "model_config", "logprobs_mode")
        if mode != LOGPROBS_MODE:
            raise VllmError(
                f"rollout.url={self.url!r} has logprobs_mode={mode!r}, and rollouts need the log-probabilities of the "
                f"distribution that is sampled from; start it by: {self._command()}"
            )
        if self.returns_experts and _at(config, "aux_output_config", "enable_return_routed_experts") is not True:
            if _at(config, "device_config", "device") == "cpu":
                raise VllmError(
                    f"rollout.url={self.url!r} runs on a CPU, where vLLM has no Triton and returns no experts, "
                    "and rl.replay needs them; set rl.replay='off'"
                )
            raise VllmError(
                f"rollout.url={self.url!r} returns no experts, which rl.replay needs; start it by: {self._command()} "
                "(which needs Triton); or set rl.replay='off'"
            )
        probe = SampleRequest(prompt=(0,), max_tokens=1)
        self.complete(probe, SamplingParams(), None, time.monotonic() + self.timeout_s)

    def _check_dtype(self, dtype: object) -> None:
        served = str(dtype).removeprefix("torch.")
        if served == self.dtype:
            return
        alternative = f"; or set run.dtype={served!r}" if served in VLLM_DTYPES else ""
        raise VllmError(
            f"rollout.url={self.url!r} computes in {served}, and training in run.dtype={self.dtype!r}, so sampling "
            f"would differ by more than rounding; start it by: {self._command()}{alternative}"
        )

    def _longer_context_advice(self) -> str:
        """Return the advice to start the server with space for the longest rollout."""
        positions = _positions(self.folder)
        if positions is not None and positions < self.max_tokens - 1:
            return (
                f"rollout.folder={self.folder!r} has max_position_embeddings={positions}, less than train.seq_len="
                f"{self.max_tokens - 1}: export it from a run of this length, or lower train.seq_len"
            )
        return f"start it by: {self._command()}"

    def load_weights(self, folder: Path, version: str) -> None:
        """Load the weights of a folder, clear the cached keys and values of the old ones, and set the new version."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": self.timeout_s}
        self._call("/collective_rpc", body)
        answer = self._call("/reset_prefix_cache", {})
        if answer.get("success") is not True:
            raise VllmError(
                f"rollout.url={self.url!r} keeps keys and values of former weights, as other requests run on it; give "
                "the run a server of its own"
            )
        answer = self._call("/update_weight_version", {"new_version": version})
        if answer.get("new_version") != version:
            raise self._unexpected_answer("/update_weight_version", answer)

    def complete(
        self, request: SampleRequest, sampling: SamplingParams, version: str | None, deadline_s: float
    ) -> tuple[Completion, NDArray[np.integer] | None]:
        """Sample the continuation of a prompt, without top-k and top-p.

        Args:
            version: required version of the weights. None means any.
            deadline_s: latest end, on the clock of time.monotonic.

        Returns:
            The completion, and the experts of each token except the last [prompt + new tokens - 1, layers, K], None
            without `returns_experts`.

        Raises:
            VllmError: the server failed, or other weights sampled.
        """
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise self._timeout_error()
        path = "/inference/v1/generate"
        answer = self._call(path, generate_body(request, sampling), remaining_s)
        try:
            (choice,) = answer["choices"]
            completion = _parse_completion(choice, request)
            versions = {span["version"] for span in choice["weight_versions"]}
            experts = _parse_experts(choice["routed_experts"]) if self.returns_experts else None
        except (KeyError, TypeError, ValueError, IndexError, Base64Error):
            raise self._unexpected_answer(path, answer) from None
        if version is not None and versions != {version}:
            raise VllmError(
                f"rollout.url={self.url!r} sampled with weights {sorted(versions)}, not with {version!r}; give the run "
                "a server of its own"
            )
        if experts is not None and len(experts) != len(request.prompt) + len(completion.tokens) - 1:
            raise VllmError(
                f"rollout.url={self.url!r} returned the experts of {len(experts)} tokens for a prompt of "
                f"{len(request.prompt)} and {len(completion.tokens)} new ones; set rl.replay='off'"
            )
        return completion, experts

    def _served_model(self) -> Mapping[str, Any]:
        answer = self._call("/v1/models")
        models = answer.get("data")
        if not (isinstance(models, list) and models and isinstance(models[0], dict)):
            raise self._unexpected_answer("/v1/models", answer)
        return models[0]

    def _call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0) -> dict[str, Any]:
        """Send a request, a POST if it has a body, and return the JSON object of the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        try:
            # The proxy of the environment does not apply to a server of the job.
            with build_opener(ProxyHandler({})).open(request, timeout=timeout_s or self.timeout_s) as answer:
                content = json.loads(answer.read())
        except HTTPError as error:
            text = error.read(MAX_SHOWN).decode(errors="replace")
            if error.code in (403, 404, 405):
                raise VllmError(
                    f"rollout.url={self.url!r} has no {path.partition('?')[0]}; start vLLM 0.32.0 or newer by: "
                    f"{self._command()}"
                ) from None
            raise VllmError(
                f"rollout.url={self.url!r}{path}: HTTP {error.code}: {text}; see the server's log"
            ) from None
        except TimeoutError:
            raise self._timeout_error() from None
        except (URLError, OSError, HTTPException) as error:
            if isinstance(error, URLError) and isinstance(error.reason, TimeoutError):
                raise self._timeout_error() from None
            reason = error.reason if isinstance(error, URLError) else error
            raise VllmError(
                f"rollout.url={self.url!r} cannot be reached ({reason}); start the server by: {self._command()}"
            ) from None
        except ValueError:
            raise self._unexpected_answer(path, "no JSON") from None
        if not isinstance(content, dict):
            raise self._unexpected_answer(path, content)
        return content

    def _command(self) -> str:
        return serve_command(
            self.folder, dtype=self.dtype, max_tokens=self.max_tokens, returns_experts=self.returns_experts
        )

    def _timeout_error(self) -> VllmError:
        return VllmError(
            f"rollout.url={self.url!r} has not answered within rollout.timeout_s={self.timeout_s:g} s; raise it (and "
            "faults.timeout_s), or sample fewer tokens a round"
        )

    def _unexpected_answer(self, path: str, answer: object) -> VllmError:
        return VllmError(
            f"rollout.url={self.url!r}{path} answers otherwise than vLLM 0.32.0: {str(answer)[:MAX_SHOWN]}; name a "
            "vLLM server of this interface"
        )


def vllm_server(run: RunConfig, train: TrainConfig, rollout: RolloutConfig, *, returns_experts: bool) -> VllmClient:
    """Return the server of a recipe."""
    return VllmClient(
        url=rollout.url,
        folder=rollout.folder,
        dtype=run.dtype,
        max_tokens=train.seq_len + 1,
        timeout_s=rollout.timeout_s,
        returns_experts=returns_experts,
    )


def generate_body(request: SampleRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return the body of /inference/v1/generate: vLLM's `SamplingParams` without changes of the distribution."""
    key = f"{sampling.seed} {request.prompt_number} {request.sample_number}".encode()
    return {
        "token_ids": list(request.prompt),
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1,
            # The recipe's end tokens are used, not the tokens of the folder's generation_config.json.
            "ignore_eos": True,
            "stop_token_ids": sorted(request.eos_ids),
            "max_tokens": request.max_tokens,
            "min_tokens": 0,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def _parse_completion(choice: Mapping[str, Any], request: SampleRequest) -> Completion:
    """Return the completion of a choice. Raise ValueError if its parts contradict each other."""
    tokens = tuple(int(token) for token in choice["token_ids"])
    content: Sequence[Mapping[str, Any]] = choice["logprobs"]["content"]
    log_probs = tuple(min(0.0, float(entry["logprob"])) for entry in content if entry["logprob"] < MAX_ROUNDING)
    is_ended = bool(tokens) and tokens[-1] in request.eos_ids
    finish = {"stop": "eos", "length": "length"}[choice["finish_reason"]]
    if [entry["token_id"] for entry in content] != list(tokens):
        raise ValueError("log-probabilities of other tokens")
    if len(log_probs) != len(tokens) or not all(math.isfinite(value) for value in log_probs):
        raise ValueError("no log-probabilities")
    if is_ended != (finish == "eos") or not 1 <= len(tokens) <= request.max_tokens:
        raise ValueError("another end than was asked for")
    return Completion(tokens=tokens, log_probs=log_probs, finish_reason="eos" if is_ended else "length")


def _parse_experts(text: str) -> NDArray[np.integer]:
    """Return an array in NumPy's file format, in base64. Raise ValueError unless it has 3 dimensions of integers."""
    array: NDArray[np.integer] = np.load(BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError("no experts")
    return array


def _at(tree: Mapping[str, Any], section: str, key: str) -> object:
    """Return an entry of a nested mapping, or None if it is missing."""
    table = tree.get(section)
    return table.get(key) if isinstance(table, dict) else None
