"""Grades by an external `sextet.v1.RewardService`."""

from collections.abc import Sequence

import grpc
import grpc.aio

from services.reward.backend import Grade, Item, failed, valid_grade
from services.reward.external import Down, ExternalBackend, Failed, checked
from shared.gen.sextet.v1 import common_pb2, reward_pb2, reward_pb2_grpc
from shared.rpc.errors import FailedPrecondition

MAX_ANSWER_BYTES = 16 << 20
NO_GRADER = {
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


def grpc_backend() -> ExternalBackend:
    return ExternalBackend(GrpcTransport)


class GrpcTransport:
    """A channel to `host:port`, in plain text and without the cluster's token, which is not the grader's to know."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        if "//" in endpoint or ":" not in endpoint:
            text = f"reward.endpoint={endpoint!r} must be host:port when reward.backend=grpc"
            raise FailedPrecondition(text, key="reward.endpoint", value=endpoint)
        options = (
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
        )
        self._endpoint = endpoint
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(endpoint, options=options)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def send(self, run: str, items: Sequence[Item]) -> list[Grade]:
        request = reward_pb2.ScoreRequest(run=run, items=[_message(item) for item in items])
        try:
            response = await self._stub.Score(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from None
        return checked([_grade(result) for result in response.results], items)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _translated(self, error: grpc.aio.AioRpcError) -> Exception:
        code, text = error.code(), f"{error.code().name}: {error.details()}"
        if code == grpc.StatusCode.UNAVAILABLE:
            return Down(text)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Failed("timeout", f"no answer within reward.timeout={self._timeout:g} s")
        if code in NO_GRADER:
            what = f"reward.endpoint={self._endpoint!r} does not serve sextet.v1.RewardService: {text}"
            return FailedPrecondition(what, key="reward.endpoint", value=self._endpoint)
        return Failed("rejected", text)


def _message(item: Item) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        row=common_pb2.RowKey(uid=item.uid, sample=item.sample),
        data_source=item.data_source,
        prompt_json=item.prompt_json,
        response=item.response,
        ground_truth=item.ground_truth,
        extra_info_json=item.extra_info_json,
    )


def _grade(result: reward_pb2.ScoreResult) -> Grade:
    return failed("rejected", result.error) if result.error else valid_grade(result.score, result.parts)
