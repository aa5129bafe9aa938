"""The power goes off at any moment: what was not synced is lost, in any combination.

The changes that a command makes are recorded (tests/campaign/libfaults.c). Then for every prefix of that
record the disk is made as it may be found after a crash, and each output must be the older one, none, or
complete; after the end of a command that has succeeded it must be complete. On some of these disks the command runs
once more and resumes: it must end well, and leave nothing but its outputs.

The model of a file system, weaker than ext4, XFS or Btrfs promise:

- A change of a directory (an entry made, renamed, exchanged, removed) is certain once that directory was
  synced after it. Until then it may be on the disk or not, whatever came before or after it: a rename may
  land although the creation of the file did not, and the other way around. A rename is one change, also
  between directories: it happens as a whole or not at all, is certain once one of them was synced, and
  carries its file with it.
- Data and size of a file are certain once the file was synced. Until then each write may land or not, or land
  up to a multiple of 512 bytes; so may a change of its size. What was never written reads as zeros.
- Syncing a file says nothing of its name, syncing a directory nothing of the files or directories in it.

Where no more than 10 changes are uncertain at a moment, all combinations of those that are lost are tried;
otherwise 1,000 at random (full run). A torn write counts as a lost one.
"""

import itertools
import shutil

from . import commands

EXCHANGE = 2  # RENAME_EXCHANGE
EVERY_SUBSET = 10
SECTOR = 512
RESUMED = 0.2  # of the moments


class Change:
    """One recorded call: HALFBYTE_FAULTS_RECORD."""

    def __init__(self, kind, path, path2, number, data):
        self.kind, self.path, self.path2, self.number, self.data = kind, path, path2, number, data


def read_record(path):
    content, changes, at = path.read_bytes(), [], 0
    while at < len(content):
        end = content.index(b"\n", at)
        kind, first, second, number, size = content[at:end].decode().split("\t")
        at = end + 1 + int(size)
        changes.append(Change(kind, first, second, int(number), content[end + 1 : at]))
    return changes


