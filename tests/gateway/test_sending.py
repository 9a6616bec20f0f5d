"""How requests get to upstreams: cancelled at any moment, cut off, late, and past what a pool allows."""

import asyncio
import os
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from promptsluice.gateway.backends.http1 import SocketSender
from promptsluice.gateway.backends.sending import HttpxSender, ProxiedTransport, Reply, Sender, sender_to_upstreams
from promptsluice.gateway.backends.unpacking import unpacker

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"
BOTH = pytest.mark.parametrize(
    "made",
    [lambda: SocketSender(max_connections=4), lambda: HttpxSender(ProxiedTransport(max_connections=4))],
    ids=["sockets", "httpx"],
)


class Gate(httpx.AsyncBaseTransport):
    """Opens a connection for as long as the gate is shut, and tells of it as httpcore does."""

    def __init__(self) -> None:
        self.opening, self.gate, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.opened = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        trace = request.extensions["trace"]
        await trace("connection.connect_tcp.started", {})
        self.opening.set()
        await self.gate.wait()
        await trace("connection.connect_tcp.complete", {})
        self.opened = True
        await trace("http11.send_request_headers.started", {})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody answers")


def test_a_connection_is_opened_to_its_end_and_then_given_up() -> None:
    async def run() -> Gate:
        gate = Gate()
        async with ProxiedTransport(max_connections=1, transport=gate) as sender:
            asked = asyncio.create_task(sender.handle_async_request(httpx.Request("POST", "http://x/")))
            await gate.opening.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert not gate.opened
            gate.gate.set()
            await gate.cancelled.wait()
        return gate

    assert asyncio.run(run()).opened


Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served_by(answering: Answering, *, narrow: bool = False) -> AsyncIterator[str]:
    """A server that leaves each connection to a function; its URL. Ends when all connections have. `narrow`: a few KiB
    that it does not read are all that fits into its socket.
    """
    ended = list[asyncio.Task[None]]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        try:
            await answering(reader, writer)
            writer.close()
            await writer.wait_closed()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    if narrow:
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    await asyncio.wait_for(asyncio.gather(*ended), 10)


