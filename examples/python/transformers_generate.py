"""A model of transformers whose weights are quantized while it is loaded generates text, is saved, and loaded again.

    transformers_generate.py [PROMPT [SPEC]]

The model is tiny-llama, whose tokens are bytes; any other has a tokenizer in their place.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from halfbyte.torch.transformers import HalfbyteConfig

TINY_LLAMA = Path(__file__).resolve().parent.parent / "tiny-llama"


def generate(model, prompt: str) -> str:
    tokens = torch.tensor([list(prompt.encode())], device=model.device)
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=120, do_sample=False, pad_token_id=0)
    return bytes(made[0].tolist()).decode(errors="replace")


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "It is a truth "
    spec = sys.argv[2] if len(sys.argv) > 2 else "nf4"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, quantization_config=HalfbyteConfig(spec), device_map=device)
    print(model.hf_quantizer.report)
    text = generate(model, prompt)
    print(text)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
    print("the saved model writes the same:", generate(again, prompt) == text)


if __name__ == "__main__":
    main()
