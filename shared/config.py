"""The run configuration: one pydantic tree, torch-free, shared by the front door, the controller and every role.

Unknown keys are refused with the nearest known one; a rule that spans keys is checked in `RunConfig`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the text names the key, the value and what to write instead."""


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """A Hugging Face model: hub id or directory."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"


class DataConfig(Section):
    """Prompts in verl's columns (data_source, prompt, ability, reward_model, extra_info); parquet or jsonl."""

    path: str
    validation_path: str | None = None
    """Prompts to look at the policy with: greedy, one answer each; never trained on."""
    validation_interval: Positive = 10
    """Flow steps between validations; also before the first step and after the last."""
    prompt_key: str = "prompt"
    batch_size: Positive = 8
    """Prompts per step."""
    max_prompt_tokens: Positive = 512
    overlong_prompts: Literal["error", "filter"] = "error"
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["hf", "vllm", "auto"] = "auto"
    replicas: Positive = 1
    """Replicas that must be ready before the run starts."""
    n: Positive = 1
    """Samples per prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    max_tokens: Positive = 128
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)] = ()
    """Beside the model's own. vLLM has room for 128 of a row, those that a caller of the endpoint adds among them."""
    budget: Annotated[int, Field(ge=0)] = 0
    """Response tokens by which samples grow before the step looks whether it has a batch; what is unfinished then goes
    on in a later step (needs algorithm.staleness). 0: every sample ends in its step."""
    pieces: Positive = 1
    """Parts in which a step's prompts are asked for, all at once: who scores begins when the first part is done."""
    context: Positive | None = None
    """Tokens of prompt and response that the engine makes room for, if the dataset's rows need less: for conversations
    over the OpenAI endpoint."""
    agents: bool = False
    """Samples are conversations: agents claim a row of the dataset, talk to the policy over the OpenAI endpoint, and
    give a reward. Needs context."""
    agent_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without a turn after which an agent is taken for gone, and its row offered to another one; so long a step
    waits for agents that ask."""
    slots: Positive = 16
    """hf engine: rows decoded together; the shape is fixed, so that a row's tokens do not depend on its neighbours."""
    sleep: bool = False
    """vllm engine on a GPU that the actor uses, too: while no call for a step's rows is in progress, the weights are in
    main memory and there is no KV cache, and requests over the endpoint wait. See docs/weights.md."""
    engine_args: dict[str, Any] = {}
    """vllm engine: further engine arguments, checked by name when the engine starts."""


class OptimizerConfig(Section):
    """AdamW with warm-up and decay, counted in optimizer steps."""

    lr: Annotated[float, Field(ge=0)] = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Global gradient norm; 0 is off."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: Positive | None = None
    """Optimizer steps at which the decay reaches min_lr_ratio; needed by linear and cosine."""
    min_lr_ratio: Fraction = 0.0

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> "OptimizerConfig":
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule={self.schedule} needs optimizer.total_steps")
        return self


class ParallelConfig(Section):
    """How the ranks of one replica divide the work: pp x dp x cp x tp = its `--world-size`. See docs/training.md."""

    dp: Positive | None = None
    """Ranks that share the rows; None: all that pp, cp and tp leave."""
    shard: Positive | None = None
    """Of these, how many hold one copy of the model in shards (FSDP); None: all. dp / shard copies: hybrid sharding."""
    tp: Positive = 1
    """Ranks that share every layer (tensor parallel, by the model's own tp_plan)."""
    cp: Positive = 1
    """Ranks that share the tokens of each pass (context parallel: long responses). Needs packing."""
    pp: Positive = 1
    """Stages of consecutive layers, each on ranks of its own, through which micro-batches go (pipeline parallel)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Gradients are summed over ranks in this dtype."""
    offload: bool = False
    """Parameters, gradients and optimizer state live in main memory."""
    accumulate: Literal["sharded", "whole"] = "sharded"
    """Gradients between micro-batches: each rank its shard, or whole and summed once (faster, a model's size more)."""


class LoraConfig(Section):
    """Low-rank adapters: only they learn, and travel; others have them merged. See docs/training.md."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scales what an adapter adds: by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one, by the last part of their name."""