@asynccontextmanager
async def serving(answer: bytes, *, close: bool = False, stay: bool = False) -> AsyncIterator[str]:
    """A server that gives the same bytes to every request; its URL. `stay`: then it says no more and hangs."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer)
            if stay:
                await reader.read()
            if close:
                break

    async with served_by(answered) as url:
        yield url


@asynccontextmanager
async def sending(sender: Sender) -> AsyncIterator[Sender]:
    try:
        yield sender
    finally:
        await sender.aclose()


async def asked(sender: Sender, url: str, *, body: bytes = b"", **times: float) -> Reply:
    return await sender.send("POST" if body else "GET", url, headers={}, body=body, times=times)


async def whole(reply: Reply) -> bytes:
    """All that is left to read."""
    pieces = list[bytes]()
    while piece := await reply.read():
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("close", [True, False])
async def test_no_connection_is_lost(made: Callable[[], Sender], close: bool) -> None:
    """Requests that leave after any number of turns of the loop, on a real server: no place of the pool is lost."""

    async def leave(sender: Sender, url: str, turns: int) -> None:
        task = asyncio.create_task(asked(sender, url, connect=5, pool=5))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await (await task).aclose()
        except asyncio.CancelledError:
            return

    async with serving(OK, close=close) as url, sending(made()) as sender:
        for turns in range(60):
            await asyncio.gather(*(leave(sender, url, turns) for _ in range(4)))
        for _ in range(8):
            response = await asked(sender, url, pool=5)
            assert await whole(response) == b"ok"
            await response.aclose()
            await response.aclose()  # closing twice gives no place that was not taken


async def test_a_full_pool_is_told_from_a_server_that_is_late() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
    async with serving(head, stay=True) as url, sending(SocketSender(max_connections=1)) as sender:
        response = await asked(sender, url, read=0.05)
        with pytest.raises(httpx.PoolTimeout):
            await asked(sender, url, pool=0.05)
        with pytest.raises(httpx.ReadTimeout):
            await whole(response)
        await response.aclose()
        again = await asked(sender, url, pool=5)
        await again.aclose()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"what?\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nok\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 103 No\r\ncontent-length: 2\r\n\r\nok" + OK, httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 2\r\n\r\nok", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000 + b"content-length: 2\r\n\r\nok", httpx.RemoteProtocolError),
    ],
)
async def test_what_is_no_answer_is_an_error_of_httpx(answer: bytes, error: type[Exception]) -> None:
    async with serving(answer, close=True) as url, sending(SocketSender(max_connections=1)) as sender:
        for _ in range(2):  # and its place is free again
            with pytest.raises(error):
                response = await asked(sender, url, pool=5)
                try:
                    await whole(response)
                finally:
                    await response.aclose()


@pytest.mark.slow
async def test_a_server_that_takes_no_body_is_left() -> None:
    over = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()  # its buffer fills up, and then the socket's
        writer.transport.abort()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    times = {"connect": 0.1, "write": 0.1, "read": 0.1, "pool": 5.0}
    async with sending(SocketSender(max_connections=1)) as sender:
        for _ in range(2):
            with pytest.raises(httpx.TimeoutException):
                await asked(sender, url, body=b"x" * (64 << 20), **times)
    over.set()
    server.close()
    await asyncio.sleep(0.05)


async def test_nobody_there_and_no_cookie_kept() -> None:
    async with sending(SocketSender(max_connections=1)) as sender:
        with pytest.raises(httpx.ConnectError):
            await asked(sender, "http://127.0.0.1:1/")
        seen = list[bytes]()

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 302 Found\r\nlocation: /else\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(2):
            response = await asked(sender, url)
            assert response.status == 302
            await response.aclose()
        server.close()
    assert len(seen) == 2 and not any(b"cookie" in head.lower() or b"/else" in head for head in seen)


async def test_who_waits_for_a_place_in_the_pool_is_not_yet_asking() -> None:
    async with serving(OK) as url, sending(SocketSender(max_connections=1)) as sender:
        first = await asked(sender, url)
        waiting = asyncio.create_task(asked(sender, url))
        await asyncio.sleep(0.01)
        freed_at = time.perf_counter()
        await first.aclose()
        second = await waiting
        assert first.asked_at is not None and second.asked_at is not None
        assert first.asked_at < freed_at <= second.asked_at
        await second.aclose()


def test_a_proxy_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(sender_to_upstreams(max_connections=1), SocketSender)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert isinstance(sender_to_upstreams(max_connections=1), HttpxSender)


def packed(body: bytes, wbits: int) -> bytes:
    """Compressed, with zlib's names for the forms: 15 is zlib's own, 31 is gzip, -15 has no head."""
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(body) + packer.flush()


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (b"content-length: 2\r\n\r\n", b"ok"),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n"),
        (b"connection: close\r\n\r\n", b"ok"),
        (b"content-encoding: gzip\r\nconnection: close\r\n\r\n", packed(b"ok", 31)),
        (b"content-encoding: deflate\r\nconnection: close\r\n\r\n", packed(b"ok", 15)),
        (b"content-encoding: deflate\r\nconnection: close\r\n\r\n", packed(b"ok", -15)),
    ],
    ids=["length", "chunks", "end", "gzip", "zlib", "deflate"],
)
async def test_bodies_in_every_framing(made: Callable[[], Sender], fields: bytes, body: bytes) -> None:
    answer = (
        b"HTTP/1.1 100 Continue\r\nx-first: 1\r\n\r\nHTTP/1.1 200 OK\r\nx-Twice: a\r\nX-twice: b\r\n" + fields + body
    )
    async with serving(answer, close=True) as url, sending(made()) as sender:
        reply = await asked(sender, url, connect=5, read=5)
        assert reply.status == 200 and reply.headers["x-twice"] == "a, b" and "x-first" not in reply.headers
        assert await whole(reply) == b"ok"
        await reply.aclose()


async def test_trailers_change_nothing() -> None:
    answer = CHUNKS + b"0\r\ncontent-encoding: gzip\r\nx-late: 1\r\n\r\n"
    async with serving(answer) as url, sending(SocketSender(max_connections=1)) as sender:
        for _ in range(2):
            reply = await asked(sender, url, read=5)
            assert await whole(reply) == b"ok"
            assert reply.headers == {"transfer-encoding": "chunked"}
            await reply.aclose()


@pytest.mark.parametrize("rest", [b"0\r\nx: " + b"y" * (1 << 20), b"2;x=" + b"y" * (1 << 20)], ids=["trailer", "chunk"])
async def test_what_has_no_end_is_not_gathered(rest: bytes) -> None:
    async with serving(CHUNKS + rest, stay=True) as url, sending(SocketSender(max_connections=1)) as sender:
        reply = await asked(sender, url, read=5)
        with pytest.raises(httpx.RemoteProtocolError):
            await whole(reply)
        await reply.aclose()


def unpacked(body: bytes, encoding: str, *, step: int) -> list[bytes]:
    """What comes of a body that is fed in pieces of `step` bytes."""
    unpack, pieces = unpacker(encoding), list[bytes]()
    assert unpack is not None
    for at in range(0, len(body), step):
        unpack.feed(body[at : at + step])
        while piece := unpack.take():
            pieces.append(piece)
    unpack.end()
    return pieces


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(("wbits", "encoding"), [(31, "gzip"), (15, "deflate"), (-15, "deflate"), (31, "x-gzip")])
def test_packed_bodies_in_any_pieces(wbits: int, encoding: str, step: int) -> None:
    body = packed(b"some text, some more text", wbits)
    assert b"".join(unpacked(body, encoding, step=step)) == b"some text, some more text"
    assert unpacked(b"", encoding, step=step) == [] == unpacked(packed(b"", wbits), encoding, step=step)
    with pytest.raises(httpx.DecodingError):
        unpacked(body[:-1], encoding, step=step)
    if encoding == "gzip":
        assert b"".join(unpacked(body * 3, encoding, step=step)) == b"some text, some more text" * 3
        with pytest.raises(httpx.DecodingError):
            unpacked(body + b"??", encoding, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("wbits", [31, 15, -15])
def test_a_bomb_goes_off_a_piece_at_a_time(wbits: int) -> None:
    for size in (16 << 20, (1 << 20) + 5):
        pieces = unpacked(packed(b"\0" * size, wbits), "gzip" if wbits == 31 else "deflate", step=1 << 20)
        assert sum(map(len, pieces)) == size and max(map(len, pieces)) == 1 << 20


async def test_a_packed_body_comes_in_bounded_pieces_and_breaks_off_as_an_error() -> None:
    body = packed(b"\0" * (4 << 20), 31)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: "
    for sent in (body, body[:-4]):
        answer = head + b"%d\r\n\r\n" % len(sent) + sent
        async with serving(answer) as url, sending(SocketSender(max_connections=1)) as sender:
            reply = await asked(sender, url, read=5)
            for _ in range(4):
                assert len(await reply.read()) == 1 << 20
            if sent is body:
                assert await reply.read() == b""
            else:
                with pytest.raises(httpx.DecodingError):
                    await reply.read()
            await reply.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_what_cannot_be_unpacked_is_an_error_and_frees_its_place(answer: bytes) -> None:
    async with serving(answer) as url, sending(SocketSender(max_connections=1)) as sender:
        for _ in range(2):
            with pytest.raises(httpx.DecodingError):
                reply = await asked(sender, url, pool=5)
                try:
                    await whole(reply)
                finally:
                    await reply.aclose()


async def test_what_comes_unasked_answers_no_later_request() -> None:
    """A server that answers twice, at once or a moment later: each request gets its own answer."""
    told = iter([OK + OK.replace(b"ok", b"no"), OK, OK])
    seen = list[bytes]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(next(told))
            await asyncio.sleep(0.02)
            writer.write(OK.replace(b"ok", b"no"))

    async with served_by(answered) as url, sending(SocketSender(max_connections=1)) as sender:
        for _ in range(3):
            reply = await asked(sender, url, pool=5, read=5)
            assert await whole(reply) == b"ok"
            await reply.aclose()
            await asyncio.sleep(0.05)
    assert len(seen) == 3


@pytest.mark.parametrize("said", [b"HTTP/1.1 408 No\r\ncontent-length: 0\r\n\r\n", b""], ids=["words", "end"])
async def test_what_lies_in_a_kept_connection_answers_no_later_request(said: bytes) -> None:
    """The loop has no turn between the server's last words, or its leave, and the next request."""
    ends = list[socket.socket]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer.get_extra_info("socket"))
        while await reader.readuntil(b"\r\n\r\nbody"):
            writer.write(OK)

    async with served_by(answered) as url, sending(SocketSender(max_connections=1)) as sender:
        for _ in range(3):
            reply = await asked(sender, url, body=b"body", read=5)
            assert reply.status == 200 and await whole(reply) == b"ok"
            await reply.aclose()
            if said:
                os.write(ends[-1].fileno(), said)
            else:
                ends[-1].shutdown(socket.SHUT_WR)
    assert len(ends) == 3


