"""Many processes share the cache of compiled kernels: cold, damaged, full, read-only, while some are killed.

The processes are tests/stub/cuda_child with the stand-ins for driver and NVRTC: what they print follows from
the kernels that they got. Whatever happens to the cache, every process that is not killed ends well and
prints what it prints without a cache. Where the lock works, no kernel is compiled twice. What is temporary is
left by killed processes only, and goes when it is old. Then single processes: each byte of an entry damaged,
each call of libc on the cache failing, the holder of the lock stopped.
"""

import errno
import os
import shutil
import signal
import stat
import subprocess
import time

from .base import text_of

KERNELS = list("abcdefgh")
OLD = 2 * 3600  # seconds: more than cubin_cache.cc lets pass before what is temporary goes
NOBODY = 65534
LOCK_WAIT = 10  # seconds that a process waits for the lock

# What becomes of the cache before the processes of a round start, or while they run.
STATES = [
    "cold", "warm", "flipped", "truncated", "emptied", "swapped", "grown", "killed", "deleted while used",
    "damaged while used", "read-only", "full", "no locks", "other times",
]  # fmt: skip
# Errors of any call on the cache: none may be more than a miss.
ERRORS = "ENOENT ESTALE EBUSY EIO EACCES ENOSPC EDQUOT EROFS ENOMEM EMFILE EINTR ENOLCK EINVAL"


class Cache:
    def __init__(self, section, folder):
        self.section, self.folder = section, folder
        self.path, self.log = folder / "cache", folder / "compilations"
        tests = section.build / "tests"
        self.child = tests / "cuda_child"
        self.library = tests / "campaign" / "libfaults.so"
        self.environment = {
            "HALFBYTE_CUDA_DRIVER": str(tests / "libstub_cuda.so"),
            "HALFBYTE_NVRTC": str(tests / "libstub_nvrtc.so"),
            "HALFBYTE_CACHE_DIR": str(self.path),
            "STUB_LOG": str(self.log),
        }
        done = self._run(KERNELS, HALFBYTE_CACHE_DIR="")
        if done.returncode != 0:
            raise RuntimeError(f"{self.child}: {text_of(done.stdout)}{text_of(done.stderr)}")
        self.expected = done.stdout.splitlines()
        self.user = NOBODY if os.geteuid() == 0 and self._works_as(NOBODY) else None

    def _works_as(self, user):
        environment = self.environment | {"HALFBYTE_CACHE_DIR": ""}
        command = [self.child, "kernels", "1", "a"]
        return subprocess.run(command, env=environment, capture_output=True, user=user).returncode == 0

    def _run(self, kernels, **environment):
        command = [self.child, "kernels", "1", *kernels]
        return subprocess.run(command, env=self.environment | environment, capture_output=True, timeout=60)

    def right(self, kernels):
        return [self.expected[KERNELS.index(kernel)] for kernel in kernels]

    def check(self, done, what, kernels=KERNELS):
        """That a run has ended well and got the right kernels."""
        output = done.stdout.splitlines()
        self.section.check(
            done.returncode == 0 and output == self.right(kernels),
            f"{what}: exit code {done.returncode}, {text_of(done.stdout)!r} {text_of(done.stderr)!r}",
        )

    def run(self, what, kernels=KERNELS, **environment):
        self.check(self._run(kernels, **environment), what, kernels)

    def faulty(self, what, kernels=KERNELS, **faults):
        """A run whose calls on the cache fail. The lines of its log."""
        log = self.folder / "calls"
        log.unlink(missing_ok=True)
        self.run(what, kernels, **self.faults(HALFBYTE_FAULTS_LOG=log, **faults))
        return [line.split(" ", 2) for line in log.read_text().splitlines()]

    def faults(self, **variables):
        preload = {"LD_PRELOAD": str(self.library), "HALFBYTE_FAULTS_UNDER": str(self.path)}
        return preload | {name: str(value) for name, value in variables.items()}

    def lacking(self, kinds, error):
        """As on a disk where all calls of these kinds fail."""
        return self.faults(HALFBYTE_FAULTS_LACKS=" ".join(f"{kind} {error}" for kind in kinds.split()))

    def entries(self):
        return sorted(self.path.glob("*.cubin")) if self.path.exists() else []

    def temporary(self):
        return sorted(path for pattern in ["*.tmp", "*.lock"] for path in self.path.glob(pattern))

    def compilations(self):
        """Kernel -> how often it was compiled since the last call."""
        counts = {}
        if self.log.exists():
            for line in self.log.read_text().splitlines():
                if line.startswith("compile "):
                    counts[line] = counts.get(line, 0) + 1
            self.log.unlink()
        return counts

    def empty(self):
        shutil.rmtree(self.path, ignore_errors=True)

    def fill(self):
        self.empty()
        self.run("filling the cache")
        self.compilations()


def _damage(random, path, how, others):
    try:
        content = bytearray(path.read_bytes())
        if how == "flipped":
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        elif how == "truncated":
            del content[random.randrange(len(content)) :]
        elif how == "emptied":
            content.clear()
        elif how == "swapped":
            content = random.choice([other for other in others if other != path]).read_bytes()
        elif how == "grown":
            content += bytes(random.randrange(1, 100))
        path.write_bytes(content)
        path.chmod(0o600)
    except (FileNotFoundError, ValueError, IndexError):  # a process has replaced it in the meantime
        pass


