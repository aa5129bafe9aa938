#!/usr/bin/env python3
"""Makes the table of model architectures from the readers' own code.

    tools/architectures.py [--check] [--report FILE] [--only REGEX] [OUTPUT]

Builds every model class of the installed transformers without weights (on torch's meta device, with default
configurations and variants of these), and those of mlx-lm, and writes what a checkpoint's tensors are: the class and role of their modules,
ties, the names of modules and how names of checkpoints map to them, what stays in f32, what quantizers leave out.
docs/architectures.md explains the result. It depends on the versions of the readers only; --check compares it with
OUTPUT (src/io/architectures.json) and exits 1 if it differs. --report writes what failed and what is ambiguous.

Needs transformers, torch, timm, scipy and mlx-lm (mlx[cpu]); no accelerator, no network, no weights.
"""

import argparse
import ast
import difflib
import importlib
import inspect
import json
import math
import os
import pkgutil
import re
import sys
import warnings
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers import conversion_mapping, core_model_loading  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION, get_keys_to_not_convert  # noqa: E402

transformers.logging.set_verbosity(50)

# The number of experts of every model that is built: a prime, so that a dimension of this size is one of experts.
NUM_EXPERTS = 11
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Arguments without which a default configuration does not build, by the name of the configuration's class.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_SPARSE = {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
_EXPERTS = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 64, "top_k_experts": 2}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4}
_PERCEPTION = {"model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": {"embed_dim": 1024}}
_TALKER = {"text_config": {"shared_expert_intermediate_size": 256}, "spatial_merge_size": 2}
REQUIRED = {
    "AutoformerConfig": {"prediction_length": 8},
    "AyaVisionConfig": {"vision_config": {"model_type": "siglip_vision_model"}},
    "BeitConfig": {"out_indices": [3, 5, 7, 11]},
    "BridgeTowerConfig": {"contrastive_hidden_size": 512},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "CohereCompassConfig": {"text_config": _ROPES},
    "CohereCompassTextConfig": _ROPES,
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0}},
    "DeepseekOcr2Config": {"text_config": _SPARSE},
    "DeepseekOcr2TextConfig": _SPARSE,
    "DiffusionGemmaConfig": {"text_config": _EXPERTS},
    "DiffusionGemmaTextConfig": _EXPERTS,
    "Dots1Config": {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1},
    "EmbeddingGemma2Config": {"vision_config": {}, "audio_config": {}},
    "Emu3Config": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6, "<|visual token 000000|>": 7}},
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1, "esmfold_config": {}},
    "Gemma4Config": {"vision_config": {}, "audio_config": {}},
    "Gemma4UnifiedConfig": {"vision_config": {}, "audio_config": {}},
    "Granite4VisionConfig": {"deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [0], "downsample_rate": "1/2"},
    "HunYuanDenseV1Config": {"head_dim": 128},
    "HunYuanMoEV1Config": {"head_dim": 128, "num_experts": NUM_EXPERTS},
    "HunYuanVLConfig": {"text_config": {"head_dim": 128}},
    "HunYuanVLTextConfig": {"head_dim": 128},
    "InformerConfig": {"prediction_length": 8},
    "Lfm2MoeConfig": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "MinistralConfig": {"head_dim": 128},
    "MoonshineStreamingConfig": {"num_key_value_heads": 8},
    "MoshiConfig": {"audio_vocab_size": 2048},
    "NemotronConfig": {"num_key_value_heads": 8},
    "PerceptionLMConfig": {"vision_config": _PERCEPTION},
    "Qwen3OmniMoeConfig": {"talker_config": _TALKER},
    "Qwen3OmniMoeTalkerConfig": _TALKER,
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 256},
    "Qwen4ExpConfig": {"text_config": _INDEXER},
    "Qwen4ExpTextConfig": _INDEXER,
    "ReformerConfig": {"is_decoder": True},
    "TimeSeriesTransformerConfig": {"prediction_length": 8},
    "ViltConfig": {"num_images": 2},
    "Wav2Vec2BertConfig": {"vocab_size": 32},
    "Wav2Vec2ConformerConfig": {"vocab_size": 32},
}

# Values of arguments that add modules; of flags both values are taken.
VARIANTS = {
    "embedding_size": [96],
    "feed_forward_proj": ["gated-gelu"],
    "first_k_dense_replace": [0, 2],
    "layer_types": [["full_attention", "sliding_attention"], ["linear_attention", "full_attention"]],
    "mlp_only_layers": [[0, 1]],
    "moe_layer_freq": [1],
    "n_shared_experts": [None, 1],
    "num_experts": [0, 4],
    "num_local_experts": [0, 4],
    "position_embedding_type": ["relative_key", "relative_key_query"],
    "q_lora_rank": [None, 64],
    "shared_intermediate_size": [0, 64],
    "word_embed_proj_dim": [96],
}
# Configurations with what takes several arguments.
ALSO = {
    "DogeConfig": [{"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}],
    "Gemma4TextConfig": [{"enable_moe_block": True, **_EXPERTS}],
}
# Flags that change how a model is run or trained, not what it consists of.
NOT_STRUCTURE = re.compile(
    r"^(use_cache|output_\w+|return_dict|torchscript|use_bfloat16|tie_word_embeddings|chunk_size\w*|do_sample|"
    r"remove_invalid_values|use_return_dict|gradient_checkpointing|_\w+|initializer\w*|.*dropout.*|.*aux_loss.*|"
    r"ctc_zero_infinity|apply_spec_augment|norm_topk_prob)$"
)

ROUTER_CLASS = re.compile(r"Router|TopKGate|TopkGate|M[oO]EGate|MoeGate|TopKGating")


# --- Building -------------------------------------------------------------------------------------------------------


def model_classes(failures):
    """Every class of a model of transformers, by name."""
    found = {}
    models = transformers.models
    for package in sorted(p.name for p in pkgutil.iter_modules(models.__path__)):
        path = importlib.import_module(f"{models.__name__}.{package}").__path__
        for file in sorted(f.name for f in pkgutil.iter_modules(path) if f.name.startswith("modeling_")):
            name = f"{models.__name__}.{package}.{file}"
            try:
                module = importlib.import_module(name)
            except Exception as error:
                failures[f"{package}.{file}"] = f"import: {first_line(error)}"
                continue
            for key, value in vars(module).items():
                if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == name:
                    own = value.__init__ is not PreTrainedModel.__init__
                    if own and not key.endswith("PreTrainedModel") and inspect.isclass(value.config_class):
                        found[key] = value
    return found


def first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0]}"[:160]


def subconfigs(config):
    """The configurations within a configuration, with their paths."""
    for key in config.sub_configs:
        value = getattr(config, key, None)
        if isinstance(value, PreTrainedConfig):
            yield key, value
            for path, inner in subconfigs(value):
                yield f"{key}.{path}", inner


def build(cls, config, shrink=True):
    """The model on the meta device. Fewer experts where that builds: names have a place for the number."""
    if shrink:
        changed = []
        for part in [config, *(c for _, c in subconfigs(config))]:
            for key in EXPERT_COUNTS:
                count = vars(part).get(key)
                if isinstance(count, int) and not isinstance(count, bool) and count > NUM_EXPERTS:
                    changed.append((part, key, count))
                    setattr(part, key, NUM_EXPERTS)
        try:
            return build(cls, config, shrink=False)
        except Exception:
            for part, key, count in changed:
                setattr(part, key, count)
    with torch.device("meta"):
        model = cls(config)
    if not hasattr(model, "all_tied_weights_keys"):  # a part that is no model of its own
        model.post_init()
    return model


