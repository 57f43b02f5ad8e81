"""Who may call what under TLS: role -> service -> methods. What is not here is not allowed."""

from collections.abc import Mapping

Allowed = Mapping[str, Mapping[str, tuple[str, ...]]]

_ROLE = ("Configure", "Describe", "StageCheckpoint", "SaveCheckpoint", "ReleaseStep", "ReleaseRun")
_RUNS = (
    "CreateRun", "GetRun", "ListRuns", "WatchRun", "PauseRun", "ResumeRun", "CancelRun", "CheckpointRun",
    "ProfileRun", "ListServices", "Scale",
)  # fmt: skip

ALLOWED: Allowed = {
    # Commands. It has no business with data or weights (law 1).
    "controller": {
        "sextet.v1.RoleService": _ROLE,
        "sextet.v1.RolloutService": ("Generate", "PrepareWeights", "CommitWeights"),
        "sextet.v1.ActorService": (
            "ComputeLogprobs", "ComputeAdvantages", "Update", "PublishWeights", "ExportModel", "HoldRows",
        ),
        "sextet.v1.CriticService": ("ComputeValues", "Update"),
        "sextet.v1.ReferenceService": ("ComputeLogprobs",),
        "sextet.v1.ScoringService": ("ScoreBatch",),
        # The command line inside its container.
        "sextet.v1.ControllerService": _RUNS,
    },
    # Data, straight from whoever made it.
    "actor": {"sextet.v1.DataService": ("Read",)},
    "critic": {"sextet.v1.DataService": ("Read",)},
    "reference": {"sextet.v1.DataService": ("Read",)},
    "reward": {"sextet.v1.DataService": ("Read",), "sextet.v1.RewardService": ("Score",)},
    "rollout": {"sextet.v1.DataService": ("Read",), "sextet.v1.WeightsService": ("Fetch", "Join")},
    # It passes HTTP on, and calls nothing here.
    "gateway": {},
    # People: the command line and the Python client.
    "client": {"sextet.v1.ControllerService": _RUNS},
}  # fmt: skip
EVERYBODY: Mapping[str, tuple[str, ...]] = {
    "grpc.health.v1.Health": ("Check", "Watch", "List"),
    # Only served where settings ask for it.
    "grpc.reflection.v1alpha.ServerReflection": ("ServerReflectionInfo",),
}
ROLES = tuple(ALLOWED)


def callers(method: str) -> list[str]:
    """The roles that may call `/package.Service/Method`."""
    service, _, name = method.strip("/").rpartition("/")
    if name in EVERYBODY.get(service, ()):
        return list(ROLES)
    return [role for role, services in ALLOWED.items() if name in services.get(service, ())]
