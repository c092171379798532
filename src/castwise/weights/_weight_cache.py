"""`WeightCache`: low-precision copies of weights that outlive an autocast region, refreshed only after a change.

Autocast casts a weight at its first use in each region; a frozen weight, or any weight under `inference_mode`, at every
use. While regions with a cache are active, each plain layer of the model (`nn.Linear`, convolutions) has its own
forward, an attribute of the instance, that passes copies to the op. Three facts shaped the code:

* Unusual cases are left to autocast, which computes the same bits: compiled, traced and transformed code, tensor
  subclasses, parametrizations, torch's inference fast path, function modes, threads outside the cache's regions.
* With gradients enabled, autocast is made to use a copy as its own cast, so it builds its usual graph.
* A copy that a graph has saved is never written to: a changed weight gets a new copy.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from castwise._patches import OPS, Part, parts_of, patch_of
from castwise._recipes.quantized_linear import quantize_weight
from castwise._recipes.scalings import Quantized, Scaling
from castwise._torch_private import (
    REPLICATE,
    TO_COPY,
    TorchDispatchMode,
    are_functorch_transforms_active,
    children_in,
    dispatch_modes,
    function_modes,
    is_compiled,
    is_default_device,
    is_jit_tracing,
    is_torch_function_mode_enabled,
    on_collective,
    parameters_in,
    without_dispatch_modes,
)
from castwise._warnings import warn
from castwise.weights._weight_copies import Copies, Copy, QuantizedBy, why_not

# Making autocast use a copy as its own cast takes about as long as a cast of this many elements.
_MIN_TRAINED = 1 << 19
_NO_COPY = Copy(torch.empty(0), torch.float32)
_Attributes = dict[str, Callable[..., Any]]


class WeightCacheReport(NamedTuple):
    """The contents and statistics of a cache.

    Args:
        cached: Qualified names of the weights that have a copy.
        nbytes: Bytes of all copies.
        hits: Uses of an existing copy.
        refreshes: Copies created, including the first ones.
        refused: By qualified name, why a weight of a linear layer or a convolution is not cached.
    """

    cached: list[str]
    nbytes: int
    hits: int
    refreshes: int
    refused: dict[str, str]


class _Thread(threading.local):
    """A thread's active regions of a cache."""

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.device: str | None = None  # of the innermost
        self.known: dict[int, Copy] = {}  # copies that autocast uses as its own casts, by their parameters' ids


