"""The [checkpoint] section: folder, intervals and resume, described in docs/checkpoints.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import Bound, ReadIf, VerifyAs, at_least
from moefold.config.base.part import Table
from moefold.config.base.path_rules import NO_TILDE


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig(Table):
    """Initial experts from the feed-forward layers of a dense model."""

    dense: Annotated[str, Bound("must name a folder", bool)]
    """Dense checkpoint or Hugging Face folder: the experts are copies or slices of its feed-forward layers."""
    router_init: Literal["group", "expert", "zero"] = "group"
    """Initial weights of the new routers: one random row per whole copy of the dense layer (group), a random row per
    expert, or zeros."""
    scaling: bool = True
    """Scale the experts' weights so that a token's experts add up to the dense layer (arXiv:2410.07524)."""
    noise: Annotated[float, at_least(0, "0: none")] = 0.0
    """Add normal noise to each copied tensor, in units of its standard deviation. 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoint folder, intervals and resume."""

    dir: Annotated[str, NO_TILDE] = ""
    """Folder of the checkpoints. Empty: RUN_DIR/checkpoints. May be remote, such as s3://BUCKET/RUN
    ([remote.md](remote.md))."""
    every: Annotated[int, at_least(0, "0: never")] = 500
    """Save every this many steps. 0: never during the run. A run with fewer steps saves at its end."""
    at_end: bool = True
    """Save after the last step, unless checkpoint.every has just done so."""
    keep: Annotated[int, at_least(0, "0: all"), ReadIf("checkpoint.every!=0 checkpoint.at_end=true")] = 10
    """Number of newest complete checkpoints to keep. Older ones are deleted after each save. 0 keeps all."""
    keep_every: Annotated[int, at_least(0, "0: none"), ReadIf("checkpoint.keep!=0"), ReadIf("checkpoint.every!=0")] = 0
    """Also keep the checkpoint of every this many steps, a multiple of `every`, whatever `keep` is. 0: none."""
    keep_best: Annotated[bool, ReadIf("checkpoint.keep!=0"), ReadIf("checkpoint.every!=0")] = False
    """Also keep the checkpoint with the lowest held-out loss, whatever `keep` is. RUN/best names it in the commands
    that read a model ([checkpoints.md](checkpoints.md#the-best-checkpoint)). checkpoint.every must be a multiple of
    train.eval_every."""
    verify: Annotated[bool, ReadIf("checkpoint.resume!=never")] = True
    """Before a resume, compare every file with the hash recorded when it was written. false: compare only its size."""
    async_save: Annotated[bool, ReadIf("checkpoint.every!=0 checkpoint.at_end=true")] = False
    """Write during training from a copy in host memory, which is as large as a rank's weights and moments."""
    peer_every: Annotated[int, at_least(0, "0: never"), ReadIf("faults.on_loss=regroup")] = 0
    """Copy each rank's state to its host memory, and its shards to the host memory of a rank of another replica, every
    this many steps ([checkpoints.md](checkpoints.md#snapshots-in-the-memory-of-peers)). 0: never."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of dir, if any. never: start from scratch. A path: this checkpoint."""
    init_from: Annotated[str, VerifyAs.START] = ""
    """Initial weights of a new run: an imported or any other checkpoint, a run (its newest), or a Hugging Face
    folder. May be remote, or hf://ORG/NAME ([remote.md](remote.md#the-hugging-face-hub))."""
    upcycle: Annotated[UpcycleConfig | None, VerifyAs.START] = None
    """Begin with experts made from a dense model ([conversion.md](conversion.md#upcycling)), instead of `init_from`."""
    ignore_keys: Annotated[tuple[str, ...], ReadIf("checkpoint.init_from checkpoint.upcycle rl.reference")] = ()
    """Keys of the JSON files of a Hugging Face folder with initial weights that moefold does not know, and that change
    nothing ([conversion.md](conversion.md#keys-of-json-files))."""

    @property
    def start(self) -> str:
        """Initial weights of a new run. Empty: random."""
        return self.upcycle.dense if self.upcycle else self.init_from

    @property
    def saves(self) -> bool:
        """Return whether the run saves at all. If so, it also saves when a signal stops it."""
        return self.every > 0 or self.at_end
