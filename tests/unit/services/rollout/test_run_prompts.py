"""What a run asks of its prompts, looked at before anything is loaded."""

import pytest

from services.rollout.prompts import load_prompts
from shared.training.errors import ModelError
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama


def test_a_stop_token_that_the_model_does_not_have_is_named(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    with pytest.raises(ModelError, match="99 is no token of this model, whose vocabulary has 64"):
        load_prompts(rollout_config(model, "rollout.stop_token_ids=[3, 99]"))