def variants(config_class):
    """Arguments of configurations that may have other modules than the default one."""
    try:
        default = config_class(**REQUIRED.get(config_class.__name__, {}))
    except Exception:
        return
    yield from ALSO.get(config_class.__name__, ())
    accepted = {k: v for k, v in vars(default).items() if not isinstance(v, PreTrainedConfig)}
    for key in sorted(accepted):
        value = accepted[key]
        if isinstance(value, bool) and not NOT_STRUCTURE.match(key):
            yield {key: not value}
        for other in VARIANTS.get(key, ()):
            if key == "layer_types":
                count = len(value or []) or getattr(default, "num_hidden_layers", 2)
                other = (other * count)[:count]
            if other != value:
                yield {key: other}


# --- What is in a model ---------------------------------------------------------------------------------------------


def wild(name):
    """The name with `*` for every number that is a component, or ends one as in `expert_7`."""
    return ".".join("*" if part.isdigit() else re.sub(r"^(expert_)\d+$", r"\1*", part) for part in name.split("."))


def modalities(cls):
    value = cls.input_modalities
    return (value,) if isinstance(value, str) else tuple(value or ())


def modality(cls):
    """What a class is beside a language model: vision, audio, a projector between them, or None.

    By what it says that it reads, but parts of a larger model often say what that reads: then by their names.
    """
    name, kinds = cls.__name__, set(modalities(cls))
    if re.search(r"Text(Model|Encoder|Decoder|Stack)$", name):
        return None
    if re.search(r"QFormerModel|PerceiverResampler|Molmo2Adapter", name):
        return "projector"
    if kinds and kinds <= {"image", "video"}:
        return "vision"
    if kinds == {"audio"}:
        return "audio"
    if "text_config" not in cls.config_class.sub_configs:
        if re.search(r"Vision(Model|Transformer|Encoder)|VQVAE", name):
            return "vision"
        if re.search(r"Audio(Model|Encoder)$|Speech2TextEncoder|HifiGan", name):
            return "audio"
    return None


class Row:
    """What was seen of a class of models, in all configurations."""

    def __init__(self, cls):
        self.name = cls.__name__
        self.model_type = getattr(cls.config_class, "model_type", "") or "-"
        self.reads = modality(cls)
        self.kinds = defaultdict(set)  # pattern of a module or tensor -> its kinds
        self.exact = defaultdict(set)  # the same with the numbers that a Sequential has
        self.children = {}  # pattern of a module -> (key of the configuration or None, {classes})
        self.tied = set()
        self.tie = set()
        self.float32 = set()
        self.float32_always = set()
        self.skipped = set()
        self.apart = set()
        self.probed = set()  # linear layers
        self.uncompressed = set()
        self.ignored = set()
        self.names = {}  # pattern of the checkpoint -> pattern of the model, where they differ or are equal
        self.fused = {}  # (patterns of the model) -> (operations, patterns of the checkpoint)
        self.prefixes = set()


def sequential_name(model, name):
    """The name with `*` for the numbers of lists, but not for those of an nn.Sequential."""
    module, parts = model, []
    for part in name.split("."):
        digit = part.isdigit()
        parts.append(part if digit and isinstance(module, nn.Sequential) else wild(part))
        module = getattr(module, part, None) if not digit else (module[int(part)] if hasattr(module, "__getitem__") else getattr(module, part))
    return ".".join(parts)


def expert_kind(module, name, parameter, config):
    """The kind of a parameter with all experts of a layer: `experts` is [E, out, in]."""
    text = config.get_text_config()
    hidden = getattr(text, "hidden_size", None)
    transposed = getattr(module, "is_transposed", None)
    if transposed is None and hidden is not None and parameter.ndim == 3 and parameter.shape[1] != parameter.shape[2]:
        down = re.search(r"down|output|w2|wo|fc2", name) is not None
        transposed = parameter.shape[2 if down else 1] == hidden
    kind = "experts-transposed" if transposed else "experts"
    if "gate_up" in name and getattr(module, "is_concatenated", True) is False:
        kind += "-interleaved"
    return kind


def own_kinds(model):
    """Kind of each module, or of each tensor that is no part of one that has a kind: (path, kind, module).

    Without those of nested models, which have rows of their own.
    """
    found, children, taken = [], {}, []
    for name, module in model.named_modules(remove_duplicate=False):
        if name and any(name == t or name.startswith(t + ".") for t in taken):
            continue
        if name and isinstance(module, PreTrainedModel):
            children[name] = module
            taken.append(name)
            continue
        tensors = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        tensors.update({k: v for k, v in module.named_buffers(recurse=False) if k not in module._non_persistent_buffers_set})
        if isinstance(module, nn.MultiheadAttention):
            found.append((name, "attention", module))
            taken.append(name)
        elif type(module) is nn.Linear:
            found.append((name, "linear", module))
        elif isinstance(module, nn.Linear):
            found.append((name, "linear-subclass", module))
        elif isinstance(module, Conv1D):
            found.append((name, "conv1d", module))
        elif isinstance(module, nn.Embedding):
            found.append((name, "embedding", module))
        elif isinstance(module, nn.modules.conv._ConvNd) and not is_parametrized(module):
            found.append((name, "convolution", module))
        elif "norm" in type(module).__name__.lower() and tensors and all(t.ndim <= 1 for t in tensors.values()) and set(tensors) <= {"weight", "bias"}:
            found.append((name, "norm", module))
        else:
            for key, tensor in tensors.items():
                path = f"{name}.{key}" if name else key
                if "parametrizations." in path or ".weight_g" in path or ".weight_v" in path:
                    kind = "convolution-part"
                elif tensor.ndim >= 3 and is_experts(module, tensor, model.config):
                    kind = expert_kind(module, path, tensor, model.config)
                elif tensor.ndim >= 2 and not key.endswith("bias"):
                    kind = "parameter"
                else:
                    kind = "vector"
                found.append((path, kind, module))
    return found, children


def is_parametrized(module):
    return torch.nn.utils.parametrize.is_parametrized(module)


def is_experts(module, tensor, config):
    counted = any(key in vars(config) for key in EXPERT_COUNTS)
    return hasattr(module, "is_transposed") or "Expert" in type(module).__name__ or (counted and tensor.shape[0] == NUM_EXPERTS)


def roles(model, found, children):
    """The role of each of `found`: head, router, projector, adapter, expert, or none."""
    outputs = model.get_output_embeddings()
    base = model.base_model_prefix
    has_base = base in children and base != ""
    kinds = [modality(type(c)) for c in children.values()]
    joins = any(k is not None for k in kinds) and (None in kinds or len(set(kinds)) > 1) and len(set(modalities(type(model)))) > 1
    result = {}
    for path, kind, module in found:
        name = type(module).__name__
        weight = getattr(module, "weight", None)
        role = ""
        if kind in ("norm", "vector", "convolution-part"):
            pass
        elif kind.startswith("experts"):
            pass
        elif outputs is not None and module is outputs and kind != "embedding":
            role = "head"
        elif kind == "embedding":
            pass
        elif ROUTER_CLASS.search(name) or re.search(r"(^|\.)(router\w*|shared_expert_gate|gate\.wg)(\.|$)", path):
            role = "router"
        elif weight is not None and getattr(weight, "ndim", 0) == 2 and NUM_EXPERTS in weight.shape and has_experts(model, path):
            role = "router"
        elif re.search(r"(^|\.)\w*(lora|adapter)", path, re.IGNORECASE) or "Lora" in name or "LoRA" in name:
            role = "adapter"
        elif re.search(r"(^|\.)experts\.", path):
            role = "expert"
        elif has_base:
            role = "head"
        elif joins:
            role = "projector"
        elif children and "For" in type(model).__name__:
            role = "head"
        result[path] = role
    return result


