#!/usr/bin/env python3
"""Makes the table of model architectures from the readers' own code.

    tools/architectures.py [--check] [--report FILE] [--only REGEX] [OUTPUT]

Builds every model class of the installed transformers without weights (on torch's meta device, with default
configurations and variants of these), and writes what a checkpoint's tensors are: the class and role of their modules,
ties, the names of modules and how names of checkpoints map to them, what stays in f32, what quantizers leave out.
docs/architectures.md explains the result. It depends on the versions of the readers only; --check compares it with
OUTPUT (src/io/architectures.json) and exits 1 if it differs. --report writes what failed and what is ambiguous.

Needs transformers, torch, timm and scipy; no accelerator, no network, no weights.
"""

import argparse
import gc
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import warnings
from collections import defaultdict
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
from transformers.quantizers.base import get_keys_to_not_convert  # noqa: E402

transformers.logging.set_verbosity(50)

# The number of experts of every model that is built: a prime, so that a dimension of this size is one of experts.
NUM_EXPERTS = 11
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Arguments without which a default configuration does not build, by the name of the configuration's class.
REQUIRED = {
    "AutoformerConfig": {"prediction_length": 8},
    "BeitConfig": {"out_indices": [3, 5, 7, 11]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1},
    "HunYuanDenseV1Config": {"head_dim": 128},
    "HunYuanMoEV1Config": {"head_dim": 128},
    "HunYuanVLTextConfig": {"head_dim": 128},
    "InformerConfig": {"prediction_length": 8},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 16},
    "MinistralConfig": {"head_dim": 128},
    "NemotronConfig": {"num_key_value_heads": 8},
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
                count = getattr(part, key, None)
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
    """The name with `*` for every number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def modalities(cls):
    value = cls.input_modalities
    return (value,) if isinstance(value, str) else tuple(value or ())


def modality(cls):
    """What a model reads if it does not read text: vision or audio, or None."""
    kinds = set(modalities(cls))
    if kinds and kinds <= {"image", "video"}:
        return "vision"
    if kinds == {"audio"}:
        return "audio"
    return None


class Row:
    """What was seen of a class of models, in all configurations."""

    def __init__(self, cls):
        self.cls = cls
        self.config_class = cls.config_class
        self.kinds = defaultdict(set)  # pattern of a module or tensor -> its kinds
        self.exact = defaultdict(set)  # the same with the numbers that a Sequential has
        self.children = {}  # pattern of a module -> (key of the configuration or None, {classes})
        self.tied = set()
        self.tie = set()
        self.float32 = set()
        self.float32_always = set()
        self.skipped = set()
        self.names = {}  # pattern of the checkpoint -> pattern of the model, where they differ or are equal
        self.fused = {}  # (patterns of the model) -> (operations, patterns of the checkpoint)
        self.prefixes = set()
        self.built = False


def sequential_name(model, name):
    """The name with `*` for the numbers of lists, but not for those of an nn.Sequential."""
    module, parts = model, []
    for part in name.split("."):
        digit = part.isdigit()
        parts.append("*" if digit and not isinstance(module, nn.Sequential) else part)
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
                elif tensor.ndim >= 3 and is_experts(module, tensor):
                    kind = expert_kind(module, key, tensor, model.config)
                elif tensor.ndim >= 2 and not key.endswith("bias"):
                    kind = "parameter"
                else:
                    kind = "vector"
                found.append((path, kind, module))
    return found, children


def is_parametrized(module):
    return torch.nn.utils.parametrize.is_parametrized(module)


def is_experts(module, tensor):
    return hasattr(module, "is_transposed") or "Expert" in type(module).__name__ or tensor.shape[0] == NUM_EXPERTS


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
        elif ROUTER_CLASS.search(name) or re.search(r"(^|\.)(router|shared_expert_gate)(\.|$)", path):
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
    for path, kind, _ in found:
        value = kind + ("/" + role[path] if role[path] else "")
        row.kinds[wild(path)].add(value)
        row.exact[sequential_name(model, path)].add(value)
    for path, child in children.items():
        key = child_config(model, child)
        auto = key is not None and is_auto(model, key)
        config_key, classes = row.children.setdefault(wild(path), [key if auto else None, set()])
        if auto and config_key is None:
            row.children[wild(path)][0] = key
        classes.add(type(child).__name__)
        observe(child, rows)
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


def observe_names(model, row):
    for ops, modules, names in checkpoint_names(model):
        if not ops:
            for module in modules:
                for name in names:
                    row.names[wild(name)] = wild(module)
        else:
            key = tuple(sorted({wild(m) for m in modules}))
            # The order of the parts is that of the operations: kept, without the number of the expert.
            parts = list(dict.fromkeys(wild(n) for n in names))
            row.fused[key] = (ops, tuple(parts))
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


def matches(pattern, name):
    """Whether a pattern, in components, matches the beginning of a name, in components."""
    return len(pattern) <= len(name) and all(p == n or (p == "*" and (n.isdigit() or n == "*")) for p, n in zip(pattern, name))


def rename(rules, name):
    """The name after the rule with the longest matching prefix, or the name."""
    parts = name.split(".")
    best = None
    for source, target in rules.items():
        pattern = source.split(".") if source else []
        if matches(pattern, parts) and (best is None or len(pattern) > len(best[0])):
            best = (pattern, target)
    if best is None:
        return name
    pattern, target = best
    numbers = [n for p, n in zip(pattern, parts) if p == "*"]
    out = []
    for part in target.split(".") if target else []:
        out.append(numbers.pop(0) if part == "*" and numbers else part)
    return ".".join(out + parts[len(pattern) :])


def rules_of(pairs):
    """The fewest prefix rules that rename each of {name: module} right."""
    pairs = dict(sorted(pairs.items()))
    rules = {}
    for name, module in pairs.items():
        if name == module:
            continue
        a, b = name.split("."), module.split(".")
        while len(a) > 1 and len(b) > 1 and a[-1] == b[-1] and a[:-1] != b[:-1]:
            a.pop()
            b.pop()
        # One more component, if both sides lost a prefix only.
        if len(a) == 1 and len(b) > 1 and a[-1] == b[-1]:
            pass
        rules[".".join(a)] = ".".join(b)
    wrong = True
    for _ in range(8):
        wrong = {n: m for n, m in pairs.items() if rename(rules, n) != m}
        if not wrong:
            break
        for name, module in wrong.items():
            # A longer rule for this name: one component more than the rule that was taken.
            taken = max((len(r.split(".")) for r in rules if matches(r.split("."), name.split("."))), default=0)
            a, b = name.split("."), module.split(".")
            while len(a) > taken + 1 and len(b) > 1 and a[-1] == b[-1]:
                a.pop()
                b.pop()
            rules[".".join(a)] = ".".join(b)
    # Without the rules that change nothing.
    for rule in sorted(rules, key=lambda r: (-len(r.split(".")), r)):
        fewer = {k: v for k, v in rules.items() if k != rule}
        if all(rename(fewer, n) == m for n, m in pairs.items()):
            rules = fewer
    return rules, sorted(n for n, m in pairs.items() if rename(rules, n) != m)


# --- The table ------------------------------------------------------------------------------------------------------


def kinds_of_row(row, report):
    """{kind: [patterns]}: numbers of an nn.Sequential stay where modules of several kinds have them."""
    result = defaultdict(list)
    exact = defaultdict(dict)
    for pattern, kinds in row.exact.items():
        exact[wild(pattern)][pattern] = kinds
    for pattern, kinds in sorted(row.kinds.items()):
        if len(kinds) == 1:
            result[next(iter(kinds))].append(pattern)
            continue
        for finer, some in sorted(exact[pattern].items()):
            if len(some) > 1:
                report["ambiguous"].append(f"{row.cls.__name__} {finer}: {sorted(some)}")
            for kind in sorted(some):
                result[kind].append(finer)
    return result


def table(rows, report):
    # Which class a configuration's model has, by model type, in the order of transformers' own mapping.
    types = defaultdict(dict)
    base_of = dict(modeling_auto.MODEL_MAPPING_NAMES)
    for name, row in sorted(rows.items()):
        model_type = getattr(row.config_class, "model_type", "") or "-"
        types[model_type][name] = row
    result = {}
    for model_type, classes in sorted(types.items()):
        base = base_of.get(model_type)
        base = base if isinstance(base, str) else (base[0] if base else None)
        out = {}
        order = sorted(classes, key=lambda n: (n != base, n))
        for name in order:
            out[name] = class_entry(classes[name], rows, report)
        result[model_type] = out
    compact(result)
    return result


def class_entry(row, rows, report):
    entry = {}
    kind = modality(row.cls)
    if kind:
        entry["reads"] = kind
    for path, (key, classes) in sorted(row.children.items()):
        value = "|".join(sorted(classes))
        entry.setdefault("models", {})[path] = f"{key}:{value}" if key else value
    for kind, patterns in sorted(kinds_of_row(row, report).items()):
        entry[kind] = braces(patterns)
        if sorted(expand(entry[kind])) != sorted(patterns):
            raise AssertionError(f"{row.cls.__name__}: braces of {patterns}")
    if row.tied:
        entry["tied"] = {a: b for a, b in sorted(row.tied)}
        entry["tie"] = True in row.tie
    if row.float32_always:
        entry["f32"] = sorted(row.float32_always)
    if row.float32:
        entry["f32-from-f16"] = sorted(row.float32)
    if row.skipped:
        entry["skipped"] = sorted(row.skipped)
    # Names: those of nested models are their rows', behind a prefix.
    names = dict(row.names)
    fused = dict(row.fused)
    rules = {}
    for path, (_, classes) in sorted(row.children.items(), key=lambda item: item[0]):
        prefix = nested_prefix(path, [rows[c] for c in sorted(classes)], names, fused)
        if prefix is None:
            continue
        for name in [n for n, m in names.items() if (m + ".").startswith(path + ".")]:
            del names[name]
        for key in [k for k in fused if all((m + ".").startswith(path + ".") for m in k)]:
            del fused[key]
        if prefix != path:
            rules[prefix] = path
    more, wrong = rules_of(names)
    for name in wrong:
        report["names"].append(f"{row.cls.__name__} {name}: not by prefix rules, is {names[name]}")
    rules.update(more)
    if rules:
        entry["names"] = dict(sorted(rules.items()))
    if fused:
        entry["fused"] = {braces(k): f"{', '.join(ops)}: {' '.join(parts)}" for k, (ops, parts) in sorted(fused.items())}
    if row.prefixes:
        entry["may-be"] = {a: b for a, b in sorted(row.prefixes)}
    return entry


def nested_prefix(path, children, names, fused):
    """The prefix that the names of a nested model have in a checkpoint, behind which they are those of its row."""
    inner = {n: m for n, m in names.items() if m.startswith(path + ".")}
    inner_fused = {k: v for k, v in fused.items() if all(m.startswith(path + ".") for m in k)}
    own, own_fused = {}, {}
    for child in children:
        own.update(child.names)
        own_fused.update(child.fused)
    if not inner or not own:
        return None
    prefix = None
    back = {m: n for n, m in own.items()}
    for name, module in sorted(inner.items()):
        expected = back.get(module[len(path) + 1 :])
        if expected is None or not ("." + name).endswith("." + expected):
            return None
        found = name[: len(name) - len(expected)].removesuffix(".")
        if prefix is not None and found != prefix:
            return None
        prefix = found
    for key, (ops, parts) in inner_fused.items():
        expected = own_fused.get(tuple(m[len(path) + 1 :] for m in key))
        head = prefix + "." if prefix else ""
        if expected is None or expected[0] != ops or tuple(head + p for p in expected[1]) != parts:
            return None
    return prefix


def compact(types):
    """`@` for the first class of a model type in others of it; then the name of an equal class before it for a class."""
    seen = {}
    for classes in types.values():
        base = next(iter(classes))
        for name, entry in classes.items():
            for path, value in entry.get("models", {}).items():
                if value == base:
                    entry["models"][path] = "@"
            text = json.dumps(entry, sort_keys=True)
            if name != base or '"@"' not in text:
                classes[name] = seen.setdefault(text, name) if len(text) > 40 else entry
            if classes[name] == name:
                classes[name] = entry


def dump(head, types):
    """One line a class, sorted."""
    lines = ["{", '"readers": ' + json.dumps(head) + ",", '"types": {']
    items = list(types.items())
    for i, (model_type, value) in enumerate(items):
        lines.append(f"{json.dumps(model_type)}: {{")
        classes = list(value.items())
        for j, (name, entry) in enumerate(classes):
            comma = "," if j + 1 < len(classes) else ""
            lines.append(f" {json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}{comma}")
        lines.append("}" + ("," if i + 1 < len(items) else ""))
    lines += ["}", "}", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with OUTPUT instead of writing it")
    parser.add_argument("--report", help="a file for what failed and what is ambiguous")
    parser.add_argument("--only", help="model types that match this regular expression, for trials")
    parser.add_argument("--no-variants", action="store_true", help="default configurations only, for trials")
    parser.add_argument("output", nargs="?", default=Path(__file__).parent.parent / "src/io/architectures.json")
    options = parser.parse_args()

    failures, report = {}, defaultdict(list)
    classes = model_classes(failures)
    if options.only:
        classes = {k: v for k, v in classes.items() if re.fullmatch(options.only, getattr(v.config_class, "model_type", "") or "-")}
    rows, built = {}, set()
    for name, cls in sorted(classes.items()):
        config_class = cls.config_class
        arguments = REQUIRED.get(config_class.__name__, {})
        configs = [arguments]
        if not options.no_variants:
            configs += [{**arguments, **v} for v in variants(config_class)]
        for index, values in enumerate(configs):
            try:
                model = build(cls, config_class(**values))
            except Exception as error:
                if index == 0:
                    failures[name] = f"{getattr(config_class, 'model_type', '')}: {first_line(error)}"
                continue
            observe(model, rows)
            observe_root(model, rows)
            built.add(name)
            try:
                observe_names(model, rows[name])
            except Exception as error:
                report["names"].append(f"{name} {values}: {first_line(error)}")
            del model
        gc.collect(1)

    types = table(rows, report)
    text = dump({"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}, types)
    print(f"{len(types)} model types, {len(rows)} classes, {len(failures)} failed, {len(text)} bytes", file=sys.stderr)
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
