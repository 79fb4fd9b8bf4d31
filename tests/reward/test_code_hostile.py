"""reward=code against hostile answers: each scores 0 and leaves trainer, files and machine as they were."""

import os
import socket
import subprocess
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from tests.reward.code_tasks import SECRET, best, code, folders, function_rows, of_runners, processes, program_rows

# Bodies of f(x). What succeeds returns SECRET: a score of 1 shows that the defence has failed.
HOSTILE = {
    "fork bomb": "while True:\n    os.fork()",
    "fork bomb that waits": "for _ in range(1000):\n    if os.fork() == 0: time.sleep(60)\nreturn SECRET",
    "thread bomb": "for _ in range(1000): threading.Thread(target=time.sleep, args=(60,)).start()\nreturn SECRET",
    "memory bomb": "kept = []\nwhile True: kept.append(bytearray(10**7))",
    "memory at once": "bytearray(2**33); return SECRET",
    "shared memory": "return SECRET if ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0 else 0",
    "memory as a file": "os.memfd_create('kept'); return SECRET",
    "endless output": "while True: print('2' * 1000)",
    "endless errors": "while True: sys.stderr.write('2' * 1000)",
    "reading a file": "return int(open(VICTIM).read())",
    "reading through a link": "os.symlink(VICTIM, 'link'); return int(open('link').read())",
    "reading a folder": "return SECRET if os.listdir(os.path.dirname(VICTIM)) else 0",
    "reading the users": "return SECRET if open('/etc/passwd').read() else 0",
    "reading the environment": "return int(os.environ['THE_SECRET'])",
    "reading a process": "return SECRET if open(f'/proc/{os.getppid()}/environ', 'rb').read() else 0",
    "writing to a file": "open(VICTIM, 'w').write('overwritten'); return SECRET",
    "writing through a link": "os.symlink(VICTIM, 'link'); open('link', 'w').write('overwritten'); return SECRET",
    "removing a file": "os.remove(VICTIM); return SECRET",
    "writing to the root": "open('/file', 'w').write('x'); return SECRET",
    "writing to Python": "open(os.__file__, 'a').write('x'); return SECRET",
    "the network": "return int(socket.create_connection(('127.0.0.1', PORT), 2).recv(10))",
    "the net outside": "socket.create_connection(('1.1.1.1', 53), 2); return SECRET",
    "an abstract socket": (
        "peer = socket.socket(socket.AF_UNIX); peer.connect('\\0' + NAME); return int(peer.recv(10))"
    ),
    "killing the parent": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.2); return 0",
    "killing everything": "os.kill(-1, signal.SIGKILL); return 0",
    "killing the trainer": "os.kill(TRAINER, signal.SIGKILL); return SECRET",
    "killing all numbers": "for p in range(2, 99999):\n    try: os.kill(p, 9)\n    except OSError: pass\nreturn 0",
    "killing the group": "os.killpg(0, signal.SIGKILL); return 0",
    "signals to the group": "for s in range(1, 32): signal.signal(s, 1) if s not in (9, 19) else 0\nos.kill(0, 15)",
    "stopping itself": "os.kill(os.getpid(), signal.SIGSTOP); return 0",
    "_exit": "os._exit(0)",
    "exit": "sys.exit(0)",
    "raising an exit": "raise SystemExit(0)",
    "raising a group": "raise BaseExceptionGroup('', [SystemExit(0)])",
    "patching asserts": "builtins.AssertionError = type('Never', (Exception,), {}); return 0",
    "patching the tests": "sys.modules['tests'] = sys.modules['__main__']; sys.modules['__main__'].check = print",
    "patching the protocol": (
        "m = sys.modules['__main__']; m.send = lambda c, v: c.sendall(b'\\0\\0\\0\\6passed'); return 0"
    ),
    "always equal": "return type('Same', (), {'__eq__': lambda *_: True, '__ne__': lambda *_: False})()",
    "an int that is always equal": "return type('Same', (int,), {'__eq__': lambda *_: True, '__hash__': None})(3)",
    "a text that is always equal": "return type('Same', (str,), {'__eq__': lambda *_: True})('x')",
    "looking for the tests": (
        "texts = [t for o in gc.get_objects() for t in gc.get_referents(o) if isinstance(t, str)]\n"
        "return SECRET * any(''.join(['assert', ' candi', 'date']) in t or t.strip() == str(SECRET) for t in texts)"
    ),
    "looking up the frames": (
        "frame = sys._getframe()\nwhile frame:\n    if 'candidate' in frame.f_locals: return SECRET\n"
        "    frame = frame.f_back\nreturn 0"
    ),
    "printing success": "print('passed'); print(SECRET - 1); return None",
    "writing to all descriptors": (
        "for d in range(64):\n    try: os.write(d, b'passed')\n    except OSError: pass\nos._exit(0)"
    ),
    "answering before": (
        "for d in range(3, 64):\n    try: os.write(d, b'\\0\\0\\0\\x10{\"value\": true}  ' * 9)\n"
        "    except OSError: pass\nreturn True"
    ),
    "sleeping": "time.sleep(60); return SECRET",
    "sleeping with signals blocked": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(60)"
    ),
    "spinning": "while True: pass",
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nreturn 0"
    ),
    "filling the disk": (
        "for i in range(100): open(str(i), 'wb', 0).write(bytes(2**20))\nreturn SECRET"
    ),
    "one big file": "f = open('f', 'wb')\nfor _ in range(99): f.write(bytes(2**20))\nf.flush(); return SECRET",
    "many files": "for i in range(5000): open(str(i), 'w').close()\nreturn SECRET",
    "many descriptors": "kept = [os.dup(1) for _ in range(1000)]; return SECRET",
    "a huge number": "return 9 ** 9 ** 9",
    "a long number": "return 1 << 10**8",
    "a long text": "return 'x' * 10**8",
    "a deep list": "x = []\nfor _ in range(10**5): x = [x]\nreturn x",
    "a deep recursion": "sys.setrecursionlimit(10**9)\ng = lambda n: [g(n + 1)]\nreturn sorted([1, 2], key=g)",
    "closing descriptors": "os.closerange(0, 64); return 0",
    "removing its folder": "import shutil; shutil.rmtree(os.getcwd(), True); return 0",
    "locking its folder": "os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0); return 0",
    "a bad address": "ctypes.string_at(0); return SECRET",
    "becoming root": "os.setuid(0); return SECRET",
    "new rights": "return SECRET if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0",
    "mounting": "return SECRET if ctypes.CDLL(None).mount(b'/', b'/tmp', None, 4096, None) == 0 else 0",
    "another root": "os.mkdir('d'); os.chroot('d'); return SECRET",
    "tracing the parent": "return SECRET if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else 0",
    "raising its limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (99, 99)); return SECRET",
}  # fmt: skip
IMPORTS = "import builtins, ctypes, gc, os, signal, socket, sys, threading, time\n"


