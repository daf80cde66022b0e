"""One way to cut a model over ranks, as integers: what the planner prices."""

from dataclasses import dataclass, fields

from moefold.config.schema import Config

OFFLOADED_OPTIMIZER = "optimizer"
"""Of `ParallelMapping.offload`: the moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMapping:
    """The degrees of both views, the micro-batch and how a step is run; names as in a recipe."""

    tp: int = 1
    """Tensor parallelism of attention and dense layers, with sequence parallelism."""
    cp: int = 1
    """Context parallelism."""
    dp: int = 1
    """Data parallelism of attention."""
    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Model chunks on each pipeline rank."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of an expert."""
    edp: int = 1
    """Data parallelism of the experts."""
    mbs: int = 1
    """Samples of a micro-batch."""
    zero: int = 1
    """0 replicate; 1 shard optimizer state; 2 and gradients; 3 and parameters."""
    recompute: tuple[str, ...] = ()
    """Parts of the layers that run again in the backward pass."""
    offload: tuple[str, ...] = ()
    """What lives in host memory: "optimizer", and parts of the layers between the passes."""
    dispatcher: str = "alltoall"
    """How tokens reach their experts: local, allgather, alltoall, leastloaded, deepep or hybridep."""
    overlap: bool = False
    """Whether the experts' exchange of one micro-batch runs under the compute of another."""
    schedule: str = "1f1b"
    """Pipeline schedule; `vpp` of 2 or more with "1f1b" means its interleaved form."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches that one data-parallel rank works through in a step."""
        return global_batch_size // (self.mbs * self.dp)

    def as_dict(self) -> dict[str, object]:
        """Every field by its name, as `--json` prints it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def mapping_from_config(cfg: Config) -> ParallelMapping:
    """The mapping of a recipe."""
    p, train = cfg.parallel, cfg.train
    return ParallelMapping(
        tp=p.tp,
        cp=p.cp,
        dp=p.dp,
        pp=p.pp,
        vpp=p.virtual_stages,
        ep=p.ep,
        etp=p.etp,
        edp=p.edp,
        mbs=train.micro_batch_size,
        zero=p.zero,
        recompute=train.recompute,
        offload=(*train.offload, *((OFFLOADED_OPTIMIZER,) if train.offload_optimizer == "host" else ())),
        overlap=p.overlap_experts,
        dispatcher="alltoall" if p.dispatcher == "auto" else p.dispatcher,
        schedule=p.schedule,
    )
