"""Tensor parallelism: quantized layers cut over the devices of a mesh.

    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)

The styles are those of PyTorch, and do with other modules what those do. A QuantizedLinear becomes the smaller layer of its
part, with the codes and scales that it had; its parameters are ordinary ones. state_dict() gives the whole layer on every
process, and load_state_dict() takes it: both are called by all.
"""

import fnmatch
import json
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as _torch

from .. import _core
from . import _fast
from .linear import QuantizedLinear, as_tensor, autocast


class _Copied(torch.autograd.Function):
    """x of all processes, whose gradients are summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple:
        dx = dx.contiguous().clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _Summed(torch.autograd.Function):
    """The sum of y over all processes, all of which use it alike."""

    @staticmethod
    def forward(ctx, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        return dy, None


class Part:
    """What a process has of a QuantizedLinear: rows of its weight (axis 0) or columns (axis 1)."""

    def __init__(self, layer: QuantizedLinear, axis: int, mesh: DeviceMesh, input_layout: Placement,
                 output_layout: Placement, use_local_output: bool) -> None:
        self.axis, self.mesh, self.group = axis, mesh, mesh.get_group()
        self.input_layout, self.output_layout, self.use_local_output = input_layout, output_layout, use_local_output
        self.shape = [layer.out_features, layer.in_features]  # of the whole
        extent, world = self.shape[axis], mesh.size()
        if extent % world:
            raise ValueError(f"{extent} {'out' if axis == 0 else 'in'}_features are not a multiple of the {world} devices")
        size = extent // world
        self.begin, self.end = mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size
        # Neither side is seen by other modules as a DTensor.
        shard = Shard(-1)
        layouts = (Replicate(), shard) if axis == 0 else (shard, Replicate())
        self.is_plain = use_local_output and (input_layout, output_layout) == layouts

    def __deepcopy__(self, memo: dict) -> "Part":
        return self  # nothing of it changes, and a process group has no copy

    # ---- Weights

    def cut_weight(self, whole: object) -> object:
        """The part of a QuantizedTensor."""
        return (whole.expanded() if whole.spec.double_quant else whole).slice(self.axis, self.begin, self.end)

    def cut_bias(self, bias: Tensor) -> Tensor:
        return bias[self.begin:self.end].clone() if self.axis == 0 else bias

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.mesh.size())]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def join(self, part: object) -> object:
        """The whole QuantizedTensor that the parts of all processes make."""
        spec, rows = part.spec, part.shape[0]

        def joined(array: object | None, is_cut: bool) -> Tensor | None:
            if array is None:
                return None
            tensor = as_tensor(array)
            stored = tensor.view(torch.uint8).reshape(rows, -1) if is_cut else tensor
            if not is_cut or stored.numel() == 0:
                return tensor
            return torch.cat(self.gather(stored), self.axis).view(tensor.dtype)

        by_column = spec.granularity in ("group", "flat")
        of_rows = spec.granularity != "tensor" and (self.axis == 0 or by_column)
        parts = {name: joined(getattr(part, name), name == "codes" or of_rows)
                 for name in ("codes", "scales", "zeros", "biases")}
        parts["global_scale"] = part.global_scale
        whole = {name: of for name, of in parts.items() if of is not None}
        return _core.QuantizedTensor(spec, tuple(self.shape), part.dtype, **whole)

    # ---- Forward

    def forward(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        x = autocast(x)
        if bias is not None:
            bias = bias.to(x.dtype)
        if self.axis == 0:
            return self.output(_fast.linear(self.input(x), weight, bias, layer._shape))
        # The bias is added to the sum, once.
        y = self.output(_fast.linear(self.input(x), weight, None, layer._shape))
        if bias is None:
            return y
        if self.is_plain:
            return y + bias
        if not isinstance(y, DTensor):
            y = DTensor.from_local(y, self.mesh, (self.output_layout,), run_check=False)
        y = y + DTensor.from_local(bias, self.mesh, (Replicate(),), run_check=False)
        return y.to_local() if self.use_local_output else y

    def input(self, x: Tensor) -> Tensor:
        if self.is_plain and not isinstance(x, DTensor):
            return _Copied.apply(x, self.group) if self.axis == 0 and torch.is_grad_enabled() and x.requires_grad else x
        last = Shard(x.dim() - 1)
        wanted, of_gradient = (Replicate(), Partial()) if self.axis == 0 else (last, last)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, (self.input_layout,), run_check=False)
        return x.redistribute(placements=(wanted,)).to_local(grad_placements=(of_gradient,))

    def output(self, y: Tensor) -> Tensor:
        if self.is_plain:
            if self.axis == 0:
                return y
            if torch.is_grad_enabled() and y.requires_grad:
                return _Summed.apply(y, self.group)
            dist.all_reduce(y, group=self.group)
            return y
        made = Shard(y.dim() - 1) if self.axis == 0 else Partial()
        y = DTensor.from_local(y, self.mesh, (made,), run_check=False).redistribute(placements=(self.output_layout,))
        return y.to_local() if self.use_local_output else y

    # ---- state_dict

    def put_whole(self, layer: QuantizedLinear, destination: dict, prefix: str) -> None:
        destination[prefix + "weight"] = as_tensor(self.join(layer.quantized()).pack().data).view(layer.weight.dtype)
        if layer.bias is not None and self.axis == 0:
            destination[prefix + "bias"] = torch.cat(self.gather(layer.bias))

    def take_whole(self, layer: QuantizedLinear, state_dict: dict, prefix: str) -> None:
        """Puts the part in the place of the whole. Raises ValueError where that is no layer of its shape."""
        described = state_dict.get(prefix + "weight_spec")
        if described is None:
            raise ValueError("a layer that is cut takes what state_dict() of such layers gives, with weight_spec")
        text = json.loads(bytes(described.cpu().tolist()))
        if text["shape"] != self.shape:
            raise ValueError(f"the weight must have the shape {self.shape}, got {text['shape']}")
        spec = _core.QuantSpec.parse(text["spec"])
        data = state_dict[prefix + "weight"].view(torch.uint8).to(layer.weight.device)
        part = self.cut_weight(_core.PackedTensor.copy_of(spec, *self.shape, data).unpack())
        state_dict[prefix + "weight"] = as_tensor(part.pack().data).view(layer.weight.dtype)
        text.update(spec=str(part.spec), shape=list(part.shape))
        state_dict[prefix + "weight_spec"] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        if prefix + "bias" in state_dict:
            state_dict[prefix + "bias"] = self.cut_bias(state_dict[prefix + "bias"])


class _Style:
    """Of a style of PyTorch: what it does with a QuantizedLinear."""

    _axis: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantizedLinear):
            return super()._apply(module, device_mesh)
        if module.part is not None:
            raise ValueError("the layer is cut already")
        if module.lora_a is not None:
            raise ValueError("a layer with an adapter of its own is not cut: merge it, or shard the model with FSDP2")
        module.cut(Part(module, self._axis, device_mesh, self.input_layouts[0], self.output_layouts[0],
                        self.use_local_output))
        return module


class ColwiseParallel(_Style, _torch.ColwiseParallel):
    """torch.distributed.tensor.parallel.ColwiseParallel, for quantized layers too: each device has some of the outputs,
    rows of the weight."""

    _axis = 0


class RowwiseParallel(_Style, _torch.RowwiseParallel):
    """torch.distributed.tensor.parallel.RowwiseParallel, for quantized layers too: each device has some of the inputs,
    columns of the weight. What the devices compute is summed in the dtype of x."""

    _axis = 1


def plan_of(model: nn.Module) -> dict[str, _torch.ParallelStyle]:
    """What parallelize_module is to do with a model of transformers, by the plan that it has (`tp_plan`): the styles of
    its linear layers, quantized or not. Embeddings and experts stay whole. Raises ValueError where it has no plan."""
    words = getattr(model, "tp_plan", None)
    if not words:
        raise ValueError(f"{type(model).__name__} has no tp_plan")
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel,
              "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate())}
    plan = {}
    for name, module in model.named_modules():
        word = next((word for pattern, word in words.items() if fnmatch.fnmatch(name, pattern)), None)
        if word in styles and isinstance(module, nn.Linear):
            plan[name] = styles[word]()
    return plan