class File:
    def __init__(self, data=b""):
        self.data = bytearray(data)

    def write(self, offset, data):
        if len(self.data) < offset + len(data):
            self.data.extend(bytes(offset + len(data) - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def resize(self, size, grow_only=False):
        if size > len(self.data):
            self.data.extend(bytes(size - len(self.data)))
        elif not grow_only:
            del self.data[size:]

    def content(self):
        return bytes(self.data)


class Directory:
    def __init__(self):
        self.entries = {}

    def content(self):
        found = {}
        for name, node in self.entries.items():
            content = node.content()
            found[name] = None if isinstance(content, dict) else content
            if isinstance(content, dict):
                found |= {f"{name}/{below}": value for below, value in content.items()}
        return found


def directory_of(path):
    root = Directory()
    for entry in path.iterdir():
        root.entries[entry.name] = directory_of(entry) if entry.is_dir() else File(entry.read_bytes())
    return root


def write_directory(path, root):
    """Makes `path` what `root` is."""
    shutil.rmtree(path)
    path.mkdir()
    for name, node in root.entries.items():
        if isinstance(node, Directory):
            (path / name).mkdir()
            write_directory(path / name, node)
        else:
            (path / name).write_bytes(node.data)


class Steps:
    """The record as steps on nodes: which node each path means at a step is found by replaying all before it.

    A step is (what makes it certain once it is synced, what it does). Nodes are numbers, so that a disk with
    other content can be made for each crash."""

    def __init__(self, root_path, root, changes):
        self.root_path, self.nodes, self.start = str(root_path), [], []
        self.names = {}  # number of a directory -> its entries now
        self.steps = []
        self.root = self._add(root)
        for change in changes:
            self._step(change)

    def _add(self, node):
        number = len(self.nodes)
        self.nodes.append(type(node))
        self.start.append(bytes(node.data) if isinstance(node, File) else {})
        if isinstance(node, Directory):
            self.names[number] = {}
            for name, below in node.entries.items():
                self.names[number][name] = self.start[number][name] = self._add(below)
        return number

    def _find(self, path):
        """Number of the directory that holds `path`, last part of its name; or of the root itself."""
        below = path[len(self.root_path) :].strip("/")
        number, parts = self.root, below.split("/")
        for part in parts[:-1]:
            number = self.names[number][part]
        return number, parts[-1]

    def _node(self, path):
        directory, name = self._find(path)
        return self.names[directory][name] if name else directory

    def _rename(self, entries):
        """A step that sets entries: (directory, name, node or None) each."""
        for directory, name, node in entries:
            if node is None:
                self.names[directory].pop(name, None)
            else:
                self.names[directory][name] = node
        self.steps.append(({("names", directory) for directory, _, _ in entries}, ("entries", entries)))

    def _step(self, change):
        if not change.path.startswith(self.root_path):
            return
        kind = change.kind
        if kind == "sync":
            node = self._node(change.path)
            what = "data" if self.nodes[node] is File else "names"
            self.steps.append((set(), ("sync", (what, node))))
        elif kind in ("create", "mkdir"):
            directory, name = self._find(change.path)
            self._rename([(directory, name, self._add(File() if kind == "create" else Directory()))])
        elif kind in ("unlink", "rmdir"):
            directory, name = self._find(change.path)
            self._rename([(directory, name, None)])
        elif kind in ("rename", "renameat2", "link"):
            source, target = self._find(change.path), self._find(change.path2)
            node, other = self._node(change.path), self.names[target[0]].get(target[1])
            exchange = kind == "renameat2" and change.number & EXCHANGE
            left = node if kind == "link" else other if exchange else None
            self._rename([(*target, node), (*source, left)])
        elif kind in ("write", "truncate", "allocate"):
            node = self._node(change.path)
            self.steps.append(({("data", node)}, (kind, (node, change.number, change.data))))
        else:
            raise ValueError(f"a change of kind {kind}")

    def uncertain(self, end):
        """Of the first `end` steps those that a crash may undo."""
        synced, found = {}, []
        for i in range(end - 1, -1, -1):
            needs, (kind, what) = self.steps[i]
            if kind == "sync":
                synced[what] = True
            elif not any(need in synced for need in needs):
                found.append(i)
        return found[::-1]

    def disk(self, end, lost, torn):
        """The root after a crash: without the steps `lost`, of which write i lands up to byte torn(i)."""
        made = [File(start) if kind is File else Directory() for kind, start in zip(self.nodes, self.start)]
        for node, start in zip(made, self.start):
            if isinstance(node, Directory):
                node.entries = {name: made[number] for name, number in start.items()}
        for i in range(end):
            kind, what = self.steps[i][1]
            if i in lost and not (kind == "write" and torn(i)):
                continue
            if kind == "entries":
                for directory, name, node in what:
                    if node is None:
                        made[directory].entries.pop(name, None)
                    else:
                        made[directory].entries[name] = made[node]
            elif kind == "write":
                node, offset, data = what
                made[node].write(offset, data[: torn(i)] if i in lost else data)
            elif kind in ("truncate", "allocate"):
                made[what[0]].resize(what[1], grow_only=kind == "allocate")
        return made[self.root]


def subsets(section, uncertain, most):
    """Sets of lost steps."""
    if len(uncertain) <= EVERY_SUBSET and 2 ** len(uncertain) <= most:
        for count in range(len(uncertain) + 1):
            yield from (frozenset(lost) for lost in itertools.combinations(uncertain, count))
        return
    yield frozenset(uncertain)
    yield frozenset()
    for _ in range(most - 2):
        share = section.random.random()
        yield frozenset(i for i in uncertain if section.random.random() < share)


def _content(root, name):
    node = root.entries.get(name)
    return None if node is None else node.content()


def _accepts(command, name, old, new, content, complete):
    if content == new or (not complete and content == old):
        return True
    if content is None:
        return not complete and not command.keeps_older
    is_report = name.endswith(".json") and isinstance(content, bytes)
    return is_report and commands.report_of(content) == commands.report_of(new)


def _check_crashes(section, bench, command, steps, new, most):
    bad = 0
    for end in range(len(steps.steps) + 1):
        complete = end == len(steps.steps)
        resumes = command.can_resume and section.random.random() < RESUMED
        for lost in subsets(section, steps.uncertain(end), most):
            torn = {i: SECTOR * section.random.randrange(0, 8) for i in lost if section.random.random() < 0.2}
            root = steps.disk(end, lost, lambda i: torn.get(i, 0))
            section.count("crashes")
            for name in command.outputs:
                old = bench.old[command.name][name]
                if _accepts(command, name, old, new[name], _content(root, name), complete):
                    continue
                bad += 1
                if bad <= 3:
                    what = [steps.steps[i][1][:1] + tuple(steps.steps[i][1][1][:2]) for i in sorted(lost)]
                    section.finding(
                        f"{name} is broken by a crash after step {end} of {len(steps.steps)}, "
                        f"where these of its changes are lost: {what[:12]}"
                    )
            if resumes and not complete:
                resumes = False
                write_directory(bench.work, root)
                if all(bench.state_of(command, name) in ("old", "absent") for name in command.outputs):
                    bench.check_resumed(command, f"after step {end}")
    if bad > 3:
        section.finding(f"{bad} crashes break an output")


def check_command(section, bench, command, most):
    """Records the command, and breaks it off at every step, in up to `most` ways each."""
    record = bench.folder / "record"
    record.unlink(missing_ok=True)
    bench.restore(command)
    before = directory_of(bench.work)
    done = bench.run(command, restore=False, faults={"record": record})
    new = {output: commands.content_of(bench.work / output) for output in command.outputs}
    section.check(done.returncode == 0, f"ended with {done.returncode}")
    bench.check_outputs(command, complete=True)
    steps = Steps(bench.work, before, read_record(record))
    everything = steps.disk(len(steps.steps), frozenset(), lambda i: 0)
    for output in command.outputs:
        section.check(_content(everything, output) == new[output], f"{output} is not what was recorded")
    _check_crashes(section, bench, command, steps, new, most)


def run(section):
    if section.quick:
        section.limit = min(section.limit or 20, 20)
    with section.directory() as folder:
        bench = commands.Bench(section, folder)
        by_name = {command.name: command for command in bench.commands()}
        for name in section.cases(by_name):
            check_command(section, bench, by_name[name], 30 if section.quick else 2**EVERY_SUBSET)
