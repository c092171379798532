"""Steps of fused AdamW on CPUs in one compiled pass over memory, instead of joining, stepping and splitting buckets.

It has the bits of the other way, which takes the steps that it does not know: the first one, which creates state; a
scaler's; and those of gradients that are not bfloat16, or have other strides than their weights. Needs numba.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch

from castwise._warnings import warn_or_print
from castwise.master_weights import _numba_kernels as kernels
from castwise.master_weights._buckets import Bucket, Weight, local
from castwise.master_weights._clipping import Clip
from castwise.master_weights._codecs import Split
from castwise.master_weights._inner_optimizers import MOMENTS, step_without_hooks
from castwise.master_weights._kernels import GOLDEN, POOL
from castwise.master_weights._low_state import LowState, stream_of

_NO_WORDS = np.zeros(POOL, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
_OF_ONE_THREAD = "workqueue"
"""The layer of numba whose use by two threads at once ends the process."""
_LAUNCHED_IN: list[int] = []  # the process
_T = TypeVar("_T")


class Forms(NamedTuple):
    """How torch's fused kernel rounds on this machine, which its compiler has decided."""

    width: int
    """Elements in a vector. The last ones of a weight, fewer than this, are stepped one by one."""
    in_vectors: int
    """`PLAIN`, `SQUARE_LAST` or `SQUARE_FIRST` of `_numba_kernels`."""
    one_by_one: int
    """One of the same."""


@dataclass(slots=True)
class _Stepped:
    """A weight in a step."""

    memory: tuple[int, ...]
    """Addresses of its 16-bit weights, gradient, and first and second moments."""
    sizes: tuple[int, ...]
    """Bytes of an element of each."""
    setting: tuple[Any, ...]
    """As `_numba_kernels.step` takes it."""
    count: torch.Tensor
    """The number of its steps."""


def take(
    optimizer: torch.optim.Optimizer,
    buckets: Sequence[Bucket],
    clips: Sequence[Clip],
    residues: Collection[torch.Tensor],
    low_state: LowState,
) -> bool:
    """Step the weights in buckets, if this step is of the kind that is compiled; return whether they are stepped.

    Args:
        optimizer: The inner optimizer.
        buckets: All buckets.
        clips: How gradients are clipped.
        residues: The parameters whose gradients are not all in their `.grad`.
        low_state: Which state is stored in 16 bits.
    """
    forms, dtype = forms_of_torch(), low_state.dtypes.get(MOMENTS[0], torch.float32)
    if forms is None or _is_forked() or residues or (stepped := _stepped(optimizer, buckets, clips, dtype)) is None:
        return False
    # Nothing is written before all weights have been compared: the other way handles those that were written to.
    before = {}
    for bucket, digests in zip(buckets, _map(digests_of, buckets), strict=True):
        if digests is None or bucket.digest not in (None, digests):
            return False
        before[bucket] = digests
    _map(lambda bucket: _step_bucket(bucket, before[bucket], stepped, forms, low_state), buckets)
    if stepped:
        torch._foreach_add_([each.count for each in stepped.values()], 1)
    for weight in stepped:
        torch.autograd.graph.increment_version(local(weight.param))
        weight.note_written()
    return True


def _stepped(
    optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], clips: Sequence[Clip], dtype: torch.dtype
) -> dict[Weight, _Stepped] | None:
    """Return the weights that have gradients; None if any step or moment, of `dtype`, is not of the compiled kind."""
    if any(clip.factor is None for clip in clips):
        return None
    weights = {segment.weight.param: segment.weight for bucket in buckets for segment in bucket.segments}
    stepped = {}
    for group in optimizer.param_groups:
        is_known, settings = _is_known(group, optimizer), dict[tuple[float, float], tuple[Any, ...]]()
        for param in group["params"]:
            if param.grad is None or (weight := weights.get(param)) is None:
                continue
            state = optimizer.state.get(param, {})
            if not is_known or not _has_counted(state):
                return None
            factors = [clip.factor for clip in clips if clip.params is None or param in clip.params]
            tensors = [local(each) for each in (param, param.grad, *(state[name] for name in MOMENTS if name in state))]
            if len(tensors) < 4 or len(factors) > 1 or not _fit(tensors, dtype):
                return None
            of_step = state["step"].item(), 1.0 if not factors or factors[0] is None else factors[0].item()
            if of_step not in settings:
                settings[of_step] = _setting(group, *of_step)
            memory, sizes = zip(*((tensor.data_ptr(), tensor.itemsize) for tensor in tensors), strict=True)
            stepped[weight] = _Stepped(memory, sizes, settings[of_step], state["step"])
    return stepped


