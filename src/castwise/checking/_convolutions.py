"""Convolutions in float64 on a CPU, where torch has one kernel, which copies all that each output reads."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

_COLUMNS = 600_000  # numbers of float64 that a core's cache holds
_LEAST_COLUMNS = 140_000  # below this, torch's kernel was as fast as `_shifted` where both were measured
_LEAST_CHANNELS = 16


def convolution(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """Return what `aten.convolution` returns."""
    if _can_shift(image, weight, *rest):
        result = _shifted(image, weight, rest[1], rest[2])
        return result if bias is None else result.add_(bias.view(-1, *[1] * (image.dim() - 2)))
    parts = torch.split(image, _samples(image, weight, rest[0]))
    results = [torch.ops.aten.convolution(part, weight, bias, *rest) for part in parts]
    return results[0] if len(results) == 1 else torch.cat(results)


def convolution_backward(grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    """Return what `aten.convolution_backward` returns: the gradients of the input, the weight and the bias."""
    _, *options, wanted = rest
    if _can_shift(image, weight, *options):
        return _shifted_backward(grad, image, weight, options[1], options[2], wanted)
    count = _samples(image, weight, options[0])
    pairs = zip(torch.split(grad, count), torch.split(image, count), strict=True)
    results = [torch.ops.aten.convolution_backward(*pair, weight, *rest) for pair in pairs]
    if len(results) == 1:
        return results[0]
    of_images, *of_params = zip(*results, strict=True)
    of_image = None if of_images[0] is None else torch.cat(of_images)
    return of_image, *(None if parts[0] is None else functools.reduce(torch.add, parts) for parts in of_params)


def _columns(image: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]) -> int:
    """Return how many numbers torch's kernel copies for a sample."""
    return math.prod(image.shape[1:]) * math.prod(weight.shape[2:]) // math.prod(stride)


def _samples(image: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]) -> int:
    """Return how many samples of a batch to convolve at once: the kernel is slower if its copies leave the cache."""
    count = max(1, _COLUMNS // max(_columns(image, weight, stride), 1))
    return count if image.device.type == "cpu" else max(1, image.shape[0])


def _can_shift(
    image: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Sequence[int],
    groups: int,
) -> bool:
    """Return True for large images, of which `_shifted` is up to twice as fast as torch's kernel."""
    is_simple = image.device.type == "cpu" and not transposed and groups == 1 and all(step == 1 for step in stride)
    if not is_simple or hasattr(image, "to_local") or image.dim() != weight.dim():
        return False
    pixels, (outputs, inputs) = math.prod(image.shape[2:]), weight.shape[:2]
    return (
        pixels >= inputs >= _LEAST_CHANNELS <= outputs
        and _columns(image, weight, stride) >= _LEAST_COLUMNS
        and all(p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True))
    )


def _padded(
    image: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], dilation: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return where a sample is put, what each position of the kernel reads of it, where results are, and their row.

    If each channel of a padded sample is one row of numbers, a position of the kernel reads a part of the row. So does
    it write one, with a few numbers between the lines that are no results.
    """
    kernel = weight.shape[2:]
    sizes = [n + 2 * p for n, p in zip(image.shape[2:], padding, strict=True)]
    outputs = [n - d * (k - 1) for n, d, k in zip(sizes, dilation, kernel, strict=True)]
    samples, results = (image.new_zeros(channels, *sizes) for channels in (image.shape[1], weight.shape[0]))
    steps = samples.stride()[1:]
    length = 1 + sum((n - 1) * step for n, step in zip(outputs, steps, strict=True))
    read = []
    for position in itertools.product(*map(range, kernel)):
        start = sum(i * d * step for i, d, step in zip(position, dilation, steps, strict=True))
        read.append(samples.flatten(1).narrow(1, start, length))
    row = results.flatten(1).narrow(1, 0, length)
    for dim, (p, n, output) in enumerate(zip(padding, image.shape[2:], outputs, strict=True), 1):
        samples, results = samples.narrow(dim, p, n), results.narrow(dim, 0, output)
    return samples, read, results, row


def _shifted(
    image: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """Convolve by one product for each position of the kernel, which copies nothing."""
    sample, read, result, row = _padded(image, weight, padding, dilation)
    first, *others = weight.flatten(2).permute(2, 0, 1).contiguous()
    out = image.new_empty(image.shape[0], *result.shape)
    for source, target in zip(image, out, strict=True):
        sample.copy_(source)
        torch.mm(first, read[0], out=row)
        for part, values in zip(others, read[1:], strict=True):
            row.addmm_(part, values)
        target.copy_(result)
    return out


def _shifted_backward(
    grad: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    dilation: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    of_image, of_weight, of_bias = None, None, None
    if wanted[0]:  # a convolution of the gradient with the kernel from its end to its begin
        margins = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=True)]
        of_image = _shifted(grad, weight.flip(*range(2, weight.dim())).transpose(0, 1), margins, dilation)
    if wanted[1]:
        sample, read, result, row = _padded(image, weight, padding, dilation)
        parts = weight.new_zeros(len(read), *weight.shape[:2])
        for source, of_source in zip(image, grad, strict=True):
            sample.copy_(source)
            result.copy_(of_source)  # what is between the lines stays 0
            for part, values in zip(parts, read, strict=True):
                part.addmm_(row, values.t())
        of_weight = parts.permute(1, 2, 0).reshape(weight.shape)
    if wanted[2]:
        of_bias = grad.sum((0, *range(2, grad.dim())))
    return of_image, of_weight, of_bias
