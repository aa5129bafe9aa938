"""What faults, kills and power disturb: commands on small checkpoints, and what they must leave."""

import errno
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np

from independent import safetensors_io as st

from .base import CODES

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
SIDE_FILES = {"tokenizer.json": b'{"vocab": {}}', "README.md": b"# A model\n", "deep/er/merges.txt": b"a b\n"}
PRECOMPILE = "precompile --arch sm_90a --ops dequantize --formats nf4,int8 --dtypes f16".split()
# What is counted as a change of files. Of "open" and "close" kills make no difference.
CHANGES = {
    "create", "write", "copy", "truncate", "fallocate", "sync", "rename", "renameat2", "link", "symlink",
    "unlink", "rmdir", "mkdir", "chmod", "utime",
}  # fmt: skip


def _layer(rng, number):
    names = ["mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"]
    prefix = f"model.layers.{number}"
    weights = {f"{prefix}.{name}.weight": rng.standard_normal((64, 64)) for name in names}
    for norm in ["input_layernorm", "post_attention_layernorm"]:
        weights[f"{prefix}.{norm}.weight"] = np.ones(64)
    return weights


def _tensors(weights):
    return {name: st.from_f32(np.asarray(x, np.float32), "BF16") for name, x in weights.items()}


class Call:
    """A line of the log of tests/campaign/libfaults.c."""

    def __init__(self, line):
        number, self.kind, self.path = line.split(" ", 2)
        self.number = int(number)

    def __str__(self):
        return f"call {self.number}, {self.kind} {self.path}"


class Command:
    """One command of the tool: `arguments` with {input} and {work} for directories of the bench, the names of
    its outputs below `work`, and whether it runs over older ones, with --force. `lacks`: calls that the file
    system does not have, and their errors, as HALFBYTE_FAULTS_LACKS."""

    def __init__(self, name, arguments, outputs, force=False, environment=None, lacks=None):
        self.name = name + " --force" * force + (f" without {' '.join(lacks.split()[::2])}" if lacks else "")
        self.arguments = [*arguments, "--force"] if force else arguments
        self.outputs, self.force, self.environment, self.lacks = outputs, force, environment or {}, lacks
        self.can_resume = self.arguments[0] in ("quantize", "dequantize", "convert")
        # Whether the older output is there until the new one is: without a rename that exchanges, directories
        # are renamed one after the other.
        self.keeps_older = force and not (lacks and "out" in outputs)

    def with_options(self, *options):
        """The same, on a file system that lacks nothing."""
        same = Command(self.name, [*self.arguments, *options], self.outputs, False, self.environment)
        same.force = self.force
        return same


