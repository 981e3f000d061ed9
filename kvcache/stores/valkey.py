"""Keep values in Valkey or Redis, one server or a cluster, which many machines may share.

The server has a value under its name: the prefix and the key, as bytes. Reading a value renews its time to live.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcache import errors
from kvcache.arguments import INT64_MAX, check_path, integer, spelt, to_float
from kvcache.stores.calls import encode_key, view_of

DEFAULT_PORT = 6379


@spelt
class ValkeyStore(MutableMapping[str, bytes]):
    """A mapping of str to bytes in Valkey, or in Redis from 6.2: one server, or a cluster.

    Needs the package valkey: ``pip install 'kvcache[valkey]'``. Calls for many keys are pipelined. Nothing is connected
    before the first call, and a call that fails raises an error of ``valkey.exceptions``; a later one connects again.
    Any number of threads and processes may share it.

    Parameters
    ----------
    url : str
        ``valkey://HOST:PORT/DATABASE`` is one server, ``valkey+cluster://HOST:PORT`` a cluster, of which some nodes are
        named: ``valkey+cluster://HOST:PORT,HOST:PORT``. ``valkeys`` in place of ``valkey`` takes TLS, and checks the
        server's certificate and name. ``redis`` and ``rediss`` are the same as ``valkey`` and ``valkeys``.
        ``USER:PASSWORD@`` may precede the host, each percent-encoded.
    ttl : float or None, default 86,400
        Seconds after which a value goes that was neither read nor written. None keeps it until the server evicts it.
    timeout : float, default 1
        Seconds that a call waits to connect, and for the server to send or take anything.
    prefix : str, default "kvcache:"
        What keys begin with on the server. Others are left alone.
    ca_certs : path, optional
        The certificates that sign the server's, if not those that the system trusts.
    certfile, keyfile : path, optional
        The certificate and key of this client, if the server asks for them.

    Raises
    ------
    ValueError
        If the address or an argument is unsuitable.
    TypeError
        If an argument has the wrong type, a key is no str, or a value no bytes.
    ImportError
        If the package valkey is not installed.

    Examples
    --------
    >>> store = ValkeyStore("valkey+cluster://10.0.0.1:6379,10.0.0.2:6379", ttl=3600)  # doctest: +SKIP
    >>> store["a key"] = b"a value"  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        *,
        ttl: float | None = 86_400,
        timeout: float = 1,
        prefix: str = "kvcache:",
        ca_certs: str | os.PathLike[str] | None = None,
        certfile: str | os.PathLike[str] | None = None,
        keyfile: str | os.PathLike[str] | None = None,
    ) -> None:
        if ttl is not None and not 0.001 <= to_float(ttl, "ttl") <= 1e9:
            raise ValueError(f"ttl={ttl}: must be None, or from 0.001 to 1e9 seconds")
        if not 0 < to_float(timeout, "timeout") <= 1e6:
            raise ValueError(f"timeout={timeout}: must be above 0 and at most 1e6 seconds")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix={errors.shown(prefix)}: a str is needed, not {type(prefix).__name__}")
        self.ttl = ttl
        self.timeout = timeout
        self.prefix = prefix
        self._is_cluster, self._tls, self._nodes, self._options = _parse(url)
        files = {"ssl_ca_certs": ca_certs, "ssl_certfile": certfile, "ssl_keyfile": keyfile}
        given = {name: path for name, path in files.items() if path is not None}
        for name, path in given.items():
            check_path(path, name.removeprefix("ssl_"))
        if self._tls:
            # They are read anew for each connection, when the process may have changed its folder.
            self._options |= {name: str(Path(os.fsdecode(path)).absolute()) for name, path in given.items()}
        elif given:
            raise ValueError(f"{shown(url)} takes no TLS: certificates need valkeys:// or valkeys+cluster://")
        self._url = shown(url)
        self._client_and_process: tuple[Any, int] | None = None  # None: the next call makes one
        import_valkey()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client_and_process": None}

    def __repr__(self) -> str:
        return f"ValkeyStore({self._url!r}, ttl={self.ttl}, timeout={self.timeout}, prefix={self.prefix!r})"

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """Yield the client; another one in a forked child, because locks of this one may be held for ever there.

        After an error of a cluster the next call makes another client, which asks the nodes of the address again who
        has what. The old client forgets nodes that failed, and once it has forgotten all, it learns of no others.
        """
        found = self._client_and_process  # another thread's call may end with an error of its own meanwhile
        if found is None or found[1] != os.getpid():
            found = self._client_and_process = self._connect(), os.getpid()
        try:
            yield found[0]
        except Exception:
            if self._is_cluster:
                self._client_and_process = None
            raise

    def _connect(self) -> Any:
        options = self._options | {"socket_timeout": self.timeout, "socket_connect_timeout": self.timeout}
        valkey, (host, port) = import_valkey(), self._nodes[0]
        if not self._is_cluster:
            return valkey.Valkey(host, port, ssl=self._tls, ssl_check_hostname=self._tls, **options)
        # A cluster's client drops ssl_check_hostname, unless its pools of connections bring it.
        checks = {"ssl_check_hostname": True} if self._tls else {}
        return valkey.ValkeyCluster(
            url=f"{'valkeys' if self._tls else 'valkey'}://{f'[{host}]' if ':' in host else host}:{port}",
            startup_nodes=[valkey.cluster.ClusterNode(*node) for node in self._nodes[1:]],
            connection_pool_class=partial(valkey.ConnectionPool, **checks),
            cluster_error_retry_attempts=1,  # finds a replica that was promoted; more would only prolong a failure
            **options,
        )

    def close(self) -> None:
        """Close all connections; a later call opens them again."""
        found, self._client_and_process = self._client_and_process, None
        if found is not None and found[1] == os.getpid():
            found[0].close()

    # ---- one value

    def __getitem__(self, key: str) -> bytes:
        with self._client() as client:
            value = self._get(client, self._name(key))
        if value is None:
            raise KeyError(key)
        return bytes(value)

    def __setitem__(self, key: str, value: bytes) -> None:
        with self._client() as client:
            self._set(client, self._name(key), value)

    def __delitem__(self, key: str) -> None:
        with self._client() as client:
            num_removed = client.unlink(self._name(key))
        if not num_removed:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        with self._client() as client:
            return bool(client.exists(self._name(key)))

    # ---- many

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the values that there are of these keys, in one round trip to each node."""
        keys = list(keys)
        with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                self._get(pipeline, self._name(key))
            found = _execute(pipeline)
        return {key: value for key, value in zip(keys, found, strict=True) if value is not None}

    def read_many(self, keys: Iterable[str], most: int) -> dict[str, bytes]:
        """Return the values that there are of these keys, as `get_many` does; of longer ones the first `most` bytes.

        An empty value counts as none.
        """
        keys, most = list(keys), integer(most, "most", 1, INT64_MAX)
        with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(self._name(key), 0, most - 1)
                if self.ttl is not None:
                    pipeline.pexpire(self._name(key), int(1000 * self.ttl))
            found = _execute(pipeline)[:: 1 if self.ttl is None else 2]  # every other result is that of pexpire
        return {key: value for key, value in zip(keys, found, strict=True) if value}

    def set_many(self, items: Mapping[str, bytes]) -> None:
        """Store values, in one round trip to each node. An error leaves some of them stored."""
        with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for key, value in items.items():
                self._set(pipeline, self._name(key), value)
            _execute(pipeline)

    def __iter__(self) -> Iterator[str]:
        first = len(self._name(""))
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._name("")) + b"*"
        with self._client() as client:
            names = set(client.scan_iter(match=pattern, count=1000))  # it may repeat some
        for name in names:
            yield name[first:].decode(errors="surrogatepass")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all values whose keys begin with the prefix."""
        keys = list(self)
        for begin in range(0, len(keys), 1000):
            with self._client() as client:
                pipeline = client.pipeline(transaction=False)
                for key in keys[begin : begin + 1000]:
                    pipeline.unlink(self._name(key))
                _execute(pipeline)

    # ---- commands

    def _name(self, key: str) -> bytes:
        return encode_key(self.prefix) + encode_key(key)

    def _get(self, client: Any, name: bytes) -> Any:
        return client.get(name) if self.ttl is None else client.getex(name, px=int(1000 * self.ttl))

    def _set(self, client: Any, name: bytes, value: bytes) -> Any:
        data = value if isinstance(value, bytes) else bytes(view_of(value))
        return client.set(name, data, px=None if self.ttl is None else int(1000 * self.ttl))


