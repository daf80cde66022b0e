"""Every parity case that the oracle computes."""

from tests.verify import (
    feature_cases,
    linear_cases,
    llama4_cases,
    lora_cases,
    mapping_cases,
    phi_cases,
    placement_cases,
    planned_cases,
    shortcut_cases,
    sparse_cases,
    zero_expert_cases,
)
from tests.verify.cases import cases, in_one_step
from tests.verify.same_bits_cases import OVERLAP

OVERLAPPED = cases("expert overlap", OVERLAP[8:9], [*OVERLAP[:8], *OVERLAP[9:]])
FAMILY_CASES = [
    *linear_cases.CASES,
    *llama4_cases.CASES,
    *zero_expert_cases.CASES,
    *shortcut_cases.CASES,
    *phi_cases.CASES,
]
ORACLE_CASES = [
    *mapping_cases.CASES,
    *in_one_step(
        [
            *feature_cases.CASES,
            *FAMILY_CASES,
            *planned_cases.CASES,
            *placement_cases.CASES,
            *sparse_cases.CASES,
            *lora_cases.CASES,
            *OVERLAPPED,
        ]
    ),
]
