"""Messages between a worker and the consumer: one pair of sockets a worker, with descriptors passed beside the bytes.

A message is four bytes of length (big-endian) and a pickle. Several arrive in one read, and neither end ever waits on
an end that waits on it: a sender that finds the way full takes in what has come first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, final

__all__ = ["Channel"]

_LENGTH = struct.Struct("!I")
_READ = 1 << 15
_ANCILLARY = socket.CMSG_SPACE(4 * struct.calcsize("i"))
_RECEIVE_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@final
class Channel:
    """One end. It can be given to a process that is being started, by any start method."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._bytes = bytearray()
        self._held = b""
        self._descriptors: deque[int] = deque()

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(one), Channel(other)

    def __reduce__(self) -> tuple[type[Channel], tuple[socket.socket]]:
        return Channel, (self._end,)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any, descriptor: int | None = None, when_full: Callable[[], Any] | None = None) -> None:
        """Send a message, and a descriptor with it.

        ``when_full`` is called where the way is full and something has come meanwhile, to take it in.
        Raises ``OSError`` where the other end is gone.
        """
        self.hold(message)
        self.flush(descriptor, when_full)

    def hold(self, message: Any) -> None:
        """Keep a message for the next ``flush`` or ``send``: one call of the system may carry several."""
        payload = pickle.dumps(message, 5)
        self._held += _LENGTH.pack(len(payload)) + payload

    def flush(self, descriptor: int | None = None, when_full: Callable[[], Any] | None = None) -> None:
        """Send what is held, as ``send`` does it."""
        view, self._held = memoryview(self._held), b""
        while view:
            try:
                if descriptor is None:
                    view = view[self._end.send(view, socket.MSG_DONTWAIT) :]
                else:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
                    view = view[self._end.sendmsg([view], rights, socket.MSG_DONTWAIT) :]
                    descriptor = None
            except BlockingIOError:
                if self._wait_to_send(readable=when_full is not None) and when_full is not None:
                    when_full()

    def _wait_to_send(self, *, readable: bool) -> bool:
        """Wait until there is room again, or something to read; whether there is something to read."""
        waiting = select.poll()
        waiting.register(self._end, select.POLLOUT | (select.POLLIN if readable else 0))
        return any(event & select.POLLIN for _, event in waiting.poll())

    def receive(self, *, wait: bool = True) -> list[Any]:
        """Wait for bytes, and return the messages that are complete, none perhaps.

        Raises ``EOFError`` at the end, and ``BlockingIOError`` where nothing has come and ``wait`` is False.
        """
        flags = _RECEIVE_FLAGS if wait else _RECEIVE_FLAGS | socket.MSG_DONTWAIT
        data, ancillary, _, _ = self._end.recvmsg(_READ, _ANCILLARY, flags)
        for _, _, raw in ancillary:
            self._descriptors.extend(memoryview(raw[: len(raw) // 4 * 4]).cast("i"))
        if not data:
            raise EOFError
        if not self._bytes and len(data) > 4 and len(data) - 4 == _LENGTH.unpack_from(data)[0]:
            return [pickle.loads(memoryview(data)[4:])]  # as it nearly always is
        self._bytes += data
        messages, start = [], 0
        while len(self._bytes) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if len(self._bytes) - start - 4 < length:
                break
            with memoryview(self._bytes) as view:
                messages.append(pickle.loads(view[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._bytes[:start]
        return messages

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just read; the caller closes it."""
        return self._descriptors.popleft()

    def shut_down(self) -> None:
        """Close this end, and have the other end see it even where a forked process holds a copy of ours."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this end; may be called again."""
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self._end.close()