def _execute(pipeline: Any) -> list[Any]:
    """Return the results of a pipeline, or raise its first error, which would else quote the whole command, rows too.

    A cluster's pipeline would try failed commands again, one by one. Each would wait for a node that does not answer.
    """
    if hasattr(pipeline, "send_cluster_commands"):
        results = pipeline.send_cluster_commands(pipeline.command_stack, raise_on_error=False, allow_redirections=False)
    else:
        results = pipeline.execute(raise_on_error=False)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


def import_valkey() -> Any:
    """Return the module valkey; raise ImportError if it is not installed."""
    try:
        importlib.import_module("valkey.cluster")
        return importlib.import_module("valkey")
    except ImportError as error:
        raise ImportError("the package valkey is needed for this store: pip install 'kvcache[valkey]'") from error


def shown(url: str) -> str:
    """Return an address without its password; raise TypeError if it is no str."""
    if not isinstance(url, str):
        raise TypeError(f"url={errors.shown(url)}: an address is needed, as a str")
    return re.sub(r"^(?!dir:)((?:[^:/@]*://)?+[^:@]*:).*@", r"\1***@", url, flags=re.DOTALL)


def check_login(url: str) -> None:
    """Raise ValueError if "@" stands behind the host: what is taken for the host may be part of a password.

    No other message would know what not to show, so this one shows the scheme alone.
    """
    scheme, _, rest = url.partition(":")
    _, *behind = re.split(r"[/?#]", rest.removeprefix("//"), maxsplit=1)
    if "@" in "".join(behind):
        raise ValueError(
            f"the address {errors.plain(scheme)}:// has an '@' behind its host: '/', '?' and '#' in a password are"
            " written %2F, %3F and %23, and '@' in an option %40"
        )


