"""22 architectures, built small from their configurations, trained for three steps and evaluated in bf16.

    python side.py torch|run|install FACTS.json models.py NAME torch|autocast|monitor|weight_cache|policy

The last argument says what the region of this file is: torch's own, which `run` and `install` replace; castwise's; or
castwise's under a Monitor, with a WeightCache, or with the policy `policies.bf16` bound to the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import castwise
import facts

STEPS = 3
Forward = Callable[[nn.Module], Any]
MODELS: dict[str, Callable[[], tuple[nn.Module, Forward]]] = {}


def model(name: str) -> Callable[[Any], Any]:
    """Register what returns a model, and what calls it: the output is a tensor, or has a loss of its own."""

    def add(build: Callable[[], tuple[nn.Module, Forward]]) -> Callable[[], tuple[nn.Module, Forward]]:
        MODELS[name] = build
        return build

    return add


def tokens(length: int = 12, size: int = 64) -> Tensor:
    return torch.randint(3, size, (2, length))


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size)


def from_transformers(model_class: str, config_class: str, options: dict[str, Any], **inputs: Tensor) -> Any:
    import transformers

    config = getattr(transformers, config_class)(**options)
    return getattr(transformers, model_class)(config), lambda model: model(**inputs)


def from_timm(name: str, size: int = 32, **options: Any) -> Any:
    import timm

    x = images(size)
    return timm.create_model(name, num_classes=5, **options), lambda model: model(x)


TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@model("Llama")
def _llama() -> Any:
    ids = tokens()
    options = {**TEXT, **ENDS, "num_key_value_heads": 2}
    return from_transformers("LlamaForCausalLM", "LlamaConfig", options, input_ids=ids, labels=ids)


@model("mixture of experts (Mixtral)")
def _mixtral() -> Any:
    ids = tokens()
    options = {**TEXT, **ENDS, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return from_transformers("MixtralForCausalLM", "MixtralConfig", options, input_ids=ids, labels=ids)


@model("GPT-2")
def _gpt2() -> Any:
    ids = tokens()
    options = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, **ENDS}
    return from_transformers("GPT2LMHeadModel", "GPT2Config", options, input_ids=ids, labels=ids)


@model("BERT")
def _bert() -> Any:
    ids = tokens()
    mask = torch.ones_like(ids).index_fill_(1, torch.tensor([10, 11]), 0)
    return from_transformers("BertForMaskedLM", "BertConfig", TEXT, input_ids=ids, attention_mask=mask, labels=ids)


@model("T5")
def _t5() -> Any:
    ids, labels = tokens(), tokens(6)
    options = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    options |= {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}
    return from_transformers("T5ForConditionalGeneration", "T5Config", options, input_ids=ids, labels=labels)


@model("Whisper")
def _whisper() -> Any:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "num_mel_bins": 8}
    options = {**sizes, **ENDS, "vocab_size": 64, "max_source_positions": 16, "decoder_start_token_id": 0}
    heard = torch.randn(2, 8, 32)
    name = "WhisperForConditionalGeneration"
    return from_transformers(name, "WhisperConfig", options, input_features=heard, labels=tokens(6))


@model("Mamba")
def _mamba() -> Any:
    ids = tokens()
    options = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **ENDS}
    return from_transformers("MambaForCausalLM", "MambaConfig", options, input_ids=ids, labels=ids)


@model("ViT")
def _vit() -> Any:
    options = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    options |= {"image_size": 32, "patch_size": 8, "num_labels": 5}
    labels = torch.tensor([1, 4])
    return from_transformers("ViTForImageClassification", "ViTConfig", options, pixel_values=images(), labels=labels)


@model("CLIP")
def _clip() -> Any:
    tower = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    text = {**tower, **ENDS, "vocab_size": 64, "max_position_embeddings": 16}
    options = {"text_config": text, "vision_config": {**tower, "image_size": 32, "patch_size": 8}, "projection_dim": 16}
    built, _ = from_transformers("CLIPModel", "CLIPConfig", options)
    ids, seen = tokens(), images()
    return built, lambda model: model(input_ids=ids, pixel_values=seen, return_loss=True)


@model("ResNet-18 (timm)")
def _resnet() -> Any:
    return from_timm("resnet18")


@model("ConvNeXt (timm)")
def _convnext() -> Any:
    return from_timm("convnext_atto", 64, depths=(1, 1, 1, 1))


@model("EfficientNet (timm)")
def _efficientnet() -> Any:
    return from_timm("test_efficientnet")


@model("UNet (diffusers)")
def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (16, 32)}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1}
    built = UNet2DConditionModel(sample_size=8, norm_num_groups=8, cross_attention_dim=16, **blocks)
    noisy, when, words = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 5, 16)
    return built, lambda model: model(noisy, when, words).sample


@model("CLIP (open_clip)")
def _open_clip() -> Any:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    built = CLIP(16, {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}, text)
    ids, seen, loss = tokens(), images(), ClipLoss()
    return built, lambda model: loss(*model(seen, ids)).reshape(1)


@model("SwinUNETR (monai)")
def _swin() -> Any:
    from monai.losses import DiceCELoss
    from monai.networks.nets import SwinUNETR

    built = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1))
    x, labels, loss = torch.randn(2, 1, 64, 64), torch.randint(2, (2, 1, 64, 64)), DiceCELoss(to_onehot_y=True)
    return built, lambda model: loss(model(x), labels).reshape(1)


@model("graph attention (torch_geometric)")
def _graph() -> Any:
    from torch_geometric.nn import GATv2Conv, GCNConv, Sequential, global_mean_pool

    arguments = "x, edges, batch"
    layers = [(GATv2Conv(8, 8, heads=4, edge_dim=None), "x, edges -> x"), nn.ReLU(), (GCNConv(32, 16), "x, edges -> x")]
    built = Sequential(arguments, [*layers, (global_mean_pool, "x, batch -> x"), nn.Linear(16, 5)])
    x, edges, batch = torch.randn(20, 8), torch.randint(20, (2, 60)), torch.arange(20) // 10
    return built, lambda model: model(x, edges, batch)


@model("decoder with rotary embeddings (x-transformers)")
def _x_transformers() -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, attn_qk_norm=True)
    built = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers))
    ids = tokens()
    return built, lambda model: model(ids).reshape(1)


@model("embeddings with a learnt loss (pytorch-metric-learning)")
def _metric_learning() -> Any:
    from pytorch_metric_learning.losses import ArcFaceLoss, TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    trunk, arc = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), ArcFaceLoss(4, 8)
    triplets, miner = TripletMarginLoss(), MultiSimilarityMiner()
    x, labels = torch.randn(16, 16), torch.arange(16) % 4

    def forward(model: nn.Module) -> Tensor:
        embeddings = model[0](x)
        loss = model[1](embeddings, labels) + triplets(embeddings, labels, miner(embeddings, labels))
        return loss.reshape(1)

    return nn.Sequential(trunk, arc), forward


@model("nn.TransformerEncoder")
def _encoder() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x, padding = torch.randn(2, 12, 32), torch.arange(12) >= torch.tensor([[12], [9]])
    built = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # nested tensors and autocast: torch raises
    return built, lambda model: [model(x), model(x, src_key_padding_mask=padding)]


@model("nn.TransformerDecoder")
def _decoder() -> Any:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 12, 32)
    return nn.TransformerDecoder(layer, 2), lambda model: model(x, memory)


@model("nn.MultiheadAttention")
def _attention() -> Any:
    x = torch.randn(2, 12, 32)
    built = nn.MultiheadAttention(32, 4, batch_first=True)
    return built, lambda model: [*model(x, x, x), model(x, x, x, need_weights=False)[0]]


class _LanguageModel(nn.Module):
    """Embedding, LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        with torch.backends.mkldnn.flags(enabled=False):  # it has no LSTM in 16 bits for many CPUs
            hidden = self.lstm(self.embedding(ids))[0]
        logits: Tensor = self.output(hidden)
        return logits


