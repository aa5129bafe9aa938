"""Training over two processes, with gloo or on two GPUs with NCCL: FSDP2 and DDP give what one process gives."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from halfbyte.torch import QuantizedExperts, QuantizedLinear, replace_linear

WORLD = 2
takes_bytes = pytest.mark.skipif(torch.__version__ < torch.torch_version.TorchVersion("2.13"),
                                 reason="fully_shard of torch < 2.13 takes floating parameters only")


class Mixture(nn.Module):
    """Three experts, of which each row has two."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 3)
        self.experts = QuantizedExperts(3, 64, 64, nn.GELU(), up_features=64, up_name="up_proj", bias=True, lora_rank=2)
        for name in self.experts.packed_names:
            self.experts.set_weight(name, torch.randn(3, 64, 64) / 8)

    def forward(self, x):
        routing_weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, routing_weights)


def make(storage_dtype=torch.uint8):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64)).requires_grad_(False)
    replace_linear(model, "nf4", lora_rank=4, storage_dtype=storage_dtype)
    if storage_dtype == torch.uint8:
        model.append(Mixture())
    return model


def train(model, rank=0, world=1, steps=3):
    """Losses of the whole batch, of which each process has a part."""
    generator = torch.Generator().manual_seed(8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    device, losses = next(model.parameters()).device, []
    for _ in range(steps):
        x, target = (torch.randn(8, size, generator=generator).to(device) for size in (128, 64))
        loss = (model(x.chunk(world)[rank]) - target.chunk(world)[rank]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if world > 1:
            dist.all_reduce(whole)
            whole /= world
        losses.append(whole.item())
    return losses


def shard(model, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(next(model.parameters()).device.type, (WORLD,))
    for layer in model:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(state):
    """A state_dict of sharded tensors, gathered."""
    return {name: (of.full_tensor() if hasattr(of, "full_tensor") else of).cpu() for name, of in state.items()}


def fsdp(rank, folder, storage_dtype, policy, device="cpu"):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    model = make(storage_dtype)
    expected = {name: of.clone() for name, of in model.state_dict().items()}
    shard(model.to(device), **({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if policy else {}))
    for name, packed in model.named_parameters():
        if packed.dtype == storage_dtype and not packed.requires_grad:  # the larger part: two experts of three
            assert packed.to_local().numel() <= packed.numel() * (2 / 3 if "experts" in name else 1 / 2), name
    losses = train(model, rank, WORLD)
    state = whole(model.state_dict())
    for name in [name for name in state if "weight_spec" not in name and state[name].dtype == storage_dtype]:
        assert torch.equal(state[name].view(torch.uint8), expected[name].view(torch.uint8)), name
    if rank == 0:
        torch.save({"losses": losses, "state": state}, folder / "result.pt")


def cast(rank, folder):
    """A policy that casts what is stored as floats of another dtype: the bytes are gone, and that is said."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    model = shard(make(torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a cast destroys them"):
        model(torch.randn(2, 128))


def outside(rank, folder):
    """A layer that is called without the module that gathers its weight."""
    model = shard(make())
    with pytest.raises(RuntimeError, match="the weight is sharded"):
        QuantizedLinear.forward(model[0], torch.randn(2, 128))
    with pytest.raises(RuntimeError, match="the weight is sharded"):
        QuantizedExperts.forward(model[3].experts, torch.randn(2, 64), torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 2))


def ddp(rank, folder, storage_dtype=torch.uint8, device="cpu"):
    model = nn.parallel.DistributedDataParallel(make(storage_dtype).to(device))
    losses = train(model, rank, WORLD)
    if rank == 0:
        torch.save({"losses": losses, "state": whole(model.module.state_dict())}, folder / "result.pt")


def checkpoint(rank, folder):
    """A distributed checkpoint of sharded weights fills a model of other values."""
    import torch.distributed.checkpoint as dcp
    model = shard(make())
    train(model, rank, WORLD, 1)
    saved = whole(model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    model.load_state_dict(state["model"])
    assert all(torch.equal(of, saved[name]) for name, of in whole(model.state_dict()).items())


def _process(rank, of, folder, *arguments):
    torch.set_num_threads(1)
    on_gpu = "cuda" in arguments
    if on_gpu:
        torch.cuda.set_device(rank)
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # needs rights that a container may lack
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank,
                            world_size=WORLD)
    of(rank, folder, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo may still have the last reference of a tensor, for which it takes the lock of an interpreter that
    # is being shut down: the process then ends by SIGABRT, one time in 30 of a plain model with torch 2.15.
    os._exit(0)


def spawn(of, folder, *arguments):
    mp.spawn(_process, (of, folder, *arguments), nprocs=WORLD)


def assert_is_that_of_one_process(folder, storage_dtype=torch.uint8, tolerance=1e-5, device="cpu"):
    result = torch.load(folder / "result.pt")
    model = make(storage_dtype).to(device)
    losses = train(model)
    assert result["losses"] == pytest.approx(losses, rel=tolerance)
    again = make(storage_dtype)
    again.load_state_dict(result["state"])
    for (name, got), wanted in zip(again.named_parameters(), model.cpu().parameters()):
        if wanted.requires_grad:
            assert (got - wanted).norm() <= 10 * tolerance * wanted.norm(), name
        else:
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), name


@takes_bytes
def test_fsdp_of_bytes(tmp_path):
    spawn(fsdp, tmp_path, torch.uint8, False)
    assert_is_that_of_one_process(tmp_path)


@takes_bytes
def test_fsdp_of_bytes_with_a_policy(tmp_path):
    """Weights that are no floats are not cast; x, bias and adapters are bf16."""
    spawn(fsdp, tmp_path, torch.uint8, True)
    assert torch.load(tmp_path / "result.pt")["losses"] == pytest.approx(train(make()), rel=0.02)


@pytest.mark.parametrize("policy", [False, True])
def test_fsdp_of_a_floating_storage_dtype(policy, tmp_path):
    spawn(fsdp, tmp_path, torch.bfloat16, policy)
    if not policy:
        assert_is_that_of_one_process(tmp_path, torch.bfloat16)


def test_a_cast_is_said(tmp_path):
    spawn(cast, tmp_path)


@takes_bytes
def test_a_sharded_weight_is_refused(tmp_path):
    spawn(outside, tmp_path)


def test_ddp(tmp_path):
    spawn(ddp, tmp_path)
    assert_is_that_of_one_process(tmp_path)


# Parts of a batch may go to other kernels than the whole, whose sums are rounded otherwise.
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
@pytest.mark.parametrize("of,arguments", [(ddp, ()), (fsdp, (False,))])
def test_on_two_gpus(of, arguments, tmp_path):
    spawn(of, tmp_path, torch.bfloat16, *arguments, "cuda")
    assert_is_that_of_one_process(tmp_path, torch.bfloat16, 1e-3, "cuda")


@takes_bytes
def test_distributed_checkpoint(tmp_path):
    spawn(checkpoint, tmp_path)
