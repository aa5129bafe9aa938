"""QLoRA with transformers and peft: tiny-llama, which has read novels, learns to write documentation. Its weights are NF4
from the moment they are read; adapters of rank 16 learn beside them, are saved, and are merged in the end.

    peft_qlora.py [TEXT [STEPS]]
"""

import sys
import tempfile
from pathlib import Path

import peft
import torch
from tiny_llama import TINY_LLAMA, windows
from transformers import AutoModelForCausalLM

from halfbyte.torch.peft import merge_and_unload
from halfbyte.torch.transformers import HalfbyteConfig

BATCH, WINDOW = 8, 128


def load(device: str):
    return AutoModelForCausalLM.from_pretrained(TINY_LLAMA, quantization_config=HalfbyteConfig("nf4"),
                                                dtype=torch.float32, device_map=device)


@torch.no_grad()
def loss_of(model, tokens: torch.Tensor) -> float:
    return model(tokens, labels=tokens).loss.item()


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "training.md"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    tokens = windows(text, WINDOW).to(device)
    held_out, tokens = tokens[::8], tokens[torch.arange(len(tokens)) % 8 != 0]

    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(device), config)
    before = loss_of(model, held_out)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (BATCH,))]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = loss_of(model, held_out)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the adapters only
        again = peft.PeftModel.from_pretrained(load(device), folder)
    merged, reports = merge_and_unload(again)
    lost = max(report.relative_rmse for report in reports.values())
    print(f"nats per byte of {text.name}: {before:.4f}, with adapters {after:.4f}, merged into NF4 "
          f"{loss_of(merged, held_out):.4f} (which lost up to {lost:.1%} of a weight)")


if __name__ == "__main__":
    main()