@cache
def class_sources(module):
    """{class: its syntax tree} of a module of Python."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def used_weights(cls):
    """The attributes of a class of modules whose weight it computes with itself: it never calls them."""
    called, used = set(), set()
    for part in cls.__mro__:
        if not part.__module__.startswith(f"{transformers.__name__}.models."):
            continue
        tree = class_sources(part.__module__).get(part.__name__)
        if tree is None:  # made by a decorator
            continue
        parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef) or "init" in function.name:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called.add(ast.unparse(node.func))
                match = re.fullmatch(r"self\.(\w+)\.weight", ast.unparse(node)) if isinstance(node, ast.Attribute) else None
                if match is not None and isinstance(node.ctx, ast.Load) and getattr(parent[node], "attr", "") not in ("dtype", "device", "shape"):
                    used.add(match[1])
    return {name for name in used if f"self.{name}" not in called}


def is_compressible(model, path, module):
    """Whether `_init_weights`, which transformers 5 calls for each module that it has loaded, leaves the linear layer at `path`
    alone if it has no weight, as those of compressed-tensors."""
    parameters = dict(module._parameters)
    del module._parameters["weight"]
    parts = path.split(".")
    try:
        with torch.no_grad():
            for count in range(len(parts) + 1):
                model._init_weights(model.get_submodule(".".join(parts[:count])))
    except AttributeError as error:
        return "weight" not in str(error)
    finally:  # in their order
        module._parameters.clear()
        module._parameters.update(parameters)
    return True


def has_experts(model, path):
    """Whether experts are beside the module at `path`."""
    parent = path.rpartition(".")[0]
    for _ in range(2):
        module = model.get_submodule(parent)
        for name, _p in module.named_parameters():
            if "expert" in name:
                return True
        parent = parent.rpartition(".")[0]
    return False


def child_config(model, child):
    """The key of the configuration within that of `model` that a nested model was made from, or None."""
    for key, config in subconfigs(model.config):
        if config is child.config or (type(config) is type(child.config) and config.to_dict() == child.config.to_dict()):
            return key
    return None


def is_auto(model, key):
    """Whether the configuration at `key` may be that of any model."""
    cls = type(model.config)
    for part in key.split("."):
        inner = cls.sub_configs.get(part)
        if inner is None:
            return False
        if inner.__name__ == "AutoConfig":
            return True
        cls = inner
    return False


def observe(model, rows):
    """Adds what `model` and the models within it consist of to their rows."""
    cls = type(model)
    row = rows.setdefault(cls.__name__, Row(cls))
    found, children = own_kinds(model)
    role = roles(model, found, children)
    for path, kind, module in found:
        if kind in ("linear", "linear-subclass") and role[path] in ("", "expert"):
            parent, _, name = path.rpartition(".")
            # No reader can quantize what is used in this way.
            if name in used_weights(type(model.get_submodule(parent))):
                role[f"{path}.weight"] = role[path]
                path, kind = f"{path}.weight", "parameter"
            elif wild(path) not in row.probed:
                row.probed.add(wild(path))
                if not is_compressible(model, path, module):
                    row.uncompressed.add(wild(path))
        value = kind + ("/" + role[path] if role[path] else "")
        row.kinds[wild(path)].add(value)
        row.exact[sequential_name(model, path)].add(value)
        experts = path.rpartition(".")[0]
        if kind.startswith("experts") and type(model.get_submodule(experts)).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION:
            row.apart.add(wild(experts))
    for path, child in children.items():
        key = child_config(model, child)
        auto = key is not None and is_auto(model, key)
        config_key, classes = row.children.setdefault(wild(path), [key if auto else None, set()])
        if auto and config_key is None:
            row.children[wild(path)][0] = key
        classes.add(type(child).__name__)
        observe(child, rows)
    row.ignored |= set(cls._keys_to_ignore_on_load_unexpected or [])
    # Those of nested models are in their rows.
    nested = [type(m) for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]
    for kept, name in ((row.float32, "_keep_in_fp32_modules"), (row.float32_always, "_keep_in_fp32_modules_strict")):
        kept |= set(getattr(cls, name) or []) - {k for c in nested for k in getattr(c, name) or []}


def observe_root(model, rows):
    """What is known of a model as a whole: ties, what quantizers leave out."""
    row = rows[type(model).__name__]
    row.tie.add(bool(getattr(model.config, "tie_word_embeddings", False)))
    kept = getattr(model.config, "tie_word_embeddings", None)
    try:
        model.config.tie_word_embeddings = True
        ties = model.get_expanded_tied_weights_keys(all_submodels=False)
    except Exception:
        ties = {}
    finally:
        if kept is not None:
            model.config.tie_word_embeddings = kept
    for target, source in ties.items():
        if target.endswith(".bias") or not has_tensor(model, target) or not has_tensor(model, source):
            continue
        row.tied.add((wild(target).removesuffix(".weight"), wild(source).removesuffix(".weight")))
    outputs = model.get_output_embeddings()
    derived = {n for n, m in model.named_modules() if outputs is not None and m is outputs}
    for target, source in model.all_tied_weights_keys.items():
        derived |= {target.removesuffix(".weight"), source.removesuffix(".weight")}
    heads = {path for path, kinds in row.kinds.items() if any(k.endswith("/head") for k in kinds)}
    for name in set(get_keys_to_not_convert(model)) - derived - heads:
        try:
            # A name that ends with `.bias`, as that of the last parameter may, matches no module.
            if type(model.get_submodule(name)) is nn.Linear or isinstance(model.get_submodule(name), Conv1D):
                row.skipped.add(wild(name))
        except AttributeError:
            pass


def has_tensor(model, name):
    module, _, tensor = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(module), tensor)
    except AttributeError:
        return False


# --- Names in checkpoints -------------------------------------------------------------------------------------------


def operation(op):
    """An operation on the way from a checkpoint to a model, as a word with its dimensions."""
    name = type(op).__name__
    if name == "MergeModulelist":
        return f"stack {op.dim}"
    if name == "Concatenate":
        return f"concat {op.dim}"
    if name == "Chunk":
        return f"chunk {op.dim}"
    if name == "Split":
        return f"split {op.dim}"
    if name == "Interleave":
        return f"{'interleave' if op.inverse else 'deinterleave'} {op.dim}"
    if name == "Transpose":
        return f"transpose {op.dim0} {op.dim1}" + (" if-shape" if op.check_dims else "")
    if name == "PermuteForRope":
        return "rope" + (" inverse" if op.inverse else "")
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def checkpoint_names(model):
    """[(operations, {names of the model}, {names of the checkpoint})] of a model as save_pretrained writes it."""
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    ties = {k for k in model.all_tied_weights_keys}
    state = {k: v for k, v in state.items() if k not in ties}
    origin, keep = {}, []

    def recording(original):
        def convert(self, layer_name, *args, **kwargs):
            sources = tuple(sorted(self.layer_targets.get(layer_name) or {s for t in self.layer_targets.values() for s in t}))
            result = original(self, layer_name, *args, **kwargs)
            ops = () if not hasattr(self, "operations") else tuple(operation(o.reverse_op) for o in self.operations[::-1])
            group = (ops, sources, id(self))
            for value in result.values():
                tensor = value[0] if isinstance(value, list) else value
                if id(tensor) in origin:
                    tensor = tensor.detach()
                keep.append(tensor)
                origin[id(tensor)] = group
            return result

        return convert

    patched = []
    for cls in (core_model_loading.WeightRenaming, core_model_loading.WeightConverter):
        patched.append((cls, cls.convert))
        cls.convert = recording(cls.convert)
    try:
        # Tensors that are one object would be one origin.
        result = core_model_loading.revert_weight_conversion(model, {k: v.detach() for k, v in state.items()})
    finally:
        for cls, original in patched:
            cls.convert = original
    if not origin:
        return [((), (k,), (k,)) for k in state]
    groups = defaultdict(list)
    for name, tensor in result.items():
        ops, sources, identity = origin[id(tensor)]
        groups[(ops, sources, identity)].append(name)
    return [(ops, sources, tuple(names)) for (ops, sources, _), names in groups.items()]


def wild_as(name, module):
    """The name of the module's tensor with `*` for as many numbers as the name in the checkpoint has."""
    count, parts = wild(name).count("*"), []
    for part, other in zip(module.split("."), wild(module).split(".")):
        parts.append(other if count > 0 else part)
        count -= "*" in other
    return ".".join(parts)


