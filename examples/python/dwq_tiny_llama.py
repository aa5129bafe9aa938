"""DWQ of tiny-llama: the codes of rounding stay, and their scales and biases learn to answer as the dense model does.

    dwq_tiny_llama.py TEXT -o tiny-dwq --bits 2

TEXT is what it learns from: an eighth of it chooses the best step. What it stores, in the layout of MLX, is read by
mlx-lm and by examples/llama.
"""

import argparse
import copy
from pathlib import Path

import torch
from tiny_llama import TINY_LLAMA, load, loss, windows

from halfbyte.torch import dwq, prepare_dwq, save_dwq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 5, 6, 8))
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--window", type=int, default=256, help="bytes of context")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--validation", type=int, default=16, help="batches that choose the best step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    teacher = load(TINY_LLAMA, torch.bfloat16).to(options.device)
    student = prepare_dwq(copy.deepcopy(teacher), f"affine{options.bits},group_size={options.group_size}")
    tokens = windows(options.text, options.window).to(options.device)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0)).to(options.device)
    batches = tokens[order].split(options.batch)
    validation = batches[: options.validation]

    def nats() -> float:
        with torch.no_grad():
            return sum(loss(student, batch).item() for batch in validation) / len(validation)

    before = nats()
    report = dwq(student, teacher, batches[options.validation :], validation=validation, steps=options.steps,
                 learning_rate=options.learning_rate)
    print(f"divergence from the dense model: {report.start_loss:.6f}, after {report.best_step} steps "
          f"{report.best_loss:.6f}; nats per byte of the validation: {before:.6f}, {nats():.6f}")
    print(save_dwq(student, TINY_LLAMA, options.output, force=True))


if __name__ == "__main__":
    main()
