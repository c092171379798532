"""What is watched computes what it computes by itself: in evaluation as in training, eager and compiled."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise import Monitor
from castwise._torch_private import dispatch_modes, function_modes

Watched = Callable[[nn.Module, torch.optim.Optimizer, Any, Path], AbstractContextManager[Any]]
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """A trained head on an encoder in evaluation, which runs as one kernel in training as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(encoder_layer(), 1).requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2),
    "layer": encoder_layer,
    "layer in a wrapper": lambda: nn.DataParallel(encoder_layer()),
    "decoder": Decoder,
    "attention": Attention,
    "frozen encoder": Frozen,
}

WATCHED: dict[str, Watched] = {
    "sampled": lambda model, optimizer, scaler, _: Monitor(model, optimizer, scaler, every=1),
    "unsampled": lambda model, optimizer, scaler, _: Monitor(model, optimizer, scaler, every=100),
    "diagnosed": lambda model, optimizer, scaler, _: Monitor(
        model, optimizer, scaler, every=2, on_nonfinite="diagnose"
    ),
    "without a scaler": lambda model, optimizer, *_: Monitor(model, optimizer, every=2),
    "installed": lambda *_: castwise.installed(),
    "installed and recorded": lambda *given: castwise.installed(given[-1], every=1),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:this CPU has no units for torch:UserWarning"),
    pytest.mark.filterwarnings("ignore:not replaced by castwise, because they already existed:UserWarning"),
    pytest.mark.filterwarnings("ignore:this GradScaler scales for bf16:UserWarning"),
]


def evaluated(model: nn.Module, no_grad: Callable[[], Any] = torch.no_grad) -> torch.Tensor:
    was_training = model.training
    model.eval()
    with no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output: torch.Tensor = model(X)
    model.train(was_training)
    return output


def outputs(model: nn.Module, watched: Watched | None, folder: Path) -> list[torch.Tensor]:
    """Train with an evaluation before each forward, after each backward, and at the end; step 2 is skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = castwise.GradScaler("cpu")
    seen: list[torch.Tensor] = []
    with nullcontext() if watched is None else watched(model, optimizer, scaler, folder):
        for step in range(4):
            seen.append(evaluated(model))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(X)
            seen.append(output.detach())
            scaler.scale(output.float().mean() * (float("inf") if step == 2 else 1.0)).backward()
            seen.append(evaluated(model, torch.inference_mode))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(evaluated(model))
    return [*seen, evaluated(model)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_is_watched_returns_what_it_returns_by_itself(kind: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    by_itself = copy.deepcopy(model)
    assert_same(outputs(model, WATCHED[how], tmp_path), outputs(by_itself, None, tmp_path))


class NoisyOps(TorchDispatchMode):
    """A mode that counts ops and rounds their results at random."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            result = result * (1 + torch.rand(result.shape) / 256)
        return result


