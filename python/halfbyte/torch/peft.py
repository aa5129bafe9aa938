"""Adapters of peft on the layers of halfbyte.torch.

peft takes the layers as they are, as nn.Linear: get_peft_model, training, save_pretrained and PeftModel.from_pretrained
need nothing of this module. Only its own merge adds to a dense weight, which these layers do not have.
"""

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from .linear import MergeReport, QuantizedLinear


def merge_and_unload(model: PeftModel) -> tuple[nn.Module, dict[str, MergeReport]]:
    """Adds the active LoRA adapters to the weights, and returns the base model without adapters; and of each quantized
    layer, by its name, what the merge did, since to quantize again rounds. Dense layers are merged by peft.

    Raises ValueError, before anything is merged, for a layer whose adapters are merged already, and for adapters that
    are more than a product of two matrices, such as those with a bias of their own.
    """
    layers = {name: layer for name, layer in model.base_model.model.named_modules() if isinstance(layer, LoraLayer)}
    quantized = {name: layer for name, layer in layers.items() if isinstance(layer.get_base_layer(), QuantizedLinear)}
    for name, layer in quantized.items():
        if layer.merged:
            raise ValueError(f"{name}: the adapters {', '.join(layer.merged_adapters)} are merged already")
        for adapter in layer.active_adapters:
            if layer.lora_bias.get(adapter) or adapter in layer.lora_variant:
                raise ValueError(f"{name}: adapter {adapter} must be LoRA without a bias, and no variant of it, to be merged")
    reports = {}
    for name, layer in layers.items():
        if name in quantized:
            changes = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters if adapter in layer.lora_A]
            if changes:
                reports[name] = layer.get_base_layer().add_to_weight(sum(change.detach().float() for change in changes))
        else:
            layer.merge()
    return model.unload(), reports
