"""Experts over packed weights."""

import json
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _core
from ._fast import refuse_sharded
from ._ops_experts import qgemm_grouped, qgemm_grouped_sum, quantize_experts, route
from ._ops_weight import aligned, dequantize_packed, spec_of
from .linear import autocast, refuse_cast, relative_rmse


class QuantizedExperts(nn.Module):
    """A mixture of experts: y = sum over the top_k experts e of a token of r_e (W_down,e h_e + b_down,e) with
    h_e = activation(W_up,e x + b_up,e) and the routing weight r_e.

    up_name, which is gate_up_proj where the activation has a gate and else up_proj: the packed weights
    [up_features, hidden_size], and down_proj: those [hidden_size, intermediate_size], of all experts; parameters
    without gradient, u8 [num_experts, bytes] (or `storage_dtype`, whose bytes they are). NAME_bias: [num_experts,
    features]. NAME_lora_a [num_experts, lora_rank, in] and NAME_lora_b [num_experts, features, lora_rank]: parameters of
    adapters, as those of QuantizedLinear. Gradients flow to x, the routing weights, the biases and the adapters; no weight
    is dense. Products are those of halfbyte.qgemm_grouped.

        >>> import torch, halfbyte.torch
        >>> gate = lambda h: torch.nn.functional.silu(h[:, :64]) * h[:, 64:]
        >>> experts = halfbyte.torch.QuantizedExperts(4, 128, 64, gate, up_features=128, spec="nf4")
        >>> experts
        QuantizedExperts(num_experts=4, hidden_size=128, intermediate_size=64, bias=False, spec=nf4)
        >>> experts(torch.ones(3, 128), torch.tensor([[0, 2], [1, 3], [3, 2]]), torch.full((3, 2), 0.5)).shape
        torch.Size([3, 128])
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int,
                 activation: Callable[[Tensor], Tensor], *, up_features: int, up_name: str = "gate_up_proj",
                 bias: bool = False, spec: _core.QuantSpec | str = "nf4", lora_rank: int = 0,
                 lora_alpha: float | None = None, storage_dtype: torch.dtype = torch.uint8,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """activation: [slots, up_features] -> [slots, intermediate_size]. spec: of all weights, which are 0 at first.
        dtype: of biases and adapters, and of dequantized(). storage_dtype: as in QuantizedLinear. Raises ValueError where
        there is no packed form."""
        super().__init__()
        spec = spec_of(str(_core.QuantSpec.parse(str(spec))))
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.up_name, self.spec = activation, up_name, spec
        self._spec = str(spec)  # as operators take it
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.extents = {up_name: (up_features, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (n, k) in self.extents.items():
            packed = torch.empty(num_experts, spec.packed_bytes(n, k) // storage_dtype.itemsize, dtype=storage_dtype,
                                 device=device)
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            bias_of = nn.Parameter(torch.zeros(num_experts, n, dtype=self.dtype, device=device)) if bias else None
            self.register_parameter(name + "_bias", bias_of)
            self.register_parameter(name + "_lora_a", None)
            self.register_parameter(name + "_lora_b", None)
        if self.down_proj.device.type != "meta":
            for name, (n, k) in self.extents.items():
                self.set_weight(name, torch.zeros(1, n, k, device=device).expand(num_experts, n, k))
        self.lora_rank, self.lora_alpha = 0, 0.0
        if lora_rank > 0:
            self.add_adapter(lora_rank, lora_alpha)

    # ---- Weights

    @property
    def packed_names(self) -> tuple[str, ...]:
        """The parameters that hold packed weights."""
        return tuple(self.extents)

    def _description(self) -> dict:
        return {"spec": str(self.spec), "num_experts": self.num_experts,
                "shapes": {name: list(shape) for name, shape in self.extents.items()},
                "packed_version": _core._packed_version}

    @property
    def weight_spec(self) -> Tensor:
        """What the bytes of the weights are, as a JSON text in a u8 tensor: a key of state_dict()."""
        return torch.tensor(list(json.dumps(self._description()).encode()), dtype=torch.uint8)

    def packed_of(self, name: str, dense: Tensor) -> Tensor:
        """What the parameter `name` holds of dense weights [num_experts, n, k]."""
        shape = [self.num_experts, *self.extents[name]]
        if list(dense.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {list(dense.shape)}")
        packed = dense.new_empty([self.num_experts, self.spec.packed_bytes(*shape[1:])], dtype=torch.uint8)
        return quantize_experts(dense.detach(), self._spec, packed).view(self.down_proj.dtype)

    @torch.no_grad()
    def set_weight(self, name: str, dense: Tensor) -> None:
        """Quantizes dense weights [num_experts, n, k], each for itself, into the parameter `name`."""
        self.get_parameter(name).copy_(self.packed_of(name, dense))

    def dequantized(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weights of the parameter `name`, [num_experts, n, k] of `dtype`; None: that of the module."""
        dtype = self.dtype if dtype is None else dtype
        return torch.stack([dequantize_packed(packed, self._spec, *self.extents[name], dtype)
                            for packed in self.get_parameter(name).detach()])

    # ---- Adapters

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.lora_rank if self.lora_rank else 0.0

    def add_adapter(self, rank: int, alpha: float | None = None) -> None:
        """New adapters of all weights, which add nothing yet: lora_b is 0. alpha: None: as rank. Their products need
        torch.nn.functional.grouped_mm (torch 2.10 and later)."""
        if rank <= 0:
            raise ValueError(f"the rank of an adapter must be positive, got {rank}")
        self.lora_rank, self.lora_alpha = rank, float(rank if alpha is None else alpha)
        for name, (n, k) in self.extents.items():
            where = {"dtype": self.dtype, "device": self.down_proj.device}
            a, b = torch.empty(self.num_experts, rank, k, **where), torch.zeros(self.num_experts, n, rank, **where)
            self.register_parameter(name + "_lora_a", nn.Parameter(a.uniform_(-1 / math.sqrt(k), 1 / math.sqrt(k))))
            self.register_parameter(name + "_lora_b", nn.Parameter(b))

    @torch.no_grad()
    def merge_adapter(self) -> dict[str, float]:
        """Adds the adapters to the weights, which are quantized again, and removes them. Returns what it lost: the
        relative RMSE of each new weight against the old one with the adapter added."""
        if self.lora_rank == 0:
            raise ValueError("the experts have no adapter")
        lost = {}
        for name in self.packed_names:
            a, b = (self._parameters[name + suffix].float() for suffix in ("_lora_a", "_lora_b"))
            exact = self.dequantized(name, torch.float32).baddbmm_(b, a, alpha=self.scaling)
            self.set_weight(name, exact)
            lost[name] = relative_rmse(self.dequantized(name, torch.float32), exact)
            self.register_parameter(name + "_lora_a", None)
            self.register_parameter(name + "_lora_b", None)
        self.lora_rank, self.lora_alpha = 0, 0.0
        return lost

    def _adapted(self, name: str, x: Tensor, offsets: Tensor, slots: Tensor) -> Tensor:
        """What the adapter adds to each slot, of x with a row for each slot."""
        a, b = (self._parameters[name + suffix].to(x.dtype) for suffix in ("_lora_a", "_lora_b"))
        rest = -self.lora_rank % 8  # grouped_mm wants strides of 16 bytes
        a, b = nn.functional.pad(a, (0, 0, 0, rest)), nn.functional.pad(b, (0, rest))
        order = slots.long()
        h = nn.functional.grouped_mm(x[order], a.transpose(1, 2), offs=offsets) * self.scaling
        y = nn.functional.grouped_mm(h, b.transpose(1, 2), offs=offsets)
        return y[torch.argsort(order)]

    # ---- Forward

    def forward(self, x: Tensor, experts: Tensor, routing_weights: Tensor) -> Tensor:
        """x: f32, f16 or bf16 [tokens, hidden_size]; experts: the numbers of the experts of each token,
        i32 or i64 [tokens, top_k]; routing_weights: [tokens, top_k]. y: as x."""
        refuse_sharded(self.down_proj)
        x, (tokens, top_k) = autocast(x), experts.shape
        offsets, slots = route(experts, self.num_experts)
        up, down = (self._parameters[name].view(torch.uint8) for name in self.packed_names)
        h = qgemm_grouped(x, up, offsets, slots, self._spec, *self.extents[self.up_name], top_k)
        if (bias := self._parameters[self.up_name + "_bias"]) is not None:
            h = h + bias.to(x.dtype)[experts.reshape(-1)]
        if self.lora_rank > 0:
            h = h + self._adapted(self.up_name, x.repeat_interleave(top_k, 0), offsets, slots)
        h = self.activation(h)
        y = qgemm_grouped_sum(h, down, offsets, slots, routing_weights.float(), self._spec, *self.extents["down_proj"])
        of_slots = []  # [tokens, top_k, hidden_size]
        if self.down_proj_bias is not None:
            of_slots.append(self.down_proj_bias.to(x.dtype)[experts])
        if self.lora_rank > 0:
            of_slots.append(self._adapted("down_proj", h, offsets, slots).view(tokens, top_k, -1))
        if of_slots:
            y = y + (routing_weights.to(x.dtype).unsqueeze(-1) * sum(of_slots)).sum(1)
        return y

    def extra_repr(self) -> str:
        return (f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
                f"intermediate_size={self.intermediate_size}, bias={self.down_proj_bias is not None}, spec={self.spec}"
                + (f", lora_rank={self.lora_rank}" if self.lora_rank else ""))

    # ---- Storing

    def check_description(self, text: bytes) -> None:
        """Raises ValueError if a weight_spec is not that of this module."""
        given = json.loads(text)
        for key, value in self._description().items():
            if given.get(key) != value:
                raise ValueError(f"the weights must have {key} {value}, got {given.get(key)}")

    def _apply(self, fn, recurse: bool = True):
        refuse_cast(self.down_proj, fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.down_proj.device)).dtype
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight_spec"] = self.weight_spec

    def _load_from_state_dict(self, state_dict, prefix: str, local_metadata, strict: bool, missing_keys,
                              unexpected_keys, error_msgs) -> None:
        described = state_dict.pop(prefix + "weight_spec", None)
        try:
            if described is not None:
                self.check_description(bytes(described.cpu().tolist()))
            for name in self.packed_names:
                given = state_dict.get(prefix + name)
                if given is not None and given.dim() == 3:
                    state_dict[prefix + name] = self.packed_of(name, given)
                elif given is not None and described is not None:
                    state_dict[prefix + name] = aligned(given)
                elif given is not None:
                    missing_keys.append(prefix + "weight_spec")
        except ValueError as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)
