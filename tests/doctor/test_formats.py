"""Which formats a device has units for."""

from __future__ import annotations

import pytest
import torch

from castwise._doctor.native_formats import of_cpu, of_cuda, of_device, to_try
from castwise.amp._emulation import is_native_here


@pytest.mark.parametrize(
    ("gpu", "capability", "formats"),
    [
        ("P100", (6, 0), ["fp32"]),
        ("V100", (7, 0), ["fp32", "fp16"]),
        ("T4", (7, 5), ["fp32", "fp16"]),
        ("A100", (8, 0), ["fp32", "tf32", "bf16", "fp16"]),
        ("RTX 3090", (8, 6), ["fp32", "tf32", "bf16", "fp16"]),
        ("L4", (8, 9), ["fp32", "tf32", "bf16", "fp16", "fp8"]),
        ("H100", (9, 0), ["fp32", "tf32", "bf16", "fp16", "fp8"]),
        ("B200", (10, 0), ["fp32", "tf32", "bf16", "fp16", "fp8"]),
    ],
)
def test_a_gpus_formats_follow_from_its_capability(gpu: str, capability: tuple[int, int], formats: list[str]) -> None:
    assert [name for name, native in of_cuda(capability).items() if native] == formats


def test_what_a_gpu_can_only_emulate_is_tried_and_what_it_cannot_do_at_all_is_not() -> None:
    assert to_try(of_cuda((7, 0))) == ["fp32", "bf16", "fp16"]
    assert to_try(of_cuda((9, 0))) == ["fp32", "tf32", "bf16", "fp16", "fp8"]


def test_a_cpus_formats_are_those_that_regions_do_not_warn_of() -> None:
    expected = {"fp32": True, "bf16": is_native_here(torch.bfloat16), "fp16": is_native_here(torch.float16)}
    assert of_cpu() == of_device(torch.device("cpu")) == expected


def test_of_an_accelerator_that_does_not_tell_nothing_is_claimed() -> None:
    assert of_device(torch.device("mps")) == {"fp32": True, "bf16": None, "fp16": None}
