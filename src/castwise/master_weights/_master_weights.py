"""`MasterWeights`: wraps an optimizer so that it steps fp32 weights while the model has 16-bit ones.

`step` works bucket by bucket: it decodes the fp32 weights, lends them with fp32 gradients to the inner optimizer, calls
its step, and encodes them again. `codecs` defines the number formats, `buckets` the memory, `lending` what the inner
optimizer sees, `narrowing` which parameters become 16-bit, and `checkpoint_entries` what is saved.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from castwise._number_text import percent
from castwise._registered_hooks import Hooks, hooks_of
from castwise._shown import ShownCounts
from castwise._state_decay import factor_of, falling_share
from castwise._suggestions import listed, nearest
from castwise._torch_private import (
    UNSCALES_IN_STEP,
    is_fsdp_flattened,
    never_traced,
    note_stepped,
    unscales_in_step,
    wraps_compiled,
)
from castwise._warnings import warn, warn_or_print
from castwise.amp._closures import no_momentum_of_a_skipped_step, temporary_attributes
from castwise.amp._iteration import Snapshot
from castwise.amp._measure import check_bound, check_norm_type, reciprocal
from castwise.amp.autocast_mode import autocast
from castwise.master_weights import _narrowing as narrowing
from castwise.master_weights._accumulation import Accumulation
from castwise.master_weights._buckets import (
    ALIGNED,
    Bucket,
    BucketViews,
    Layout,
    Loan,
    Part,
    Segment,
    Weight,
    Workspace,
    as_dtensor,
    fill,
    flat,
    is_dtensor,
    local,
    rounded_up,
    write_count,
)
from castwise.master_weights._checkpoint_entries import (
    PREFIX,
    as_split,
    chance_in,
    check_entries,
    check_form,
    check_kinds,
    check_state,
    entries_of,
    load_entries,
    load_inner,
    separated,
)
from castwise.master_weights._clipping import Clip, Clipping, grads_of, norm_and_factor
from castwise.master_weights._codecs import Chance, codec_of
from castwise.master_weights._inner_optimizers import (
    Reach,
    check,
    check_can_compile,
    nonnegative_state,
    reach_of,
    state_after_step,
    state_names,
    step_without_hooks,
)
from castwise.master_weights._kernels import WORTH_COMPILING
from castwise.master_weights._lending import lent, loans_of
from castwise.master_weights._low_state import BLOCK, Blockwise, Created, LowState, in_fp32, nbytes
from castwise.master_weights._narrowing_report import NarrowingReport, compare_forwards
from castwise.master_weights._rounded_clipping import RoundedClipping
from castwise.policy._bound_policy import BoundPolicy

_METHODS = ("split", "stochastic")
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCKWISE = "int8_blockwise"
_STATE = {
    *("defaults", "_inner", "_dtype", "_method", "_grad_dtype", "_chance", "_low_state", "_reach", "_weights"),
    *("_buckets", "_is_compiled"),
}
_OWNERS = WeakTensorKeyDictionary()  # parameters that have a MasterWeights


@dataclass(slots=True)
class _Round:
    """One call of the inner optimizer."""

    buckets: list[Bucket]
    """The buckets whose weights are lent."""
    members: dict[int, list[Segment | torch.Tensor]]
    """By group index, the members of the call: segments of 16-bit parameters, and other parameters."""


@unscales_in_step  # in fp32
class MasterWeights(torch.optim.Optimizer):
    """Train 16-bit weights with any optimizer as if they were fp32, by keeping the bits that rounding removes.

    A bfloat16 weight and 16 extra bits form an fp32 weight. `step` joins them, a few megabytes at a time, lets the
    inner optimizer step the fp32 weights with fp32 gradients and state, and splits them again. A weight takes 4 bytes
    instead of 4 + 2 with autocast's copies, and a gradient 2 instead of 4. By default the parameters that autocast
    casts become 16-bit. Training under autocast then gives the same losses and weights as fp32 weights, bit for bit,
    unless the model's own code reads a weight or its dtype, which `narrowing_report` finds.

    Use this optimizer instead of the inner one: pass it to schedulers, scalers and frameworks. `param_groups` and
    `state` are those of the inner optimizer. Create it after moving the model to its device and before DDP or a
    scheduler. Run the model under autocast, including in evaluation. After `model.to(dtype)` the next step raises.

    Args:
        optimizer: The inner optimizer. Its own `step` raises a RuntimeError from then on.
        model: The model that owns the parameters, in fp32 or already in `dtype`.
        dtype: Dtype of the 16-bit weights: bfloat16 or float16.
        method: "split" keeps all bits; "stochastic" keeps nothing and rounds stochastically.
        state_dtype: Storage dtypes of optimizer state by name, such as {"exp_avg": torch.bfloat16}; fp32 by default.
            State is computed in fp32 and rounded stochastically, or to nearest with
            {"exp_avg": (torch.bfloat16, "nearest")}. An average that could then never fall is refused: (1 - beta) v
            must be at least half of v's last bit. "int8_blockwise" keeps 8 bits, and an fp32 scale for each 256
            elements of a weight; an inf or NaN spreads over its 256 elements.
        narrow: Which parameters become 16-bit. By default, weights and biases of linear and convolution layers that no
            other module shares; with a bound policy, those of them that compute in `dtype`; with "all", all parameters.
        grad_dtype: Dtype in which gradients accumulate: "param", the dtype of the weights, or torch.float32 (needs
            torch >= 2.13; not with DDP and FSDP, which require one dtype for both).
        accumulate: How bf16 gradients of several micro-batches are added. "plain" rounds each sum to bf16, as torch
            does. "compensated" keeps what rounding drops, in 2 more bytes per parameter from the second micro-batch
            until the step, which has the bits of fp32 sums then. Not with FSDP, nor with float16.
        generator: Its `initial_seed()` seeds stochastic rounding; 0 by default. Must be the same on all ranks.
        compiled: Step fused AdamW, or Adam without weight decay, on CPUs in one pass over memory, compiled by numba
            (`pip install castwise[compiled]`) once on a machine, which takes 10 to 20 s. Bits are the same. Both
            moments must be in fp32, or both in bfloat16 by `state_dtype`. The first step, those of a gradient scaler,
            those of gradients in fp32, and those of a forked process take as long as before.

    Raises:
        ModuleNotFoundError: `compiled` is set, and numba is not installed.
        TypeError: `optimizer` is not a torch optimizer, or cannot be wrapped (LBFGS, SparseAdam); `narrow` is invalid;
            or another argument has the wrong type.
        ValueError: An argument is out of range; a parameter is in another `MasterWeights`, or a wrapper keeps it from
            becoming 16-bit (DDP, FSDP1, an FSDP2 unit that would have two dtypes); a weight is too large for float16;
            a parameter is on the meta device; or `state_dtype` names state that the optimizer does not keep, or an
            average that cannot fall. Nothing has been changed then.

    Example:
        >>> import castwise
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = MasterWeights(torch.optim.AdamW(model.parameters()), model)
        >>> with castwise.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> loss.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, optimizer.fp32_state_dict(model)["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    _steps_in_fp32 = True  # the protocol `amp._fp32_steps.StepsInFP32`
    _has_warned_of_late_backward = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.bfloat16,
        method: str = "split",
        state_dtype: Mapping[str, torch.dtype | str | tuple[torch.dtype | str, str]] | None = None,
        narrow: object = None,
        grad_dtype: str | torch.dtype = "param",
        accumulate: str = "plain",
        generator: torch.Generator | None = None,
        compiled: bool = False,
    ) -> None:
        if isinstance(optimizer, MasterWeights):
            raise TypeError("MasterWeights cannot wrap a MasterWeights: give it the inner optimizer")
        check(optimizer)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        _check_choice("dtype", dtype, _DTYPES)
        _check_choice("method", method, _METHODS)
        _check_choice("grad_dtype", grad_dtype, ("param", torch.float32))
        _check_choice("accumulate", accumulate, ("plain", "compensated"))
        if accumulate == "compensated" and (dtype is torch.float16 or grad_dtype is torch.float32):
            raise ValueError(
                'accumulate="compensated" is for bfloat16 gradients: omit it to accumulate in fp32 by grad_dtype, and '
                "give grad_dtype=torch.float32 with float16 weights"
            )
        if grad_dtype is torch.float32 and not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(f"grad_dtype=torch.float32 needs torch >= 2.13, got {torch.__version__}")
        if not isinstance(generator, (torch.Generator, type(None))):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self._dtype, self._method = dtype, method
        self._narrow, self._grad_dtype = narrow, grad_dtype
        self._chance = Chance(0 if generator is None else generator.initial_seed())
        self._model: ref[nn.Module] | None = ref(model)
        self._reach = reach_of(optimizer)
        self._weights: list[Weight] = []
        self._buckets: list[Bucket] = []
        self._workspace = Workspace(0, ())
        self._known_rounds: tuple[list[list[int]], list[_Round]] | None = None
        self._clipping: Clipping | None = None
        self._rounded_clipping: RoundedClipping | None = None
        self._accumulation = Accumulation() if accumulate == "compensated" else None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        chosen = self._check_params(optimizer, model, params)
        self._low_state = _low_state(optimizer, state_dtype, self._chance)
        if compiled:
            low = self._low_state
            stored = {name: (kind, "nearest") if name in low.nearest else kind for name, kind in low.dtypes.items()}
            check_can_compile(optimizer, dtype, method, stored, {param.device.type for param in params})
        self._is_compiled = compiled and _does_compile()
        self._inner = optimizer
        self.__setstate__({"defaults": optimizer.defaults})
        self._share_hooks()
        self._adopt(model, params, chosen)

    def _share_hooks(self) -> None:
        """Run the hooks of the inner optimizer once per step, and make its own `step` raise."""
        before = hooks_of(self._inner.register_step_pre_hook)
        if _refuse_alone not in before.values():
            self._inner.register_step_pre_hook(_refuse_alone)
        super().register_step_pre_hook(functools.partial(_run_before, before))
        super().register_step_post_hook(functools.partial(_run_after, hooks_of(self._inner.register_step_post_hook)))

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the inner optimizer, which runs before each step.

        Args:
            hook: Called as torch calls it, with the inner optimizer.
        """
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the inner optimizer, which runs after each step.

        Args:
            hook: Called as torch calls it, with the inner optimizer.
        """
        return self._inner.register_step_post_hook(hook)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer, with the model's parameters."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of the inner optimizer, by parameter of the model."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._inner.state = state

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that steps the fp32 weights."""
        return self._inner

    def _check_params(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, params: list[torch.Tensor]
    ) -> set[torch.Tensor]:
        """Return the parameters that should be 16-bit, or raise without changing anything."""
        names = narrowing.names_of(model)
        for param in params:
            if param.is_meta:
                raise ValueError(
                    f"{names.get(param, 'a parameter')!r} is on the meta device and has no values: call "
                    "model.to_empty(device=...) and initialize it before creating MasterWeights"
                )
        chosen = narrowing.choose(model, self._narrow, self._dtype, params)
        low = [param for param in params if param in chosen or param.dtype is self._dtype]
        other = torch.float16 if self._dtype is torch.bfloat16 else torch.bfloat16
        for param in params:
            name = names.get(param, "a parameter that the model does not have")
            if param.dtype is other and self._narrow is None:
                raise ValueError(f"{name!r} is {other} already: give dtype={other}, or convert the model to fp32 first")
            if any(str(key).startswith(PREFIX) for key in optimizer.state.get(param, ())):
                raise ValueError(
                    f"the optimizer has state of a MasterWeights for {name!r}: load the checkpoint into it"
                )
        for param in low:
            self._check_low(names.get(param, "a parameter that the model does not have"), param)
        narrowing.check_is_possible(model, set(low), self._dtype)
        return set(low)

    def _check_low(self, name: str, param: torch.Tensor) -> None:
        """Raise if a parameter cannot be 16-bit."""
        if owner_of(param) not in (None, self):
            raise ValueError(f"{name!r} is in another MasterWeights already: a parameter can be in only one")
        if is_fsdp_flattened(param) and self._reach is not Reach.ELEMENT:
            raise ValueError(
                f"{name!r} is flattened by FSDP1, which works only with optimizers that step each element "
                "independently: use FSDP2 (fully_shard)"
            )
        if self._accumulation is not None and (is_dtensor(param) or is_fsdp_flattened(param)):
            raise ValueError(
                f"{name!r} is sharded, and FSDP adds its gradients itself: omit accumulate, reduce in fp32 with "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32), and call model.set_requires_gradient_sync("
                "False) for all micro-batches but the last"
            )
        if self._grad_dtype is torch.float32 and is_dtensor(param):
            raise ValueError(
                f"{name!r} is a DTensor, whose gradients torch keeps in its own dtype: omit grad_dtype, and reduce "
                "in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if self._grad_dtype is torch.float32 and param.grad is not None:
            raise ValueError(f"{name!r} has a gradient, whose dtype would change: call zero_grad() first")
        here = local(param)
        if not (here.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(here)):
            raise ValueError(f"{name!r} has strides {param.stride()}: only dense parameters can be 16-bit")
        if self._dtype is torch.float16 and param.dtype is not torch.float16:
            largest = float(local(param).abs().amax()) if local(param).numel() else 0.0
            if 65504.0 < largest < float("inf"):
                raise ValueError(
                    f"{name!r} has a weight of magnitude {largest:.6g}, but float16 ends at 65504: use bfloat16"
                )

    def _adopt(self, model: nn.Module, params: Iterable[torch.Tensor], chosen: set[torch.Tensor]) -> None:
        """Make parameters 16-bit and keep the bits that they lose."""
        names = narrowing.names_of(model)
        fp32 = {param: flat(local(param)).clone() for param in chosen if param.dtype is torch.float32}
        narrowing.narrow_(model, chosen, self._dtype)
        new = [
            Weight(param, names.get(param, f"parameter {index}"), Layout.of(param))
            for index, param in enumerate(params)
            if param in chosen
        ]
        aligned = BLOCK if self._low_state.has_blocks() else ALIGNED
        added = fill(new, cuts=self._reach is Reach.ELEMENT, aligned=aligned)
        is_compiled = sum(bucket.length for bucket in added) >= WORTH_COMPILING
        if is_compiled and self._saved_chance() is not None:
            self._chance.compile_on({bucket.device for bucket in added})
        for bucket in added:
            of_bucket: Any = {"chance": self._chance, "stream": f"weights {len(self._buckets)}"}
            bucket.codec = codec_of(
                self._method, self._dtype, bucket.length, bucket.device, **of_bucket, is_compiled=is_compiled
            )
            bucket.digests_of = _compiled_step().digests_of if self._is_compiled else None
            self._buckets.append(bucket)
        length = max((rounded_up(bucket.length, aligned) for bucket in self._buckets), default=0)
        self._workspace = Workspace(length, self._low_state.names())
        self._known_rounds = None
        for bucket in added:
            self._fill(bucket, fp32)
        for weight in new:
            weight.kept_digests = weight.digest()
            _OWNERS[weight.param] = ref(self)
            if self._grad_dtype is torch.float32:
                weight.param.grad_dtype = torch.float32
            if self._accumulation is not None:
                self._accumulation.watch(weight)
            of_param = self.state.get(weight.param, {})
            of_param.update(self._low_state.stored(of_param, weight.param))
        self._weights += new
        trained = [weight.param for weight in self._weights if weight.param.requires_grad and weight.param.is_leaf]
        if self._rounded_clipping is None and trained:
            self._rounded_clipping = RoundedClipping(trained[0])
        if not self._weights:
            warn(
                "MasterWeights has nothing to do: the optimizer has no weights of linear or convolution layers of this "
                'model. To make other parameters 16-bit, give narrow="all"',
                UserWarning,
            )

    @torch.no_grad()
    def _fill(self, bucket: Bucket, fp32: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Encode the weights of a new bucket, from their fp32 values where they had some."""
        views = self._workspace.views_of(bucket)
        views.values.zero_()
        for segment in bucket.segments:
            param = segment.weight.param
            segment.bucket_view(views.values).copy_(segment.view_of(fp32[param] if param in fp32 else local(param)))
        bucket.encode(views, bucket.segments)

    @staticmethod
    def narrow_(model: nn.Module, dtype: torch.dtype = torch.bfloat16, narrow: object = None) -> None:
        """Make the same weights 16-bit as a `MasterWeights` would, before DDP or FSDP1 wraps the model.

        The bits that fp32 weights lose are not kept. Lightning wraps a model before it calls `configure_optimizers`, so
        call this in `configure_model`.

        Args:
            model: The model, which is changed in place.
            dtype: bfloat16 or float16.
            narrow: As in the constructor.

        Raises:
            TypeError: `narrow` is invalid.
            ValueError: `dtype` is invalid, or the model is already wrapped.
        """
        _check_choice("dtype", dtype, _DTYPES)
        chosen = narrowing.choose(model, narrow, dtype, model.parameters())
        narrowing.check_is_possible(model, chosen, dtype)
        narrowing.narrow_(model, chosen, dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, and make its parameters 16-bit by the rules of the constructor.

        Args:
            param_group: A dict with "params" (tensors, or pairs of name and tensor) and options for them.

        Raises:
            RuntimeError: The model no longer exists.
            TypeError: `param_group` is not such a dict.
            ValueError: See the constructor, and the inner optimizer. Nothing has been changed then.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'param_group must be a dict with "params", got {param_group!r}')
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else [*params]
        tensors = [param[1] if isinstance(param, tuple) else param for param in params]
        model = self._find_model({each for each in tensors if isinstance(each, torch.Tensor)})
        if model is None:
            raise RuntimeError("the model no longer exists, so parameters cannot be added: create a new MasterWeights")
        chosen = self._check_params(self._inner, model, [each for each in tensors if isinstance(each, torch.Tensor)])
        self._inner.add_param_group({**param_group, "params": params})
        self._adopt(model, tensors, chosen)

    def sum_over_ranks(self, model: nn.Module) -> None:
        """Have DDP average bf16 gradients over ranks in fp32, and keep what bf16 cannot hold until the step.

        Gradients then have the bits that DDP computes from fp32 weights, but are sent in fp32. Call before training.
        A second call for the same model does nothing. Needs `accumulate="compensated"`.

        Args:
            model: The model in DDP, or a framework's wrapper of that. DDP must be without `gradient_as_bucket_view`
                and without another communication hook.

        Raises:
            RuntimeError: DDP has another communication hook.
            TypeError: `model` is not in DDP.
            ValueError: `accumulate` is not "compensated", or DDP's gradients are views of its buckets.
        """
        parallel = _in_ddp(model)
        if parallel is None:
            raise TypeError(f"model must be a DistributedDataParallel, got {type(model).__name__}")
        if self._accumulation is None:
            raise ValueError('sum_over_ranks keeps bits beside gradients: give MasterWeights accumulate="compensated"')
        if parallel.gradient_as_bucket_view:
            raise ValueError("gradients must not be views of DDP's buckets: omit gradient_as_bucket_view")
        accumulation = self._accumulation
        if parallel in accumulation.reduces:
            return

        def all_reduce(state: Any, bucket: Any) -> Any:
            return accumulation.all_reduce(state, bucket)

        all_reduce.__annotations__.clear()  # which DDP would compare with its own classes
        parallel.register_comm_hook(parallel.process_group, all_reduce)
        accumulation.reduces.add(parallel)

    def _find_model(self, new: set[torch.Tensor]) -> nn.Module | None:
        """Return the model; of a copied or unpickled optimizer, the smallest module that has its weights and `new`."""
        model = None if self._model is None else self._model()
        if model is None and (model := narrowing.owner_of({weight.param for weight in self._weights}, new)) is not None:
            self._model = ref(model)
        return model

    # -- the step -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the total gradient norm in fp32 in the next `step`.

        Use this instead of `torch.nn.utils.clip_grad_norm_`, which would round norms and clipped gradients to 16 bits.
        `.grad` is not changed. With a scaler, call the scaler's `clip_grad_norm_`.

        Args:
            max_norm: The largest allowed norm, >= 0.
            norm_type: p of the p-norm, > 0, or inf.
            error_if_nonfinite: Raise if the norm is not finite. Syncs.

        Returns:
            The p-norm before clipping: shape (), the same as torch's function gives for fp32 gradients; fp32, or fp64
            if a gradient is. After an earlier call for the same gradients, their norm as clipped then.

        Raises:
            RuntimeError: The norm is not finite and `error_if_nonfinite` is set, a backward has added to gradients
                after an earlier call, or the model is in FSDP1.
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of range.
        """
        max_norm, norm_type = check_bound("max_norm", max_norm), check_norm_type(norm_type)
        pairs = self._pairs_to_clip()
        if not pairs:
            return torch.zeros(())
        with torch.no_grad():
            fp32_of = functools.partial(self._fp32_grad, clips=self._clips())
            norm, factor = norm_and_factor(pairs, max_norm, norm_type, error_if_nonfinite, fp32_of)
            self._add_clip(Clip(factor))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradients to [-v, v] in fp32 in the next `step`.

        Use this instead of `torch.nn.utils.clip_grad_value_`, which would round v to 16 bits. `.grad` is not changed.
        With a scaler, call the scaler's `clip_grad_value_`.

        Args:
            clip_value: v, >= 0.

        Raises:
            RuntimeError: A backward has added to gradients after an earlier call, or the model is in FSDP1.
            TypeError: `clip_value` is not a number, or there are complex gradients.
            ValueError: `clip_value` < 0.
        """
        clip_value = check_bound("clip_value", clip_value)
        if any(grad.is_complex() for _, grad in self._pairs_to_clip()):
            raise TypeError("complex gradients cannot be clipped by value: use clip_grad_norm_")
        self._add_clip(Clip(bound=clip_value))

    def _clip_once_unscaled(self, *, factor: torch.Tensor | None = None, clip_value: float = 0.0) -> None:
        """Clip in the next `step`, for a scaler, which unscales the gradients first."""
        self._add_clip(Clip(factor, clip_value), is_once_unscaled=True)

    def _check_not_clipped_by_value(self) -> None:
        """Raise a RuntimeError if a scaler has clipped these gradients by value, which their norm would not include."""
        if any(clip.factor is None for clip in self._clips()):
            raise RuntimeError(
                "the gradients are clipped by value in the step: call scaler.clip_grad_norm_(optimizer, ...) before "
                "scaler.clip_grad_value_(optimizer, ...)"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and forget how they were to be clipped.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        self._clipping = None
        if self._accumulation is not None:
            self._accumulation.clear()
        super().zero_grad(set_to_none)

    def _fp32_grad(self, param: torch.Tensor, grad: torch.Tensor, clips: tuple[Clip, ...]) -> torch.Tensor | None:
        """Return a gradient in fp32 as it is clipped by now; None if it is the gradient itself."""
        in_fp32 = self._unrounded_sum(param)
        if in_fp32 is None and clips:
            in_fp32 = grad.to(torch.float32) if grad.dtype.itemsize < 4 else grad.clone()
        if in_fp32 is not None:
            for clip in clips:
                clip.apply_([(param, in_fp32)])
        return in_fp32

    def _unrounded_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 sum that a parameter's gradient was rounded from; None if it was not, or is not kept."""
        residue = None if self._accumulation is None else self._accumulation.residue_of(param)
        if residue is None or param.grad is None:
            return None
        in_fp32 = param.grad.to(torch.float32)
        in_fp32.view(torch.int32).add_(residue)
        return in_fp32

    def _pairs_to_clip(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters that have gradients, with these; raise a RuntimeError if FSDP1 has flattened them."""
        if any(is_fsdp_flattened(weight.param) for weight in self._weights):
            raise RuntimeError("FSDP1 shards the gradients: call the model's clip_grad_norm_")
        params = [param for group in self.param_groups for param in group["params"]]
        return [(param, param.grad) for param in params if param.grad is not None]

    def _clips(self, *, is_stepping: bool = False) -> tuple[Clip, ...]:
        """Return how the current gradients are clipped already.

        If gradients were written to since, a RuntimeError is raised. If they were clipped by parameters there is a
        warning instead, and their sum is clipped once: a later clipping replaces the earlier ones.
        """
        clipping, grads = self._clipping, _grads(self.param_groups)
        if clipping is None:
            return ()
        if not clipping.is_by_parameters or not clipping.has_written(grads):
            return clipping.clips_of(grads)
        if not self._has_warned_of_late_backward:
            self._has_warned_of_late_backward = True
            warn_or_print(
                "gradients of MasterWeights were clipped before the last backward added to them. Their sum is clipped, "
                "once: clip after the last backward before a step",
                UserWarning,
            )
        return clipping.clips if is_stepping else ()

    def _add_clip(self, clip: Clip, *, is_once_unscaled: bool = False, is_by_parameters: bool = False) -> None:
        """Clip the current gradients in the next step.

        Args:
            clip: How; after earlier clippings of these gradients.
            is_once_unscaled: Whether a scaler is going to unscale them first.
            is_by_parameters: Whether the caller knows no optimizer, and may clip again after another backward.
        """
        clips, grads = (*self._clips(), clip), Snapshot(_grads(self.param_groups))
        self._clipping = Clipping(grads, clips, is_once_unscaled, is_by_parameters)

    def _take_clips(self, scale: torch.Tensor | None, *, is_fused: bool) -> tuple[Clip, ...]:
        """Return what to do to the fp32 gradients of this step, in order, and forget it.

        Args:
            scale: What the gradients have to be divided by.
            is_fused: Whether the inner optimizer divides by it, unless there is something else to do afterwards.
        """
        try:
            clips = self._clips(is_stepping=True)
        finally:
            self._clipping = None
        if scale is None or (is_fused and not clips):
            return clips
        factor = None if is_fused else getattr(self, "grad_factor", None)  # the scaler includes clipping in it
        return Clip(reciprocal(scale) if factor is None else factor), *clips

    @never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the fp32 weights, and write their rounded values to the model.

        If a scaler has set `grad_scale` on the optimizer, gradients are first divided by it in fp32. If it has set a
        nonzero `found_inf`, nothing is changed; on an accelerator this syncs unless the inner optimizer is fused.

        Args:
            closure: Computes gradients and returns the loss. Called once, before anything is stepped.

        Returns:
            The return value of the closure; without a closure, that of the inner optimizer's `step`.

        Raises:
            TypeError: A closure is given for an inner optimizer that may call it several times, or a 16-bit parameter
                has a sparse gradient.
            RuntimeError: A parameter has another dtype, device or shape than before, or a backward has added to
                gradients after clipping. Nothing has been changed then.

        Warns:
            UserWarning: A weight was written from outside since the last step; the new value is used. Writes that do
                not change the version counter, as through `.data`, are detected on CPUs only, after the step.
        """
        loss = None
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function, got {type(closure).__name__}")
        if closure is not None:
            if self._reach is Reach.ALL:
                raise TypeError(
                    f"MasterWeights takes no closure for {type(self._inner).__name__}, which may call it during the "
                    "step: compute the gradients first, and call step() without a closure"
                )
            with torch.enable_grad():
                loss = closure()
        rounds = self._checked_rounds()
        self._warn_of_rounded_clipping()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None and self._clipping is not None and not self._clipping.is_once_unscaled:
            raise RuntimeError(
                "the gradients are scaled, but were clipped as if they were not: call "
                "scaler.clip_grad_norm_(optimizer, ...) instead of the optimizer's method"
            )
        is_fused = bool(getattr(self._inner, UNSCALES_IN_STEP, False))
        # A fused optimizer on an accelerator reads found_inf on the device; for all others the host has to know it.
        if found_inf is not None and (found_inf.is_cpu or not is_fused) and found_inf.item():
            self._clipping = None
            return loss
        clips, returned = self._take_clips(scale, is_fused=is_fused), None
        created: Created = {}
        written: list[Weight] = []
        residues = {} if self._accumulation is None else self._accumulation.residues()
        with torch.no_grad(), ExitStack() as stack:
            if is_fused:
                inner_scale = None if clips else scale
                stack.enter_context(temporary_attributes(self._inner, grad_scale=inner_scale, found_inf=found_inf))
                if found_inf is not None and not found_inf.is_cpu and isinstance(self._inner, torch.optim.SGD):
                    stack.enter_context(no_momentum_of_a_skipped_step(self._inner, found_inf))
            if self._is_compiled and scale is None and found_inf is None:
                rounds = self._take_compiled(rounds, clips, residues)
            for round_ in rounds:
                returned = self._step_round(round_, clips, created, written, residues, writes_grads=scale is not None)
        if self._accumulation is not None:
            self._accumulation.clear()
        note_stepped(self._inner)
        if self._saved_chance() is not None and self._buckets:
            self._chance.count(self._buckets[0].device, found_inf)
        self._warn_of(written, is_counted=False)
        return returned if closure is None else loss

    def _take_compiled(
        self, rounds: list[_Round], clips: tuple[Clip, ...], residues: Mapping[torch.Tensor, torch.Tensor]
    ) -> list[_Round]:
        """Step the 16-bit weights in compiled code if it knows this kind of step; return the calls that are left."""
        is_taken = _compiled_step().take(self._inner, self._buckets, clips, residues, self._low_state)
        return [round_ for round_ in rounds if not round_.buckets] if is_taken else rounds

    def _rounds(self) -> list[_Round]:
        """Return the calls of the inner optimizer for one step; raise a RuntimeError if a weight is in no group."""
        ids = [[id(param) for param in group["params"]] for group in self.param_groups]
        if self._known_rounds is not None and self._known_rounds[0] == ids:
            return self._known_rounds[1]
        group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for weight in self._weights:
            if weight.param not in group_of:
                raise RuntimeError(f"{weight.name!r} is no longer in any group: create a new MasterWeights without it")
        if self._reach is Reach.ALL:
            rounds = [self._whole()]
        else:
            rounds = []
            for bucket in self._buckets:
                rounds.append(_Round([bucket], {}))
                for segment in bucket.segments:
                    rounds[-1].members.setdefault(group_of[segment.weight.param], []).append(segment)
            low = {weight.param for weight in self._weights}
            kept: dict[int, list[Segment | torch.Tensor]] = {}
            for param, index in group_of.items():
                if param not in low:
                    kept.setdefault(index, []).append(param)
            if kept:
                rounds.append(_Round([], kept))
        self._known_rounds = ids, rounds
        return rounds

    def _whole(self) -> _Round:
        """Return one call with all parameters, for an optimizer that needs them together."""
        of_param = {segment.weight.param: segment for bucket in self._buckets for segment in bucket.segments}
        members: dict[int, list[Segment | torch.Tensor]] = {
            index: [of_param.get(param, param) for param in group["params"]]
            for index, group in enumerate(self.param_groups)
        }
        return _Round(self._buckets, members)

    def _step_round(
        self,
        round_: _Round,
        clips: tuple[Clip, ...],
        created: Created,
        written: list[Weight],
        residues: dict[torch.Tensor, torch.Tensor],
        *,
        writes_grads: bool,
    ) -> Any:
        with self._lent(round_, created, written, residues) as loans:
            groups = self._inner.param_groups
            if not loans and self._reach is not Reach.ALL and not _grads(groups):
                return None
            if clips:
                lent_for = {id(loan.stand_in): loan.segment.weight.param for loan in loans}
                params = [param for group in groups for param in group["params"] if param.grad is not None]
                pairs_to_clip = [(lent_for.get(id(param), param), param.grad) for param in params]
                for clip in clips:
                    clip.apply_(pairs_to_clip)
            returned = step_without_hooks(self._inner)
            if writes_grads:
                pairs = [(loan.grad, loan.stand_in.grad) for loan in loans]
                copied = [(to, local(grad)) for to, grad in pairs if to is not None and grad is not None]
                copied = [(to, grad) for to, grad in copied if to.dtype is not grad.dtype]
                if copied:
                    torch._foreach_copy_([to for to, _ in copied], [grad for _, grad in copied])
        return returned

    @contextmanager
    def _lent(
        self,
        round_: _Round,
        created: Created,
        written: list[Weight],
        residues: dict[torch.Tensor, torch.Tensor],
        *,
        all_: bool = False,
    ) -> Iterator[list[Loan]]:
        """Lend fp32 weights to the inner optimizer in the body; write their rounded values if it does not raise.

        Args:
            round_: The call, with the members to lend.
            created: State that parts of cut weights have created in this step.
            written: Weights found to be written from outside are appended.
            residues: What to add to the bits of gradients in fp32, by parameter.
            all_: Whether to also lend weights without gradients.
        """
        all_ = all_ or self._reach is Reach.ALL  # such optimizers may refer to parameters by position
        views_of, found, loans = dict[Bucket, BucketViews](), dict[Bucket, list[Segment]](), dict[Segment, Loan]()
        for bucket in round_.buckets:
            if all_ or bucket.has_grads():
                # An unknown optimizer may keep lent tensors or assign to their `.data`, so it gets new ones.
                own = Workspace(rounded_up(bucket.length, bucket.aligned), self._low_state.names()) if all_ else None
                views = self._workspace.views_of(bucket) if own is None else BucketViews(bucket, own)
                views_of[bucket], found[bucket] = views, bucket.decode(views)
                loans.update((loan.segment, loan) for loan in loans_of(views, residues, all_=all_))
        members: dict[int, list[Loan | torch.Tensor]] = {
            index: [
                loans[each] if isinstance(each, Segment) else each
                for each in of_group
                if not isinstance(each, Segment) or each in loans
            ]
            for index, of_group in round_.members.items()
        }
        with lent(self._inner, members, views_of, self._low_state, created, all_=all_):
            yield [*loans.values()]
        if all_ and any(write_count(each.weight.param) != each.weight.version for each in loans):
            raise RuntimeError(
                f"{type(self._inner).__name__} has written to parameters from its own list instead of its groups: "
                "MasterWeights cannot wrap it"
            )
        for bucket, views in views_of.items():
            changed = found[bucket]
            if all_:
                views.copy_values_back()
            bucket.encode(views, [each for each in bucket.segments if each in loans or each in changed])
            written += [segment.weight for segment in changed]

    def __getattr__(self, name: str) -> Any:
        """Provide `train` and `eval` of inner optimizers that have them (schedule-free ones) and change weights."""
        inner = self.__dict__.get("_inner")
        if name not in ("train", "eval") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._switch, getattr(inner, name))

    def _switch(self, method: Callable[[], object]) -> None:
        self._checked_rounds()
        written: list[Weight] = []
        with torch.no_grad(), self._lent(self._whole(), {}, written, {}, all_=True):
            method()
        self._warn_of(written, is_counted=False)

    def _checked_rounds(self) -> list[_Round]:
        """Return the calls for one step; raise if the layout of a weight has changed.

        Adopts weights that were written from outside, if their version counters have changed.
        """
        rounds = self._rounds()
        for weight in self._weights:
            if (now := Layout.of(weight.param)) != (was := weight.layout):
                raise RuntimeError(
                    f"{weight.name!r} was {was.dtype} of shape {tuple(was.shape)}, strides {was.stride}, on "
                    f"{was.device}, and is {now.dtype} of shape {tuple(now.shape)}, strides {now.stride}, "
                    f"on {now.device} now. Undo the change; or save fp32_state_dict(model), delete this MasterWeights "
                    "and its schedulers, create new ones, and call load_fp32_state_dict"
                )
            grad = weight.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(f"{weight.name!r} has a gradient of layout {grad.layout}: keep its weight in fp32")
        self._warn_of(self._take_over_counted(), is_counted=True)
        return rounds

    def _take_over_counted(self) -> list[Weight]:
        """Adopt weights whose version counters have changed as the new fp32 weights, and return them."""
        written: list[Weight] = []
        if self._method == "stochastic":  # keeps no data that could belong to other weights
            return written
        for weight in self._weights:
            if write_count(weight.param) == weight.version:
                continue
            if weight.matches_kept():
                weight.note_rewritten()
            else:
                written.append(weight)
        if written:
            self._set_values({weight: local(weight.param).float() for weight in written})
        return written

    def _take_over_written(self) -> None:
        """Adopt all weights that were written from outside as the new fp32 weights."""
        self._warn_of(self._take_over_counted(), is_counted=True)
        written: list[Weight] = []
        with torch.no_grad():
            for bucket in (each for each in self._buckets if each.digest is not None):
                views = self._workspace.views_of(bucket)
                if changed := bucket.decode(views):
                    bucket.encode(views, changed)
                    written += [segment.weight for segment in changed]
        self._warn_of(written, is_counted=False)

    def _warn_of(self, written: list[Weight], *, is_counted: bool) -> None:
        """Warn about weights that were written.

        Args:
            written: The weights. If torch has not counted the write, all that are stepped with the written one.
            is_counted: Whether their version counters have changed.
        """
        if not written:
            return
        names = [repr(weight.name) for weight in dict.fromkeys(written)]
        count = "1 weight was" if len(names) == 1 else f"{len(names)} weights were"
        listed_names = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        unsure = not is_counted and len(names) > 1
        warn(
            f"{'some of ' if unsure else ''}{count} written since the last step of MasterWeights ({listed_names}): "
            "training continues from their 16-bit values. "
            + ("torch does not count writes as through `.data`: use torch.no_grad() to change single ones. " * unsure)
            + "To resume, load the model and this optimizer from the same checkpoint. To load fp32 weights, use "
            "load_fp32_state_dict. If ranks started from different weights, give them the same seed",
            UserWarning,
        )

    def _warn_of_rounded_clipping(self) -> None:
        """Warn, once, that gradients were clipped in 16 bits before this step."""
        if self._rounded_clipping is None or (how := self._rounded_clipping.step()) is None:
            return
        self._rounded_clipping.stop()
        self._rounded_clipping = None
        warn_or_print(
            f"gradients of MasterWeights were {how} in {self._dtype} since the backward, as by "
            "torch.nn.utils.clip_grad_norm_, so they and their norm are rounded to 16 bits. Instead, write "
            "optimizer.clip_grad_norm_(max_norm), or with a scaler scaler.clip_grad_norm_(optimizer, max_norm). "
            "With Accelerate or the Transformers Trainer, call castwise.integrations.accelerate.prepare(accelerator); "
            "with Lightning, use castwise's precision plugin",
            UserWarning,
        )

    def _set_values(self, values: Mapping[Weight, torch.Tensor]) -> None:
        """Set fp32 weights, given with the strides of the parameters."""
        with torch.no_grad():
            for bucket in self._buckets:
                given_here = [segment for segment in bucket.segments if segment.weight in values]
                if given_here:
                    bucket.digest = None
                    views = self._workspace.views_of(bucket)
                    bucket.decode(views)
                    for segment in given_here:
                        segment.bucket_view(views.values).copy_(segment.view_of(values[segment.weight]))
                    bucket.encode(views, given_here)

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's `state_dict()`, with the extra bits of 16-bit weights added to their state.

        Returns:
            "state" and "param_groups". Besides its fp32 (or `state_dtype`) state, each 16-bit parameter has entries in
            its shape: "master_weights.residue" (int16) and "master_weights.ties" (bool); with float16, only
            "master_weights.half_residue" (int16); with `method="stochastic"`, none. Beside them is a
            "master_weights.row_digests" of each row of the weight they belong to (int32; -1 for a DTensor that is not
            sharded by rows; a single one under FSDP1); and, with stochastic rounding, "master_weights.seed" and
            "master_weights.steps". These entries are copies, and so is state of "int8_blockwise", which is in fp32 for
            other optimizers to load.
        """
        self._take_over_written()
        for hook in hooks_of(self.register_state_dict_pre_hook).values():
            hook(self)
        saved = self._inner.state_dict()
        numbers, parts = self._numbers(), self._parts()
        saved["state"] = dict(saved["state"])
        for weight in self._weights:
            number, entries = numbers[weight.param], entries_of(weight, parts[weight], self._saved_chance())
            saved["state"][number] = {**in_fp32(saved["state"].get(number, {}), weight.param), **entries}
        for post_hook in hooks_of(self.register_state_dict_post_hook).values():
            result = post_hook(self, saved)
            saved = saved if result is None else result
        return saved

    def _numbers(self, saved_groups: list[dict[str, Any]] | None = None) -> dict[torch.Tensor, Any]:
        """Return the key of each parameter in a `state_dict()`: its number, or its key in saved groups."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_groups is None:
            numbers: Iterable[Any] = range(sum(sizes))
        elif (saved := [len(group["params"]) for group in saved_groups]) != sizes:
            raise ValueError(f"the checkpoint has groups of {saved} parameters, but this optimizer has {sizes}")
        else:
            numbers = [number for group in saved_groups for number in group["params"]]
        return dict(zip((param for group in self.param_groups for param in group["params"]), numbers, strict=True))

    def _saved_chance(self) -> Chance | None:
        """Return the source of random bits if anything is rounded stochastically."""
        return self._chance if self._method == "stochastic" or self._low_state.dtypes else None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of a `MasterWeights`, or of the inner optimizer alone, in any dtype.

        The groups stay the same objects. The model may be loaded before or after. If there are no entries of
        `MasterWeights`, as after training in plain fp32 or bfloat16, the fp32 weights are unchanged. `method="split"`
        also loads checkpoints of castwise 0.2 with method "fp32", "kahan" (load the model first) or rounding
        "nearest_away".

        Args:
            state_dict: A dict with "state" and "param_groups".

        Raises:
            ValueError: Groups or shapes do not match, the entries belong to another method or dtype, or an entry is
                damaged. Nothing has been changed then.
        """
        check_form(state_dict)
        state_dict = dict(state_dict)
        for hook in hooks_of(self.register_load_state_dict_pre_hook).values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else dict(result)
            check_form(state_dict)
        ours, of_inner = separated(state_dict["state"])
        numbers = self._numbers(state_dict["param_groups"])
        low = {numbers[weight.param] for weight in self._weights}
        if stray := [number for number in ours if number not in low]:
            raise ValueError(
                f"the checkpoint has bits of a 16-bit weight for parameter {stray[0]!r}, which is fp32 here: use the "
                "narrow=... it was saved with"
            )
        settings = f"method={self._method!r} with {self._dtype}"
        parts = self._parts()
        if self._method == "split":
            ours = as_split({numbers[weight.param]: weight for weight in self._weights}, ours)
        self._check_state(state_dict["param_groups"], of_inner, numbers)
        for weight in self._weights:
            if entries := ours.get(numbers[weight.param]):
                check_entries(weight, parts[weight], entries, settings)
        chance = chance_in(ours)
        low_params = {weight.param for weight in self._weights}
        load_inner(self._inner, {**state_dict, "state": of_inner}, low_params, self._low_state)
        for weight in self._weights:
            if entries := ours.get(numbers[weight.param]):
                load_entries(weight, parts[weight], entries)
        if chance is not None and self._saved_chance() is not None:
            self._chance.set(*chance)
        for post_hook in hooks_of(self.register_load_state_dict_post_hook).values():
            post_hook(self)

    def _check_state(
        self, saved_groups: list[dict[str, Any]], state: Mapping[Any, Any], numbers: Mapping[torch.Tensor, Any]
    ) -> None:
        """Raise a ValueError if state of a checkpoint cannot be the inner optimizer's."""
        weights = {weight.param: weight for weight in self._weights}
        # Foreign optimizers may do more in a step than step, and may create any tensor late; of torch's, only SGD does.
        is_torchs = self._reach is not Reach.ALL
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            created = state_after_step(self._inner, [{**group, **saved}]) if is_torchs else None
            for param in group["params"]:
                own = {name: it for name, it in self.state.get(param, {}).items() if not isinstance(it, Blockwise)}
                of_param, kept = state.get(numbers[param], {}), {**(created or {}), **own}
                name = weights[param].name if param in weights else f"parameter {numbers[param]}"
                check_kinds(name, of_param, kept, may_be_none=lambda entry: entry == "momentum_buffer" or not is_torchs)
                if param in weights:
                    check_state(weights[param], of_param, kept, by_element=self._reach is Reach.ELEMENT)

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return `model.state_dict()` with the fp32 weights: a standard checkpoint of an fp32 model.

        Args:
            model: The model, or a wrapper of it.

        Raises:
            RuntimeError: The model's `state_dict()` does not contain its parameters by name (FSDP1).
            ValueError: The model has none of the 16-bit weights.
        """
        self._take_over_written()
        saved, named = model.state_dict(), self._named(model)
        fp32 = self._fp32_of(set(named.values()))
        for name, weight in named.items():
            if name not in saved:
                raise RuntimeError(f"{name!r} is not in the model's state_dict(), so its fp32 weight cannot be added")
            saved[name] = fp32[weight]
        return saved

    def load_fp32_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a standard checkpoint into the model, and keep the bits that its 16-bit weights cannot hold.

        Args:
            model: The model, or a wrapper of it.
            state_dict: The checkpoint of a model of the same architecture, in any floating dtype.
            strict: As in `model.load_state_dict`, whose result is returned.

        Raises:
            ValueError: A 16-bit weight has another shape in the checkpoint. Nothing has been changed then.
            RuntimeError: `strict` is set, and a 16-bit weight is missing in the checkpoint. Nothing has been changed
                then. Or as for `model.load_state_dict`, which raises after it has loaded what fits.
        """
        named = self._named(model)
        for name, weight in named.items():
            if name not in state_dict:
                if strict:
                    raise RuntimeError(
                        f"{name!r} is missing in the checkpoint: give strict=False to keep the weights that it lacks"
                    )
            elif state_dict[name].shape != weight.layout.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(state_dict[name].shape)} in the checkpoint, but the parameter has "
                    f"{tuple(weight.layout.shape)}"
                )
        owners = {owner_of(param) for param in model.parameters()}  # other parameters may be in another MasterWeights
        try:
            return model.load_state_dict(state_dict, strict=strict)
        finally:  # also if torch raises, or weights that it has loaded would keep the extra bits of the former ones
            for owner in (each for each in owners if isinstance(each, MasterWeights)):
                owner._set_values(
                    {
                        weight: torch.empty_like(local(weight.param), dtype=torch.float32).copy_(
                            local(state_dict[name])
                        )
                        for name, weight in owner._named(model).items()
                        if name in state_dict
                    }
                )

    def _named(self, model: nn.Module) -> dict[str, Weight]:
        of_param = {weight.param: weight for weight in self._weights}
        named = model.named_parameters(remove_duplicate=False)
        found = {name: of_param[param] for name, param in named if param in of_param}
        if self._weights and not found:
            raise ValueError("the model has none of the weights of this MasterWeights: give the model it belongs to")
        return found

    def _fp32_of(self, weights: set[Weight]) -> dict[Weight, torch.Tensor]:
        """Return fp32 weights in new tensors."""
        values = {weight: torch.empty_like(local(weight.param), dtype=torch.float32) for weight in weights}
        with torch.no_grad():
            for bucket in self._buckets:
                if any(segment.weight in values for segment in bucket.segments):
                    views = self._workspace.views_of(bucket)
                    bucket.decode(views)
                    for segment in bucket.segments:
                        if segment.weight in values:
                            segment.view_of(values[segment.weight]).copy_(segment.bucket_view(views.values))
        return {weight: as_dtensor(value, weight.param) for weight, value in values.items()}

    def __getstate__(self) -> dict[str, Any]:
        self._take_over_written()
        # Hooks, patches by schedulers, and the model are not pickled, as with torch's optimizers.
        state = {name: value for name, value in self.__dict__.items() if name in _STATE}
        # A copy finds the model's copy by its parameters: a reference would copy the model with the optimizer alone.
        made = {"_workspace": Workspace(self._workspace.length, self._low_state.names()), "_known_rounds": None}
        narrow = narrowing.without_model(self._narrow)
        accumulation = None if self._accumulation is None else Accumulation()
        return {
            **state,
            **made,
            "_model": None,
            "_narrow": narrow,
            "_clipping": None,
            "_rounded_clipping": None,
            "_accumulation": accumulation,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_weights" in state:
            self._share_hooks()
        for weight in self.__dict__.get("_weights", []):
            weight.version = write_count(weight.param)
            _OWNERS[weight.param] = ref(self)
            if self._accumulation is not None:
                self._accumulation.watch(weight)

    # -- facts --------------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[Weight, list[Part]]:
        """Return the segments of each weight with their buckets, in order."""
        parts = defaultdict[Weight, list[Part]](list)
        for bucket in self._buckets:
            for segment in bucket.segments:
                parts[segment.weight].append(Part(bucket, segment))
        return parts

    def narrowing_report(self, model: nn.Module, *args: Any, **kwargs: Any) -> NarrowingReport:
        """Compare one forward of the model with one of fp32 weights, and name the modules that differ.

        16-bit weights give the same bits as fp32 weights under autocast, unless the model's own code reads a weight or
        its dtype, for example to cast activations to it. Call this once, with the first training batch, before DDP
        or `torch.compile` wraps the model. Both forwards run in the active autocast region, or else in one of `dtype`,
        on copies of the batch. They change no weight, buffer, gradient, hook, attribute of a module, or random state of
        torch, Python and NumPy (`numpy.random.seed`), and need memory for the fp32 weights. Syncs. Code that computes
        other numbers in each call is reported as a difference: with noise from a generator of its own, or with a list
        or other object that it changes in place.

        Args:
            model: The model.
            *args: What the model is called with.
            **kwargs: What the model is called with, by keyword.

        Raises:
            RuntimeError: The model is sharded or compiled.
            ValueError: The model has none of the 16-bit weights.

        Example:
            >>> import castwise
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = MasterWeights(torch.optim.SGD(model.parameters()), model)
            >>> optimizer.narrowing_report(model, torch.ones(1, 2)).is_same
            True
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        if any(is_dtensor(param) or is_fsdp_flattened(param) for param in model.parameters()):
            raise RuntimeError("the model is sharded: call narrowing_report in one process, before sharding the model")
        if wraps_compiled(model):
            raise RuntimeError("the model is compiled: give narrowing_report the model that torch.compile was given")
        weights = set(self._named(model).values())
        self._take_over_written()
        fp32: dict[torch.Tensor, torch.Tensor] = {}
        for weight, value in self._fp32_of(weights).items():
            fp32[weight.param] = nn.Parameter(value, requires_grad=weight.param.requires_grad)
        kind = next((weight.layout.device.type for weight in weights), "cpu")
        policy = self._narrow if isinstance(self._narrow, BoundPolicy) else None
        own = autocast(kind, self._dtype) if policy is None else autocast(kind, policy=policy)
        with nullcontext() if torch.is_autocast_enabled(kind) else own:
            return compare_forwards(model, fp32, args, kwargs)

    def memory(self) -> dict[str, int]:
        """Return the memory of the 16-bit parameters on this rank.

        Returns:
            A dict with "parameters" (their number), and in bytes "weights", "kept" (the extra bits that make them
            fp32), "gradients", "state" and "workspace" (memory that steps reuse, allocated by the first one).
        """
        low = [weight.param for weight in self._weights]
        counts = {
            "parameters": sum(local(param).numel() for param in low),
            "weights": sum(local(param).nbytes for param in low),
            "kept": sum(bucket.codec.bytes() for bucket in self._buckets),
            "gradients": sum(local(param.grad).nbytes for param in low if param.grad is not None)
            + (0 if self._accumulation is None else self._accumulation.nbytes()),
            "state": nbytes(value for param in low for value in self.state.get(param, {}).values()),
            "workspace": self._workspace.bytes(),
        }
        return ShownCounts.of(counts, "number of 16-bit parameters, and bytes of each part")

    def __repr__(self) -> str:
        return f"MasterWeights({self._inner!r}, dtype={self._dtype}, method={self._method!r})"


def _compiled_step() -> ModuleType:
    from castwise.master_weights import _compiled_step  # which needs numba

    return _compiled_step


def _does_compile() -> bool:
    """Return whether compiled steps work here; if not, warn."""
    try:
        return _compiled_step().forms_of_torch() is not None
    except Exception as error:  # numba may raise anything
        first_line = str(error).strip().partition("\n")[0]
        warn_or_print(
            f"steps of MasterWeights are not compiled, because numba raised {type(error).__name__}: {first_line}",
            RuntimeWarning,
        )
        return False


def _run_before(hooks: Hooks, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Step pre-hook: run others, each with the arguments that the one before it returned."""
    for hook in hooks.values():
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            if not (isinstance(changed, tuple) and len(changed) == 2):
                return changed  # which torch refuses
            args, kwargs = changed
    return args, kwargs


def _run_after(hooks: Hooks, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step post-hook: run others."""
    for hook in hooks.values():
        hook(optimizer, args, kwargs)


def _refuse_alone(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook: raise if user code steps the inner optimizer, which would update the 16-bit weights only.

    While a `MasterWeights` steps it, its groups hold fp32 tensors instead.
    """
    params = [] if isinstance(optimizer, MasterWeights) else [p for g in optimizer.param_groups for p in g["params"]]
    if any(owner_of(param) is not None for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is inside a MasterWeights, which keeps the fp32 weights: call step() of "
            "the MasterWeights, and pass that to schedulers, scalers and frameworks"
        )


def owner_of(param: torch.Tensor) -> object:
    """Return the `MasterWeights` that steps a parameter as a 16-bit one; None if there is none."""
    return _OWNERS[param]() if param in _OWNERS else None


def sum_over_ranks(model: nn.Module) -> None:
    """Call `MasterWeights.sum_over_ranks` for a model that a framework has wrapped in DDP, where that is possible."""
    parallel = _in_ddp(model)
    if parallel is None or parallel.gradient_as_bucket_view:
        return
    owners = {owner for param in parallel.parameters() if isinstance(owner := owner_of(param), MasterWeights)}
    if len(owners) == 1 and (owner := owners.pop())._accumulation is not None:
        with suppress(RuntimeError):  # DDP has another communication hook, which the script has asked for
            owner.sum_over_ranks(parallel)


def _in_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((each for each in modules if isinstance(each, nn.parallel.DistributedDataParallel)), None)


def has_owners() -> bool:
    """Return True if a `MasterWeights` steps any parameter of this process."""
    return bool(_OWNERS)


def _grads(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return grads_of(param for group in groups for param in group["params"])


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        hint = nearest(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def _check_can_fall(name: str, dtype: torch.dtype, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        beta = factor_of(name, group)
        share = 1.0 if beta is None else falling_share(dtype, beta)
        if share < 1.0:
            raise ValueError(
                f'state_dtype[{name!r}]: an average with beta {beta:g} that is rounded to "nearest" in {dtype} falls '
                f"only if (1 - beta) v is at least half of v's last bit, which holds in {percent(share)} of each "
                'binade: round it with "stochastic", or keep it in torch.float32'
            )


def _low_state(
    optimizer: torch.optim.Optimizer,
    state_dtype: Mapping[str, torch.dtype | str | tuple[torch.dtype | str, str]] | None,
    chance: Chance,
) -> LowState:
    if not isinstance(state_dtype, (Mapping, type(None))):
        raise TypeError(f"state_dtype must be a mapping from state names to dtypes, got {state_dtype!r}")
    settings = {
        name: wanted if isinstance(wanted, tuple) and len(wanted) == 2 else (wanted, "stochastic")
        for name, wanted in (state_dtype or {}).items()
    }
    for name, (dtype, rounding) in settings.items():
        _check_choice(f"state_dtype[{name!r}]", dtype, (*_DTYPES, torch.float32, _BLOCKWISE))
        roundings = ("stochastic",) if dtype == _BLOCKWISE else ("stochastic", "nearest")
        _check_choice(f"the rounding of state_dtype[{name!r}]", rounding, roundings)
    known = state_names(optimizer) if settings else None
    unknown = [] if known is None else [name for name in settings if name not in known]
    if known is not None and unknown:
        raise ValueError(
            f"{type(optimizer).__name__} keeps no state {unknown[0]!r} with the shape of its weights; "
            f"it keeps {listed(sorted(known)) or 'none'}"
        )
    nearest = {name for name, (_, rounding) in settings.items() if rounding == "nearest"}
    unsigned = nonnegative_state(optimizer) if any(dtype == _BLOCKWISE for dtype, _ in settings.values()) else set()
    dtypes = {
        name: dtype if isinstance(dtype, torch.dtype) else torch.uint8 if name in unsigned else torch.int8
        for name, (dtype, _) in settings.items()
    }
    for name in sorted(nearest):
        _check_can_fall(name, dtypes[name], optimizer)
    return LowState(dtypes, nearest, chance)