@model("nn.LSTM")
def _lstm() -> Any:
    ids = tokens()
    return _LanguageModel(), lambda model: model(ids)


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model has computed, or one that weighs every number of its outputs."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    outputs = output if isinstance(output, list) else [output]
    return sum(((each.float() - 0.5) ** 2).mean() for each in outputs)  # type: ignore[return-value]


def run(name: str, way: str) -> None:
    """Train and evaluate a model, and note outputs, losses, gradients and weights."""
    torch.manual_seed(0)
    built, forward = MODELS[name]()
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    amp: Any = torch.amp if way == "torch" else castwise
    scaler = amp.GradScaler("cpu", init_scale=2.0**10)
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    monitor: Any = contextlib.nullcontext()
    if way == "weight_cache":
        options["weight_cache"] = castwise.WeightCache(built)
    elif way == "policy":
        options = {"policy": castwise.policies.bf16.bind(built)}
    elif way == "monitor":
        monitor = castwise.Monitor(built, optimizer, scaler, every=2, sinks=[lambda record: None])
    with monitor:
        for step in range(STEPS):
            torch.manual_seed(step)  # dropout
            with amp.autocast("cpu", **options):
                output = forward(built)
                loss = loss_of(output)
            scaler.scale(loss).backward()
            facts.put(f"step {step}: output", output)
            for parameter_name, parameter in built.named_parameters():
                if parameter.grad is not None:
                    facts.put(f"step {step}: gradient of {parameter_name}", parameter.grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            evaluate(f"after step {step}", built, forward, lambda: amp.autocast("cpu", **options))
        facts.put("weights", dict(built.named_parameters()))
        facts.put("buffers", dict(built.named_buffers()))


def evaluate(when: str, built: nn.Module, forward: Forward, region: Callable[[], Any]) -> None:
    """Note outputs in eval(), in each mode of autograd, and with frozen weights."""
    built.eval()
    modes: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "enable_grad": torch.enable_grad,
    }
    for mode, context in modes.items():
        with context(), region():
            facts.put(f"{when}: eval output, {mode}", forward(built))
    trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    with region():
        facts.put(f"{when}: eval output, frozen", forward(built))
    for parameter in trained:
        parameter.requires_grad_(True)
    built.train()


if __name__ == "__main__":
    run(*sys.argv[1:])
