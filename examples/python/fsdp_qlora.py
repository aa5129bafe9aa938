"""QLoRA over several processes: each keeps a part of the NF4 bytes (FSDP2), and takes a part of each batch. On as many
GPUs as there are processes, over NCCL; without GPUs on the CPU, over gloo.

    torchrun --nproc-per-node 2 fsdp_qlora.py [TEXT [STEPS]]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_llama import load, loss, windows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halfbyte.torch import replace_linear

BATCH, WINDOW = 8, 128
# Bytes as bytes where fully_shard takes them: from torch 2.13.
STORAGE = torch.uint8 if torch.__version__ >= torch.torch_version.TorchVersion("2.13") else torch.bfloat16


@torch.no_grad()
def loss_of(model, rows: torch.Tensor) -> float:
    """Of the rows of all processes."""
    sums = torch.stack((loss(model, rows) * len(rows), torch.tensor(float(len(rows)), device=rows.device)))
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def bytes_of(model) -> tuple[int, int]:
    """Of the packed weights: those that this process keeps, and all."""
    packed = [p for p in model.parameters() if p.dtype == STORAGE]
    return (sum(p.to_local().nbytes for p in packed), sum(p.numel() * p.element_size() for p in packed))


def main() -> None:
    torch.manual_seed(1)
    text = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "training.md"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.split(":")[0], (int(os.environ["WORLD_SIZE"]),))
    rank, world = mesh.get_rank(), mesh.size()
    if BATCH % world:
        sys.exit(f"{world} processes cannot share {BATCH} rows of a batch evenly")

    model = load().requires_grad_(False)
    replace_linear(model, "nf4", lora_rank=16, storage_dtype=STORAGE)
    model.to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # From here on, parameters are sharded: the optimizer has its state of a part of each.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    tokens = windows(text, WINDOW).to(device)
    held_out, tokens = tokens[::8], tokens[torch.arange(len(tokens)) % 8 != 0]
    held_out = held_out[rank::world]
    before = loss_of(model, held_out)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (BATCH,))]  # the same in each process
        value = loss(model, batch.chunk(world)[rank])
        optimizer.zero_grad()
        value.backward()  # averages the gradients of all processes
        optimizer.step()
    after = loss_of(model, held_out)
    kept, whole = bytes_of(model)
    if rank == 0:
        print(f"nats per byte of {text.name}: {before:.4f}, with adapters {after:.4f}; "
              f"{kept} of {whole} bytes of NF4 in each of {world} processes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