class TrainingConfig(Section):
    """What actor and critic share."""

    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: Positive = 1
    """Passes over a step's batch."""
    mini_batch_size: Positive | None = None
    """Rows per optimizer step; None: the whole batch."""
    micro_batch_size: Positive = 8
    """Rows per forward and backward pass; changes memory and speed, never the gradient."""
    micro_batch_tokens: Positive | Literal["auto"] | None = None
    """Tokens per pass, with padding where rows are padded, in place of micro_batch_size: as many rows as fit, at least
    one. auto: what there is memory for, found at the start."""
    packing: bool = True
    """Rows one after another without padding; of a model whose attention can't do that, side by side and padded."""
    gradient_checkpointing: bool = False
    eight_bit_activations: bool = False
    """What a pass keeps for its backward pass is kept in 8 bits: less memory, slightly other gradients."""
    lora: LoraConfig | None = None
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _one_way_to_save_memory(self) -> "TrainingConfig":
        if self.eight_bit_activations and self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing keeps none of what eight_bit_activations would store: choose one")
        return self


class PolicyLossConfig(Section):
    """Options of the policy loss; which apply depends on `algorithm.policy_loss`. See docs/algorithms.md."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    """Dual clip (> 1); None is off."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    entropy_coef: float = 0.0
    options: dict[str, float] = {}
    """Further numbers of one loss (see docs/algorithms.md), checked by name."""


class ActorConfig(TrainingConfig):
    """The policy in training."""

    loss: PolicyLossConfig = PolicyLossConfig()
    park: bool = False
    """One rank on a GPU that a rollout uses, too: from a publish to the next computation it is in main memory."""


class CriticConfig(TrainingConfig):
    """The value model; its backbone is `model` unless `critic.model` names another."""

    model: ModelConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    clip_range_value: float = 0.5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Flow steps in which only the critic learns."""


class KLConfig(Section):
    """Distance to the reference: as a penalty in the reward or as a term of the loss, never both."""

    placement: Literal["none", "reward", "loss"] = "none"
    estimator: str = "k1"
    """k1, abs, k2, k3 and straight-through forms; see docs/algorithms.md."""
    coef: Annotated[float, Field(ge=0)] = 0.001
    target: float | None = None
    """Set: adaptive coefficient towards this KL (placement: reward)."""
    horizon: Positive = 10000


class CorrectionConfig(Section):
    """Rollout correction: what is done about the difference between the engine's and the actor's log-probs."""

    mode: Literal["none", "decoupled", "bypass"] = "none"
    token_cap: float | None = None
    """Truncated importance sampling per token."""
    sequence_cap: float | None = None
    token_bounds: tuple[float, float] | None = None
    """Two-sided masking (IcePop)."""
    reject: Literal[
        "none",
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ] = "none"
    """What leaves the loss: tokens, or rows by the sum, mean or maximum of an estimator of the divergence."""
    reject_threshold: float | None = None
    """k1: bound (> 1) of the ratio and of its inverse; k2, k3: nats."""


class AlgorithmConfig(Section):
    """Advantages, policy loss, KL. `algorithm: dapo` and `preset: dapo` fill in a named method (shared/presets.py)."""

    preset: str | None = None
    """Whose settings were filled in where the configuration had none."""
    advantage: str = "gae"
    policy_loss: str = "ppo"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    whiten_advantages: bool = True
    """Whiten over the batch where the method's paper does (GAE, REINFORCE++)."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO)."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Answers cut by max_tokens: as scored, scored 0, or left out of the loss."""
    overlong_buffer: int = 0
    """DAPO's soft penalty over the last tokens before max_tokens; 0 is off."""
    overlong_penalty: float = 1.0
    staleness: Annotated[int, Field(ge=0)] = 0
    """Updates that the policy may have had since a token was sampled, when it is trained on; 0: strictly on-policy. At
    most (1 + staleness) x data.batch_size prompts are in flight. For flow: async_ppo and rollout.budget."""
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    """Decoupled with token_cap 2 where nothing is said and samples may be older than the policy."""
    options: dict[str, float] = {}
    """Further numbers of one estimator, checked by name."""


class RewardConfig(Section):
    """Who grades: `function` (Python), `model` (Hugging Face), `grpc` or `http` (external), or rollout.agents."""

    backend: Literal["function", "model", "grpc", "http", "agents"] = "function"
    function: str | None = None
    """`module:name` or `path/to/file.py:name`; verl's or TRL's signature."""
    model: ModelConfig | None = None
    endpoint: str | None = None
    """host:port (grpc) or URL (http)."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for one response (function) or one request (external)."""
    workers: Positive = 1
    kwargs: dict[str, Any] = {}


class CheckpointConfig(Section):
    """When and where state is saved."""

    auto_save: bool = True
    save_interval: Positive = 1000
    """Flow steps between checkpoints; the last step is always saved when auto_save is on."""
    keep: Positive = 2
    directory: str | None = None
    """Where a run's checkpoints go, under its id: a directory that actor, critic and controller see, or
    `s3://bucket/prefix`. Default: into the run's directory."""
    export: bool = True
    """Write the policy as a Hugging Face directory when the run is done."""