def content_of(path):
    """All bytes at `path`, which may be a directory; None where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        files = sorted(path.rglob("*"))
        return {str(file.relative_to(path)): None if file.is_dir() else content_of(file) for file in files}
    return path.read_bytes() if path.exists() else None


def report_of(content):
    """A JSON report without what differs from run to run, the word "failed" for one of a command that failed;
    None for what is no whole report."""
    try:
        report = json.loads(content)
    except ValueError:
        return None
    varying = ("leftovers", "num_resumed_files", "bottleneck")
    kept = {k: v for k, v in report.items() if not k.endswith("seconds") and k not in varying}
    return kept if report["ok"] else "failed"


class Bench:
    """Inputs in `folder`/input, outputs in `folder`/work, which is made anew for each run."""

    def __init__(self, section, folder):
        self.section, self.folder = section, Path(folder)
        self.input, self.work, self.kept = (self.folder / name for name in ["input", "work", "kept"])
        self.log, self.counter = self.folder / "log", self.folder / "counter"
        self.library = section.build / "tests" / "campaign" / "libfaults.so"
        if not self.library.exists():
            raise FileNotFoundError(f"{self.library}: build halfbyte_campaign")
        self.cli = section.campaign.cli
        self.plain = {**os.environ, "HALFBYTE_CACHE_DIR": "", "HALFBYTE_CUDA_DRIVER": "/nowhere/libcuda.so"}
        self.nvrtc = {"HALFBYTE_NVRTC": str(section.build / "tests" / "libstub_nvrtc.so")}
        for directory in [self.input, self.work, self.kept]:
            directory.mkdir()
        self._make_inputs()
        self.input_state = self._state_of_input()

    def _make_inputs(self):
        rng = np.random.default_rng(20)
        st.write(self.input / "single.safetensors", _tensors(_layer(rng, 0)), {"format": "pt"})
        model = self.input / "model"
        for name, content in SIDE_FILES.items():
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_bytes(content)
        (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
        ends = {"lm_head.weight": rng.standard_normal((16, 64)), "model.norm.weight": np.ones(64)}
        begin = {"model.embed_tokens.weight": rng.standard_normal((16, 64))}
        shards = [_layer(rng, 0) | begin, _layer(rng, 1) | ends]
        weight_map = {}
        for number, weights in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            st.write(model / file, _tensors(weights), {"format": "pt"})
            weight_map |= dict.fromkeys(weights, file)
        total = sum(2 * np.size(x) for weights in shards for x in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        quantize = ["quantize", "{input}/model", "--format"]
        self._must_run(*quantize, "int4", "--group-size", "64", "-o", "{input}/int4")
        self._must_run(*quantize, "affine4", "--layout", "mlx", "-o", "{input}/affine4")
        self._must_run(*PRECOMPILE, "--jobs", "1", "-o", "{input}/kernels.hbk", **self.nvrtc)

    def _words(self, arguments):
        return [str(word).format(input=self.input, work=self.work) for word in arguments]

    def _must_run(self, *arguments, **environment):
        command = [self.cli, *self._words(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**self.plain, **environment})
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")

    def commands(self, names=None):
        """Those that are attacked, or those named; their undisturbed outputs are in self.new, what they
        replace in self.old."""
        model, single = "{input}/model", "{input}/single.safetensors"
        out, report = ["-o", "{work}/out", "--threads", "1"], ["--json", "{work}/out.json"]
        packed = {**self.nvrtc, "HALFBYTE_KERNEL_PACK": str(self.input / "kernels.hbk")}
        to_pack = ["-o", "{work}/out.hbk", "--jobs"]
        table = [
            ("quantize-file", ["quantize", single, "-o", "{work}/out.safetensors", "--threads", "1"],
             ["out.safetensors"]),
            ("quantize-nf4", ["quantize", model, *out, *report], ["out", "out.json"]),
            ("quantize-mlx", ["quantize", model, "-o", "{work}/out", "--threads", "2", "--layout", "mlx",
                              "--format", "affine4"], ["out"]),
            ("quantize-shards", ["quantize", model, *out, "--format", "int8", "--group-size", "64",
                                 "--shard-size", "20KB"], ["out"]),
            ("dequantize", ["dequantize", "{input}/int4", *out], ["out"]),
            ("convert", ["convert", "{input}/affine4", *out, *report, "--layout", "halfbyte"],
             ["out", "out.json"]),
            ("inspect", ["inspect", "{input}/affine4", *report], ["out.json"]),
            ("compare", ["compare", model, "{input}/int4", *report, "--threads", "1"], ["out.json"]),
            ("ptx", ["ptx", "dequantize", "--arch", "sm_90a", "-o", "{work}/out.ptx"], ["out.ptx"],
             self.nvrtc),
            ("precompile", [*PRECOMPILE, *to_pack, "1"], ["out.hbk"], self.nvrtc),
            ("precompile-packed", [*PRECOMPILE, *to_pack, "1"], ["out.hbk"], packed),
            ("precompile-jobs", [*PRECOMPILE, *to_pack, "2"], ["out.hbk"], self.nvrtc),
        ]  # fmt: skip
        all_commands = [
            Command(name, arguments, outputs, force, *environment)
            for name, arguments, outputs, *environment in table
            for force in [False, True]
        ]
        for name, arguments, outputs, *_ in table[:2]:
            for force in [False, True]:
                all_commands.append(Command(name, arguments, outputs, force, {}, f"renameat2 {errno.EINVAL}"))
        self.old, self.new = {}, {}
        for command in all_commands:
            if names is None or command.name in names:
                self._prepare(command)
                yield command

    # The content that --force replaces: a checkpoint or file of another kind.
    def _older(self, name):
        target = self.kept / name
        if not target.exists():
            if name == "out":
                self._must_run("quantize", "{input}/model", "-o", str(target), "--format", "fp4")
            elif name == "out.safetensors":
                self._must_run("quantize", "{input}/single.safetensors", "-o", str(target), "--format", "fp4")
            else:
                target.write_bytes(b'{"ok": true, "older": true}\n')
        return target

    def _prepare(self, command):
        self.old[command.name] = {
            name: content_of(self._older(name)) if command.force else None for name in command.outputs
        }
        done = self.run(command)
        if done.returncode != 0:
            raise RuntimeError(f"{command.name}, undisturbed: {done.stderr}")
        self.new[command.name] = {name: content_of(self.work / name) for name in command.outputs}
        assert all(self.new[command.name][name] != old for name, old in self.old[command.name].items())

    def restore(self, command):
        """Puts the outputs in the state before the command, and removes all else."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in command.outputs if command.force else []:
            older = self._older(name)
            if older.is_dir():
                shutil.copytree(older, self.work / name)
            else:
                shutil.copyfile(older, self.work / name)

    def _environment(self, command, faults):
        environment = {**self.plain, **command.environment}
        if faults is not None:
            self.log.unlink(missing_ok=True)
            self.counter.write_bytes(bytes(8))
            under = {
                "LD_PRELOAD": self.library,
                "HALFBYTE_FAULTS_UNDER": self.folder,
                "HALFBYTE_FAULTS_LOG": self.log,
                "HALFBYTE_FAULTS_COUNTER": self.counter,
            }
            if command.lacks:
                faults = {**faults, "lacks": command.lacks}
            faults = {f"HALFBYTE_FAULTS_{k.upper()}": v for k, v in faults.items()}
            environment |= {k: str(v) for k, v in (under | faults).items()}
        return environment

    def start(self, command, **faults):
        """The command as a process that leads its own group; `faults` are variables HALFBYTE_FAULTS_*."""
        return subprocess.Popen(
            [self.cli, *self._words(command.arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, env=self._environment(command, faults), start_new_session=True,
        )  # fmt: skip

    def run(self, command, restore=True, faults=None):
        """To its end. `faults`: None for an undisturbed run."""
        if restore:
            self.restore(command)
        return self.section.cli(
            *self._words(command.arguments), expect_signal=True, env=self._environment(command, faults)
        )

    def calls(self):
        """What the last run with faults has called."""
        return [Call(line) for line in self.log.read_text().splitlines()]

    def keep_input(self):
        if not (self.folder / "input-kept").exists():
            shutil.copytree(self.input, self.folder / "input-kept")

    def restore_input(self):
        shutil.rmtree(self.input)
        shutil.copytree(self.folder / "input-kept", self.input)
        self.input_state = self._state_of_input()

    # Checks. Each names what it finds in self.section.finding().

    def _state_of_input(self):
        return {
            file: (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            for file in [self.input, *self.input.rglob("*")]
            if (status := file.lstat())
        }

    def state_of(self, command, name):
        """"old", "absent", "new", or what is wrong."""
        old, new = self.old[command.name][name], self.new[command.name][name]
        content = content_of(self.work / name)
        if content == old:
            return "absent" if old is None else "old"
        if content == new:
            return "new"
        if content is None:
            return "absent"
        if name.endswith(".json") and name != "out":
            report = report_of(content)
            if report == "failed":
                return "failed"
            if report is not None and report == report_of(new):
                return "new"
        return "broken"

    def check_outputs(self, command, complete=False):
        """That each output is the older one, none, or complete; complete where it must be. Their states."""
        states = {name: self.state_of(command, name) for name in command.outputs}
        allowed = {"new"} if complete else {"old", "absent", "new", "failed"}
        for name, state in states.items():
            self.section.check(state in allowed, f"{name} is {state}")
        return states

    def check_input(self):
        if self._state_of_input() != self.input_state:
            self.section.finding("the input was changed")
            self.input_state = self._state_of_input()

    def leftovers(self, command):
        return sorted({entry.name for entry in self.work.iterdir()} - set(command.outputs))

    def unfinished(self, command):
        """Leftovers that a run can go on with."""
        return [name for name in self.leftovers(command)
                if (self.work / name / "journal").is_file() and (self.work / name / "output").is_dir()]  # fmt: skip

    def check_resumed(self, command, what):
        """That a run goes on with what is unfinished, ends, and leaves nothing."""
        self.section.count("resumed")
        done = self.run(command.with_options("--resume"), restore=False)
        if self.section.check(done.returncode == 0, f"{what}: resumed, it ends with {done.returncode}: {done.stderr!r}"):
            self.check_outputs(command, complete=True)
        left = self.leftovers(command)
        self.section.check(not left, f"{what}: resumed, it leaves {left}")

    def check_code(self, code):
        if code is not None and code < 0:
            return self.section.finding(f"ended by {signal.Signals(-code).name}")
        return self.section.check(code in CODES.values(), f"exit code {code}")