async def test_tls_is_told_which_http_is_spoken() -> None:
    """In its first words, which are not encrypted: a server that prefers HTTP/2 must not choose it."""
    hellos = list[bytes]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hellos.append(await reader.read(1 << 16))

    async with served_by(answered) as url, sending(SocketSender(max_connections=1)) as sender:
        with pytest.raises(httpx.ConnectError):
            await asked(sender, url.replace("http:", "https:"), connect=5)
    assert b"\x00\x09\x08http/1.1" in hellos[0]


async def test_a_connection_that_broke_before_the_request_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    create = asyncio.get_running_loop().create_connection

    async def late(*args: Any, **kwargs: Any) -> Any:
        made = await create(*args, **kwargs)
        made[0].abort()
        await asyncio.sleep(0.01)
        return made

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", late)
    async with serving(OK) as url, sending(SocketSender(max_connections=1)) as sender:
        with pytest.raises(httpx.ReadError):
            await asked(sender, url, read=5)


@pytest.mark.parametrize(("status", "size"), [(b"413 No", 70_000), (b"200 OK", 60_000)], ids=["in time", "unsent"])
async def test_no_request_follows_one_that_was_not_taken_whole(
    monkeypatch: pytest.MonkeyPatch, status: bytes, size: int
) -> None:
    """Its server would take it for the rest of the first one. The small one does not fit into the socket's buffers."""
    loop, opened, over = asyncio.get_running_loop(), 0, asyncio.Event()
    create = loop.create_connection

    async def narrow(*args: Any, **kwargs: Any) -> Any:
        made = await create(*args, **kwargs)
        made[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
        return made

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # pyright: ignore
        writer.write(OK.replace(b"200 OK", status))
        await over.wait()
        raise ConnectionError

    if status == b"200 OK":
        monkeypatch.setattr(loop, "create_connection", narrow)
    async with (
        served_by(answered, narrow=status == b"200 OK") as url,
        sending(SocketSender(max_connections=1)) as sender,
    ):
        for _ in range(2):
            reply = await asked(sender, url, body=b"x" * size, read=1)
            assert await whole(reply) == b"ok"
            await reply.aclose()
        over.set()
    assert opened == 2


async def test_no_more_connections_wait_than_may_be_busy() -> None:
    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer.get_extra_info("sockname"))
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)

    opened = list[Any]()
    sender = SocketSender(max_connections=1)
    async with served_by(counted) as one, served_by(counted) as other, sending(sender):
        for url in (one, one, other, other, one):
            reply = await asked(sender, url, read=5)
            assert await whole(reply) == b"ok"
            await reply.aclose()
            with pytest.raises(httpx.StreamClosed):
                await reply.read()
    assert len(opened) == 3


