"""Quantization-aware training: a network of two layers learns with 2-bit weights and 8-bit activations, and its
weights go into a checkpoint as the last step computed with them.

    qat_mlp.py [OUTPUT.safetensors]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import halfbyte
from halfbyte.torch import QatLinear, convert, prepare_qat


def train(model: nn.Module, teacher: nn.Module, steps: int, rate: float) -> float:
    """The mean squared error of the last ten steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64)
        loss = (model(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def main() -> None:
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).requires_grad_(False)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    dense = train(model, teacher, 1000, 5e-3)
    rounded = prepare_qat(model, "int2,group_size=32", activations="int8,granularity=tensor", learn_scale=True)
    with torch.no_grad():
        x = torch.randn(1024, 64)
        at_once = (rounded(x) - teacher(x)).square().mean().item()
    trained = train(rounded, teacher, 400, 1e-3)
    print(f"mean squared error: dense {dense:.5f}, rounded {at_once:.5f}, trained rounded {trained:.5f}")

    model.eval()
    y = model(x)
    last = {f"{name}.weight": layer.weight_quantizer(layer.weight).detach()
            for name, layer in model.named_modules() if isinstance(layer, QatLinear)}
    with tempfile.TemporaryDirectory() as temporary:
        output = sys.argv[1] if len(sys.argv) > 1 else Path(temporary) / "qat.safetensors"
        with halfbyte.CheckpointWriter(output, force=True) as writer:
            for name, layer in model.named_modules():
                if isinstance(layer, QatLinear):
                    writer.set(f"{name}.weight", layer.quantized_weight())
        checkpoint = halfbyte.Checkpoint(output)
        same = all(torch.equal(checkpoint.load_dense(name, "f32", framework="torch"), w) for name, w in last.items())
    converted = convert(model)
    print(converted)
    print(f"stored weights are those of the last forward: {same}; outputs of the converted model differ by "
          f"{(converted(x) - y).abs().max():.1e}")
    sys.exit(0 if same and trained < at_once / 2 else 1)


if __name__ == "__main__":
    main()
