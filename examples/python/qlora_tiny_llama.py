"""QLoRA: tiny-llama, which has read novels, learns to write documentation. Its weights are NF4 and stay; adapters of
rank 16 learn beside them, within the same products.

    qlora_tiny_llama.py [TEXT [STEPS]]
"""

import sys
from pathlib import Path

import torch
from tiny_llama import load, loss, windows

from halfbyte.torch import QuantizedLinear, replace_linear

BATCH, WINDOW = 8, 128


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "training.md"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    model = load().requires_grad_(False)
    replace_linear(model, "nf4", lora_rank=16)
    model.to(device)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(adapters, lr=2e-3)
    tokens = windows(text, WINDOW).to(device)
    held_out, tokens = tokens[::8], tokens[torch.arange(len(tokens)) % 8 != 0]

    with torch.no_grad():
        before = loss(model, held_out).item()
    for _ in range(steps):
        value = loss(model, tokens[torch.randint(len(tokens), (BATCH,))])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    with torch.no_grad():
        after = loss(model, held_out).item()
    lost = max(m.merge_adapter().relative_rmse for m in model.modules() if isinstance(m, QuantizedLinear))
    with torch.no_grad():
        merged = loss(model, held_out).item()
    print(f"nats per byte of {text.name}: {before:.4f}, with adapters {after:.4f}, merged into NF4 {merged:.4f} "
          f"(which lost up to {lost:.1%} of a weight)")


if __name__ == "__main__":
    main()
