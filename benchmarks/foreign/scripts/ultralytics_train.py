"""YOLO of ultralytics on eight drawn images: its own trainer and validator, and its loss and EMA in a CPU region.

On a CPU its trainer turns mixed precision off, and makes a disabled scaler and disabled regions; so what it does on a
GPU is done here once more, by a loop with the model, the loss, and the EMA of the library.
"""

import os
from pathlib import Path

os.environ["YOLO_VERBOSE"] = "False"  # it would print times

import torch
import torchvision
from PIL import Image
from ultralytics import YOLO
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.nms import TorchNMS
from ultralytics.utils.torch_utils import ModelEMA

if not torchvision.extension._has_ops():  # beside a torch without CUDA; ultralytics has one of its own
    torchvision.ops.nms = TorchNMS.nms

for part in ("images", "labels"):
    Path("data", part).mkdir(parents=True)
for i in range(8):
    Image.effect_mandelbrot((64, 64), (-2, -1.5, 1, 1.5), 10 + i).convert("RGB").save(f"data/images/{i}.png")
    Path(f"data/labels/{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.4 0.{i + 1}\n")
Path("data.yaml").write_text(f"path: {Path('data').absolute()}\ntrain: images\nval: images\nnames: [a, b]\n")
model = YOLO("yolov8n.yaml", verbose=False)
options = {"epochs": 1, "imgsz": 64, "batch": 4, "workers": 0, "device": "cpu", "optimizer": "SGD", "plots": False}
model.train(data="data.yaml", amp=True, verbose=False, exist_ok=True, **options)

torch.manual_seed(0)
detector = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
detector.args = get_cfg()
optimizer = torch.optim.SGD(detector.parameters(), lr=0.001, momentum=0.9, nesterov=True)
scaler, ema = torch.amp.GradScaler("cpu"), ModelEMA(detector)
boxes = {"batch_idx": torch.tensor([0.0, 1.0]), "cls": torch.tensor([[0.0], [1.0]])}
boxes["bboxes"] = torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.4, 0.6, 0.2, 0.2]])
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, items = detector({"img": torch.rand(2, 3, 64, 64), **boxes})
        loss = loss.sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(detector.parameters(), max_norm=10.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ema.update(detector)
    print("TRAINED", loss.item(), items, scaler.get_scale())
ema.ema.eval()
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    found = ema.ema(torch.linspace(0, 1, 3 * 64 * 64).view(1, 3, 64, 64))[0]
print("EVALUATED", found.dtype, found.double().sum().item())
