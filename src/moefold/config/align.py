"""The [align] section: offline alignment with rewards or preferences; see docs/alignment.md."""

import math
from dataclasses import dataclass
from typing import Annotated

from moefold.config.field import POSITIVE, Bound, Judged, at_least
from moefold.config.part import KindOf, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig:
    """Offline alignment with rewards or preferences ([alignment.md](alignment.md))."""

    method: Annotated[str | Part, KindOf("alignment", is_flat=True)] = "none"
    """none: no alignment. With data.kind "sft" and a reward in each row: filter trains on the rows with high rewards,
    weight scales each row's loss by exp(reward / beta), condition writes the reward into the prompt (arXiv:2308.12050).
    With data.kind "preference": dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), simpo (arXiv:2405.14734), kto
    (arXiv:2402.01306)."""
    reward: Annotated[str, Bound("must name a column", bool), Judged.SAMPLES] = "reward"
    """Column with the reward of a row (filter, weight, condition)."""
    threshold: Annotated[float | str, Judged.SAMPLES] = "best"
    """Rows that filter keeps. A number: rewards of at least it. "q0.8": rewards of at least that quantile of the data
    set. "best": the row with the highest reward of each prompt."""
    beta: Annotated[float, POSITIVE, Judged.SAMPLES] = 0.1
    """weight: temperature of the rewards. dpo, ipo, simpo, kto: scale of the implicit rewards; the higher, the closer
    to the reference (simpo: 2.0 to 2.5 is usual)."""
    weight_cap: Annotated[
        float, Bound("must be at least 1, or 0 (none)", lambda cap: cap >= 1 or cap == 0), Judged.SAMPLES
    ] = 20.0
    """Maximum factor of a row's loss, whose mean over the data set is 1 before the cap (weight); 0: none."""
    template: Annotated[str, Judged.SAMPLES] = "{prompt} <reward>{reward:.2f}</reward>"
    """Text that replaces the last message before the answer (condition)."""
    want: Annotated[float, Bound("must be a finite number", math.isfinite), Judged.SAMPLES] = 1.0
    """Reward that prompts ask for after training (condition): generate --chat, serve, rollout and lm_eval write it into
    the prompt by the template; their option --want takes another one."""
    gamma: Annotated[float, at_least(0)] = 0.5
    """Target margin between the implicit rewards of a pair (simpo)."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of desirable completions (kto)."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of undesirable completions (kto)."""
