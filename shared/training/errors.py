"""What can go wrong in training, in words a caller can act on. The roles turn these into gRPC errors."""


class ModelError(ValueError):
    """A model that cannot be used; the text names the configuration key and the value."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is NaN or infinite; nothing was changed."""


class HalfStepError(RuntimeError):
    """An optimizer step failed while it was changing parameters; only a copy or a checkpoint brings them back."""


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, or not be read now; the text names the file."""


class DamagedError(CheckpointError):
    """A checkpoint that is torn, tampered with, or made for something else; the text names the file."""
