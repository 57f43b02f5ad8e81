"""An external grader over gRPC: `python examples/rewards/python_server.py 127.0.0.1:50070`.

Then `reward: {backend: grpc, endpoint: "127.0.0.1:50070"}` in the run's config.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from shared.gen.sextet.v1 import reward_pb2, reward_pb2_grpc


class ExactMatch(reward_pb2_grpc.RewardServiceServicer):
    def Score(self, request: reward_pb2.ScoreRequest, context: grpc.ServicerContext) -> reward_pb2.ScoreResponse:
        return reward_pb2.ScoreResponse(results=[grade(item) for item in request.items])


def grade(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    if not item.ground_truth:
        return reward_pb2.ScoreResult(error="this item has no ground truth")
    exact = float(item.response.strip() == item.ground_truth)
    return reward_pb2.ScoreResult(score=exact, parts={"length": len(item.response)})


if __name__ == "__main__":
    server = grpc.server(ThreadPoolExecutor(4))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(ExactMatch(), server)
    port = server.add_insecure_port(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50070")
    server.start()
    print(f"listening on port {port}", flush=True)
    server.wait_for_termination()
