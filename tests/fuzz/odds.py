"""What does not belong where the fuzzer puts it: values, ids, queries, headers, and bytes that are no HTTP."""

ODD: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400),
    *(0.0, -0.0, 1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "NaN", "Infinity", "1e400", "1"),
    *("", " ", "x" * 3000, "\x00", "a\x00b", "\n", "é\U0001f600", "\u202e\ufeff", "\ud800", "a\udfff"),
    *("../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "tinker://a/weights/b", "tinker://", "tinker:///weights/../x"),
    *("{{ 7*7 }}", "{% for x in y %}", "'; DROP TABLE x", "%s%n", "2026-13-45", "0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-12:00"),
    *([], {}, [[]], [{}], [None], {"": None}, {"a": {"b": []}}, {"type": "image", "data": "x"}, [1, "a", None], [0] * 5000, ["s"] * 300),
)
ODD_IDS = (
    *(
        "",
        ".",
        "..",
        "../..",
        "a/b",
        "a%2Fb",
        "%2e%2e%2f",
        "%00",
        "%",
        "%zz",
        "%ff%fe",
        "%ed%a0%80",
        "é",
        "\U0001f600",
        " ",
        "+",
        "a;b",
        "a?b",
    ),
    *("a#b", "\\", "tinker://a/weights/b", "x" * 3000, "0", "-1", "null", "<script>", "a:b:c", "s:train:99999999999", ":train:0", "*"),
)
ODD_QUERIES = (
    "",
    "&&&",
    "=",
    "a=b",
    "%",
    "%ff=%ff",
    "limit",
    "limit=",
    "limit=-1",
    "limit=1e3",
    "limit=%d9%a1",
    "limit=99999999999999999999",
)
ODD_TYPES = (
    *(
        "",
        "text/plain",
        "application/json; charset=utf-16",
        "application/x-protobuf",
        "multipart/form-data; boundary=x",
        "APPLICATION/JSON",
    ),
    *("application/x-www-form-urlencoded", "application/json" * 300, "\xff", "application/octet-stream"),
)
ODD_ENCODINGS = ("zstd", "gzip", "br", "identity", "zstd, zstd", "ZSTD", "\xff", "")
ODD_HEADERS: tuple[tuple[str, str], ...] = (
    *(
        ("accept", "application/x-protobuf"),
        ("accept", "\xff"),
        ("accept", ""),
        ("x-idempotency-key", "k" * 300),
        ("x-idempotency-key", "é"),
    ),
    *(
        ("x-tinker-weights-access-token", "tml-x"),
        ("x-tinker-weights-access-token", "\xe9" * 50),
        ("x-api-key", "x" * 5000),
        ("range", "bytes=9-"),
    ),
    *(
        ("host", "evil.example"),
        ("host", "[::1"),
        ("host", "[::1]x"),
        ("host", "localhost:99999999"),
        ("host", "127.0.0.1:abc"),
        ("host", ""),
    ),
    *(
        ("origin", "http://evil.example"),
        ("expect", "x"),
        ("user-agent", "AsyncTinker/Python 0.25"),
        ("user-agent", "AsyncTinker/Python 9" * 40),
    ),
    *(("x-tinker-sampling-backpressure", "1"), ("x-forwarded-for", "\xff"), ("x-request-id", "a" * 9000), ("if-none-match", "*")),
)
_POST = b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_HEADS = (
    b"Content-Length: -1\r\n\r\n{}",
    b"Content-Length: x\r\n\r\n{}",
    b"Content-Length: 99999999999999999999\r\n\r\n{}",
    b"Content-Length: 9\r\n\r\n{}",
    b"Content-Length: 1\r\n\r\n{}",
    b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    b"X: \x00\r\n\r\n",
    b"X y\r\n\r\n",
    b"",
    b"A: b\r\n" * 5000 + b"\r\n",
)
_LINES = (b"GET /v1/models\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n", b"")
# Requests that are no HTTP, or lie about their length.
BROKEN = (*(_POST + head for head in _HEADS), *_LINES)