class Victims:
    """A file, a variable, two servers and a process that answers may try to get at."""

    def __init__(self, folder: Path):
        folder.chmod(0o755)
        self.file = folder / "secret"
        self.file.write_text(str(SECRET))
        self.file.chmod(0o666)
        os.environ["THE_SECRET"] = str(SECRET)
        self.bystander = subprocess.Popen(["sleep", "600"])
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.name = f"secret-{os.getpid()}"
        self.servers[1].bind("\0" + self.name)
        self.servers[1].listen()
        self.visits = 0
        for server in self.servers:
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            self.visits += 1
            with peer:
                peer.sendall(str(SECRET).encode())

    def answer(self, body: str) -> str:
        for name, value in {
            "VICTIM": repr(str(self.file)),
            "PORT": str(self.servers[0].getsockname()[1]),
            "NAME": repr(self.name),
            "TRAINER": str(os.getpid()),
        }.items():
            body = body.replace(name, value)
        # the secret is not in the answer as such, so that looking for it finds the tests or nothing
        return IMPORTS + f"SECRET = {SECRET // 4} * 4\ndef f(x):\n" + textwrap.indent(body, "    ") + "\n"

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.bystander.kill()
        self.bystander.wait()
        del os.environ["THE_SECRET"]


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    victims = Victims(tmp_path_factory.mktemp("victim"))
    yield victims
    victims.close()


@pytest.fixture(scope="module")
def component():
    component = code(timeout=2.0, workers=6, memory=128, processes=4, output=4)
    yield component
    component.close()


@pytest.fixture(scope="module")
def outcome(component, victims):
    """The scores of all hostile answers, in both forms; run at the same time, because many take all of their time."""
    before = folders(), sorted(os.listdir(tempfile.gettempdir()))
    assert component(function_rows([victims.answer("return 0")])) == [0.0]
    server = component._sandbox._server.pid
    answers = [victims.answer(body) for body in HOSTILE.values()]
    functions = component(function_rows(answers))
    programs = component(program_rows([answer + "print(f(int(input())))\n" for answer in answers]))
    assert component._sandbox._server.pid == server
    assert folders() == before[0]
    return dict(zip(HOSTILE, zip(functions, programs, strict=True), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_scores_0(outcome, name):
    assert outcome[name] == (0.0, 0.0)


def test_the_machine_is_as_it_was(outcome, component, victims):
    assert victims.file.read_text() == str(SECRET)
    assert os.listdir(victims.file.parent) == ["secret"]
    assert victims.bystander.poll() is None
    assert victims.visits == 0
    assert processes(component) == []
    assert of_runners() == []


def test_an_answer_that_knew_the_secret_would_score(component, victims):
    answer = victims.answer("return SECRET")
    assert component(function_rows([answer])) == [1.0]
    assert component(program_rows([answer + "print(f(int(input())))"])) == [1.0]


@pytest.mark.parametrize("features", [("user",), ("user", "processes"), ("user", "network", "processes", "calls")])
def test_with_less_isolation_nothing_stays_either(victims, features):
    component = best(features, timeout=2.0, workers=6, memory=128, processes=4, output=4)
    before = folders()
    names = [
        "fork bomb", "fork bomb that waits", "a daemon", "locking its folder", "removing its folder", "sleeping",
        "killing the parent", "killing the trainer", "killing everything", "filling the disk", "_exit", "always equal",
        "becoming root", "new rights", "memory bomb", "endless output",
    ]  # fmt: skip
    if os.getuid() != 0:  # without a user of its own an answer may signal whatever this user may
        names = [name for name in names if not name.startswith("killing") and name != "becoming root"]
    if "calls" not in features:
        names.remove("new rights")  # a user namespace can be made, in which nothing outside is its own
    if "mounts" not in features:
        names.remove("filling the disk")  # bounded by file only
    try:
        assert component(function_rows([victims.answer("return SECRET")])) == [1.0]
        assert component(function_rows([victims.answer(HOSTILE[name]) for name in names])) == [0.0] * len(names)
        assert processes(component) == []
        assert of_runners() == []
        assert folders() == before
    finally:
        component.close()