def _start(cache, number, slow_ms, user=None, **environment):
    environment = cache.environment | {"STUB_NVRTC_SLEEP_MS": str(slow_ms)} | environment
    options = {"user": user, "group": user} if user is not None else {}
    return [
        subprocess.Popen([cache.child, "kernels", "1", *KERNELS], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **options)
        for _ in range(number)
    ]  # fmt: skip


def _prepare(cache, state, random):
    if state in ("cold", "killed"):
        cache.empty()
        return
    cache.fill()
    entries = cache.entries()
    for path in entries:
        if state in ("flipped", "truncated", "emptied", "swapped", "grown"):
            _damage(random, path, state, entries)
    if state == "full":
        cache.empty()
        cache.path.mkdir(mode=0o700)
    if state == "read-only":
        for path in entries[::2]:
            path.unlink()
        if cache.user is not None:
            for path in [cache.path, *cache.entries()]:
                os.chown(path, cache.user, cache.user)
        cache.path.chmod(0o500)
    if state == "other times":
        for i, path in enumerate(entries):
            when = time.time() + (i - len(entries) // 2) * 86400 * 365
            os.utime(path, (when, when))
            if i % 2:
                path.unlink()


# Kills, deletes or damages while they run.
def _meddle(cache, state, processes, random):
    killed = []
    if state == "killed":
        victims = processes[::2]
        random.shuffle(victims)
        for process in victims:
            time.sleep(random.random() * 0.003)
            if process.poll() is None:
                process.kill()
                killed.append(process)
    while state.endswith("while used") and any(process.poll() is None for process in processes):
        for path in cache.entries() + cache.temporary():
            if random.random() < 0.3:
                if state.startswith("deleted"):
                    path.unlink(missing_ok=True)
                else:
                    _damage(random, path, random.choice(["flipped", "truncated", "emptied"]), cache.entries())
        time.sleep(0.002)
    return killed


def _pid_of(temporary):
    """Of HASH.PID-THREAD-RANDOM.tmp."""
    return int(temporary.name[33:].split("-")[0])


def _round(section, cache, state, num_processes):
    random = section.random
    _prepare(cache, state, random)
    environment = {}
    if state == "full":
        kinds = "write create mkdir fallocate truncate link rename"
        environment = cache.lacking(kinds, errno.ENOSPC)
    elif state == "no locks":
        cache.empty()
        environment = cache.lacking("lock", errno.ENOLCK)
    user = cache.user if state == "read-only" else None
    if user is not None:
        cache.log.touch()
        os.chown(cache.log, user, user)
    processes = _start(cache, num_processes, random.choice([0, 1, 5]), user, **environment)
    killed = _meddle(cache, state, processes, random)
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        section.count("processes")
        if process in killed and process.returncode == -signal.SIGKILL:
            section.count("killed")
            continue
        done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        cache.check(done, f"process {process.pid}")
    if cache.path.exists():
        cache.path.chmod(0o700)
        if user is not None:
            cache.empty()
    most = max(cache.compilations().values(), default=0)
    if state in ("cold", "warm", "flipped", "truncated", "emptied", "swapped", "grown", "other times"):
        allowed = 0 if state == "warm" else 1
        section.check(most <= allowed, f"a kernel was compiled {most} times")
    elif state == "killed":
        what = f"a kernel was compiled {most} times, {len(killed)} processes were killed"
        section.check(most <= 1 + len(killed), what)
    survivors = {process.pid for process in processes if process not in killed}
    if cache.path.exists() and state not in ("deleted while used", "damaged while used"):
        by_survivors = [path.name for path in cache.path.glob("*.tmp") if _pid_of(path) in survivors]
        section.check(not by_survivors, f"processes that were not killed leave {by_survivors}")
    _check_old_ones_go(section, cache)


def _check_old_ones_go(section, cache):
    if not cache.path.exists() or not cache.temporary():
        return
    when = time.time() - OLD
    old = cache.temporary()
    for path in old:
        os.utime(path, (when, when))
    for path in cache.entries()[:1]:
        path.unlink()
    cache.run("the next process")  # stores at least one entry, and so cleans
    if cache.compilations():
        left = [path.name for path in old if path.exists()]
        section.check(not left, f"{left} are {OLD} s old and were not removed")


# One entry, damaged at each of its bytes: always a miss, and repaired.
def _damaged_entries(section, cache):
    cache.empty()
    cache.run("filling the cache", ["a"])
    (entry,) = cache.entries()
    content = entry.read_bytes()
    names = [f"{how} at {at}" for at in range(len(content)) for how in ["entry cut", "entry flipped"]]
    for name in section.cases(section.sample(names, 120)):
        at = int(name.split()[-1])
        damaged = bytearray(content)
        if name.startswith("entry cut"):
            del damaged[at:]
        else:
            damaged[at] ^= 1 << section.random.randrange(8)
        entry.write_bytes(damaged)
        cache.compilations()
        cache.run("with a damaged entry", ["a"])
        section.check(len(cache.compilations()) == 1, "the damaged entry was not a miss")
        section.check(entry.read_bytes() == content, "the entry was not repaired")
        section.count("damaged entries")


def _failing_calls(section, cache):
    names = []
    for state in ["cold", "warm"]:
        cache.empty()
        if state == "warm":
            cache.run("filling the cache", ["a"])
        for number, kind, _ in cache.faulty("undisturbed", ["a"]):
            names += [f"call {number} {kind} {error} {state}" for error in ERRORS.split()]
            names += [f"call {number} {kind} short {state}"] * (kind in ("read", "write"))
    for name in section.cases(section.sample(names, 250)):
        _, number, kind, error, state = name.split()
        cache.empty()
        if state == "warm":
            cache.run("filling the cache", ["a"])
        what = "short 1" if error == "short" else f"error {getattr(errno, error)}"
        cache.faulty("with a failing call", ["a"], HALFBYTE_FAULTS_AT=number, HALFBYTE_FAULTS_DO=what)
        section.count("failing calls")
        if cache.path.exists() and kind != "unlink":
            left = [path.name for path in cache.path.glob("*.tmp")]
            section.check(not left, f"leaves {left}")
        cache.run("afterwards", ["a"])


def _directories(section, cache):
    """What is there instead of a directory that may be used: no cache then, and nothing is written there."""
    other = cache.folder / "other"
    other.mkdir(exist_ok=True)
    made = {
        "a file": lambda: cache.path.write_bytes(b""),
        "a link": lambda: cache.path.symlink_to(other),
        "a dangling link": lambda: cache.path.symlink_to(cache.folder / "nothing"),
        "writable by others": lambda: (cache.path.mkdir(), cache.path.chmod(0o777)),
        "writable by the group": lambda: (cache.path.mkdir(), cache.path.chmod(0o770)),
        "a FIFO": lambda: os.mkfifo(cache.path),
    }
    if os.geteuid() == 0:
        made["of another user"] = lambda: (cache.path.mkdir(0o700), os.chown(cache.path, NOBODY, NOBODY))
    for name in section.cases(f"cache is {what}" for what in made):
        cache.empty()
        cache.path.unlink(missing_ok=True)
        made[name.removeprefix("cache is ")]()
        cache.run("a process")
        kept = cache.path.lstat()
        inside = os.listdir(cache.path) if stat.S_ISDIR(kept.st_mode) else os.listdir(other)
        section.check(not inside, f"{inside} were written there")
        section.check(not (cache.folder / "nothing").exists(), "the link was followed")
        if stat.S_ISDIR(kept.st_mode):
            cache.empty()
        else:
            cache.path.unlink()


class StoppedHolder:
    """A process that has the lock and is stopped; others wait for it for a while and go on. Started
    first, seen to last."""

    def __init__(self, section, folder):
        folder.mkdir()
        self.cache = Cache(section, folder)
        calls = self.cache.faulty("undisturbed", ["a"])
        self.cache.empty()
        self.cache.compilations()
        number = next(number for number, kind, _ in calls if kind == "lock")
        stop = self.cache.faults(HALFBYTE_FAULTS_AT=number, HALFBYTE_FAULTS_DO=f"after {int(signal.SIGSTOP)}")
        command = [self.cache.child, "kernels", "1", "a"]
        self.holder = subprocess.Popen(command, env=self.cache.environment | stop, stdout=subprocess.PIPE)
        os.waitpid(self.holder.pid, os.WUNTRACED)
        self.start = time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.waiting = [subprocess.Popen(command, env=self.cache.environment, **pipes) for _ in range(4)]

    def kill(self):
        for process in [self.holder, *self.waiting]:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def end(self):
        for process in self.waiting:
            stdout, stderr = process.communicate(timeout=4 * LOCK_WAIT)
            done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
            self.cache.check(done, "a process that waits", ["a"])
        self.cache.run("a later one", ["a"])  # finds the entry
        os.kill(self.holder.pid, signal.SIGCONT)
        stdout, _ = self.holder.communicate(timeout=60)
        done = subprocess.CompletedProcess(self.holder.args, self.holder.returncode, stdout, b"")
        self.cache.check(done, "the holder", ["a"])


def run(section):
    if section.quick:
        section.limit = min(section.limit or 28, 28)
    num_processes, num_rounds = (16, len(STATES)) if section.quick else (64, 100)
    with section.directory() as name:
        folder = type(section.build)(name)
        folder.chmod(0o755)
        stopped = StoppedHolder(section, folder / "stopped")
        try:
            cache = Cache(section, folder)
            _directories(section, cache)
            _failing_calls(section, cache)
            _damaged_entries(section, cache)
            for case in section.cases(f"round {i}, {STATES[i % len(STATES)]}" for i in range(num_rounds)):
                _round(section, cache, case.split(", ")[1], num_processes)
            for _ in section.cases(["the holder of the lock is stopped"]):
                stopped.end()
        finally:
            stopped.kill()