def _parse(url: str) -> tuple[bool, bool, list[tuple[str, int]], dict[str, Any]]:
    """Return whether an address is of a cluster and takes TLS, the nodes, and options of the client."""
    address = shown(url)
    check_login(url)
    netloc = re.match(r"[^/?#]*//([^/?#]*)", url)
    login, _, hosts = netloc[1].rpartition("@") if netloc else ("", "", "")
    try:
        if "[" in login or "]" in login:
            raise ValueError
        found = urlsplit(url.replace("[", "").replace("]", ""))  # newer CPythons refuse brackets in a list of hosts
    except ValueError:  # whose message may quote the password
        raise ValueError(
            f"{address!r} cannot be read: what is neither a letter nor a digit of ASCII is percent-encoded in a"
            " password"
        ) from None
    scheme, _, kind = found.scheme.partition("+")
    if scheme not in ("valkey", "valkeys", "redis", "rediss") or kind not in ("", "cluster"):
        raise ValueError(f"{address!r} is no address of a server: valkey://HOST:PORT/0 or valkey+cluster://HOST:PORT")
    if found.query or found.fragment:
        raise ValueError(f"{address!r} has options: give them as arguments, or use kvcache.stores.open")
    if not hosts:
        raise ValueError(f"{address!r} names no host: {found.scheme}://HOST, or {found.scheme}://HOST:PORT, is needed")
    is_cluster = kind == "cluster"
    nodes = [_parse_node(url, host) for host in hosts.split(",")]
    if len(nodes) > 1 and not is_cluster:
        raise ValueError(f"{address!r} names several hosts, which only valkey+cluster:// does")
    database = found.path.removeprefix("/") or "0"
    if not database.isdecimal() or len(database) > 9 or (is_cluster and int(database)):
        wanted = "0 in a cluster" if is_cluster else "a number of at most 9 digits"
        raise ValueError(f"{address!r}: the database must be {wanted}")
    options: dict[str, Any] = {} if is_cluster else {"db": int(database)}
    user, _, password = login.partition(":")
    for name, text in (("username", user), ("password", password)):
        if text:
            options[name] = unquote(text)
    return is_cluster, scheme in ("valkeys", "rediss"), nodes, options


def _parse_node(url: str, text: str) -> tuple[str, int]:
    """Return the host and port of one node of an address."""
    found = re.fullmatch(r"(?:\[([^\]\s]+)\]|([^:\[\]\s]+))(?::(\d+))?", text)
    if found is None or not 0 <= int(found[3] or 0) < 1 << 16:
        raise ValueError(f"{shown(url)!r}: {text!r} is neither HOST nor HOST:PORT, nor [IPV6] nor [IPV6]:PORT")
    return unquote(found[1] or found[2]), int(found[3] or DEFAULT_PORT)