def observe_names(model, row):
    plain = defaultdict(dict)
    for ops, modules, names in checkpoint_names(model):
        if not ops:
            for module in modules:
                for name in names:
                    plain[wild(name)][name] = wild_as(name, module)
        else:
            key = tuple(sorted({wild(m) for m in modules}))
            # The order of the parts is that of the operations: kept, without the number of the expert.
            parts = list(dict.fromkeys(wild(n) for n in names))
            row.fused[key] = (ops, tuple(parts))
    for name, exact in plain.items():
        if len(set(exact.values())) == 1 or len(exact) > 16:
            row.names[name] = max(exact.values())
        else:  # the numbers are those of an nn.Sequential
            row.names.update(exact)
    for change in conversion_mapping.extract_weight_conversions_for_model(model) or ():
        if isinstance(change, core_model_loading.PrefixChange):
            at = change.model_prefix + "." if change.model_prefix else ""
            if change.prefix_to_remove:
                row.prefixes.add((at + change.prefix_to_remove, change.model_prefix))
            else:
                row.prefixes.add((change.model_prefix, at + change.prefix_to_add))


# --- Patterns -------------------------------------------------------------------------------------------------------


def braces(patterns):
    """The patterns as one, in the notation of the shell: a.{b,c.d}. The same set gives the same text."""
    def tree(items):
        children = defaultdict(list)
        for item in items:
            head, *rest = item
            children[head].append(rest)
        return {head: (any(not r for r in rests), tree([r for r in rests if r])) for head, rests in children.items()}

    def render(node):
        groups = defaultdict(list)  # text of what follows -> heads
        for head, (ends, below) in node.items():
            inner = render(below)
            if not inner:
                text = ""
            elif ends:
                text = "{,." + (inner if len(split(inner)) == 1 else "{" + inner + "}") + "}"
            else:
                text = "." + (inner if len(split(inner)) == 1 else "{" + inner + "}")
            groups[text].append(head)
        terms = []
        for text, heads in groups.items():
            if text == "":
                terms += heads
            else:
                heads = sorted(heads)
                terms.append((heads[0] if len(heads) == 1 else "{" + ",".join(heads) + "}") + text)
        return ",".join(sorted(terms))

    return render(tree([p.split(".") for p in patterns]))


def split(text):
    """The parts of a list with commas, not of those in braces."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]]


def expand(text):
    """The patterns of a brace expression."""
    result = []
    for part in split(text):
        open_at = part.find("{")
        if open_at < 0:
            result.append(part)
            continue
        depth, close = 0, open_at
        for i in range(open_at, len(part)):
            depth += (part[i] == "{") - (part[i] == "}")
            if depth == 0:
                close = i
                break
        inner = expand(part[open_at + 1 : close])
        tails = expand(part[close + 1 :]) if part[close + 1 :] else [""]
        result += [part[:open_at] + i + t for i in inner for t in tails]
    return result


def components(text):
    """The components of a name or of a part of one; the first is `^` at the beginning of a name."""
    if text.startswith("^"):
        return ["^"] + (text[1:].split(".") if text[1:] else [])
    return text.split(".") if text else []


def joined(parts):
    return "^" + ".".join(parts[1:]) if parts[:1] == ["^"] else ".".join(parts)


def same(pattern, part):
    return pattern == part or (pattern.endswith("*") and part.startswith(pattern[:-1]) and part[len(pattern) - 1 :].isdigit())


def matches(pattern, name):
    """Whether the pattern is that of the beginning of a name."""
    pattern, parts = pattern.split("."), name.split(".")
    return len(pattern) < len(parts) and all(map(same, pattern, parts))


def rename(rules, name):
    """The name with each part that a rule has replaced, from left to right; of several rules the longest is taken."""
    parts, out, i = ["^"] + name.split("."), [], 0
    while i < len(parts):
        best = None
        for source, target in rules.items():
            pattern = components(source)
            if (best is None or len(pattern) > len(best[0])) and len(pattern) <= len(parts) - i and all(map(same, pattern, parts[i:])):
                best = (pattern, target)
        if best is None:
            out.append(parts[i])
            i += 1
            continue
        numbers = [n for p, n in zip(best[0], parts[i:]) if p == "*"]
        for part in components(best[1]):
            out.append(numbers.pop(0) if part == "*" and numbers else part)
        i += len(best[0])
    return ".".join(out[1:])


def changes(name, module):
    """[(first, last, components instead)] that make `name`, in components from `^`, the name of the module."""
    a, b = ["^"] + name.split("."), ["^"] + module.split(".")
    result = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag in ("insert", "delete"):
            i1, j1 = i1 - 1, j1 - 1
        if tag != "equal":
            result.append((i1, i2, b[j1:j2]))
    return a, result


def around(name, module, left, right):
    """One rule for all that changes in `name`, with some components before and behind it."""
    a, b = ["^"] + name.split("."), ["^"] + module.split(".")
    ends = max(0, common_end(name, module) - right)
    starts = next(i for i, (x, y) in enumerate(zip(a + [""], b + [""])) if x != y)
    starts = max(0, starts - left)
    if len(a) - ends <= starts:  # nothing of the name changes but that something is added
        ends = max(0, len(a) - starts - 1)
    return joined(a[starts : len(a) - ends]), joined(b[starts : len(b) - ends])


def rules_of(pairs):
    """Rules that rename each of {name: name of the module} right, and those names for which there are none."""
    pairs = dict(sorted(pairs.items()))
    rules = {}
    for name, module in pairs.items():
        parts, some = changes(name, module)
        for first, last, instead in some:
            rules.setdefault(joined(parts[first:last]), joined(instead))
    # With more and more of what surrounds the change: each change alone at first, then all of a name at once.
    for left, right in [(1, None), (2, None), (3, None), (0, 0), (0, 1), (1, 1), (2, 2), (0, 3), (99, 0), (99, 1), (99, 3), (99, 99)]:
        wrong = {n: m for n, m in pairs.items() if rename(rules, n) != m}
        if not wrong:
            break
        for name, module in wrong.items():
            parts, some = changes(name, module)
            if some and right is not None:
                source, target = around(name, module, left, right)
                if right == 99:  # the whole name
                    rules[source] = target
                rules.setdefault(source, target)
                continue
            if not some:  # a rule of others: it is none of this name
                for source in list(rules):
                    pattern = components(source)
                    for i in range(len(parts) - len(pattern) + 1):
                        if all(map(same, pattern, parts[i:])):
                            some.append((i, i + len(pattern), parts[i : i + len(pattern)]))
            for first, last, instead in some:
                start = max(0, first - left)
                end = min(len(parts), last + max(0, left - first))
                rules.setdefault(joined(parts[start:end]), joined(parts[start:first] + instead + parts[last:end]))
    wrong = {n for n, m in pairs.items() if rename(rules, n) != m}
    pairs = {n: m for n, m in pairs.items() if n not in wrong}
    for rule in sorted(rules, key=lambda r: (-len(components(r)), r)):
        fewer = {k: v for k, v in rules.items() if k != rule}
        if all(rename(fewer, n) == m for n, m in pairs.items()):
            rules = fewer
    return rules, sorted(wrong)


# --- The table ------------------------------------------------------------------------------------------------------


def kinds_of_row(row, report):
    """{kind: [patterns]}: numbers of an nn.Sequential stay where modules of several kinds have them.

    Without what has one dimension, and without roles of convolutions: neither is ever quantized.
    """
    def plain(kinds):
        return {"convolution" if k.startswith("convolution") else k for k in kinds if not k.startswith(("norm", "vector"))}

    result = defaultdict(list)
    exact = defaultdict(dict)
    for pattern, kinds in row.exact.items():
        exact[wild(pattern)][pattern] = kinds
    for pattern, kinds in sorted(row.kinds.items()):
        if len(kinds) == 1:
            for kind in plain(kinds):
                result[kind].append(pattern)
            continue
        for finer, some in sorted(exact[pattern].items()):
            if len(some) > 1:
                report["ambiguous"].append(f"{row.name} {finer}: {sorted(some)}")
            for kind in sorted(plain(some)):
                result[kind].append(finer)
    return result


def table(rows, report):
    """{model type: {class: entry}}: the class of a configuration's model first, the others sorted."""
    names = modeling_auto.MODEL_MAPPING_NAMES
    base_of = {k: v if isinstance(v, str) else v[0] for k, v in names.items()}
    wanted = {n for n in rows if hasattr(transformers, n)}
    while True:
        more = {c for n in wanted for _, some in rows[n].children.values() for c in some} - wanted
        if not more:
            break
        wanted |= more
    types = defaultdict(dict)
    for name in sorted(wanted, key=lambda n: (n != base_of.get(rows[n].model_type), n)):
        types[rows[name].model_type][name] = class_entry(rows[name], rows, report)
    types = dict(sorted(types.items()))
    verify(types, rows, report)
    compact(types)
    return types


