"""Settings of the gateway."""

from shared.rpc.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """One URL for the policy in training: OpenAI's API, balanced over the rollouts."""

    role: str = "gateway"
    http: str = "127.0.0.1:8000"
    """host:port of the OpenAI API; port 0 picks a free one (see facts "openai")."""
