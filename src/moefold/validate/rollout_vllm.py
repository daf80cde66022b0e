"""Rules on a vLLM server as the sampler of rollouts (`rollout.engine="vllm"`)."""

from collections.abc import Iterator

from moefold.config.schema import Config
from moefold.topology.rollout_mapping import has_rollout_mapping


def validate_vllm(cfg: Config) -> Iterator[str]:
    """Check that the recipe names the server's folder, and leaves the mapping of sampling to the server."""
    rollout = cfg.rollout
    if not cfg.is_rl or not rollout.uses_server:
        return
    if not rollout.folder:
        yield (
            "rollout.folder='' must name the Hugging Face folder that the vLLM server was started with; write one by "
            "moefold export CHECKPOINT FOLDER"
        )
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        yield (
            "rollout.engine='vllm' samples under the mapping of the server (vllm serve --tensor-parallel-size), so "
            "rollout.ranks, tp, pp, ep, etp and experts have no effect; leave them out, or choose rollout.engine='own'"
        )
    if rollout.timeout_s >= cfg.faults.timeout_s:
        yield (
            f"rollout.timeout_s={rollout.timeout_s:g} must be less than faults.timeout_s={cfg.faults.timeout_s:g}, "
            "after which the other ranks end the run; lower it, or raise faults.timeout_s"
        )