def class_entry(row, rows, report):
    entry = {}
    if row.reads:
        entry["reads"] = row.reads
    for path, (key, classes) in sorted(row.children.items()):
        value = "|".join(sorted(classes))
        entry.setdefault("models", {})[path] = f"{key}:{value}" if key else value
    for kind, patterns in sorted(kinds_of_row(row, report).items()):
        entry[kind] = braces(patterns)
        if sorted(expand(entry[kind])) != sorted(patterns):
            raise AssertionError(f"{row.name}: braces of {patterns}")
    if row.tied:
        entry["tied"] = braces([a for a, _ in row.tied]) + "=" + braces({b for _, b in row.tied})
        if True in row.tie:
            entry["tie"] = True
    if row.float32_always:
        entry["f32"] = " ".join(sorted(row.float32_always))
    if row.float32:
        entry["f32-from-f16"] = " ".join(sorted(row.float32))
    if row.skipped:
        entry["skipped"] = braces(row.skipped)
    if row.apart:
        entry["apart"] = braces(row.apart)
    if row.uncompressed:
        entry["uncompressed"] = braces(row.uncompressed)
    if row.ignored:
        entry["ignored"] = " ".join(sorted(row.ignored))
    wanted, fused = names_here(row, rows)
    rules, wrong = rules_of(wanted)
    for name in wrong:
        report["names"].append(f"{row.name} {name}: by no rules, is {wanted[name]}")
    if rules:
        entry["names"] = dict(sorted(rules.items()))
    if fused:
        entry["fused"] = {braces(k): f"{', '.join(ops)}: {parts_text(parts)}" for k, (ops, parts) in sorted(fused.items())}
    if row.prefixes:
        entry["may-be"] = {a: b for a, b in sorted(row.prefixes)}
    return entry


def parts_text(parts):
    """The patterns as one brace expression if that gives them in their order, or apart."""
    text = braces(parts)
    return text if expand(text) == list(parts) else " ".join(parts)


def common_end(a, b):
    a, b = a.split("."), b.split(".")
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def is_listed(row, rows, name):
    """Whether the table has the module of a tensor: not if it has one dimension."""
    for path, (_, classes) in row.children.items():
        if wild(name).startswith(path + "."):
            return any(is_listed(rows[c], rows, name[len(path) + 1 :]) for c in classes)
    name = wild(name)
    kinds = [row.kinds.get(p, ()) for p in (name, name.rpartition(".")[0], name.rpartition(".out_proj.")[0])]
    return any(not kind.startswith(("norm", "vector")) for some in kinds for kind in some)


def names_here(row, rows):
    """What names are renamed to by the rules of this class, those of nested models to the names that their rows have;
    and what is fused here."""
    wanted, fused = {}, {}
    children = []
    for path, (_, classes) in row.children.items():
        back, parts = defaultdict(list), {}
        for child in sorted(classes):
            for name, module in rows[child].names.items():
                back[module].append(name)
            parts.update(rows[child].fused)
        children.append((path + ".", back, parts))
    for name, module in row.names.items():
        if not is_listed(row, rows, module):
            continue
        candidates = [module]
        for path, back, _ in children:
            if module.startswith(path):
                candidates += [path + n for n in back.get(module[len(path) :], ())]
        wanted[name] = max(candidates, key=lambda c: (common_end(name, c), c == name, c))
    for modules, (ops, parts) in row.fused.items():
        for path, _, inner in children:
            if all(m.startswith(path) for m in modules):
                known = inner.get(tuple(m[len(path) :] for m in modules))
                if known is not None and known[0] == ops and len(known[1]) == len(parts):
                    wanted.update({p: path + k for p, k in zip(parts, known[1])})
                    break
        else:
            fused[modules] = (ops, parts)
    return wanted, fused


def resolve(types, rows, name, text):
    """Where the tensor `text` of a checkpoint of class `name` is: the names of its modules' tensors, one at a time."""
    entry = types[rows[name].model_type][name]
    renamed = [rename(entry.get("names", {}), text), text]
    for source, target in entry.get("may-be", {}).items():
        for one in list(renamed):
            if source == "":
                renamed.append(f"{target}.{one}")
            elif one.startswith(source + "."):
                renamed.append((target + "." if target else "") + one[len(source) + 1 :])
    for modules, value in entry.get("fused", {}).items():
        for part in value.split(": ", 1)[1].split(" "):
            if text in expand(part):
                yield from expand(modules)
    for one in renamed:
        nested = [p for p in entry.get("models", {}) if matches(p, one)]
        if nested:
            path = max(nested, key=len)
            count = len(path.split("."))
            head, rest = one.split(".")[:count], one.split(".")[count:]
            for child in entry["models"][path].rpartition(":")[2].split("|"):
                for found in resolve(types, rows, child, ".".join(rest)):
                    yield ".".join([*head, found])
        elif any(wild(p) in rows[name].kinds for p in (one, one.rpartition(".")[0], one.rpartition(".out_proj.")[0])):
            yield one


def verify(types, rows, report):
    """Reports the names of checkpoints that are not found again."""
    for classes in types.values():
        for name in classes:
            row = rows[name]
            expected = {n: {m} for n, m in row.names.items() if is_listed(row, rows, m)}
            expected.update({n: set(modules) for modules, (_, parts) in row.fused.items() for n in parts})
            for text, modules in sorted(expected.items()):
                found = next(iter(resolve(types, rows, name, text)), None)
                if found not in modules:
                    report["not-found"].append(f"{name} {text}: is {sorted(modules)}, found {found}")


# --- mlx-lm ---------------------------------------------------------------------------------------------------------

# A small model: the elements of its weights are numbered, so that it shows where mlx-lm puts them.
SMALL = {
    "d_ff": 96, "d_kv": 16, "d_model": 64, "depth": 2, "embed_dim": 64, "out_hidden_size": 64, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "head_dim": 16, "hidden_dim": 96,
    "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 112, "kv_lora_rank": 16, "linear_key_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16, "mamba_d_head": 16, "mamba_expand": 2,
    "mamba_head_dim": 16, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_num_heads": 8, "max_position_embeddings": 64,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_embd": 64, "n_group": 1, "n_head": 4,
    "n_layer": 4, "n_positions": 64, "n_routed_experts": 6, "num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 2,
    "num_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_layers": 4, "num_local_experts": 6, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48,
    "topk_group": 1, "v_head_dim": 16, "vocab_size": 128, "vocab_size_per_layer_input": 128,
}  # fmt: skip


