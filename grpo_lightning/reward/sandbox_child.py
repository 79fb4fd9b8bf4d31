"""The processes behind `reward=code`, run as a script that knows nothing of the trainer (no environment, no imports).

server      has the trainer's rights. Takes descriptors from its standard input and forks; it never reads a job, so
            that nothing of one answer's tests is left in the memory that the next answer is forked from.
supervisor  one per job: makes the namespaces, kills all that is in them when the trainer hangs up, says how it ended.
init        the first process of the namespace: makes the private file system, waits for the runner. All that the
            runner has started dies with it.
runner      no privileges, limits; runs the code.

An order is JSON: kind, features, memory, processes, files, seconds, and the number of descriptors that belong to the
runner. The descriptors are the supervisor's connection to the trainer, the job, and what the runner uses.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

USER = 60600  # the first of the users that runners become; not in /etc/passwd
USERS = 500

libc = ctypes.CDLL(None, use_errno=True)
NAMESPACES = {"network": 0x40000000, "processes": 0x20000000, "ipc": 0x08000000 | 0x04000000}  # NET, PID, IPC and UTS
NEWNS, NEWUSER = 0x00020000, 0x10000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = NOSUID | NODEV | 8 | 1024 | 2048  # noexec, noatime, nodiratime: a user namespace may not take them off
SET_PDEATHSIG, SET_SECCOMP, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 22, 36, 38
# System calls that get memory no limit counts (the first line), reach into processes or namespaces, or that no answer
# needs and much has gone wrong in. By machine: its number for the kernel, the numbers of the calls.
FORBIDDEN = {
    "x86_64": (0xC000003E, {
        "shmget": 29, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447, "mq_open": 240,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308, "mount": 165,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "add_key": 248,
        "request_key": 249, "keyctl": 250,
    }),
    "aarch64": (0xC00000B7, {
        "shmget": 194, "msgget": 186, "semget": 190, "memfd_create": 279, "memfd_secret": 447, "mq_open": 180,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "unshare": 97, "setns": 268, "mount": 40,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "io_uring_setup": 425, "add_key": 217,
        "request_key": 218, "keyctl": 219,
    }),
}  # fmt: skip
NEW_ROOT = "/proc"  # where the private root is mounted: a folder there always is and that nothing is taken from


def system(name: str, *arguments: Any) -> None:
    if libc[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def text_of(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def prctl(option: int, value: int) -> None:
    system("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    system("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


# --- server and supervisor ---


def serve() -> tuple[str, list[int]] | None:
    """Returns in a runner, with what it is to run; in the server only when the trainer is gone."""
    trainer = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # nobody else holds the connection: its end is to be noticed
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an init is immune only to signals that it does not handle
    os.environ.clear()
    gc.freeze()  # what is shared with the children is not collected, and so not copied, in them
    while True:
        message, descriptors, _, _ = socket.recv_fds(trainer, 4096, 8)
        if not message:
            return None
        if os.fork() == 0:
            trainer.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return supervise(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def supervise(order: dict[str, Any], descriptors: list[int]) -> tuple[str, list[int]]:
    """Returns in the runner only."""
    control = socket.socket(fileno=descriptors[0])
    folder = None
    try:
        prctl(SET_CHILD_SUBREAPER, 1)
        user = os.getuid()
        isolate(set(order["features"]))
        become = USER + os.getpid() % USERS if user == 0 else None
        if "mounts" not in order["features"]:
            folder = tempfile.mkdtemp(prefix="answer-")
            if become is not None:
                os.chown(folder, become, become)
        ready, ready_end = os.pipe()
        init = os.fork()
        if init == 0:
            control.detach()  # what this number stands for changes, and the object would close it
            return order["kind"], start(order, [*descriptors[1:], ready_end], become, folder)
        for descriptor in (*descriptors[1:], ready_end):
            os.close(descriptor)
        report = watch(control, init, ready)
        kill_descendants()
    except Exception as error:
        report = {"problem": text_of(error)}
    if folder is not None:
        remove(folder)
    control.sendall(json.dumps(report).encode())
    os._exit(0)


def isolate(features: set[str]) -> None:
    """The namespaces of this process and, for processes, of its children; the mounts follow in init."""
    flags = sum(flag for name, flag in NAMESPACES.items() if name in features)
    user, group = os.getuid(), os.getgid()
    if user != 0 and "user" in features:
        flags |= NEWUSER
    system("unshare", flags)
    if flags & NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def watch(control: socket.socket, init: int, ready: int) -> dict[str, Any]:
    """Wait for the end of init or for the trainer to hang up. Says how it ended, once everything is dead."""
    ended = os.pidfd_open(init)
    waiting = select.poll()
    for descriptor in (control.fileno(), ended, ready):
        waiting.register(descriptor, select.POLLIN)
    problem = b""
    while True:
        events = {descriptor for descriptor, _ in waiting.poll()}
        if ready in events:
            data = os.read(ready, 4096)
            problem += data
            if not data:
                waiting.unregister(ready)
        elif events:
            break
    if control.fileno() in events:
        os.kill(init, signal.SIGKILL)
    _, status = os.waitpid(init, 0)  # the end of an init is reported when all of its namespace is dead
    return {"problem": problem.decode(errors="replace")} if problem else {"exit": os.waitstatus_to_exitcode(status)}


def kill_descendants() -> None:
    """Only without a process namespace is there anything left; whoever has lost its parent is a child of this one."""
    for _ in range(1000):
        found, new = [], [os.getpid()]
        while new:
            process = new.pop()
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{process}/children") as file:
                children = [int(word) for word in file.read().split()]
                found += children
                new += children
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def remove(folder: str) -> None:
    """An answer may have taken away the rights to its own folders."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(os.path.join(path, name)):
                os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


