"""gRPC channel and server options; each is a measured fact with a test in tests/unit/shared/rpc/test_grpc_facts.py."""

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 3_000
KEEPALIVE_TIMEOUT_MS = 5_000

_SIZES: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: Options = (
    *_SIZES,
    # A frozen peer keeps its sockets open: only unanswered pings give it away, after at most 8 s.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A returning server is found within a second instead of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries are ours (operations make them safe); gRPC's stop silently above 256 KiB.
    ("grpc.enable_retries", 0),
    # An http_proxy in the environment must not carry tokens and batches elsewhere.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: Options = (
    *_SIZES,
    # Otherwise two servers share a port and each gets half of the calls.
    ("grpc.so_reuseport", 0),
    # Below the client's ping interval, or calls of more than 15 s are cut off with "too many pings". gRPC ignores
    # names it does not know, and the documented ..._min_recv_ping_... is one of those.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Of calls that come faster than they are taken up, gRPC drops some from 1,000 on and all from 3,000 on, without a
    # word, as CANCELLED: to a caller that is a replica which has died.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