def small_arguments(config_class):
    """Arguments that make a small model of the default configuration."""
    default = config_class(**REQUIRED.get(config_class.__name__, {}))
    result = {}
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            result[key] = {"model_type": value.model_type, **small_arguments(type(value))}
        elif isinstance(value, int) and not isinstance(value, bool) and key in SMALL and value > SMALL[key]:
            result[key] = SMALL[key]
    layers = result.get("num_hidden_layers") or result.get("num_layers")
    for key, value in vars(default).items():
        if layers and isinstance(value, list) and len(value) > layers and key in ("layer_types", "mlp_layer_types", "layers_block_type"):
            kinds = list(dict.fromkeys(value))
            result[key] = value[:layers] if set(value[:layers]) == set(kinds) else (kinds * 4)[:layers]
    if "pad_token_id" in vars(default):
        result.update({k: 1 for k in ("pad_token_id", "bos_token_id", "eos_token_id") if k in vars(default)})
    for key, value in REQUIRED.get(config_class.__name__, {}).items():
        result[key] = {**result.get(key, {}), **value} if isinstance(value, dict) else value
    return result


# What mlx-lm asks of a config.json and transformers 5 has no more, where the configuration does not tell.
MLX_ARGUMENTS = {
    "block_dim": 64, "is_moe_layer": [False, True, True, True], "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "mlp_bias": False,
    "attention_method": "MLA", "zero_expert_type": "identity", "moe_layer_freq": 1, "n_ctx": 64, "partial_rotary_factor": 1.0,
    "first_k_dense_replace": 1, "head_dim": 16, "norm_topk_prob": True, "post_norm": False, "qk_norm": True, "rope_scaling": None, "rope_theta": 10000.0, "rotary_dim": 8, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "scoring_func": "sigmoid", "shared_intermediate_size": 48, "tie_word_embeddings": False, "topk_method": "noaux_tc",
}  # fmt: skip


# The same, of one model type: values that only published configurations have.
MLX_TYPES = {
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0, "original_max_position_embeddings": 64}},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "gpt_neox": {"intermediate_size": 256},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "longcat_flash": {"zero_expert_num": 0},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mistral3": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    "recurrent_gemma": {"num_key_value_heads": 1},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen3_vl_moe": {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
    "gpt_bigcode": {"n_inner": 256},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}},
    "gemma4": {"text_config": {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 64, "long_factor": [1.0], "short_factor": [1.0]}},
}  # fmt: skip
# Further small models, which have other modules.
MLX_VARIANTS = {
    "deepseek_v2": [{"q_lora_rank": None}, {"first_k_dense_replace": 1}],
    "deepseek_v3": [{"q_lora_rank": None}],
    "dots1": [{"first_k_dense_replace": 1}],
    "glm4_moe_lite": [{"q_lora_rank": None}],
    "llama4": [{"text_config": {"moe_layers": [1, 3], "interleave_moe_layer_step": 2}}],
    "qwen3_moe": [{"mlp_only_layers": [0]}],
}
# The same, of which mlx-lm makes other models: under names of their own, with the first argument.
MLX_OTHERS = {"granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 96}}
# Keys of a config.json that transformers' configuration does not have.
MLX_CONFIGS = {
    "gemma3": {"vocab_size": 128},
    "gemma3n": {"text_config": {"rope_local_base_freq": 10000.0}},
    "gpt_bigcode": {"mlp_bias": True},
    "gemma4": {"vocab_size": 128},
    "gemma4_unified": {"vocab_size": 128, "text_config": {"hidden_size_per_layer_input": 0}},
}
# Models whose published checkpoints have the experts as transformers 5 has them, as one tensor.
MLX_FUSED_EXPERTS = {"qwen3_5_moe"}
# What a small model does not show.
MLX_REFUSED = {
    "dbrx": "mlx-lm has experts apart there, whose number is in no name",
    "falcon_h1": "mlx-lm multiplies weights by factors of the configuration",
}
# mlx-lm reads the published 4-bit blocks of these only; of the tensors that transformers writes this is what it makes of the blocks.
MLX_FUSED = {
    "gpt_oss": {
        f"model.layers.*.mlp.experts.{target}": f"{how}: model.layers.*.mlp.experts.{source}"
        for target, how, source in (
            ("down_proj.weight", "transpose", "down_proj"),
            ("gate_proj.bias", "every 2 from 0 of 1", "gate_up_proj_bias"),
            ("gate_proj.weight", "transpose, every 2 from 0 of 1", "gate_up_proj"),
            ("up_proj.bias", "every 2 from 1 of 1", "gate_up_proj_bias"),
            ("up_proj.weight", "transpose, every 2 from 1 of 1", "gate_up_proj"),
        )
    }
}  # fmt: skip
# Models whose published checkpoints are of the base model, without its name.
MLX_WITHOUT_PREFIX = {"gpt2": "transformer"}


def as_published(values, config):
    """A config.json with the keys of transformers 4, which published models and mlx-lm have."""
    for key, value in (values.get("rope_parameters") or {}).items():
        if key != "rope_type":
            values.setdefault(key, value)
    for key, target in (config.attribute_map or {}).items():
        if target in values:
            values.setdefault(key, values[target])
    for key, value in MLX_ARGUMENTS.items():
        if values.get(key) is None:
            values[key] = value
    for key, inner in values.items():
        if isinstance(vars(config).get(key), PreTrainedConfig):
            as_published(inner, vars(config)[key])
    return values


def mlx_table(failures, report):
    """{model type: entry} of the models of mlx-lm that transformers has too."""
    import mlx.core as mx
    from mlx_lm import models, utils
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    result = {}
    names = {n.name for n in pkgutil.iter_modules(models.__path__)}
    for model_type in sorted(set(CONFIG_MAPPING.keys()) & (names | set(utils.MODEL_REMAPPING))):
        candidates = []
        for mapping in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        ):
            names_of = mapping.get(model_type, ())
            candidates += [names_of] if isinstance(names_of, str) else names_of
        classes = [c for c in (getattr(transformers, n, None) for n in candidates) if c is not None]
        classes = [c for c in classes if c.config_class.model_type == model_type]
        if not classes:
            continue
        try:
            result[model_type] = mlx_entry(mx, utils, classes[0], report, [{}, *MLX_VARIANTS.get(model_type, ())])
            if variant := MLX_OTHERS.get(model_type):
                key, value = next(iter(variant.items()))
                result[f"{model_type} {key}={value}"] = mlx_entry(mx, utils, classes[0], report, [variant])
        except (Exception, SystemExit) as error:
            failures[f"mlx {model_type}"] = first_line(error)
    return result


def update(config, values):
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key].update(value)
        else:
            config[key] = value


def mlx_sample(utils, cls, variant={}):
    """A small model of a class: (config.json, {name in the checkpoint: shape}, what makes mlx-lm's model)."""
    arguments = small_arguments(cls.config_class)
    model_type = cls.config_class.model_type
    update(arguments, MLX_TYPES.get(model_type, {}))
    update(arguments, variant)
    config = cls.config_class(**arguments)
    model = build(cls, config, shrink=False)
    config.architectures = [cls.__name__]
    state = {k: v for k, v in model.state_dict().items() if k not in model.all_tied_weights_keys}
    checkpoint = state if model_type in MLX_FUSED_EXPERTS else core_model_loading.revert_weight_conversion(model, state)
    if sum(v.numel() for v in checkpoint.values()) > 2**29:
        raise ValueError(f"no small model: {sum(v.numel() for v in checkpoint.values())} elements")
    values = as_published(json.loads(config.to_json_string(use_diff=False)), config)
    for some in (MLX_TYPES, MLX_CONFIGS):
        update(values, some.get(model_type, {}))
    update(values, variant)
    model_class, args_class = utils._get_classes(values)
    for key, parameter in inspect.signature(args_class).parameters.items():
        if parameter.default is parameter.empty and key not in values:
            values[key] = getattr(config, key, None)
    if model_type in MLX_WITHOUT_PREFIX:
        checkpoint = {k.removeprefix(MLX_WITHOUT_PREFIX[model_type] + "."): v for k, v in checkpoint.items()}
    return values, {k: tuple(v.shape) for k, v in checkpoint.items()}, lambda: model_class(args_class.from_dict(values))