class Calls(TorchFunctionMode):
    """A mode that counts calls."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [nullcontext, lambda: torch.device("cpu"), FakeTensorMode])
@pytest.mark.parametrize("is_lost", [False, True])
def test_modes_of_the_script_see_its_own_ops_alone(device: Callable[[], Any], is_lost: bool) -> None:
    def trained(*, is_watched: bool) -> list[Any]:
        torch.manual_seed(0)
        with device(), NoisyOps() as ops, Calls() as calls:
            model = nn.Linear(16, 16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: Any = {"on_nonfinite": "diagnose", "spikes": True, "snapshots": True}
            options = {"every": 2} | (options if device is not FakeTensorMode else {})  # which have no values to read
            watch = Monitor(model, optimizer, **options) if is_watched else nullcontext()
            counts = []
            with watch:
                for step in range(12):
                    optimizer.zero_grad()
                    (model(torch.randn(4, 16)).mean() * (1e39 if is_lost and step == 9 else 1.0)).backward()
                    optimizer.step()
                    counts += [ops.count, calls.count]
            return [*counts, *([] if device is FakeTensorMode else model.weight.tolist())]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert repr(trained(is_watched=False)) == repr(trained(is_watched=True))
    assert dispatch_modes() == function_modes() == []


@pytest.mark.parametrize("how", WATCHED)
def test_evaluation_is_unchanged_after_a_forward_that_was_interrupted(how: str, tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise error
            return x

    model = nn.Sequential(encoder_layer(), Interrupted(), encoder_layer())
    expected = evaluated(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
    with WATCHED[how](model, optimizer, scaler, tmp_path):
        for error in (ValueError(), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                model.train()(X)
            assert_same([evaluated(model)], [expected])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("how", WATCHED)
def test_a_copy_of_a_watched_model_evaluates_as_the_model_does(
    how: str, copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = nn.TransformerEncoder(encoder_layer(), 1)
    expected = evaluated(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), castwise.GradScaler("cpu")
    with WATCHED[how](model, optimizer, scaler, tmp_path):
        for _ in range(3):
            assert_same([evaluated(copied(model))], [expected])
            scaler.scale(model(X).mean()).backward()
            assert_same([evaluated(copied(model))], [expected])
            scaler.step(optimizer)
            scaler.update()


def test_a_layer_that_is_trained_in_evaluation_mode_is_recorded_to_its_last_module() -> None:
    model = nn.TransformerEncoder(encoder_layer(), 1).eval()
    records: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, sinks=[records.append]):
        evaluated(model)
        model(X).mean().backward()
        optimizer.step()
    assert "layers.0.linear1" in next(record for record in records if record["kind"] == "sample")["activations"]


@pytest.mark.parametrize("kind", ["encoder", "layer"])
def test_a_sample_after_an_evaluation_has_the_outputs_of_all_modules(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    samples = []
    for evaluates in (False, True):
        records: list[Any] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Monitor(model, optimizer, sinks=[records.append], every=1):
            for _ in range(2):
                if evaluates and kind == "encoder":
                    evaluated(model)
                model(X).mean().backward()
                optimizer.step()
                if evaluates:
                    evaluated(model)
        samples.append([sorted(record["activations"]) for record in records if record["kind"] == "sample"])
    without, with_evaluations = samples
    assert any(name.endswith("linear1") for name in without[0])
    assert with_evaluations[0] == without[0]
    assert kind == "layer" or with_evaluations == without


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", MODELS)
def test_a_trace_runs_what_the_model_runs(kind: str, region: Callable[[], Any]) -> None:
    model = MODELS[kind]().eval()
    seen: list[torch.Tensor] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen.append(output.clone())
        return output.float().mean()

    with region(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(X)
        traced = castwise.trace(model, X, loss_fn=loss)
    assert_same(seen, [expected])
    fused = {"aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention"}
    assert fused & {op.op for op in traced.ops}


# -- compiled ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.inner, self.encoder, self.breaks = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), encoder_layer(), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.inner, self.encoder]:
            x = layer(x)
            if self.breaks:  # within a loop, so that Dynamo leaves this function and looks at what it calls
                torch._dynamo.graph_break()
        return x


def whole(model: nn.Module, **compiler: Any) -> Callable[..., Any]:
    return torch.compile(model, **compiler)


def in_place(model: nn.Module, **compiler: Any) -> Callable[..., Any]:
    model.compile(**compiler)
    return model


def in_a_function(model: nn.Module, **compiler: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x) * 2, **compiler)


def a_part(model: nn.Module, **compiler: Any) -> Callable[..., Any]:
    model[0].compile(**compiler)  # type: ignore[index, operator]
    return model


def a_part_in_a_function(model: nn.Module, **compiler: Any) -> Callable[..., Any]:
    compiled = torch.compile(model[1].forward, **compiler)  # type: ignore[index]
    model[1].forward = lambda x: compiled(x)  # type: ignore[index, method-assign, assignment]
    return model


COMPILED = [whole, in_place, in_a_function, a_part, a_part_in_a_function]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_run(
    model: nn.Module, compiled: Callable[..., Any], watched: Watched | None, folder: Path
) -> tuple[list[int], list[str], list[torch.Tensor]]:
    """Return the sizes of graphs, warnings, and outputs of a training that is compiled after the watch has begun."""
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
    seen: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nullcontext() if watched is None else watched(model, optimizer, scaler, folder):
            call = compiled(model, backend=backend)
            for step in range(4):
                model.eval()
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    seen.append(call(X))
                model.train()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = call(X)
                seen.append(output.detach())
                scaler.scale(output.float().mean() * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        seen.append(call(X).detach())
    return graphs, [str(warning.message) for warning in caught], seen


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("compiled", COMPILED)
def test_what_is_compiled_is_the_same_as_without_a_watch(
    compiled: Callable[..., Any], breaks: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    by_itself = nn.Sequential(Block(breaks), encoder_layer())
    models = {how: copy.deepcopy(by_itself) for how in (["diagnosed"] if breaks else ["sampled", "diagnosed"])}
    try:
        expected_graphs, expected_caught, expected = compiled_run(by_itself, compiled, None, tmp_path)
    except torch._dynamo.exc.TorchRuntimeError as error:  # torch 2.11 does not compile the fused encoder layer
        assert torch.__version__ < "2.13"
        pytest.skip(f"torch does not compile this model: {error}")
    for how, model in models.items():
        graphs, caught, seen = compiled_run(model, compiled, WATCHED[how], tmp_path)
        assert graphs == expected_graphs, how
        assert [text for text in caught if "is still running" not in text] == [  # of a compiler's process
            text for text in expected_caught if "is still running" not in text
        ], how
        assert_same(seen, expected)


def pre_hook(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda _module, _args, output: output * 2)


def backward_hook(model: nn.Module) -> None:
    model.register_full_backward_hook(lambda *_: None)


def forward(model: nn.Module) -> None:
    by_class = model.forward
    model.forward = lambda x: by_class(x) * 2  # type: ignore[method-assign]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("change", [pre_hook, hook, backward_hook, forward])
def test_what_a_script_adds_to_a_model_is_compiled_once(change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    def run(watched: Watched | None) -> tuple[list[int], list[str], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        change(model)
        return compiled_run(model, in_a_function, watched, tmp_path)

    expected_graphs, _, expected = run(None)
    for how in ("sampled", "unsampled", "diagnosed"):
        graphs, _, seen = run(WATCHED[how])
        assert graphs == expected_graphs, how
        assert_same(seen, expected)
