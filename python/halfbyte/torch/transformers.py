"""halfbyte in transformers (5 and later): importing this module registers HalfbyteConfig.

    import halfbyte.torch.transformers
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=halfbyte.torch.transformers.HalfbyteConfig("nf4"))
    model.save_pretrained("quantized")
    again = AutoModelForCausalLM.from_pretrained("quantized")
"""

import json
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

try:
    from transformers.core_model_loading import ConversionOps
except ImportError as error:
    raise ImportError("halfbyte.torch.transformers needs transformers 5 or later") from error
from safetensors import safe_open
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import _core
from ._ops_weight import aligned
from .model import ModelReport, is_turned, put_module, quantized_module, replace_linear

_DESCRIPTION = "weight_spec"  # the key of state_dict() that says what the bytes are


@register_quantization_config("halfbyte")
class HalfbyteConfig(QuantizationConfigMixin):
    """How from_pretrained quantizes a dense model while it loads it; config.json of a saved model has it.

    spec: of the weights. include, exclude: regular expressions that are searched in the names of weights, as in
    halfbyte.torch.replace_linear, whose choice of layers this is. Raises ValueError for a spec that is none, and for
    a checkpoint that `halfbyte quantize` wrote, which halfbyte.torch.quantize_model loads.

        >>> import halfbyte.torch.transformers
        >>> halfbyte.torch.transformers.HalfbyteConfig("int4,group_size=32").to_dict()
        {'quant_method': 'halfbyte', 'spec': 'int4,group_size=32', 'include': None, 'exclude': None}
    """

    def __init__(self, spec: _core.QuantSpec | str = "nf4", include: Sequence[str] | str | None = None,
                 exclude: Sequence[str] | str | None = None) -> None:
        self.quant_method = "halfbyte"
        self.spec = str(_core.QuantSpec.parse(str(spec)))
        self.include, self.exclude = include, exclude

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs):
        if "format" in config_dict:
            raise ValueError("quantization_config is that of a checkpoint that halfbyte quantize wrote: load it by "
                             "halfbyte.torch.quantize_model(directory, None)")
        fields = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(fields, return_unused_kwargs, **kwargs)


def make_savable(model: nn.Module) -> None:
    """Lets save_pretrained store a model of transformers that replace_linear or quantize_model quantized, so that
    from_pretrained loads it. Raises ValueError if nothing in it is quantized."""
    specs = [module.spec for module in model.modules() if hasattr(module, "packed_names")]
    if not specs:
        raise ValueError(f"the model must have quantized layers, got a {type(model).__name__} without")
    model.hf_quantizer = HalfbyteQuantizer(HalfbyteConfig(specs[0]))  # each layer says its own spec
    model.is_quantized, model.quantization_method = True, "halfbyte"
    model.hf_quantizer.postprocess_model(model)


class _Quantize(ConversionOps):
    """Makes the packed weight of a dense one that was read."""

    def __init__(self, quantizer: "HalfbyteQuantizer") -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict, *, model: nn.Module, **_) -> dict[str, Tensor]:
        result = {}
        for name, dense in input_dict.items():
            path, _, own = name.rpartition(".")
            dense = dense[0] if isinstance(dense, list) else dense
            if path in self.quantizer.turned:
                dense = dense.transpose(-1, -2)
            result[name] = model.get_submodule(path).packed_of(own, dense)
        return result


def _descriptions(files: Sequence[str]) -> dict[str, bytes]:
    """What files of packed weights say of each module, by its name."""
    found = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if name.endswith("." + _DESCRIPTION):
                    found[name.removesuffix("." + _DESCRIPTION)] = bytes(tensors.get_tensor(name).tolist())
    return found


def _described_module(path: str, module: nn.Module, text: bytes) -> nn.Module:
    try:
        layer = quantized_module(module, json.loads(text)["spec"])
        layer.check_description(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return layer


def _show_what_is_read(quantizer: "HalfbyteQuantizer", model: nn.Module, state_dict: dict, prefix: str,
                       local_metadata: dict) -> None:
    """Makes of the state of a model what transformers is to load. It takes each key for a tensor of a file: no parameter
    holds a description, and those of files are compared here. To version 5.17 it converts what it reads to the dtype of the
    parameter of that name, also where the dense weight is read that is to be packed."""
    for name in list(state_dict):
        if name.endswith("." + _DESCRIPTION):
            del state_dict[name]
        elif not quantizer.pre_quantized and quantizer.param_needs_quantization(model, name):
            state_dict[name] = torch.empty_like(state_dict[name], dtype=quantizer.dense_dtype, device="meta")


@register_quantizer("halfbyte")
class HalfbyteQuantizer(HfQuantizer):
    """Loads models into the layers of halfbyte.torch. `report`: the ModelReport of a dense model that was quantized."""

    requires_calibration = False
    report: ModelReport | None = None
    _hook: RemovableHandle | None = None  # while the model is loaded

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Sequence[str] | None = None,
                                             **kwargs) -> None:
        self._hook = model.register_state_dict_post_hook(partial(_show_what_is_read, self))
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, rf"\.{_DESCRIPTION}$"}
        config = self.quantization_config
        if not self.pre_quantized:
            self.turned = {path for path, module in model.named_modules() if is_turned(module)}
            self.report = replace_linear(model, config.spec, include=config.include, exclude=config.exclude)
            return
        prefix = model.base_model_prefix + "."
        modules = dict(model.named_modules())
        for path, text in _descriptions(checkpoint_files or ()).items():
            names = [name for name in (path, path.removeprefix(prefix), prefix + path) if name in modules]
            if names:  # else a part that this model does not have, such as a head
                put_module(model, names[0], _described_module(path, modules[names[0]], text))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dense_dtype = dtype
        return dtype

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs) -> bool:
        path, _, own = param_name.rpartition(".")
        return own in getattr(model.get_submodule(path), "packed_names", ())

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        # Packed weights are saved under the names of the modules: they cannot be turned, split and merged as the
        # tensors of the original checkpoint.
        model._weight_conversions = []
        for module in model.modules():
            for name in getattr(module, "packed_names", ()):
                module._parameters[name].data = aligned(module._parameters[name].data)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
