"""Valkey or Redis servers for tests: on free ports of the loopback, without files that stay, killed in the end."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time

import pytest

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
LONG = 30  # seconds


def need():
    """Return the module valkey; skip the test without it, or without a server."""
    if PROGRAM is None:
        pytest.skip("neither valkey-server nor redis-server is installed here")
    return pytest.importorskip("valkey", exc_type=ImportError)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class Server:
    """A server that can be killed, stopped, and started again on the same port."""

    def __init__(self, folder, *options, tls=False):
        self.folder = folder
        self.options = options
        self.tls = tls
        self.port = self.bus = 0
        self.process = None
        folder.mkdir()

    def __enter__(self):
        for _ in range(5):  # somebody may take a port between its choice and its use
            self.port, self.bus = free_port(), free_port()
            with contextlib.suppress(ChildProcessError):
                self.start()
                return self
        pytest.fail((self.folder / "log").read_text())

    def __exit__(self, *exception):
        self.kill()

    def start(self):
        ports = ["--port", "0", "--tls-port", str(self.port)] if self.tls else ["--port", str(self.port)]
        if "--cluster-enabled" in self.options:
            ports += ["--cluster-port", str(self.bus)]
        command = [PROGRAM, *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder), *self.options]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(self.answers)
        except BaseException:
            self.kill()
            raise

    def answers(self):
        if self.process.poll() is not None:
            raise ChildProcessError(self.process.returncode)
        with contextlib.suppress(OSError):
            return bool(self.ask(b"PING"))
        return False

    def ask(self, command):
        """Return the beginning of what the server answers to a command; with TLS it hears nothing of it."""
        with socket.create_connection(("127.0.0.1", self.port), LONG) as connection:
            if self.tls:
                return b"connected"
            words = command.split()
            parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)]
            connection.sendall(b"".join(parts))
            return connection.recv(4096)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    @property
    def url(self):
        return f"{'valkeys' if self.tls else 'valkey'}://localhost:{self.port}/0"


@contextlib.contextmanager
def cluster(folder, *options, num_nodes=3):
    """Yield the servers of a cluster that has begun to work."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", *options)
        nodes = [stack.enter_context(Server(folder / f"node {i}", *options)) for i in range(num_nodes)]
        for i, node in enumerate(nodes):
            slots = range(i * 16384 // num_nodes, (i + 1) * 16384 // num_nodes)
            assert node.ask(b"CLUSTER ADDSLOTS " + b" ".join(b"%d" % slot for slot in slots)) == b"+OK\r\n"
        for node in nodes[1:]:
            assert nodes[0].ask(b"CLUSTER MEET 127.0.0.1 %d %d" % (node.port, node.bus)) == b"+OK\r\n"
        until(lambda: all(is_complete(node, num_nodes) for node in nodes))
        yield nodes


def is_complete(node, num_nodes):
    answer = node.ask(b"CLUSTER INFO")
    return b"cluster_state:ok" in answer and b"cluster_known_nodes:%d\r" % num_nodes in answer


def url_of(nodes):
    return "valkey+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
