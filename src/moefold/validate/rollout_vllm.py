"""Rules on a vLLM server as the sampler of rollouts (`rollout.engine="vllm"`)."""

from collections.abc import Iterator

from moefold.config.faults import FaultsConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.topology.rollout_mapping import has_rollout_mapping


def validate_vllm(
    parallel: ParallelConfig, faults: FaultsConfig, rl: RLConfig, rollout: RolloutConfig
) -> Iterator[str]:
    """Check that the recipe names the server's folder, and leaves the mapping of sampling to the server."""
    if not rl.is_on or not rollout.uses_server:
        return
    if not rollout.folder:
        yield (
            "rollout.folder='' must name the Hugging Face folder that the vLLM server was started with; write one by "
            "moefold export CHECKPOINT FOLDER"
        )
    if has_rollout_mapping(parallel, rl, rollout):
        yield (
            "rollout.engine='vllm' samples under the mapping of the server (vllm serve --tensor-parallel-size), so "
            "rollout.ranks, tp, pp, ep, etp and experts have no effect; leave them out, or choose rollout.engine='own'"
        )
    if rollout.timeout_s >= faults.timeout_s:
        yield (
            f"rollout.timeout_s={rollout.timeout_s:g} must be less than faults.timeout_s={faults.timeout_s:g}, "
            "after which the other ranks end the run; lower it, or raise faults.timeout_s"
        )
