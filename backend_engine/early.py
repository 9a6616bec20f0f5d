# pyright: reportMissingParameterType=false, reportAttributeAccessIssue=false
"""Kernels that begin while the one before them ends: CUDA's programmatic dependent launch, from Hopper on.

A kernel of a small model's step takes two or three microseconds, one of which passes before its first byte of weights
arrives. With this it lets the next kernel begin at once (`let_next_begin`), reads what no kernel of the step writes
(weights, keys of former steps), and only then waits for the one before it (`wait_for_last`).

What a kernel reads before it waits must be older than the last kernel before it that was launched in the ordinary way:
those between may still run, and that one's own writes need not have arrived. So it is with page tables, lengths and
angles, which the first norm of a step comes after. A kernel must wait in every program, and write nothing before:
whoever comes behind it relies on that for all that came before it.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_HOPPER = (9, 0)


@cache
def _begins_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER


def launch_options(device: torch.device) -> dict[str, Any]:
    """What a kernel with an `EARLY` constant is launched with on a device."""
    return {"EARLY": True, "launch_pdl": True} if _begins_early(device) else {"EARLY": False}


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """After this all that kernels before this one have written is there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