def mlx_sanitize(reader, weights):
    return reader.sanitize(dict(weights)) if hasattr(reader, "sanitize") else dict(weights)


def mlx_entry(mx, utils, cls, report, variants):
    """What some small models of a class have, as one entry."""
    model_type = cls.config_class.model_type
    if model_type in MLX_REFUSED:
        return {"refused": MLX_REFUSED[model_type]}
    modules, plain, made, kept, names = defaultdict(set), {}, defaultdict(set), set(), set()
    entry = {}
    for variant in variants:
        seen = mlx_observe(mx, utils, cls, report, variant)
        if isinstance(seen, str):
            return {"refused": seen}
        for key, value in seen["modules"].items():
            if isinstance(value, set):
                modules[key] |= value
            else:
                entry[key] = value
        plain.update(seen["plain"])
        for name, some in seen["made"].items():
            made[name] |= some
        kept |= seen["kept"]
        names |= seen["names"]
    rules, wrong = rules_of(plain)
    for name in wrong:
        report["mlx"].append(f"{model_type}: {name}: by no rules, is {plain[name]}")
    if model_type in MLX_WITHOUT_PREFIX:  # with it they are what transformers saves
        prefix = MLX_WITHOUT_PREFIX[model_type]
        rules[f"^{prefix}"] = rules["^"]
        for name, some in made.items():
            made[name] = some | {one.replace(": ", f": {prefix}.") for one in some}
    result = {kind: braces(some) for kind, some in sorted(modules.items())} | entry
    if rules:
        result["names"] = dict(sorted(rules.items()))
    if made:
        result["fused"] = {k: " | ".join(sorted(v)) for k, v in sorted(made.items())}
    if model_type in MLX_FUSED:
        result["fused"] = MLX_FUSED[model_type]
    if names - kept:
        result["dropped"] = braces({shortest_prefix(n, kept) for n in names - kept})
    return result


def mlx_observe(mx, utils, cls, report, variant):
    """What a small model has, or why it is refused."""
    values, checkpoint, make = mlx_sample(utils, cls, variant)
    reader = make()
    model_type = cls.config_class.model_type
    sources, given, origin = [], {}, {}
    first = 0
    for name, shape in checkpoint.items():
        count = math.prod(shape)
        given[name] = mx.arange(first, first + count, dtype=mx.int32).reshape(shape)
        origin[name] = (first, shape)
        sources.append((first, name))
        first += count
    weights = mlx_sanitize(reader, given)
    modules = mlx_modules_tied(utils, values)
    if "untied" not in modules and "lm_head" in {n.split(".")[-2] for n in weights if "." in n}:
        headless = mlx_sanitize(other := make(), {n: v for n, v in given.items() if not n.endswith("lm_head.weight")})
        if left := {n for n, _ in mlx_flatten(other.parameters())} - set(headless):
            modules["head"] = next(n.removesuffix(".weight") for n in left if n.endswith("lm_head.weight"))
    parameters = dict(mlx_flatten(reader.parameters()))
    missing = sorted(set(parameters) - set(weights))
    unexpected = sorted(set(weights) - set(parameters))
    for kind, some in (("missing", missing), ("unexpected", unexpected)):
        if some:
            report["mlx"].append(f"{model_type}: {kind} {braces(sorted({wild(n) for n in some}))}"[:300])
    if (missing or unexpected) and model_type not in MLX_FUSED:
        return "mlx-lm does not read the names of published checkpoints"
    experts = {m for kind, some in modules.items() if kind.startswith("experts") for m in some}
    plain, made = {}, defaultdict(set)
    kept = set()
    for name, value in weights.items():
        ops, parts = mlx_origin(value, sources, origin)
        ops = mlx_heads(ops, name, value, parts, given, values)
        kept |= {wild(p) for p in parts}
        if ops == "copy" and (wild(name) == wild(parts[0]) or wild(name).removesuffix(".weight") not in experts):
            plain[wild(parts[0])] = wild(name)
        else:
            made[wild(name)].add(f"{ops}: {parts_text(list(dict.fromkeys(wild(p) for p in parts)))}")
    computed = {name for name, some in made.items() if any(one.startswith("computed") for one in some)}
    if computed:
        return "mlx-lm computes new values of " + braces(computed)
    if not mlx_same(mlx_sanitize(make(), weights), weights):
        return "mlx-lm does not load what it saves"
    return {"modules": modules, "plain": plain, "made": made, "kept": kept, "names": {wild(n) for n in checkpoint}}


def mlx_same(a, b):
    return a.keys() == b.keys() and all(a[k].shape == v.shape and (a[k] == v).all().item() for k, v in b.items())


