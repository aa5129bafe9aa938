"""The programs that read what the tool writes: transformers with bitsandbytes and with compressed-tensors, and mlx-lm, on the CPU.

A reader has `load`, which gives a model that is loaded without a complaint or raises; `read`, which gives all tensors of a model, dense,
by the names of its modules, and what it computes for some input, or None without one. `Unreadable` is raised where the reader has no
such model, even dense.
"""

import importlib.metadata
import inspect
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BITSANDBYTES_NOWELCOME": "1", "TQDM_DISABLE": "1"}

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.logging.disable_progress_bar()

LENGTH = 16  # of the text


class Unreadable(Exception):
    """The reader cannot load this model, even dense."""


class Wrong(Exception):
    """What the reader made of a checkpoint is not what is in it."""


class Transformers:
    packages = ["transformers"]
    said = "transformers-5"  # in the report of the tool
    dequantize = []  # options of the tool
    beside = {"embedding", "convolution"}  # reasons of the report for weights that `linear` does not have

    def load(self, directory):
        cls = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
        model, info = cls.from_pretrained(directory, output_loading_info=True, ignore_mismatched_sizes=True)
        complaints = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if complaints:
            kind, names = next(iter(complaints.items()))
            raise Wrong(f"{kind.replace('_', ' ')}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
        return model.eval()

    def load_dense(self, directory):
        return self.load(directory)

    def outputs(self, model):
        """All tensors of what the model gives for some text, image or sound."""
        takes = inspect.signature(model.forward).parameters
        generator = torch.Generator().manual_seed(0)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        config, feed = model.config, {}
        text = torch.randint(3, 190, (2, LENGTH), generator=generator)
        if "input_ids" in takes:
            feed["input_ids"] = text
        if "decoder_input_ids" in takes:
            feed["decoder_input_ids"] = text
        vision = getattr(config, "vision_config", config)
        if "pixel_values" in takes and ("input_ids" not in takes or model.main_input_name == "pixel_values" or "For" not in type(model).__name__):
            size = vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
            feed["pixel_values"] = torch.randn(2, vision.num_channels, *size, generator=generator).to(dtype)
        if "input_features" in takes and model.main_input_name == "input_features":
            feed["input_features"] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator).to(dtype)
        if "use_cache" in takes:
            feed["use_cache"] = False
        with torch.no_grad():
            given = model(**feed)
        return {k: v for k, v in given.items() if torch.is_tensor(v) and v.is_floating_point()}

    def read(self, model, with_outputs=True):
        """(weights, outputs). The latter first: compressed-tensors makes a model dense when it is used first."""
        outputs = self.outputs(model) if with_outputs else None
        return self.weights(model), outputs

    def weights(self, model):
        found = dict(model.named_parameters(remove_duplicate=False))
        persistent = model.state_dict().keys()
        found.update({k: v for k, v in model.named_buffers(remove_duplicate=False) if k in persistent})
        return fuse_sequential_experts({k: v.detach() for k, v in found.items()}, model)

    def equal(self, a, b):
        """To the bit; the dtype may differ, since transformers holds some modules in f32 only where others are quantized."""
        return torch.equal(a.double(), b.double())

    def distance(self, a, b):
        """The norm of the difference, as a part of that of b."""
        a, b = a.double(), b.double()
        return ((a - b).norm() / b.norm().clamp_min(1e-30)).item() if torch.isfinite(a).all() or not torch.isfinite(b).all() else float("inf")

    def tolerance(self, tensor):
        return 8 * torch.finfo(tensor.dtype).eps

    def linear(self, model):
        """The names of the weights that quantizing is about: of linear layers and experts, but of the head."""
        head = model.get_output_embeddings()
        names = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head}
        return names | {n for n, p in model.named_parameters() if p.ndim > 1 and "experts." in n and not n.endswith("bias")}


