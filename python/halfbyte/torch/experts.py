"""Experts over packed weights."""

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _core
from ._fast import refuse_sharded
from ._ops_experts import qgemm_grouped, qgemm_grouped_sum, quantize_experts, route
from ._ops_weight import aligned, dequantize_packed, spec_of
from .linear import autocast


class QuantizedExperts(nn.Module):
    """A mixture of experts: y = sum over the top_k experts e of a token of r_e (W_down,e h_e + b_down,e) with
    h_e = activation(W_up,e x + b_up,e) and the routing weight r_e.

    up_name, which is gate_up_proj where the activation has a gate and else up_proj: the packed weights
    [up_features, hidden_size], and down_proj: those [hidden_size, intermediate_size], of all experts; parameters
    without gradient, u8 [num_experts, bytes]. NAME_bias: [num_experts, features]. Gradients flow to x, the routing
    weights and the biases; no weight is dense. Products are those of halfbyte.qgemm_grouped.

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
                 bias: bool = False, spec: _core.QuantSpec | str = "nf4", device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        """activation: [slots, up_features] -> [slots, intermediate_size]. spec: of all weights, which are 0 at first.
        dtype: of the biases, and of dequantized(). Raises ValueError where there is no packed form."""
        super().__init__()
        spec = spec_of(str(_core.QuantSpec.parse(str(spec))))
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.up_name, self.spec = activation, up_name, spec
        self._spec = str(spec)  # as operators take it
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.extents = {up_name: (up_features, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (n, k) in self.extents.items():
            packed = torch.empty(num_experts, spec.packed_bytes(n, k), dtype=torch.uint8, device=device)
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            bias_of = nn.Parameter(torch.zeros(num_experts, n, dtype=self.dtype, device=device)) if bias else None
            self.register_parameter(name + "_bias", bias_of)
            if packed.device.type != "meta":
                self.set_weight(name, torch.zeros(1, n, k, device=device).expand(num_experts, n, k))

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
        packed = dense.new_empty([self.num_experts, self.get_parameter(name).shape[1]], dtype=torch.uint8)
        return quantize_experts(dense.detach(), str(self.spec), packed)

    @torch.no_grad()
    def set_weight(self, name: str, dense: Tensor) -> None:
        """Quantizes dense weights [num_experts, n, k], each for itself, into the parameter `name`."""
        self.get_parameter(name).copy_(self.packed_of(name, dense))

    def dequantized(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weights of the parameter `name`, [num_experts, n, k] of `dtype`; None: that of the module."""
        dtype = self.dtype if dtype is None else dtype
        return torch.stack([dequantize_packed(packed, str(self.spec), *self.extents[name], dtype)
                            for packed in self.get_parameter(name).detach()])

    # ---- Forward

    def forward(self, x: Tensor, experts: Tensor, routing_weights: Tensor) -> Tensor:
        """x: f32, f16 or bf16 [tokens, hidden_size]; experts: the numbers of the experts of each token,
        i32 or i64 [tokens, top_k]; routing_weights: [tokens, top_k]. y: as x."""
        x, top_k, spec = autocast(x), experts.shape[1], self._spec
        refuse_sharded(self.down_proj)
        offsets, slots = route(experts, self.num_experts)
        h = qgemm_grouped(x, self.get_parameter(self.up_name), offsets, slots, spec, *self.extents[self.up_name], top_k)
        if (bias := self._parameters[self.up_name + "_bias"]) is not None:
            h = h + bias.to(x.dtype)[experts.reshape(-1)]
        h = self.activation(h)
        y = qgemm_grouped_sum(h, self.down_proj, offsets, slots, routing_weights.float(), spec,
                              *self.extents["down_proj"])
        if self.down_proj_bias is not None:
            y = y + (routing_weights.to(x.dtype).unsqueeze(-1) * self.down_proj_bias.to(x.dtype)[experts]).sum(1)
        return y

    def extra_repr(self) -> str:
        return (f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
                f"intermediate_size={self.intermediate_size}, bias={self.down_proj_bias is not None}, spec={self.spec}")

    # ---- Storing

    def check_description(self, text: bytes) -> None:
        """Raises ValueError if a weight_spec is not that of this module."""
        given = json.loads(text)
        for key, value in self._description().items():
            if given.get(key) != value:
                raise ValueError(f"the weights must have {key} {value}, got {given.get(key)}")

    def _apply(self, fn, recurse: bool = True):
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
                if given is not None and given.is_floating_point():
                    state_dict[prefix + name] = self.packed_of(name, given)
                elif given is not None and described is not None:
                    state_dict[prefix + name] = aligned(given)
                elif given is not None:
                    missing_keys.append(prefix + "weight_spec")
        except ValueError as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)