def shortest_prefix(name, others):
    """The first components of a name that none of the others has."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next(p for p in prefixes if p == name or not any(f"{o}.".startswith(f"{p}.") for o in others))


def mlx_modules_tied(utils, values):
    """The modules that mlx-lm quantizes, with the head; if it has one only if the embeddings are not tied, which (`untied`), and
    whether they are if config.json does not say so (`tied`)."""
    within = "text_config" if "text_config" in values else None

    def reader(tie):
        config = json.loads(json.dumps(values))
        config.pop("tie_word_embeddings", None)
        part = config[within] if within else config
        part["tie_word_embeddings"] = tie
        if tie is None:
            del part["tie_word_embeddings"]
        model_class, args_class = utils._get_classes(config)
        return model_class(args_class.from_dict(config))

    def modules(tie):
        return {wild(n) for n, m in reader(tie).named_modules() if hasattr(m, "to_quantized")}

    result = mlx_modules(reader(False))
    if untied := modules(False) - modules(True):
        result["untied"] = untied
        try:
            if not untied <= modules(None):
                result["tied"] = True
        except TypeError:  # it has to
            pass
    return result


def mlx_heads(ops, name, value, parts, given, values):
    """The operation, if the elements are those of the keys or values of the heads of kv_b_proj."""
    if ops != "computed" or not name.endswith((".embed_q.weight", ".unembed_out.weight")):
        return ops
    values = values.get("text_config", values)
    nope = values["qk_nope_head_dim"]
    heads = given[parts[0]].reshape(values["num_attention_heads"], nope + values["v_head_dim"], -1)
    keys, rest = heads[:, :nope].swapaxes(1, 2), heads[:, nope:]
    for which, some in (("keys of heads, transpose", keys), ("values of heads", rest)):
        if some.shape == value.shape and (some == value).all().item():
            return which
    return ops


def mlx_flatten(tree, prefix=""):
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from mlx_flatten(value, f"{prefix}.{key}" if prefix else str(key))


def mlx_modules(reader):
    """{kind: set of modules} that mlx-lm quantizes, with those that its predicate leaves out or gives other parameters."""
    kinds = {"Linear": "linear", "Embedding": "embedding", "SwitchLinear": "experts"}
    found = defaultdict(set)
    predicate = getattr(reader, "quant_predicate", None)
    for name, module in reader.named_modules():
        if not hasattr(module, "to_quantized"):
            continue
        kind = kinds.get(type(module).__name__, type(module).__name__)
        answer = predicate(name, module) if predicate is not None else True
        if isinstance(answer, dict):
            kind += " " + " ".join(f"{k}={v}" for k, v in sorted(answer.items()))
        elif not answer:
            kind += " dense"
        found[kind].add(wild(name))
    return dict(found)


def mlx_origin(value, sources, origin):
    """(operations, names in the checkpoint) of an array whose elements are numbered as in the checkpoint."""
    import bisect

    import mlx.core as mx
    import numpy as np

    array = np.array(value.astype(mx.float32 if value.dtype == mx.bfloat16 else value.dtype)).astype(np.int64)
    starts = [s for s, _ in sources]
    def source_of(number):
        return sources[bisect.bisect_right(starts, number) - 1][1]

    def numbers(name):
        first, shape = origin[name]
        return np.arange(first, first + int(np.prod(shape))).reshape(shape)

    if array.ndim == 1:
        for (start, name) in sources:
            if origin[name][1] == array.shape and (numbers(name) + 1 == array).all():
                return "plus 1", [name]
    outer = array.reshape(array.shape[0] if array.ndim else 1, -1)
    parts = list(dict.fromkeys(source_of(n) for n in outer[:, [0, -1]].reshape(-1)))
    given = [numbers(p) for p in parts]
    if len(parts) == 1:
        one = given[0]
        if one.shape == array.shape and (one == array).all():
            return "copy", parts
        for axes in ([0, 1], [1, 0]) if one.ndim == 2 else ([0, 1, 2], [0, 2, 1]) if one.ndim == 3 else ([*range(one.ndim)],):
            turned = one.transpose(axes)
            word = "transpose, " if axes[-1] != one.ndim - 1 else ""
            if turned.shape == array.shape and (turned == array).all():
                return word.removesuffix(", ") or "copy", parts
            for axis in range(turned.ndim):
                if turned.ndim != array.ndim or turned.shape[axis] <= array.shape[axis]:
                    continue
                size, all_ = array.shape[axis], turned.shape[axis]
                for begin in range(0, all_ - size + 1):
                    some = np.take(turned, range(begin, begin + size), axis)
                    if some.shape == array.shape and (some == array).all():
                        which = f"{begin // size + 1}/{all_ // size}" if all_ % size == 0 and begin % size == 0 else f"{begin}:{begin + size}"
                        return f"{word}part {which} of {axis}", parts
                for begin in range(all_ // size):  # those that take turns
                    some = np.take(turned, range(begin, all_, all_ // size), axis)
                    if some.shape == array.shape and (some == array).all():
                        return f"{word}every {all_ // size} from {begin} of {axis}", parts
        if one.size == array.size and (one.reshape(array.shape) == array).all():
            return "reshape", parts
        return "computed", parts
    if all(g.shape == given[0].shape for g in given) and array.shape == (len(given), *given[0].shape) and (np.stack(given) == array).all():
        return "stack 0", parts
    for axis in range(array.ndim):
        try:
            if (np.concatenate(given, axis) == array).all():
                return f"concat {axis}", parts
        except ValueError:
            continue
    return "computed", parts


# Others are said to be like these where they are: a new architecture changes no line of another.
KNOWN = ["llama", "mixtral", "bert", "bart", "t5", "gpt2", "vit", "clip", "clip_vision_model", "llava", "wav2vec2", "whisper"]


def compact(types):
    """`@` for the first class of a model type in others of it; `=X` for a value that class X has; the name of an equal
    class for a class."""
    entries, values = {}, {}
    for model_type in [t for t in KNOWN if t in types] + [t for t in types if t not in KNOWN]:
        classes = types[model_type]
        base = next(iter(classes))
        for name, entry in classes.items():
            for path, value in entry.get("models", {}).items():
                if value == base:
                    entry["models"][path] = "@"
            text = json.dumps(entry, sort_keys=True)
            if (name == base and '"@"' in text) or len(text) < 30:
                continue
            if text in entries:
                classes[name] = entries[text]
                continue
            entries[text] = name
            for key, value in entry.items():
                text = json.dumps([key, value], sort_keys=True)
                if len(text) > 36 and '"@"' not in text:
                    first = values.setdefault(text, name)
                    if first != name:
                        entry[key] = "=" + first


def dump(head, types, mlx):
    """One line a class, sorted."""
    lines = ["{", '"readers": ' + json.dumps(head) + ",", '"types": {']
    for i, (model_type, classes) in enumerate(types.items()):
        lines.append(f"{json.dumps(model_type)}: {{")
        lines += separated([f" {json.dumps(n)}: {json.dumps(e, separators=(',', ':'))}" for n, e in classes.items()])
        lines.append("}" + ("," if i + 1 < len(types) else ""))
    lines += ["},", '"mlx": {']
    lines += separated([f" {json.dumps(n)}: {json.dumps(e, separators=(',', ':'))}" for n, e in mlx.items()])
    return "\n".join([*lines, "}", "}", ""])


def separated(lines):
    return [line + "," for line in lines[:-1]] + lines[-1:]


def collect(options, failures, report):
    """What is seen of every class, by name."""
    classes = model_classes(failures)
    if options.only:
        classes = {k: v for k, v in classes.items() if re.fullmatch(options.only, getattr(v.config_class, "model_type", "") or "-")}
    rows = {}
    for name, cls in sorted(classes.items()):
        arguments = REQUIRED.get(cls.config_class.__name__, {})
        error = see(cls, arguments, rows, report)
        # Flags of a configuration are those of the model that heads are put on.
        if not options.no_variants and (error is not None or not rows[name].has_base):
            for values in variants(cls.config_class):
                if see(cls, {**arguments, **values}, rows, report) is None:
                    error = None
        if error is not None:
            failures[name] = f"{getattr(cls.config_class, 'model_type', '')}: {first_line(error)}"
    return rows


def see(cls, arguments, rows, report):
    """Adds a model with these arguments to the rows; the error if it cannot be built."""
    try:
        model = build(cls, cls.config_class(**arguments))
    except Exception as error:
        return error
    before = sum(len(r.kinds) for r in rows.values())
    observe(model, rows)
    observe_root(model, rows)
    row = rows[cls.__name__]
    row.has_base = model.base_model_prefix != "" and isinstance(getattr(model, model.base_model_prefix, None), PreTrainedModel)
    if not row.names or sum(len(r.kinds) for r in rows.values()) > before:
        try:
            observe_names(model, row)
        except Exception as error:
            report["names"].append(f"{cls.__name__} {arguments}: {first_line(error)}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with OUTPUT instead of writing it")
    parser.add_argument("--report", help="a file for what failed and what is ambiguous")
    parser.add_argument("--only", help="model types that match this regular expression, for trials")
    parser.add_argument("--no-variants", action="store_true", help="default configurations only, for trials")
    parser.add_argument("output", nargs="?", default=Path(__file__).parent.parent / "src/io/architectures.json")
    options = parser.parse_args()

    failures, report = {}, defaultdict(list)
    rows = collect(options, failures, report)
    types = table(rows, report)
    mlx = mlx_table(failures, report)
    head = {name: version(name) for name in ("mlx-lm", "timm", "torch", "transformers")}
    text = dump(head, types, mlx)
    print(f"{len(types)} model types, {len(rows)} classes, {len(mlx)} of mlx-lm, {len(failures)} failed, {len(text)} bytes", file=sys.stderr)
    if options.report:
        lines = [f"failed {k}: {v}" for k, v in sorted(failures.items())]
        lines += [f"{kind} {line}" for kind, some in sorted(report.items()) for line in sorted(set(some))]
        Path(options.report).write_text("\n".join(lines) + "\n")
    if options.check:
        if Path(options.output).read_text() != text:
            print(f"{options.output} is not what the installed readers give", file=sys.stderr)
            return 1
        return 0
    Path(options.output).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
