"""Whether there is a connection: asked once, because the hub's own client tries for half a minute before it says no."""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
import urllib.request
from urllib.parse import urlsplit

SECONDS = 3.0  # a connection that takes longer to open is taken for none; what it carries may be as slow as it likes
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080, "socks4": 1080}


UNREACHABLE = "the hub cannot be reached"


def why_local(local_files_only: bool = False) -> str:
    """Say why the hub is not to be asked for anything; empty: it may be."""
    from huggingface_hub import constants

    if local_files_only or constants.HF_HUB_OFFLINE:
        return "downloads are switched off"
    return "" if is_reachable(constants.ENDPOINT) else UNREACHABLE


def is_reachable(url: str, seconds: float | None = None) -> bool:
    """Whether a server listens at an address, or at the proxy that leads there."""
    if seconds is None:  # who waits longer for the hub on purpose has a reason
        timeout = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
        seconds = max(SECONDS, float(timeout)) if timeout.isdecimal() else SECONDS
    target = urlsplit(_proxy(url) or url)
    port = target.port or PORTS.get(target.scheme, 443)
    # Looking up a name cannot be given up, only left behind.
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
    arguments = (target.hostname or "", port, seconds, answer)
    threading.Thread(target=_try_connect, args=arguments, daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return False


def _proxy(url: str) -> str | None:
    target, proxies = urlsplit(url), urllib.request.getproxies()
    if urllib.request.proxy_bypass(target.hostname or ""):
        return None
    found = proxies.get(target.scheme) or proxies.get("all")
    return found if not found or "://" in found else f"http://{found}"


def _try_connect(host: str, port: int, seconds: float, answer: queue.SimpleQueue[bool]) -> None:
    try:
        answer.put(_connects(host, port, time.monotonic() + seconds))
    except (OSError, ValueError):  # no such name, or one that cannot be one
        answer.put(False)


def _connects(host: str, port: int, deadline: float) -> bool:
    """Try all addresses of a name at once: some networks have none of one kind, and never say so."""
    with selectors.DefaultSelector() as waiting:
        opened = []
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                try:
                    opened.append(socket.socket(family, kind, protocol))
                    opened[-1].setblocking(False)
                    opened[-1].connect_ex(address)
                    waiting.register(opened[-1], selectors.EVENT_WRITE)
                except OSError:
                    continue  # a kind of address that this machine does not have
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    found = key.fileobj
                    assert isinstance(found, socket.socket)
                    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        return True
                    waiting.unregister(found)
            return False
        finally:
            for one in opened:
                one.close()
