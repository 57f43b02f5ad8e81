"""Health of a service, for container checks: `python -m shared.rpc.probe HOST:PORT` exits 0 when SERVING.

Under TLS it shows the certificate that the service has (SEXTET_TLS_CERT ..., or the only one in SEXTET_TLS_DIR).
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc.tls import TLS_OPTIONS, load_tls

TIMEOUT = 4.0


def serving(endpoint: str, timeout: float = TIMEOUT) -> bool:
    """Asks grpc.health.v1 for the whole server's state; False also when nothing answers in `timeout` seconds."""
    tls = load_tls("")
    with (
        grpc.secure_channel(endpoint, tls.channel_credentials(), TLS_OPTIONS)
        if tls
        else grpc.insecure_channel(endpoint)
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    sys.exit(0 if serving(sys.argv[1]) else 1)