# --- init ---


def start(order: dict[str, Any], descriptors: list[int], become: int | None, folder: str | None) -> list[int]:
    """Returns in the runner only, with its descriptors; init waits for it and ends with 0 where that ended with 0.

    The last of `descriptors` takes what goes wrong before the runner runs.
    """
    *descriptors, ready = keep(descriptors)
    try:
        prctl(SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if folder is None:
            private_root(order["files"])
            folder = "/tmp"
        os.chdir(folder)
        child = os.fork()
        if child == 0:
            drop(order, become)
    except Exception as error:
        os.write(ready, text_of(error).encode()[:1000])
        os._exit(1)
    if child == 0:
        os.close(ready)
        return descriptors
    os.closerange(0, 100)
    while True:
        process, status = os.wait()
        if process == child:
            os._exit(0 if status == 0 else 1)


def keep(descriptors: list[int]) -> list[int]:
    """Close all but these, which become 3, 4, ...; 0, 1 and 2 become /dev/null."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
    nothing = os.open("/dev/null", os.O_RDWR)
    for target in range(3):
        os.dup2(nothing, target)
    low = [os.dup2(descriptor, 3 + i, inheritable=False) for i, descriptor in enumerate(high)]
    os.closerange(3 + len(low), 1000)
    return low


def private_root(files: int) -> None:
    """A file system with nothing in it but Python and the system's libraries to read and a small /tmp to write."""
    system("unshare", NEWNS)
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", NEW_ROOT, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    programs = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
    python = [path for path in {sys.base_prefix, sys.base_exec_prefix} if not f"{path}/".startswith("/usr/")]
    for path in [*programs, *python, "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom"]:
        if not os.path.exists(path):
            continue
        inside = NEW_ROOT + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path) and path in programs:  # /bin -> usr/bin
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            open(inside, "x").close()
        mount(path, inside, None, BIND | REC)
        read_only(inside)
    os.mkdir(NEW_ROOT + "/tmp")
    mount("tmpfs", NEW_ROOT + "/tmp", "tmpfs", NOSUID | NODEV, f"size={files},nr_inodes=1000,mode=1777")
    read_only(NEW_ROOT)
    os.chroot(NEW_ROOT)  # in a changed root the kernel refuses to make a user namespace, and with it new rights


def read_only(path: str) -> None:
    mount(None, path, None, BIND | REMOUNT | RDONLY | NOSUID | (os.statvfs(path).f_flag & KEPT_FLAGS))


def drop(order: dict[str, Any], become: int | None) -> None:
    """First the user, then the limits (of that user), then no way back."""
    if become is not None:
        os.setgroups([])
        os.setresgid(become, become, become)
        os.setresuid(become, become, become)
        if 0 in os.getresuid():
            raise OSError("still root after setresuid")
    system("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    memory, files, seconds = order["memory"], order["files"], order["seconds"]
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, order["processes"]),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    prctl(SET_NO_NEW_PRIVS, 1)
    if "calls" in order["features"]:
        filter_calls()


def filter_calls() -> None:
    """A filter in the kernel's own language: FORBIDDEN, and all calls by another machine's numbers, fail with EPERM."""
    if os.uname().machine not in FORBIDDEN:
        raise OSError(f"not written for {os.uname().machine}")
    machine, calls = FORBIDDEN[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # operations; tests skip `yes` or `no` steps
    deny, allow = 0x00050001, 0x7FFF0000
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, deny)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # from there: x86's third set of calls
    for number in calls.values():
        steps += [(equal, 0, 1, number), (give, 0, 0, deny)]
    steps.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    system("prctl", SET_SECCOMP, ctypes.c_ulong(2), program, ctypes.c_ulong(0), ctypes.c_ulong(0))


def runner() -> Any:
    """sandbox_runner.py: this folder, whose modules are named like the standard library's, is not on the path."""
    spec = importlib.util.spec_from_file_location(
        "runner", os.path.join(os.path.dirname(__file__), "sandbox_runner.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run = runner().run  # loaded once, before the first fork
    work = serve()
    if work is not None:
        run(*work)
