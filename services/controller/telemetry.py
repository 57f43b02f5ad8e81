"""The controller's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.05, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)

RECEIVED = Counter(
    "sextet_controller_received_bytes_total", "Bytes of role responses received by the controller.", ["call"]
)
RETRIES = Counter("sextet_controller_retries_total", "Attempts repeated after a failure.", ["call"])
STEPS = Counter("sextet_controller_steps_total", "Steps committed.")
STEP_SECONDS = Histogram("sextet_controller_step_duration_seconds", "Time of a step.", buckets=_SECONDS)
CALL_SECONDS = Histogram(
    "sextet_controller_call_duration_seconds", "Time of a role call of a step.", ["call"], buckets=_SECONDS
)
RECOVERIES = Counter("sextet_controller_recoveries_total", "Recoveries: reassigned, made again, taken up, rolled back.")
REPLICAS = Gauge("sextet_controller_replicas", "Replicas known to the controller.", ["role", "phase"])
HEALTH = Gauge("sextet_controller_health", "Replicas by health, see services/controller/health.py.", ["role", "health"])
WIRE_FAILURES = Counter(
    "sextet_controller_wire_failures_total", "Transfers of weights to a rollout that failed on the wire.", ["rollout"]
)
DETOURS = Gauge("sextet_controller_wire_detours", "Rollouts whose weights go by gRPC because the wire failed.")
LEADS = Gauge("sextet_controller_leads", "1 while this controller leads.")
RUNS = Gauge("sextet_controller_runs", "Runs by state.", ["state"])
TOKENS_PER_SECOND = Gauge("sextet_controller_tokens_per_second", "Prompt and response tokens of the last step.")
REWARD = Gauge("sextet_controller_reward_mean", "Mean reward of the last committed step.")
MISMATCH = Gauge(
    "sextet_controller_rollout_mismatch",
    "Actor's log-probs against the rollout's in the last committed step; measures as in shared/algo/correction.py.",
    ["measure"],
)
PROFILE = Gauge(
    "sextet_controller_profile_ratio",
    "Parts of a call's time when it was last profiled, on the ranks where they are lowest and highest.",
    ["call", "part", "rank"],
)
RANK_SECONDS = Gauge(
    "sextet_controller_rank_seconds", "Seconds of the slowest and fastest rank in the last step.", ["call", "rank"]
)
STALENESS = Gauge("sextet_controller_staleness_max", "Updates since the oldest token that the last step trained on.")
OVERLAP = Gauge("sextet_controller_overlap_ratio", "Share of the last step's sampling ahead in which it trained.")