async def test_an_international_name_is_asked_for_as_the_url_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own codec is of IDNA 2003, and takes ß for ss."""
    hosts = list[str]()

    async def found(host: str, port: int, **_: int) -> list[Any]:
        hosts.append(host)
        raise OSError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    async with sending(SocketSender(max_connections=1)) as sender:
        for host in ("straße.de", "[::1]"):
            with pytest.raises(httpx.ConnectError):
                await asked(sender, f"http://{host}/")
    assert hosts == ["xn--strae-oqa.de", "::1"]


@pytest.mark.slow
async def test_connections_serve_again_until_they_are_old() -> None:
    opened = 0

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)

    async with served_by(answered) as url, sending(SocketSender(max_connections=4, keepalive_s=0.2)) as sender:
        for expected in (1, 1, 1, 2):
            if expected == 2:
                await asyncio.sleep(0.5)
            reply = await asked(sender, url, read=5)
            assert await whole(reply) == b"ok"
            await reply.aclose()
            assert opened == expected
        unread = await asked(sender, url, read=5)
        await unread.aclose()  # all of it has come, but nobody knows what is left of it
        reply = await asked(sender, url, read=5)
        await reply.aclose()
        assert opened == 3


async def test_a_long_body_goes_out_whole_and_a_refusal_before_its_end_is_heard() -> None:
    body, taken = b"0123456789abcdef" * (1 << 16), list[int]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"POST /all " in head:
            taken.append(len(await reader.readexactly(len(body))))
            writer.write(OK)
        else:
            writer.write(OK.replace(b"200 OK", b"413 No"))
            await writer.drain()
            await asyncio.sleep(0.2)  # and takes no more of it
            raise ConnectionError

    async with served_by(answered) as url, sending(SocketSender(max_connections=1)) as sender:
        for path, status, sent in (("all", 200, body), ("none", 413, body * 32)):
            reply = await asked(sender, f"{url}{path}", body=sent, connect=5, write=5, read=5)
            assert reply.status == status
            await reply.aclose()
    assert taken == [len(body)]


@pytest.mark.slow
async def test_a_server_waits_while_nobody_reads() -> None:
    """A body of 64 MiB is not gathered here while its reader does something else, and it is not late meanwhile."""
    size, written = 64 << 20, 0

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * (1 << 16))
            written += 1 << 16
            await writer.drain()

    async with served_by(answered) as url, sending(SocketSender(max_connections=1)) as sender:
        reply = await asked(sender, url, read=0.2)
        await asyncio.sleep(0.5)
        assert written < size // 2
        assert len(await whole(reply)) == size
        await reply.aclose()


async def test_of_several_addresses_one_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 and .4 refuse."""

    async def found(host: str, port: int, **_: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        known = ["127.0.0.2", "127.0.0.1"] if host == "here" else ["127.0.0.2", "127.0.0.4"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    async with serving(OK) as url, sending(SocketSender(max_connections=1)) as sender:
        reply = await asked(sender, url.replace("127.0.0.1", "here"), connect=5, read=5)
        assert await whole(reply) == b"ok"
        await reply.aclose()
        with pytest.raises(httpx.ConnectError):
            await asked(sender, url.replace("127.0.0.1", "nowhere"), connect=5)


async def test_no_header_ends_its_line() -> None:
    async with serving(OK) as url, sending(SocketSender(max_connections=1)) as sender:
        for value in ("a\r\nx: y", "a\n", "a\0"):
            with pytest.raises(httpx.LocalProtocolError):
                await sender.send("GET", url, headers={"traceparent": value}, body=b"", times={})
        with pytest.raises(httpx.LocalProtocolError):
            await sender.send("GET", url, headers={"authorization": "Bearer €"}, body=b"", times={})
        await (await asked(sender, url, pool=5)).aclose()