class _CastToCopy(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Makes the cast of a weight return an existing copy, with autograd's own node for the cast."""

    def __init__(self, copy: Copy) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch's
        self._copy = copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is TO_COPY and args[0] is self._copy.param:
            return self._copy.low.detach()
        return func(*args, **(kwargs or {}))


class _Layer:
    """A plain layer of the model: finds the copies that replace its weight and bias in a call."""

    __slots__ = ("bias", "copies", "found", "kind", "module", "own", "params", "thread", "weight")

    def __init__(self, module: nn.Module, copies: Copies, thread: _Thread) -> None:
        self.copies, self.thread, self.kind = copies, thread, type(module)
        self.module: Callable[[], Any] = weakref.ref(module)  # the cache does not keep it alive
        self.own: dict[str, Any] = module.__dict__
        params: Any = parameters_in(module)
        self.params: dict[str, torch.Tensor | None] = params
        self.weight: torch.Tensor = params["weight"]
        self.bias: torch.Tensor | None = params["bias"]
        # The last used copies of weight and bias, with their device; "" if one of them cannot be cached.
        self.found = _NO_COPY, _NO_COPY, ""

    def arguments(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the weight and bias to pass to the op, or None if the call is left to autocast."""
        device, weight, bias = self.thread.device, self.weight, self.bias
        if self.params.get("weight") is not weight or self.params.get("bias") is not bias:
            self.copies.params_have_changed = True
            return None
        if (
            device is None
            or not torch.is_autocast_enabled(device)
            or (type(input) is not torch.Tensor and type(input) is not nn.Parameter)
            or are_functorch_transforms_active()  # which have rules of their own for autocast
            or is_jit_tracing()
            or (is_torch_function_mode_enabled() and not self._passes_modes())
        ):
            return None
        dtype, copies = torch.get_autocast_dtype(device), self.copies
        if torch.is_grad_enabled():
            return self._in_training(dtype, device)
        weight_copy, bias_copy, copied_to = self.found
        if (
            weight_copy.dtype is not dtype
            or not weight_copy.is_current()
            or (bias is not None and not bias_copy.is_current())
            or copies.verify is True
        ):
            weight_copy, bias_copy, copied_to = self._find(dtype, device)
        if copied_to != device:
            return None
        if bias is None:
            copies.uses += 1
            return weight_copy.low, None
        copies.uses += 2
        return weight_copy.low, bias_copy.low

    def _find(self, dtype: torch.dtype, device: str) -> tuple[Copy, Copy, str]:
        weight_copy = bias_copy = _NO_COPY
        if self.weight.device.type == device:
            bias_copy = weight_copy if self.bias is None else self.copies.find(self.bias, dtype)
            if self.bias is None or bias_copy.device:
                weight_copy = self.copies.find(self.weight, dtype)
        self.found = weight_copy, bias_copy, weight_copy.device
        return self.found

    def _in_training(self, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the same as `arguments`, with gradients enabled."""
        if self._is_left_to_autocast(self.weight):
            return self.weight, self.bias
        # Selective checkpointing expects the same ops when it recomputes the forward, which happens outside the region.
        if not all(hasattr(mode, "sees_copies") for mode in dispatch_modes()):
            return None
        weight_copy, bias_copy, copied_to = self._find(dtype, device)
        if copied_to != device:
            return None
        weight = self._in_graph(weight_copy)
        if self.bias is None or self._is_left_to_autocast(self.bias):
            return weight, self.bias
        return weight, self._in_graph(bias_copy)

    def _is_left_to_autocast(self, param: torch.Tensor) -> bool:
        return param.requires_grad and param.numel() < _MIN_TRAINED

    def _in_graph(self, copy: Copy) -> torch.Tensor:
        """Return a copy with a graph node, or its parameter if autocast uses the copy from now on."""
        self.copies.uses += 1
        param, known = copy.param, self.thread.known
        if not param.requires_grad:
            return copy.low
        if not torch.is_autocast_cache_enabled():
            with _CastToCopy(copy):
                return param.to(copy.low.dtype)
        if known.get(id(param)) is not copy:
            if id(param) in known:  # autocast would not see that it has changed, or needs another dtype
                torch.clear_autocast_cache()
                known.clear()
            nothing = copy.low.new_empty(0, param.shape[-2:][0])
            # This op makes autocast cast the weight and keep the cast. It is hidden from checkpoints, which count saved
            # tensors, and from selective ones, which count ops.
            with without_dispatch_modes(), saved_tensors_hooks(_unchanged, _unchanged), _CastToCopy(copy):
                torch.matmul(nothing, param)
            known[id(param)] = copy
        return param

    def _passes_modes(self) -> bool:
        """Return True if no active function mode affects the layer's op."""
        return all(
            is_default_device(mode) or (hasattr(mode, "leaves_alone") and mode.leaves_alone(self.kind))
            for mode in function_modes()
        )

    def attributes(self) -> _Attributes:
        """Return the attributes that the module has while regions are active.

        Apart from the forward, they keep deep copies, pickles, replicas and scripts of the module from getting it. They
        refer to the layer but not the reverse, so copies are freed without the garbage collector.
        """

        def linear(input: torch.Tensor) -> torch.Tensor:
            arguments = None if is_dynamo_compiling() else self.arguments(input)
            if arguments is None:
                module = self.module()
                return type(module).forward(module, input)  # type: ignore[no-any-return]
            return functional.linear(input, *arguments)

        methods = [part.name for part in parts_of(self.kind) if part.owner is self.kind and part.name != "forward"]

        def convolution(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            module = self.module()
            # Programs patch the methods of single layers, too, such as one to tile images.
            is_patched = is_dynamo_compiling() or not self.own.keys().isdisjoint(methods)
            arguments = None if is_patched else self.arguments(input)
            given = module if arguments is None else _StandIn(module, *arguments)
            return type(module).forward(given, input, *args, **kwargs)  # type: ignore[no-any-return]

        def getstate() -> dict[str, Any]:
            return _without_ours(self.own)

        def replicate() -> nn.Module:
            replica: nn.Module = getattr(self.kind, REPLICATE)(self.module())
            replica.__dict__ = _without_ours(vars(replica))
            return replica

        def prepare_scriptable() -> Any:
            for name in self.own.keys() - _without_ours(self.own).keys():
                del self.own[name]
            return self.module()

        return {
            "forward": linear if self.kind is nn.Linear else convolution,
            "__getstate__": getstate,
            REPLICATE: replicate,
            "__prepare_scriptable__": prepare_scriptable,
        }


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if getattr(value, "__module__", None) != __name__}


class _StandIn:
    """Stands in for a module in its forward, with another weight and bias."""

    __slots__ = ("_module", "bias", "weight")

    def __init__(self, module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._module, self.weight, self.bias = module, weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Plan(NamedTuple):
    """The plain layers of a model with their attributes during regions, and facts to detect that the model has changed.

    Args:
        layers: The plain layers.
        others: Layers that are not plain.
        kinds: The types of layers in the model that run torch's own code.
        parts: The code that all types of layers in the model run.
        children: The children of all modules, and their ids.
        modules: All modules. When one dies, its id may be reused, so the plan is dropped.
    """

    layers: list[tuple[_Layer, _Attributes]]
    others: list[Callable[[], nn.Module | None]]
    kinds: frozenset[type[nn.Module]]
    parts: list[Part]
    children: list[tuple[dict[str, nn.Module | None], list[int]]]
    modules: list[weakref.ref[nn.Module]]

    def is_current(self) -> bool:
        """Return True if the model has the same modules, and none of the others has become a plain layer."""
        if not self.runs_the_same():
            return False
        for children, ids in self.children:
            if [*map(id, children.values())] != ids:
                return False
        return not any(_is_plain(module(), self.kinds) for module in self.others)

    def runs_the_same(self) -> bool:
        """Return True if no class or op was patched, or restored, since the plan was made."""
        return all(part.is_current for part in self.parts)


def _is_plain(module: nn.Module | None, kinds: frozenset[type[nn.Module]]) -> bool:
    """Return True for a layer of one of some types whose parameters are of no subclass."""
    params = {} if module is None else parameters_in(module)
    return (
        type(module) in kinds
        and params.keys() >= {"weight", "bias"}
        and params["weight"] is not None
        and not any(_is_special(param) for param in params.values() if param is not None)
    )


def _is_special(param: torch.Tensor) -> bool:
    return type(param) is not nn.Parameter or param.is_inference()


class WeightCache:
    """Keep copies of a model's fp32 weights in bf16 or fp16, for `castwise.autocast(..., weight_cache=cache)`.

    For a layer with an 8-bit or 4-bit recipe in the policy, it keeps the quantized weight and its scales instead, even
    for a 16-bit weight. It stores two copies in bf16, one of them transposed.

    Outputs and gradients are bit for bit the same as without the cache, unless a weight changes inside a region: the
    cache casts it again, while autocast keeps using the old value. A weight is copied at its first use and after each
    change: an optimizer step, an in-place write, a collective, or a replacement by another tensor. Writes that leave no
    trace, such as those through `.data`, need `invalidate()`. Each region compares some weights with their copies, so
    that a stale copy is found within 200 regions plus one for each weight; entering the region then raises.

    The cache holds dense fp32 parameters of plain `nn.Linear`, convolution and transposed convolution layers;
    `report()` lists the others, with reasons. Autocast casts all other weights: those of subclasses of these layers, of
    layers whose class was patched, of layers for which a policy has a rule, and of `nn.MultiheadAttention`, and those
    used in direct calls of `F.linear`, in torch's inference fast path for `nn.TransformerEncoder`, and in code that is
    compiled, traced, or transformed by `torch.func`. A patch of a class applies from the next region on. With gradients
    enabled, it also casts trained weights of fewer than 524,288 elements, because caching them costs more.

    16-bit copies take half the bytes of their weights; all copies are freed with the weights. Threads may share a
    cache.

    Args:
        model: The model whose parameters are cached, including those added later.
        verify: `"rolling"` compares at most 0.5% of the weights' bytes in each region, but at least one weight, or
            64 KiB of a larger one, without waiting for an accelerator. True compares a copy with its weight at every
            use, which costs as much as the cache saves. False compares nothing.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `verify` has another value.

    Warns:
        UserWarning: The weights of all layers are 16-bit, so without recipes there is nothing to cache.

    Example:
        >>> import castwise
        >>> model = torch.nn.Linear(4, 4)
        >>> cache = WeightCache(model)
        >>> for _ in range(3):
        ...     with torch.no_grad(), castwise.autocast("cpu", dtype=torch.bfloat16, weight_cache=cache):
        ...         output = model(torch.ones(1, 4))
        >>> cache.report().hits, cache.report().refreshes
        (4, 2)
    """

    def __init__(self, model: nn.Module, *, verify: bool | str = "rolling") -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(verify, bool) and verify != "rolling":
            raise ValueError(f"verify must be 'rolling', True or False, got {verify!r}")
        layers = [module for module in model.modules() if isinstance(module, tuple(OPS))]
        dtypes = {param.dtype for module in layers for param in module.parameters(recurse=False)}
        if dtypes and dtypes <= {torch.bfloat16, torch.float16}:
            warn(
                "the weights of all layers are 16-bit already, so autocast casts none and this WeightCache can keep "
                "only weights quantized by 8-bit and 4-bit recipes: omit it if the policy has no recipes",
                UserWarning,
            )
        self._start(weakref.ref(model), verify)

    def _start(self, model: Callable[[], nn.Module | None], verify: bool | str) -> None:
        self._copies, self._thread, self._plan = Copies(model, verify), _Thread(), None
        self._layers: weakref.WeakKeyDictionary[nn.Module, tuple[_Layer, _Attributes]] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._quantized: weakref.WeakKeyDictionary[nn.Module, dict[QuantizedBy, Copy]] = weakref.WeakKeyDictionary()
        self._regions = 0  # of all threads
        self._installed: _Plan | None = None
        _CACHES.add(self)
        _watch_writes()

    _plan: _Plan | None

    def enter(self, region: Any) -> None:
        """Let layers use copies in a region of this thread; the region calls this after it has set autocast's state.

        Args:
            region: The region, with its type of device as `device`.

        Raises:
            RuntimeError: A weight was changed in a way that leaves no trace. Nothing is entered then.
        """
        thread = self._thread
        with self._copies.lock:
            if self._copies.verify == "rolling" and not dispatch_modes():  # which must not see these ops
                self._copies.verify_some()
            if self._regions == 0:
                if self._plan is None or self._copies.params_have_changed or not self._plan.is_current():
                    self._plan = self._make_plan()
                self._installed = self._plan
                for layer, attributes in self._installed.layers:
                    if "forward" not in layer.own and type(layer.module()) is layer.kind:
                        layer.own.update(attributes)
            elif self._installed is not None and not self._installed.runs_the_same():
                self._uninstall()
            self._regions += 1
        thread.devices.append(region.device)
        thread.device = region.device

    def leave(self, token: None) -> None:
        """Undo `enter` in this thread.

        Args:
            token: The result of `enter`.
        """
        thread = self._thread
        thread.devices.pop()
        thread.device = thread.devices[-1] if thread.devices else None
        if thread.device is None:
            thread.known.clear()
        with self._copies.lock:
            self._regions -= 1
            if self._regions == 0:
                self._uninstall()

    def _uninstall(self) -> None:
        for layer, attributes in () if self._installed is None else self._installed.layers:
            own = layer.own
            if own.get("forward") is attributes["forward"]:
                del own["forward"], own["__getstate__"]
                del own[REPLICATE], own["__prepare_scriptable__"]
        self._installed = None

    def quantized(self, module: nn.Module, weight: torch.Tensor, scaling: Scaling, is_transposed: bool) -> Quantized:
        """Return the quantized weight of a linear layer with a recipe, from the cache if possible.

        Args:
            module: The layer.
            weight: Its weight in this forward, or in the forward of this backward.
            scaling: How it is quantized.
            is_transposed: Whether its transpose is quantized.
        """
        is_seen = not all(hasattr(mode, "sees_copies") for mode in dispatch_modes())
        if weight is not parameters_in(module).get("weight") or module in self._sharded or is_seen:
            return quantize_weight(weight, scaling, is_transposed)
        how, kept = QuantizedBy(scaling, is_transposed), self._quantized.setdefault(module, {})
        copy = kept[how] = self._copies.find(weight, how)
        if copy.quantized is None:
            return quantize_weight(weight, scaling, is_transposed)
        self._copies.uses += 1
        return copy.quantized

    def _make_plan(self) -> _Plan:
        find = weakref.ref(self)

        def drop_plan(_: object) -> None:
            if (cache := find()) is not None:
                cache._plan = None

        self._copies.params_have_changed = False
        model = self._copies.model()
        modules = [] if model is None else list(model.modules())
        # Compiled code checks whether a module has its own forward.
        compiled = {inner for module in modules if is_compiled(module) for inner in module.modules()}
        # FSDP2 assembles a sharded weight for a forward, and later writes to its memory again without a trace.
        unit = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        self._sharded.update(inner for module in modules if isinstance(module, unit) for inner in module.modules())
        self._sharded.update(
            module for module in modules if any(hasattr(p, "device_mesh") for p in parameters_in(module).values())
        )
        left_alone = compiled.union(self._sharded)
        children = [(some, [*map(id, some.values())]) for module in modules if (some := children_in(module))]
        parts = {kind: parts_of(kind) for kind in {type(module) for module in modules}.intersection(OPS)}
        kinds = frozenset(
            kind for kind, parts_of_kind in parts.items() if all(part.is_torchs for part in parts_of_kind)
        )
        code = [part for parts_of_kind in parts.values() for part in parts_of_kind]
        plan = _Plan([], [], kinds, code, children, [weakref.ref(module, drop_plan) for module in modules])
        for module in modules:
            if module not in left_alone and _is_plain(module, kinds):
                known, params = self._layers.get(module), parameters_in(module)
                if known is None or known[0].weight is not params["weight"] or known[0].bias is not params["bias"]:
                    layer = _Layer(module, self._copies, self._thread)
                    known = self._layers[module] = layer, layer.attributes()
                plan.layers.append(known)
            elif module not in left_alone and isinstance(module, tuple(OPS)):
                plan.others.append(weakref.ref(module))
        return plan

    def invalidate(self) -> None:
        """Refresh all copies at their next use; call this after writes that leave no trace."""
        self._copies.invalidate()

    def report(self) -> WeightCacheReport:
        """Return the contents and statistics of the cache."""
        copies, model = self._copies.all(), self._copies.model()
        held = {id(copy.param) for copy in copies}
        return WeightCacheReport(
            cached=[] if model is None else [name for name, param in model.named_parameters() if id(param) in held],
            nbytes=sum(copy.low.nbytes for copy in copies),
            hits=self._copies.uses - self._copies.casts,
            refreshes=self._copies.casts,
            refused={} if model is None else _refused(model, held),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        model = self._copies.model()
        twin = object.__new__(WeightCache)
        copied = model if model is None else memo.get(id(model), model)
        twin._start((lambda: None) if copied is None else weakref.ref(copied), self._copies.verify)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._copies.model(), "verify": self._copies.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # On an object from `object.__new__`; mypy expects that a subclass may have other arguments.
        self.__init__(state["model"], verify=state["verify"])  # type: ignore[misc]


def _refused(model: nn.Module, held: set[int]) -> dict[str, str]:
    """Return by name why layers' weights are not cached."""
    refused: dict[str, str] = {}
    for prefix, module in model.named_modules():
        kind = next((kind for kind in OPS if isinstance(module, kind)), None)
        layer_problem = None
        if kind is not None and type(module) is not kind:
            layer_problem = f"of a {type(module).__name__}, not a plain {kind.__name__}"
        elif getattr(vars(module).get("forward"), "__module__", __name__) != __name__:
            layer_problem = f"of a {type(module).__name__} with its own forward"
        elif kind is not None and (patch := patch_of(kind)) is not None:
            layer_problem = f"of a {kind.__name__}, but {patch}"
        for name, param in module.named_parameters(prefix, recurse=False) if kind is not None else ():
            reason = layer_problem or why_not(param)
            if reason is not None and id(param) not in held:  # the weights of layers with recipes are held
                refused[name] = reason
    return refused


_CACHES: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def _invalidate_written(tensors: Iterable[torch.Tensor]) -> None:
    tensors = list(tensors)
    for cache in list(_CACHES):
        cache._copies.invalidate(tensors)


@functools.cache
def _watch_writes() -> None:
    """Notify all caches of the steps of all optimizers and of collectives, from the first cache on."""
    register_optimizer_step_post_hook(
        lambda optimizer, *_: _invalidate_written(p for group in optimizer.param_groups for p in group["params"])
    )
    on_collective(_invalidate_written)