def _is_known(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    numbers = group["lr"], group["weight_decay"], *group["betas"]
    if any(isinstance(number, torch.Tensor) for number in numbers) or not max(group["betas"]) < 1:
        return False
    is_decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    return bool(
        group["fused"]
        and not (group["amsgrad"] or group["maximize"])
        and (is_decoupled or not group["weight_decay"])
        and np.float32(1 - group["betas"][0]) < 0.5  # from which on torch's lerp rounds in another way
    )


def _has_counted(state: Mapping[str, Any]) -> bool:
    count = state.get("step")
    return isinstance(count, torch.Tensor) and count.dtype is torch.float32 and bool(count >= 0)


def _fit(tensors: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return True if a weight, its gradient and its moments have the dtypes, shapes and strides that kernels read."""
    weight, grad, *moments = tensors
    return (
        grad.dtype is torch.bfloat16
        and not grad.is_neg()
        and all(tensor.shape == weight.shape and tensor.stride() == weight.stride() for tensor in tensors)
        and all(moment.dtype is dtype for moment in moments)
    )


def _setting(group: Mapping[str, Any], count: float, factor: float) -> tuple[Any, ...]:
    lr, (beta1, beta2), count = group["lr"], group["betas"], count + 1
    numbers = (
        *(1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2),
        *(math.sqrt(1 - beta2**count), group["eps"], -(lr / (1 - beta1**count)), factor),
    )
    with np.errstate(over="ignore"):
        return tuple(map(np.float32, numbers))


def _step_bucket(
    bucket: Bucket, before: tuple[bytes, ...], stepped: Mapping[Weight, _Stepped], forms: Forms, low_state: LowState
) -> None:
    assert isinstance(bucket.codec, Split)
    ties, residue = bucket.codec.rounded_down().numpy(), bucket.codec.residue.data_ptr()
    words = _words(bucket, low_state)
    digests, new_ties = [], []
    for segment, digest_before in zip(bucket.segments, before, strict=True):
        if (weight := stepped.get(segment.weight)) is None or not segment.length:
            begin, end = np.searchsorted(ties, (segment.offset, segment.offset + segment.length))
            digests.append(digest_before)
            new_ties.append(ties[begin:end])
            continue
        memory = [address + size * segment.start for address, size in zip(weight.memory, weight.sizes, strict=True)]
        of_kernel = memory[0], residue + 2 * segment.offset, *memory[1:]
        place = segment.length, segment.offset, segment.length // forms.width * forms.width
        digest = np.frombuffer(digest_before, np.int32).copy()
        with _in_one_thread():
            found = kernels.step(of_kernel, place, forms[1:], weight.setting, ties, digest, words)
        digests.append(digest.tobytes())
        new_ties.append(found)
    bucket.codec.set_rounded_down(torch.from_numpy(np.concatenate(new_ties)))
    bucket.digest = tuple(digests)


def _words(bucket: Bucket, low_state: LowState) -> tuple[Any, ...]:
    """Return random words that round a bucket's moments, as `Chance.words` adds them."""
    if low_state.dtypes.get(MOMENTS[0]) is not torch.bfloat16:
        return _NO_WORDS
    parts = [low_state.chance.random_of(bucket.length, bucket.device, stream_of(name, bucket)) for name in MOMENTS]
    starts = [(start + taken * GOLDEN).view(-1).numpy() for _, start, taken in parts]
    return parts[0][0].numpy(), *starts


def digests_of(bucket: Bucket) -> tuple[bytes, ...] | None:
    """Return digests of the 16-bit weights of each segment of a bucket; None if kernels cannot run in this process."""
    assert isinstance(bucket.codec, Split)
    if _is_forked():
        return None
    ties = bucket.codec.rounded_down().numpy()
    places = [(segment.param_view().data_ptr(), segment.length, segment.offset) for segment in bucket.segments]
    with _in_one_thread():
        return tuple(kernels.digests_of(*place, ties).tobytes() for place in places)


def _map(function: Callable[[Bucket], _T], buckets: Sequence[Bucket]) -> list[_T]:
    """Call a function for each bucket, in as many threads as torch has."""
    threads = min(torch.get_num_threads(), len(buckets))
    if threads < 2 or numba.threading_layer() == _OF_ONE_THREAD:
        return [function(bucket) for bucket in buckets]
    return [*_pool(threads, os.getpid()).map(function, buckets)]


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return threads of this process. numba's own would compete with those of torch, which spin before they sleep."""
    return ThreadPoolExecutor(threads, "castwise step")


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Run kernels without threads of numba's."""
    with _launched():
        before = numba.get_num_threads()
        numba.set_num_threads(1)
        try:
            yield
        finally:
            numba.set_num_threads(before)


@functools.cache
def _launched() -> AbstractContextManager[Any]:
    """Start numba's threads, and return what to hold while kernels run."""
    threads = torch.get_num_threads()
    numba.get_num_threads()
    if torch.get_num_threads() != threads:  # of OpenMP, which both use; torch's sums depend on it
        torch.set_num_threads(threads)
    _LAUNCHED_IN.append(os.getpid())
    return Lock() if numba.threading_layer() == _OF_ONE_THREAD else nullcontext()


def _is_forked() -> bool:
    """Return True in a process that was forked after kernels have run: OpenMP would end it."""
    return _LAUNCHED_IN not in ([], [os.getpid()])


@functools.cache
def forms_of_torch() -> Forms | None:
    """Return how torch rounds, found by trying; None, with a warning, if kernels round in no such way."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4093, *[31] * 64]  # of which 7, or 15, are not in vectors
    params = [torch.nn.Parameter(_normal(length, generator)) for length in lengths]
    grads = [_normal(length, generator).bfloat16() for length in lengths]
    optimizer = torch.optim.AdamW(params, weight_decay=0.1, fused=True)

    def stepped() -> list[list[torch.Tensor]]:
        step_without_hooks(optimizer)
        state = optimizer.state
        return [[param.detach().clone(), *(state[param][name].clone() for name in MOMENTS)] for param in params]

    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.float()
    cases = [*zip(stepped(), grads, stepped(), strict=True)]
    ways = kernels.PLAIN, kernels.SQUARE_LAST, kernels.SQUARE_FIRST
    for forms in itertools.starmap(Forms, itertools.product((8, 16, 4, 2, 1), ways, ways)):
        ours = ((_tried(forms, optimizer.param_groups[0], *before, grad), after) for before, grad, after in cases)
        if all(tried is not None and all(map(_have_equal_bits, tried, after)) for tried, after in ours):
            return forms
    warn_or_print(
        "steps of MasterWeights are not compiled, because torch's fused AdamW rounds in another way on this machine",
        RuntimeWarning,
    )
    return None


def _normal(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(length, generator=generator, dtype=torch.float32, device="cpu")


def _have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _tried(
    forms: Forms, group: Mapping[str, Any], values: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, ...] | None:
    """Return fp32 weights and both moments after a second step from these; None if the kernel's digests are wrong."""
    first, second, gradient = (each.clone() for each in others)
    codec, low, length = Split(len(values), values.device), torch.empty_like(values, dtype=torch.bfloat16), len(values)
    codec.encode(values.clone(), low)
    ties, residue = codec.rounded_down().numpy(), codec.residue
    memory = tuple(each.data_ptr() for each in (low, residue, gradient, first, second))
    place, setting = (length, 0, length // forms.width * forms.width), _setting(group, 1.0, 1.0)
    with _in_one_thread():
        digests = kernels.digests_of(low.data_ptr(), length, 0, ties)
        ties = kernels.step(memory, place, forms[1:], setting, ties, digests, _NO_WORDS)
        are_right = np.array_equal(digests, kernels.digests_of(low.data_ptr(), length, 0, ties))
    codec.set_rounded_down(torch.from_numpy(ties))
    return (codec.decode(low, torch.empty_like(values)), first, second) if are_right else None
