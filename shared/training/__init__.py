"""The training engine of actor, critic and reference: models, log-probs, optimizer, batches, checkpoints."""