class RecoveryConfig(Section):
    """What a run does when a role fails."""

    max_retries: Annotated[int, Field(ge=0)] = 3
    backoff: Annotated[float, Field(ge=1)] = 1.5
    call_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds an operation may take over all attempts."""
    replica_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds to wait for the roles a run needs before it fails."""


class WeightsConfig(Section):
    """How new weights get from the actor to the rollouts after an update. See docs/weights.md."""

    channel: Literal["auto", "nccl", "gloo", "ipc", "grpc"] = "auto"
    """auto: nccl or ipc where actor and rollouts are on GPUs, else grpc. Who can't, or comes late, uses grpc."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds in which a transfer over nccl, gloo or ipc has ended, one way or the other."""
    bucket_mib: Positive | None = None
    """Mebibytes that travel together; two of them are in memory on either side. null: by the size of the model."""
    only_changed: bool = False
    """A tensor travels only where its digest has changed since the version that the rollout serves (frozen layers)."""


class RunConfig(Section):
    """Everything a run needs."""

    name: str = "run"
    seed: int = 0
    flow: str = "ppo"
    """A built-in flow (ppo, grpo, ...) or `module:Class` / `path/to/file.py:Class`."""
    total_steps: Positive | None = None
    total_epochs: Positive | None = None
    """Exactly one of total_steps and total_epochs."""
    directory: str | None = None
    """Checkpoints, metrics and export; default: runs/<id>."""
    resume_from: str | None = None
    """A checkpoint directory of another run."""
    model: ModelConfig
    reference_model: ModelConfig | None = None
    """Default: `model` as it was at the start."""
    reference_parallel: ParallelConfig = ParallelConfig()
    """How the reference's ranks divide the work."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    options: dict[str, Any] = {}
    """For a user's own flow; of dapo: max_refills."""

    @model_validator(mode="after")
    def _rules(self) -> "RunConfig":
        if (self.total_steps is None) == (self.total_epochs is None):
            raise ValueError("set exactly one of total_steps and total_epochs")
        cut = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if cut and self.algorithm.correction.mode == "none":
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 samples from another policy than the one trained: "
                "set algorithm.correction.mode, or top_p=1 and top_k=0"
            )
        if self.rollout.budget and not self.algorithm.staleness:
            raise ValueError(
                f"rollout.budget={self.rollout.budget} lets samples wait for a later policy: set algorithm.staleness "
                "to 1 or more, or rollout.budget=0"
            )
        if self.rollout.sleep and self.rollout.engine != "vllm":
            raise ValueError(f"rollout.sleep needs rollout.engine=vllm; it is {self.rollout.engine}")
        if self.rollout.budget and self.rollout.pieces > 1:
            raise ValueError(f"rollout.pieces={self.rollout.pieces} and rollout.budget exclude each other: choose one")
        need = {"function": "function", "model": "model", "grpc": "endpoint", "http": "endpoint"}
        if key := need.get(self.reward.backend):
            if getattr(self.reward, key) is None:
                raise ValueError(f"reward.backend={self.reward.backend} needs reward.{key}")
        elif not self.rollout.agents:
            raise ValueError("reward.backend=agents: agents give rewards where rollout.agents is true; set it")
        if self.rollout.agents:
            self._rules_of_agents()
        self._rules_of_stages()
        return self

    def _rules_of_stages(self) -> None:
        actor, critic = self.actor, self.critic
        for key, parallel, training in (
            ("actor.parallel", actor.parallel, actor),
            ("critic.parallel", critic.parallel, critic),
            ("reference_parallel", self.reference_parallel, actor),
        ):
            if parallel.pp > 1 and training.micro_batch_tokens == "auto":
                raise ValueError(
                    f"{key}.pp={parallel.pp} has several passes under way, and micro_batch_tokens=auto measures one: "
                    "set micro_batch_tokens to a number"
                )

    def _rules_of_agents(self) -> None:
        if self.rollout.context is None:
            raise ValueError(
                "rollout.agents needs rollout.context: tokens of a whole conversation at most, tools' answers included"
            )
        single = {"rollout.budget": self.rollout.budget, "algorithm.overlong_buffer": self.algorithm.overlong_buffer}
        for key, value in single.items():
            if value:
                raise ValueError(f"{key}={value} is about single answers, but rollout.agents asks for conversations")

    @property
    def samples_per_step(self) -> int:
        return self.data.batch_size * self.rollout.n


def dump_config(config: RunConfig) -> str:
    """The configuration as JSON, defaults filled in."""
    return config.model_dump_json()