class BitsAndBytes(Transformers):
    name, packages = "bitsandbytes", ["transformers", "bitsandbytes"]
    formats = {
        "nf4": ["--format", "nf4"],
        "fp4": ["--format", "fp4"],
        "nf4 double": ["--format", "nf4", "--double-quant"],
    }

    def load(self, directory):
        """Without the kernel for CPUs with AVX512-BF16: that computes in bf16 whatever the model does, and not for all shapes."""
        model = super().load(directory)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return model

    def read(self, model, with_outputs=True):
        """The weights first: bitsandbytes changes the dtype of a bias when it is used first. No outputs where its code for the CPU
        is wrong: rows that end within a block."""
        weights = self.weights(model)
        states = [m.weight.quant_state for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
        wrong = any(state.shape[-1] % state.blocksize for state in states)
        return weights, self.outputs(model) if with_outputs and not wrong else None

    def weights(self, model):
        import bitsandbytes

        found = super().weights(model)
        for name, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                weight = self.decode(module.weight.data, module.weight.quant_state)
                found[f"{name}.weight"] = weight.T if issubclass(module.source_cls, Conv1D) else weight
        return fuse_sequential_experts(found, model)

    def decode(self, codes, state):
        """By the code of bitsandbytes for all devices where that for the CPU is wrong."""
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
        from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise

        if state.shape[-1] % state.blocksize == 0:
            return dequantize_4bit(codes, state)
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        return _dequantize_4bit_compute(codes.reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype)

    def quantized(self, model):
        import bitsandbytes

        return {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}


class CompressedTensors(Transformers):
    name, packages = "compressed-tensors", ["transformers", "compressed-tensors"]
    formats = {
        "int4 group 32": ["--format", "int4", "--group-size", "32"],
        "int4 group 64": ["--format", "int4", "--group-size", "64"],
        "int8 channel": ["--format", "int8", "--group-size", "channel"],
    }

    def weights(self, model):
        """Modules that were not used are made dense here."""
        from compressed_tensors.compressors import decompress_module
        from compressed_tensors.quantization import QuantizationStatus

        for module in model.modules():
            if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
                decompress_module(module)
        parts = ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
        return {k: v for k, v in super().weights(model).items() if not k.endswith(parts)}

    def quantized(self, model):
        return {f"{n}.weight" for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}


def fuse_sequential_experts(found, model):
    """Llama 4 has a module for each expert where it is quantized, and one tensor of all where it is dense: as the latter."""
    if not any(type(m).__name__ == "SequentialLlama4TextExperts" for m in model.modules()):
        return found
    fused = {}
    for name in list(found):
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            fused.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = found.pop(name)
    for experts, parts in fused.items():
        stack = {part: torch.stack([weights[i] for i in sorted(weights)]).mT for part, weights in parts.items()}
        found[f"{experts}.gate_up_proj"] = torch.cat([stack["gate"], stack["up"]], dim=-1)
        found[f"{experts}.down_proj"] = stack["down"]
    return found


class Mlx:
    name, packages = "mlx", ["mlx-lm", "mlx"]
    said = "mlx-lm"
    dequantize = ["--dtype", "f32"]
    beside = {"convolution"}
    formats = {
        "affine4 group 32": ["--format", "affine4", "--group-size", "32"],
        "affine4 group 64": ["--format", "affine4", "--group-size", "64"],
        "affine8 group 64": ["--format", "affine8", "--group-size", "64"],
    }

    def load_dense(self, directory):
        from mlx_lm.utils import _get_classes

        config = json.loads((directory / "config.json").read_text())
        try:
            _get_classes(config)
        except (ValueError, SystemExit):  # the latter from models of packages that are missing
            raise Unreadable("mlx-lm has no such model") from None
        if config["model_type"] != "gpt_oss":
            return self.load(directory)
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(directory, copy, dirs_exist_ok=True)
            self.split_gpt_oss(Path(copy))
            return self.load(copy)

    def split_gpt_oss(self, directory):
        """mlx-lm takes the experts of gpt-oss in MXFP4, or by its own names: these, from a checkpoint with dense ones."""
        from safetensors.torch import load_file, save_file

        for file in directory.glob("*.safetensors"):
            tensors = {}
            for name, tensor in load_file(file).items():
                if name.endswith(("gate_up_proj", "down_proj")):
                    name, tensor = f"{name}.weight", tensor.mT
                elif name.endswith("proj_bias"):
                    name = name.replace("_bias", ".bias")
                if "gate_up_proj" in name:
                    parts = tensor.unflatten(1, (-1, 2)).unbind(2)
                    tensors |= {name.replace("gate_up", part): t.contiguous() for part, t in zip(("gate", "up"), parts)}
                else:
                    tensors[name] = tensor.contiguous()
            save_file(tensors, directory / file.name, metadata={"format": "pt"})

    def load(self, directory):
        from mlx_lm.utils import load_model

        return load_model(Path(directory), strict=True)[0]

    def read(self, model, with_outputs=True):
        """In f32: MLX computes a weight in the dtype of its scales, and has not all products in f16 and bf16 on the CPU."""
        import mlx.core as mx

        model.set_dtype(mx.float32)
        return self.weights(model), self.outputs(model) if with_outputs else None

    def outputs(self, model):
        import mlx.core as mx

        text = torch.randint(3, 190, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        logits = model(mx.array(text.numpy()))
        mx.eval(logits)
        return {"logits": logits}

    def weights(self, model):
        import mlx.core as mx
        from mlx.utils import tree_flatten

        found = dict(tree_flatten(model.parameters()))
        for name in self.quantized(model):
            path = name.removesuffix(".weight")
            module = dict(model.named_modules())[path]
            found[name] = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits, mode=module.mode, dtype=mx.float32)
            del found[f"{path}.scales"]
            found.pop(f"{path}.biases", None)  # modes of floats have none
        return found

    def quantized(self, model):
        return {f"{n}.weight" for n, m in model.named_modules() if "scales" in m}

    def linear(self, model):
        """What mlx-lm quantizes by itself: linear layers, experts, embeddings and head."""
        predicate = getattr(model, "quant_predicate", None)
        return {
            f"{name}.weight"
            for name, module in model.named_modules()
            if hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0 and (predicate is None or predicate(name, module))
        }

    def equal(self, a, b):
        """To the bit, in f32."""
        import mlx.core as mx

        return a.shape == b.shape and bool(mx.array_equal(a, b))

    def distance(self, a, b):
        import mlx.core as mx

        a, b = a.astype(mx.float32), b.astype(mx.float32)
        return (mx.linalg.norm((a - b).reshape(-1)) / mx.maximum(mx.linalg.norm(b.reshape(-1)), 1e-30)).item()

    def tolerance(self, tensor):
        """Dequantized weights may be 4 units of the last place apart, and products are summed in another order."""
        return 2.0**-10


READERS = [BitsAndBytes(), CompressedTensors(), Mlx()]


def versions():
    """Each package that reads, with its version, but for what belongs to a build (`+cpu`)."""
    names = sorted({name for reader in READERS for name in reader.packages} | {"torch"})
    return {name: importlib.metadata.version(name).partition("+")[0] for name in names}
